"""However much is asked at once, and whoever does not read: others come in between, and nothing piles up in the server."""

import asyncio

import pytest

from tensorcast_connector.config import REQUESTS_WAITING_BYTES_MAX, SHARE_REQUESTS
from tensorcast_connector.net import rpc
from tensorcast_connector.net.rpc import Connection, accept, open_session
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.net.turns import Turns
from tensorcast_connector.wire.codec import encode
from tensorcast_connector.wire.frames import Kind, encode_frame
from tensorcast_connector.wire.messages import GetStatistics, LookupResult, Message, Ping, Statistics
from tests.net.conftest import Place
from tests.net.pair import Pair, T, frame, hello
from tests.net.service import Scripted, lookup
from tests.waiting import until

STATISTICS = encode(GetStatistics())
FLOOD = 12_000


async def greeted(pair: Pair) -> Stream:
    """A connection that has said hello."""
    stream = await pair.raw()
    await hello(stream)
    await frame(stream)
    return stream


def flood(count: int, body: bytes = STATISTICS) -> bytes:
    """So many requests in one piece."""
    return b"".join(encode_frame(Kind.REQUEST, number, body) for number in range(2, 2 + count))


class Counted:
    """Answers at once, counts, and notes how much was served between two turns of the event loop."""

    def __init__(self, pair: Pair) -> None:
        self.served = 0
        self.most_in_a_turn = 0
        pair.service.on_statistics = self._answer

    def _answer(self) -> Message:
        self.served += 1
        return Statistics({})

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            before = self.served
            await asyncio.sleep(0)
            self.most_in_a_turn = max(self.most_in_a_turn, self.served - before)


async def read_all(stream: Stream, count: int) -> None:
    """So many answers."""
    for _ in range(count):
        await frame(stream)


@pytest.mark.slow
@pytest.mark.parametrize("connections", [1, 8])
async def test_a_flood_of_requests_leaves_the_loop_to_others(pair: Pair, connections: int) -> None:
    """Timers and heartbeats come in between, and a request on another connection does not wait for the end of the flood."""
    counted = Counted(pair)
    client = await pair.connected()
    streams = [await greeted(pair) for _ in range(connections)]
    watching = asyncio.create_task(counted.watch())
    each = FLOOD // connections
    reading = [asyncio.create_task(read_all(stream, each)) for stream in streams]
    for stream in streams:
        stream.write(flood(each))
    await until(lambda: counted.served > 0)
    before = counted.served
    pair.service.open("engine")
    assert await client.call(lookup("engine"), LookupResult, T) == LookupResult(6, 0)
    assert counted.served - before < FLOOD // 4, "it had to wait for the flood"
    async with asyncio.timeout(60):
        await asyncio.gather(*reading)
    assert counted.served == FLOOD
    # What one turn serves: a share of whose turn it is, and one request of each that something arrives of. TLS hands over
    # records one by one, and all of them at first have a whole share.
    assert counted.most_in_a_turn <= SHARE_REQUESTS * (2 + connections)
    watching.cancel()
    for stream in streams:
        stream.close()


async def test_whoever_waits_longest_has_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcast_connector.net.turns.SHARE_S", 60.0)
    turns, order = Turns(), list[str]()

    async def take(name: str, times: int) -> None:
        for _ in range(times):
            share = await turns.turn()
            order.append(name)
            assert share.left()

    tasks = [asyncio.create_task(take(name, times)) for name, times in (("a", 3), ("b", 1), ("c", 2), ("d", 1))]
    await asyncio.sleep(0)
    assert "4 wait" in repr(turns)
    assert not turns.share().left(), "one request only, while others wait"
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "b", "c", "a", "c", "a"]
    share = turns.share()
    assert [share.left() for _ in range(SHARE_REQUESTS)] == [True] * (SHARE_REQUESTS - 1) + [False], "nobody waits"


async def test_more_requests_than_may_be_under_way_wait_for_their_turn(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "REQUESTS_IN_FLIGHT_MAX", 2)
    client = await pair.connected()
    calls = [asyncio.create_task(client.call(lookup(name), LookupResult, T)) for name in ("a", "bb", "ccc", "dddd")]
    await until(lambda: len(pair.service.started) == 2)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert pair.service.started == ["a", "bb"]
    for name in ("bb", "a", "ccc", "dddd"):
        pair.service.open(name)
    assert [each.blocks for each in await asyncio.gather(*calls)] == [1, 2, 3, 4]
    assert pair.service.started == ["a", "bb", "ccc", "dddd"], "in the order of their coming"


