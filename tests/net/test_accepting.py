"""Listeners of a process that has no descriptor left: one line in the log, patience, and then service as before."""

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorcast_connector.errors import ConfigError
from tensorcast_connector.net import accepting
from tensorcast_connector.net.accepting import Acceptor, listen_tcp
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.types import Address
from tests.waiting import until

CALLERS = 5
T = 5.0


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """In this process, for new ones."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith(("tensorcast", "asyncio"))]


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
async def test_without_descriptors_it_waits_says_so_once_and_goes_on(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accepting, "ACCEPT_RETRY_S", 0.002)
    caplog.set_level(logging.INFO)
    tries = 0
    go_on = Acceptor._go_on

    def counted(self: Acceptor) -> None:
        nonlocal tries
        tries += 1
        go_on(self)

    monkeypatch.setattr(Acceptor, "_go_on", counted)
    served: list[bytes] = []

    async def on_stream(stream: Stream) -> None:
        served.append(await stream.receive())

    where = Address("tcp", host="127.0.0.1", port=0) if scheme == "tcp" else Address("unix", path=str(tmp_path / "s"))
    listener = await SocketNetwork().listen(where, on_stream)
    at = listener.address
    callers = [socket.socket(socket.AF_INET if scheme == "tcp" else socket.AF_UNIX) for _ in range(CALLERS)]
    with no_descriptor_left():
        for caller in callers:  # the kernel takes them in, and what they say
            caller.connect((at.host, at.port) if scheme == "tcp" else at.path)
            caller.sendall(b"hello")
        await until(lambda: tries > 5)
        assert not served
        (line,) = messages(caplog)
        assert str(at) in line and "accepts no connections for now: Too many open files" in line
    await until(lambda: len(served) == CALLERS)
    assert served == [b"hello"] * CALLERS
    assert [line for line in messages(caplog)[1:] if "accepts connections again" in line] == [
        f"{at} accepts connections again"
    ]
    for caller in callers:
        caller.close()
    await listener.close()


async def test_closed_while_it_waits_for_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    (sock,) = await listen_tcp("127.0.0.1", 0)
    acceptor = Acceptor(sock, asyncio.Protocol, "here")
    caller = socket.socket()
    with no_descriptor_left():
        caller.connect(sock.getsockname())
        await until(lambda: "waits for descriptors" in repr(acceptor))
        await acceptor.close()
        await acceptor.close()
    caller.close()


async def test_every_address_of_a_host_or_none() -> None:
    bound = await listen_tcp("localhost", 0)
    assert bound and all(sock.getsockname()[1] for sock in bound)
    with pytest.raises(OSError, match="in use"):
        await listen_tcp(*bound[0].getsockname()[:2])
    with pytest.raises(ConfigError, match="cannot listen on"):
        await SocketNetwork().listen(
            Address("tcp", host="no.such.host.invalid", port=0), lambda stream: asyncio.sleep(0)
        )
    for sock in bound:
        sock.close()
