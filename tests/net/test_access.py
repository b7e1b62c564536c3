"""Tokens and TLS on real TCP connections: who has them gets through, and nobody else says or hears anything."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tensorcast_connector.config import parse_address
from tensorcast_connector.errors import ConfigError, TensorcastError, Unauthorized, Unavailable
from tensorcast_connector.net import socket_stream, sockets
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.net.tls import load_tls
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.types import Address
from tensorcast_connector.wire.tokens import NONCE_BYTES, Access, proof, tenant_token
from tests.net.certificates import of

TOKEN = "a token that nobody guesses"
ANYWHERE = parse_address("127.0.0.1:0", "address")


class Echo:
    """Says back what it hears, and remembers whom it has heard."""

    def __init__(self) -> None:
        self.heard: list[tuple[str | None, bytes]] = []

    async def on_stream(self, stream: Stream) -> None:
        while data := await stream.receive():
            self.heard.append((stream.tenant, data))
            await stream.send(data)


@asynccontextmanager
async def listening(network: SocketNetwork) -> AsyncIterator[tuple[Echo, Address]]:
    echo = Echo()
    listener = await network.listen(ANYWHERE, echo.on_stream)
    try:
        yield echo, listener.address
    finally:
        await listener.close()


async def said(network: SocketNetwork, address: Address, data: bytes = b"hello") -> bytes:
    """What comes back."""
    stream = await network.dial(address, 5.0)
    try:
        stream.write(data)
        target = bytearray(len(data))
        await asyncio.wait_for(stream.receive_into(memoryview(target)), 5.0)
        return bytes(target)
    finally:
        stream.close()


async def test_members_and_tenants_get_through() -> None:
    async with listening(SocketNetwork(Access(TOKEN))) as (echo, address):
        assert await said(SocketNetwork(Access(TOKEN)), address) == b"hello"
        assert await said(SocketNetwork(Access(TOKEN), tenant="a"), address) == b"hello"
        assert await said(SocketNetwork(Access(tenant_token(TOKEN, "a")), tenant="a"), address) == b"hello"
        assert [tenant for tenant, _ in echo.heard] == [None, "a", "a"]


@pytest.mark.parametrize(
    ("access", "tenant"),
    [
        (None, ""),
        (Access(TOKEN + "x"), ""),
        (Access(TOKEN + "x"), "a"),
        (Access(tenant_token(TOKEN, "a")), "b"),
        (Access(tenant_token(TOKEN, "a")), ""),
        (Access(tenant_token(TOKEN, "a").replace(":a", ":b")), "b"),
        (Access(tenant_token(TOKEN + "x", "a")), "a"),
    ],
)
async def test_nobody_else_does(access: Access | None, tenant: str) -> None:
    async with listening(SocketNetwork(Access(TOKEN))) as (echo, address):
        with pytest.raises((Unauthorized, Unavailable, AssertionError)):
            assert await said(SocketNetwork(access, tenant=tenant), address) == b"hello"
        assert echo.heard == []


async def test_a_caller_notices_somebody_who_only_pretends_to_be_a_member() -> None:
    async with listening(SocketNetwork(Access(TOKEN + "x"))) as (_, address):
        with pytest.raises(Unauthorized, match="does not have the token of this cluster"):
            await SocketNetwork(Access(TOKEN)).dial(address, 5.0)


async def test_what_was_recorded_opens_nothing() -> None:
    """A proof is of this connection's random numbers only."""
    async with listening(SocketNetwork(Access(TOKEN))) as (echo, address):
        mine = bytes(NONCE_BYTES)
        old = proof(TOKEN.encode(), b"client", mine, bytes(NONCE_BYTES), "")
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"TCA1" + mine + b"\0")
        server = await reader.readexactly(64)
        writer.write(old)
        writer.write(b"hello")
        with contextlib.suppress(ConnectionError):
            assert b"a wrong token" in await reader.read()
        writer.write(server[32:])  # its own proof does not open it either
        writer.close()
        assert echo.heard == []


@pytest.mark.parametrize(
    "data", [b"", b"T", b"TCA1", b"TCA1" + bytes(33), b"TCA1" + bytes(32) + b"\xff", b"GET / HTTP/1.1\r\n"]
)
async def test_halves_and_garbage(data: bytes) -> None:
    async with listening(SocketNetwork(Access(TOKEN))) as (echo, address):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(data)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 5.0)
        writer.close()
        assert echo.heard == []
        assert await said(SocketNetwork(Access(TOKEN)), address) == b"hello"