async def test_pings_are_answered_and_cancels_heard_while_requests_wait(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "REQUESTS_IN_FLIGHT_MAX", 1)
    stream = await greeted(pair)
    for number, name in ((2, "a"), (3, "b"), (4, "c")):
        stream.write(encode_frame(Kind.REQUEST, number, encode(lookup(name))))
    stream.write(encode_frame(Kind.REQUEST, 5, encode(Ping())))
    assert (await frame(stream))[:2] == (Kind.REPLY, 5)
    stream.write(encode_frame(Kind.CANCEL, 3, b"") + encode_frame(Kind.CANCEL, 2, b""))
    await until(lambda: pair.service.started == ["a", "c"])
    assert pair.service.cancelled == ["a"]
    pair.service.open("c")
    assert (await frame(stream))[:2] == (Kind.REPLY, 4)
    stream.close()


@pytest.mark.slow
async def test_what_waits_is_bounded_in_bytes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request is under way for long, and megabytes of others come: they stay with who sends them, and none is lost."""
    monkeypatch.setattr(rpc, "REQUESTS_IN_FLIGHT_MAX", 1)
    waiting: list[Connection] = []
    monkeypatch.setattr(rpc, "Connection", lambda *args: waiting.append(Connection(*args)) or waiting[-1])
    stream = await greeted(pair)
    stream.write(encode_frame(Kind.REQUEST, 1000, encode(lookup("first"))))
    await until(lambda: pair.service.started)
    large = encode(lookup("x" * 100_000))
    count = 300
    for number in range(2, 2 + count):  # TLS takes one write of any size
        stream.write(encode_frame(Kind.REQUEST, number, large))
    for _ in range(50):
        await asyncio.sleep(0.001)
    (connection,) = waiting
    assert 0 < connection._waiting_bytes < 2 * (256 << 10) + REQUESTS_WAITING_BYTES_MAX + len(large)
    assert not stream.flushed
    pair.service.open("x" * 100_000)
    pair.service.open("first")
    async with asyncio.timeout(T):
        await read_all(stream, count + 1)
    assert not connection._waiting_bytes
    stream.close()


# --- who does not read ---

BIG = Statistics({"text": "x" * 4_000_000})


def gated(pair: Pair) -> asyncio.Event:
    """Every answer is 4 MB, and comes when the gate is opened."""
    gate = asyncio.Event()

    async def answer() -> Message:
        await gate.wait()
        return BIG

    pair.service.on_statistics = answer
    return gate


@pytest.mark.slow
async def test_a_peer_that_reads_nothing_is_left_when_too_much_waits_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rpc, "ANSWERS_UNREAD_BYTES_MAX", 30_000_000)
    gate = gated(pair)
    stream = await greeted(pair)
    stream.write(flood(100))
    for _ in range(20):
        await asyncio.sleep(0.001)
    gate.set()
    await until(lambda: pair.service.closed == 1)
    assert "does not read its answers" in caplog.text
    stream.close()


async def test_a_peer_that_reads_nothing_is_left_after_a_time(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rpc, "ANSWERS_UNREAD_MAX_S", 0.05)
    pair.service.on_statistics = lambda: BIG
    stream = await greeted(pair)
    stream.write(flood(5))
    await until(lambda: pair.service.closed == 1)
    assert "has read none of its answers for 0.05 s" in caplog.text
    stream.close()


@pytest.mark.slow
async def test_a_peer_that_reads_slowly_is_not(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "ANSWERS_UNREAD_MAX_S", 0.5)
    pair.service.on_statistics = lambda: BIG
    stream = await greeted(pair)
    stream.write(flood(4))
    left = memoryview(bytearray(4 * len(encode_frame(Kind.REPLY, 2, encode(BIG)))))
    while left.nbytes:
        await stream.receive_into(left[:400_000])
        left = left[400_000:]
        await asyncio.sleep(0.01)
    assert not pair.service.closed
    stream.close()


@pytest.mark.slow
async def test_one_that_may_be_writing_into_our_memory_is_never_left(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests are not read while it does not read, so that what waits for it is bounded all the same."""
    monkeypatch.setattr(rpc, "ANSWERS_UNREAD_MAX_S", 0.01)
    monkeypatch.setattr(rpc, "ANSWERS_UNREAD_BYTES_MAX", 1_000_000)
    service = Scripted()
    service.on_statistics = lambda: BIG

    async def on_stream(stream: Stream) -> None:
        greeting = await accept(stream, "worker", "w")
        await Connection(stream, service, open_session(stream, service, greeting), kept=True).serve()

    listener = await place.network.listen(place.address, on_stream)
    stream = await place.network.dial(listener.address, T)
    await hello(stream)
    await frame(stream)
    stream.write(flood(5))
    for _ in range(50):
        await asyncio.sleep(0.002)
    assert not service.closed
    async with asyncio.timeout(T):
        await read_all(stream, 5)
    stream.close()
    await until(lambda: service.closed)
    await listener.close()
