"""Names of engines: looked up now and then, remembered when the name service fails, looked up again when nobody is there."""

import asyncio
import socket

import pytest

from smetric_router.errors import UpstreamUnreachable
from smetric_router.server.addresses import FRESH_S, EngineAddress
from smetric_router.server.links import EngineLinks
from smetric_router.server.place import listen


class Names:
    """A name service: what it answers, or how it fails, and the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.asked = 0
        self.answer: list[str] | Exception | None = ["127.0.0.1"]
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._look_up)

    async def _look_up(self, host, port, *, family=0, type=0, proto=0, flags=0):
        if host[0].isdigit() or ":" in host:
            return socket.getaddrinfo(host, port, type=type)
        self.asked += 1
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        assert self.answer is not None
        return [(socket.AF_INET, type, 0, "", (address, port)) for address in self.answer for _ in range(2)]

    def clock(self) -> float:
        return self.now


@pytest.fixture
async def names(monkeypatch):
    return Names(monkeypatch)


@pytest.mark.parametrize("name", ["127.0.0.1", "[::1]", "[fe80::1%eth0]"])
async def test_addresses_are_never_looked_up(names, name):
    at = EngineAddress(f"http://{name}:1", names.clock)
    at.failed()
    names.now = 1e9
    assert await at.resolved(1) == [name.strip("[]")]
    assert names.asked == 0


async def test_a_name_is_looked_up_now_and_then_and_when_nobody_is_there(names):
    at = EngineAddress("http://engine:1", names.clock)
    assert await at.resolved(1) == await at.resolved(1) == ["127.0.0.1"]
    assert names.asked == 1
    names.now, names.answer = FRESH_S, ["127.0.0.2", "127.0.0.3"]
    assert await at.resolved(1) == ["127.0.0.2", "127.0.0.3"]
    at.failed()
    names.answer = ["127.0.0.4"]
    assert await at.resolved(1) == ["127.0.0.4"]


@pytest.mark.parametrize("failure", [socket.gaierror(socket.EAI_AGAIN, "try again"), None], ids=["error", "silence"])
async def test_a_name_service_that_fails_takes_no_engine_out(engines, names, failure):
    (engine,) = await engines()
    links = EngineLinks(connect_timeout_s=0.3, keepalive_s=1, clock=names.clock)
    url = f"http://engine:{engine.port}"
    (await links.connect(url)).abandon()
    names.now, names.answer = 100.0, failure
    (await links.connect(url)).abandon()
    assert names.asked == 2
    with pytest.raises(UpstreamUnreachable, match="no connection to http://unheard-of:1: "):
        await links.connect("http://unheard-of:1")


async def test_all_addresses_of_a_name_are_tried(engines, names):
    (engine,) = await engines()
    links = EngineLinks(connect_timeout_s=2, keepalive_s=1, clock=names.clock)
    names.answer = ["127.0.0.9", "127.0.0.1"]  # nobody listens at the first
    (await links.connect(f"http://engine:{engine.port}")).abandon()
    names.answer = ["127.0.0.9"]
    with pytest.raises(UpstreamUnreachable):
        await links.connect(f"http://engine:{engine.port}")
    names.answer = ["127.0.0.1"]
    (await links.connect(f"http://engine:{engine.port}")).abandon()


def test_who_connects_is_watched_for_being_alive():
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert 0 < accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
