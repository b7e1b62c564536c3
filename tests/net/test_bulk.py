"""Pages over bulk connections: byte-exact or not at all."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import xxhash

from tensorcast_connector.errors import NotFound, ProtocolError, TensorcastError, Unavailable
from tensorcast_connector.net import bulk
from tensorcast_connector.net.bulk import BulkClient, PageBytes, serve_bulk
from tensorcast_connector.net.rpc import accept, receive_frame
from tensorcast_connector.net.transport import Listener, Stream
from tensorcast_connector.testing.network import FakeNetwork
from tensorcast_connector.types import Address
from tensorcast_connector.wire.codec import (
    encode,
)
from tensorcast_connector.wire.frames import Kind, encode_frame
from tensorcast_connector.wire.messages import (
    BULK_ROLE,
    Fetch,
    Fetched,
    Hello,
    Message,
)
from tests.net.conftest import Place
from tests.waiting import until


class NoArtifacts:
    """A PartSource."""

    def parts(self, hello: Hello, artifact_id: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        raise NotFound("there are none")


class Shelf:
    """A PageSource over a dict, which knows what it has given out."""

    def __init__(self, pages: dict[bytes, bytes]) -> None:
        self.pages = pages
        self.held = 0
        self.asked: list[int] = []

    @asynccontextmanager
    async def hold(self, keys: Sequence[bytes]) -> AsyncIterator[list[PageBytes | None]]:
        self.held += 1
        self.asked.append(len(keys))
        found = [self.pages.get(key) for key in keys]
        try:
            yield [PageBytes(memoryview(data), xxhash.xxh3_64_intdigest(data)) if data else None for data in found]
        finally:
            self.held -= 1


class Bulk:
    """A server with a shelf, and a client."""

    def __init__(self, place: Place) -> None:
        chance = random.Random(1)
        self.place = place
        self.data = {bytes([n]): chance.randbytes(1 + chance.randrange(200_000)) for n in range(8)}
        self.shelf = Shelf(dict(self.data))
        self.streams: list[Stream] = []
        self.listener: Listener | None = None
        self.client: BulkClient | None = None

    async def on_stream(self, stream: Stream) -> None:
        hello = await accept(stream, "worker", "w")
        assert hello.role == BULK_ROLE
        self.streams.append(stream)
        await serve_bulk(stream, hello, self.shelf, NoArtifacts())

    async def listen(self) -> None:
        address = self.listener.address if self.listener else self.place.address
        self.listener = await self.place.network.listen(address, self.on_stream)

    async def fetch(
        self, keys: Sequence[bytes], target: Callable[[int, int], memoryview] | None = None
    ) -> dict[int, bytes]:
        """The pages that arrived, by index, their digests checked."""
        assert self.client is not None
        memory: dict[int, bytearray] = {}
        done: dict[int, bytes] = {}

        def room(index: int, length: int) -> memoryview:
            memory[index] = bytearray(length)
            return memoryview(memory[index])

        def arrived(index: int, digest: int) -> None:
            done[index] = bytes(memory[index])
            assert xxhash.xxh3_64_intdigest(done[index]) == digest

        try:
            await self.client.fetch(keys, target or room, arrived)
        except TensorcastError as error:
            error.args = (*error.args, done)
            raise
        return done


@pytest.fixture
async def pair(place: Place) -> AsyncIterator[Bulk]:
    pair = Bulk(place)
    await pair.listen()
    assert pair.listener is not None
    pair.client = BulkClient(place.network, pair.listener.address, "me", connections_max=2)
    yield pair
    pair.client.close()
    await pair.listener.close()
    assert pair.shelf.held == 0, "a page is still held"


async def test_pages_arrive_byte_exact_and_in_order(pair: Bulk) -> None:
    keys = [bytes([n]) for n in (3, 0, 7)]
    got = await pair.fetch(keys)
    assert list(got) == [0, 1, 2] and list(got.values()) == [pair.data[key] for key in keys]


async def test_missing_pages_are_left_out(pair: Bulk) -> None:
    assert await pair.fetch([b"none", b"\0", b"nor this", b"\1"]) == {1: pair.data[b"\0"], 3: pair.data[b"\1"]}
    assert await pair.fetch([b"none"]) == {}
    assert await pair.fetch([]) == {}


async def test_connections_are_kept_and_limited(pair: Bulk) -> None:
    keys = [[bytes([n])] for n in range(8)]
    await asyncio.gather(*(pair.fetch(each) for each in keys))
    assert 1 <= len(pair.streams) <= 2
    await pair.fetch([b"\0"])
    assert len(pair.streams) <= 2 and "idle" in repr(pair.client)


async def test_a_page_that_vanished_is_missing(pair: Bulk) -> None:
    del pair.shelf.pages[b"\1"]
    assert list(await pair.fetch([b"\0", b"\1", b"\2"])) == [0, 2]


async def test_an_idle_connection_that_the_peer_closed_is_replaced(pair: Bulk) -> None:
    await asyncio.gather(pair.fetch([b"\0"]), pair.fetch([b"\1"]))
    assert pair.listener is not None
    await pair.listener.close()
    await pair.listen()
    assert await pair.fetch([b"\0"]) == {0: pair.data[b"\0"]}


async def test_nobody_there(pair: Bulk) -> None:
    assert pair.listener is not None
    await pair.listener.close()
    with pytest.raises(Unavailable, match="cannot connect"):
        await pair.fetch([b"\0"])
    await pair.listen()


async def test_a_length_that_cannot_be_is_refused_by_the_target(pair: Bulk) -> None:
    def refuse(index: int, length: int) -> memoryview:
        raise ProtocolError(f"a page of {length} bytes")

    with pytest.raises(ProtocolError, match="a page of"):
        await pair.fetch([b"\0"], refuse)
    assert await pair.fetch([b"\0"]) == {0: pair.data[b"\0"]}, "with a new connection"


async def test_closing_ends_fetches_under_way(place: Place) -> None:
    async def silent(stream: Stream) -> None:
        await accept(stream, "worker", "w")
        while await stream.receive():
            pass

    listener = await place.network.listen(place.address, silent)
    client = BulkClient(place.network, listener.address, "me", 2)
    fetch = asyncio.create_task(client.fetch([b"k"], lambda _, n: memoryview(bytearray(n)), lambda *_: None))
    await until(lambda: client._streams)
    client.close()
    with pytest.raises(Unavailable):
        await fetch
    with pytest.raises(Unavailable, match="has left the cluster"):
        await client.fetch([b"k"], lambda _, n: memoryview(bytearray(n)), lambda *_: None)
    await listener.close()


# --- a peer that misbehaves: everything it sends after the hello is scripted ---


def reply(message: Message, payload: int, kind: Kind = Kind.REPLY) -> bytes:
    return encode_frame(kind, 1, encode(message), payload_bytes=payload)


PEERS = {
    "fewer answers": (reply(Fetched([]), 0), ProtocolError, "answered 0 pages and 0 bytes for 2 keys"),
    "more answers": (reply(Fetched([(0, 0)] * 3), 0), ProtocolError, "answered 3 pages"),
    "wrong sum": (reply(Fetched([(4, 0), (4, 0)]), 7) + b"x" * 7, ProtocolError, "2 pages and 7 bytes"),
    "negative": (reply(Fetched([(-4, 0), (8, 0)]), 4), ProtocolError, "2 pages and 4 bytes"),
    "another message": (reply(Message(), 0), ProtocolError, "reply not understood"),
    "garbage": (b"HTTP/1.1 200 OK\r\n\r\nhello there, this is long enough", ProtocolError, "not a tensorcast connection"),
    "dies before the pages": (reply(Fetched([(4, 0), (4, 0)]), 8), Unavailable, "left with 4 bytes still to come"),
    "dies mid-page": (reply(Fetched([(4, 0), (4, 0)]), 8) + b"abcdef", Unavailable, "left with 2 bytes|left with 4 bytes"),
    "dies in the header": (reply(Fetched([]), 0)[:20], Unavailable, "left with"),
    "huge page": (reply(Fetched([(1 << 39, 0), (0, 0)]), 1 << 39), ProtocolError, "too large"),
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
async def test_a_peer_that_misbehaves(place: Place, name: str) -> None:
    data, kind, message = PEERS[name]

    async def serve(stream: Stream) -> None:
        await accept(stream, "worker", "w")
        await receive_frame(stream)
        stream.write(data)

    def room(_: int, length: int) -> memoryview:
        if length > 1000:
            raise ProtocolError("too large")
        return memoryview(bytearray(length))

    done: list[int] = []
    listener = await place.network.listen(place.address, serve)
    client = BulkClient(place.network, listener.address, "me", 1)
    with pytest.raises(kind, match=message):
        await client.fetch([b"a", b"b"], room, lambda index, _: done.append(index))
    assert done == ([0] if name == "dies mid-page" else [])
    client.close()
    await listener.close()


async def raw(pair: Bulk) -> Stream:
    assert pair.listener is not None
    stream = await pair.place.network.dial(pair.listener.address, 5)
    stream.write(encode_frame(Kind.REQUEST, 0, encode(Hello(2, 2, BULK_ROLE, "raw"))))
    await receive_frame(stream)
    return stream


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (encode_frame(Kind.CANCEL, 1, b""), "takes requests only, not CANCEL"),
        (encode_frame(Kind.REQUEST, 1, b"\xc1"), "malformed|MessagePack"),
        (encode_frame(Kind.REQUEST, 1, encode(Fetch([b"k"])), payload_bytes=3), "takes requests only"),
        (encode_frame(Kind.REQUEST, 1, encode(Fetch([b""] * 65_537))), "65537 keys in one request; the limit is 65536"),
        (b"x" * 40, "not a tensorcast connection"),
    ],
)
async def test_a_caller_that_misbehaves_is_one_line(
    pair: Bulk, data: bytes, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream = await raw(pair)
    stream.write(data)
    await until(lambda: caplog.records)
    assert len(caplog.records) == 1
    stream.close()
    assert await pair.fetch([b"\0"]) == {0: pair.data[b"\0"]}


async def test_a_caller_that_does_not_read_does_not_keep_pages(pair: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "FETCH_TIMEOUT_S", 0.05)
    pair.shelf.pages = {bytes([n]): bytes(4 << 20) for n in range(8)}
    stream = await raw(pair)
    stream.write(encode_frame(Kind.REQUEST, 1, encode(Fetch([bytes([n]) for n in range(8)]))))
    await until(lambda: pair.shelf.held)
    await until(lambda: not pair.shelf.held)
    arrived = 0
    with contextlib.suppress(Unavailable):
        while piece := await stream.receive():
            arrived += len(piece)
    assert arrived < 32 << 20, "what was not on its way yet may not be read from that memory any more"
    stream.close()


async def test_a_peer_that_does_not_deliver(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "FETCH_TIMEOUT_S", 0.02)

    async def slow(stream: Stream) -> None:
        await accept(stream, "worker", "w")
        await receive_frame(stream)
        stream.write(reply(Fetched([(4, 0)]), 4) + b"ab")
        while await stream.receive():
            pass

    listener = await place.network.listen(place.address, slow)
    client = BulkClient(place.network, listener.address, "me", 1)
    with pytest.raises(Unavailable, match=r"did not deliver within 0.02 s"):
        await client.fetch([b"a"], lambda _, n: memoryview(bytearray(n)), lambda *_: None)
    client.close()
    await listener.close()


async def test_a_peer_that_does_not_answer_hello(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "HELLO_TIMEOUT_S", 0.02)

    async def mute(stream: Stream) -> None:
        while await stream.receive():
            pass

    listener = await place.network.listen(place.address, mute)
    client = BulkClient(place.network, listener.address, "me", 1)
    with pytest.raises(Unavailable, match="did not answer hello"):
        await client.fetch([b"a"], lambda _, n: memoryview(bytearray(n)), lambda *_: None)
    client.close()
    await listener.close()


async def test_a_fetch_that_is_cancelled_frees_its_slot(pair: Bulk) -> None:
    pair.shelf.pages[b"big"] = bytes(8 << 20)
    for _ in range(4):
        fetch = asyncio.create_task(pair.fetch([b"big"] * 4))
        await until(lambda: pair.shelf.held)
        fetch.cancel()
        await asyncio.gather(fetch, return_exceptions=True)
        await until(lambda: not pair.shelf.held)
    assert await pair.fetch([b"\0"]) == {0: pair.data[b"\0"]}


async def test_a_flipped_byte_does_not_go_unnoticed() -> None:
    network = FakeNetwork(random.Random(3))
    pair = Bulk(Place(network, Address("tcp", host="here")))
    await pair.listen()
    assert pair.listener is not None
    pair.client = BulkClient(network, pair.listener.address, "me", 1)
    await pair.fetch([b"\0"])
    network.flip_byte(pair.listener.address, 2000)
    with pytest.raises(AssertionError):
        await pair.fetch([b"\0"])
    assert await pair.fetch([b"\0"]) == {0: pair.data[b"\0"]}
    pair.client.close()
    await pair.listener.close()
