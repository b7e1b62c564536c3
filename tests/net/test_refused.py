"""How many connections were refused, by kind of reason, as a scrape says it."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from tensorcast_connector.net import connection_metrics, sockets
from tensorcast_connector.net.connection_metrics import ConnectionMetrics
from tensorcast_connector.net.metrics_server import serve_metrics
from tensorcast_connector.net.refusals import FULL, KINDS, PROTOCOL, UNAUTHORIZED
from tensorcast_connector.net.rpc import serve_stream
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.types import Address
from tensorcast_connector.wire.tokens import Access
from tests.documented import check_documented, families
from tests.net.service import Scripted
from tests.scrape import scrape

ANYWHERE = Address("tcp", host="127.0.0.1")
TOKEN = "a token that nobody guesses"
HTTP = b"GET / HTTP/1.1\r\n\r\n"
NAME = "tensorcast_connections_refused_total"


class Served:
    """A listener that wants a token, one that wants none, and what their process exports."""

    def __init__(self, address: Address, plain: Address, metrics: Address) -> None:
        self.address = address
        self.plain = plain
        self.metrics = metrics

    async def refused(self) -> dict[str, float]:
        """By reason."""
        found = await scrape(self.metrics)
        check_documented(found, "Connections", "tensorcast_")
        return {kind: found.value(NAME, reason=kind) for kind in KINDS}

    async def come(self, address: Address, data: bytes) -> None:
        """A stranger sends this and nothing else, and waits until it is sent away."""
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(data)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 5.0)
        writer.close()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    counts: Counter[str] = Counter()
    networks = SocketNetwork(Access(TOKEN), refused=counts), SocketNetwork(refused=counts)

    async def on_stream(stream: Stream) -> None:
        await serve_stream(stream, Scripted())

    listeners = [await each.listen(ANYWHERE, on_stream) for each in networks]
    metrics = await serve_metrics(ANYWHERE, [], [ConnectionMetrics(counts)])
    yield Served(listeners[0].address, listeners[1].address, metrics.address)
    for listener in listeners:
        await listener.close()
    await metrics.close()


def test_the_documented_families_are_those_of_the_code() -> None:
    assert families("Connections") == list(connection_metrics.FAMILIES)


async def test_each_is_counted_once_and_by_its_reason(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await served.refused() == dict.fromkeys(KINDS, 0.0)
    for _ in range(2):
        await served.come(served.address, HTTP)
    assert await served.refused() == {FULL: 0, UNAUTHORIZED: 2, PROTOCOL: 0}
    for _ in range(3):
        await served.come(served.plain, HTTP)
    assert await served.refused() == {FULL: 0, UNAUTHORIZED: 2, PROTOCOL: 3}
    stream = await SocketNetwork().dial(served.plain, 5.0)
    monkeypatch.setattr(sockets, "CONNECTIONS_MAX", 1)
    await served.come(served.plain, b"")  # both are of one host, so neither makes room for the other
    assert await served.refused() == {FULL: 1, UNAUTHORIZED: 2, PROTOCOL: 3}
    stream.close()