async def test_a_caller_with_a_token_meets_a_cluster_without() -> None:
    from tensorcast_connector.net.rpc import accept

    async def serve(stream: Stream) -> None:
        with contextlib.suppress(TensorcastError):
            await accept(stream, "worker", "w")

    listener = await SocketNetwork().listen(ANYWHERE, serve)
    with pytest.raises(Unauthorized, match="wants no token"):
        await SocketNetwork(Access(TOKEN)).dial(listener.address, 5.0)
    await listener.close()


@pytest.mark.parametrize("token", ["", "short", "x" * 15, "two\nlines" * 4])
def test_no_token(token: str) -> None:
    with pytest.raises(ConfigError, match="at least 16 printable characters"):
        Access(token)


def test_a_tenant_whose_name_is_too_long() -> None:
    SocketNetwork(Access(TOKEN), tenant="é" * 127)
    with pytest.raises(ConfigError, match="at most 255 bytes"):
        SocketNetwork(Access(TOKEN), tenant="é" * 128)


def test_a_token_is_not_shown() -> None:
    assert TOKEN not in repr(Access(TOKEN))


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_members_of_the_authority_get_through(authority: Path) -> None:
    async with listening(of(authority, "a")) as (echo, address):
        big = bytes(range(256)) * 40_000  # more than any buffer
        assert await said(of(authority, "a"), address, big) == big
        assert b"".join(data for _, data in echo.heard) == big


@pytest.mark.slow
async def test_one_side_sends_and_the_other_only_listens(authority: Path) -> None:
    """A send returns although nothing ever comes back, and what is sent just before closing arrives."""
    sent = asyncio.Event()

    async def sends(stream: Stream) -> None:
        for _ in range(20):
            await stream.send(bytes(100))
        sent.set()
        stream.write(b"and goodbye")

    listener = await of(authority, "a").listen(ANYWHERE, sends)
    stream = await of(authority, "a").dial(listener.address, 5.0)
    heard = b""
    async with asyncio.timeout(5.0):
        await sent.wait()
        while data := await stream.receive():
            heard += data
    assert heard == bytes(2000) + b"and goodbye"
    stream.close()
    await listener.close()


async def test_who_begins_no_handshake_counts_and_goes(authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_stream, "HELLO_TIMEOUT_S", 0.02)
    monkeypatch.setattr(sockets, "CONNECTIONS_MAX", 2)
    async with listening(of(authority, "a")) as (echo, address):
        opened = [await asyncio.open_connection(address.host, address.port) for _ in range(3)]
        for reader, writer in opened:  # one at once, for the third; two after a while
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 5.0) == b""
            writer.close()
        assert echo.heard == []


@pytest.mark.slow
async def test_strangers_do_not(authority: Path) -> None:
    async with listening(of(authority, "a")) as (echo, address):
        for stranger in (SocketNetwork(), of(authority, "b"), of(authority, "b", "a")):
            with pytest.raises((TensorcastError, AssertionError)):
                assert await said(stranger, address) == b"hello"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # one that trusts the server and shows nothing
        context.load_verify_locations(authority / "ca-a.pem")
        context.check_hostname = False

        def shows_nothing() -> bytes:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((address.host, address.port), timeout=5) as raw,
                context.wrap_socket(raw) as wrapped,
            ):
                wrapped.sendall(b"hello")
                return wrapped.recv(5)
            return b""

        assert await asyncio.to_thread(shows_nothing) == b""
        assert echo.heard == []
        assert await said(of(authority, "a"), address) == b"hello"


@pytest.mark.slow
async def test_token_and_tls_together(authority: Path) -> None:
    tls = load_tls(*(str(authority / name) for name in ("a.pem", "a.key", "ca-a.pem")))
    async with listening(SocketNetwork(Access(TOKEN), tls)) as (echo, address):
        assert await said(SocketNetwork(Access(TOKEN), tls, "t"), address) == b"hello"
        with pytest.raises((TensorcastError, AssertionError)):
            assert await said(SocketNetwork(None, tls), address) == b"hello"
        assert [tenant for tenant, _ in echo.heard] == ["t"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "what"),
    [
        (("a.pem", "", ""), "tls_key and tls_ca missing"),
        (("none.pem", "a.key", "ca-a.pem"), "No such file"),
        (("a.pem", "b.key", "ca-a.pem"), "tls_cert=.*MISMATCH"),
        (("a.pem", "a.key", "a.key"), "tls_ca="),
        (("a.pem", "locked.key", "ca-a.pem"), "tls_key=.*"),
    ],
)
def test_files_that_cannot_be_used(authority: Path, files: tuple[str, str, str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        load_tls(*(str(authority / name) if name else "" for name in files))


def test_no_files_are_no_tls() -> None:
    assert load_tls("", "", "") is None
