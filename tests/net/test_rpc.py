"""Requests and replies on the real networks and on the fake one."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tensorcast_connector.errors import (
    DeadlineExceeded,
    Exhausted,
    NotFound,
    ProtocolError,
    TensorcastError,
    Unavailable,
)
from tensorcast_connector.net import rpc, rpc_client
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.transport import Listener, Stream
from tensorcast_connector.types import Address
from tensorcast_connector.wire.codec import (
    encode,
    failure_decoder,
)
from tensorcast_connector.wire.frames import FRAME_BODY_BYTES_MAX, HEADER_BYTES, Kind, encode_frame
from tensorcast_connector.wire.messages import (
    GetStatistics,
    Hello,
    LookupResult,
    Message,
    Ok,
    Release,
    Statistics,
)
from tests.net.conftest import Place
from tests.net.service import Scripted, lookup
from tests.waiting import until

T = 5.0


class Pair:
    """A listener with a scripted service, and what dials it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.network = place.network
        self.service = Scripted()
        self.listener: Listener | None = None
        self.address = place.address
        self.clients: list[RpcClient] = []

    async def listen(self) -> None:
        self.listener = await self.network.listen(self.address, self.service.on_stream)
        self.address = self.listener.address

    async def stop(self) -> None:
        assert self.listener is not None
        await self.listener.close()

    def client(self, **options: Any) -> RpcClient:
        client = RpcClient(self.network, self.address, "engine", "e", random.Random(1), **options)
        client.start()
        self.clients.append(client)
        return client

    async def connected(self, **options: Any) -> RpcClient:
        client = self.client(**options)
        await client.wait_connected(T)
        return client

    async def raw(self) -> Stream:
        return await self.network.dial(self.address, T)


@pytest.fixture
async def pair(place: Place) -> AsyncIterator[Pair]:
    pair = Pair(place)
    await pair.listen()
    yield pair
    for client in pair.clients:
        await client.close()
    await pair.stop()
    assert pair.service.closed == pair.service.sessions, "a session was not closed exactly once"
    assert not pair.service.running_at_close, "a session was closed while one of its requests still ran"


async def frame(stream: Stream) -> tuple[Kind, int, bytes]:
    _, got = await rpc.receive_frame(stream)
    return got.kind, got.request_id, got.body


async def hello(stream: Stream, low: int = 1, high: int = 1) -> None:
    stream.write(encode_frame(Kind.REQUEST, 1, encode(Hello(low, high, "engine", "raw"))))


async def test_a_call_and_its_reply(pair: Pair) -> None:
    client = await pair.connected()
    pair.service.open("four")
    assert await client.call(lookup("four"), LookupResult, T) == LookupResult(4, 0)
    assert client.server_id == "scripted" and pair.service.hellos == [Hello(1, 2, "engine", "e")]
    assert "connected, 0 pending" in repr(client)


async def test_concurrent_requests_are_answered_in_any_order(pair: Pair) -> None:
    client = await pair.connected()
    order: list[int] = []

    async def ask(name: str) -> None:
        order.append((await client.call(lookup(name), LookupResult, T)).blocks)

    async with asyncio.TaskGroup() as group:
        for name in ("a", "bb", "ccc"):
            group.create_task(ask(name))
        await until(lambda: len(pair.service.started) == 3)
        for name in ("ccc", "a", "bb"):
            pair.service.open(name)
            await until(lambda name=name: len(name) in order)
    assert order == [3, 1, 2]


async def test_hundreds_at_once(pair: Pair) -> None:
    client = await pair.connected()
    names = ["x" * size for size in range(300)]
    for name in names:
        pair.service.open(name)
    results = await asyncio.gather(*(client.call(lookup(name), LookupResult, T) for name in names))
    assert [each.blocks for each in results] == list(range(300))


async def test_the_server_gives_up_at_the_deadline(pair: Pair) -> None:
    client = await pair.connected()
    with pytest.raises(DeadlineExceeded, match=r"not done within 10 ms|did not answer within"):
        await client.call(lookup("slow"), LookupResult, 0.01)
    await until(lambda: pair.service.cancelled == ["slow"])


async def mute(received: list[tuple[Kind, int]], stream: Stream) -> None:
    """A server that answers hello and nothing else."""
    await rpc.accept(stream, "worker", "mute")
    try:
        while True:
            kind, request_id, _ = await frame(stream)
            received.append((kind, request_id))
    except Unavailable:
        pass


async def test_every_call_has_its_own_deadline_whichever_began_first(place: Place) -> None:
    received: list[tuple[Kind, int]] = []
    listener = await place.network.listen(place.address, lambda stream: mute(received, stream))
    client = RpcClient(place.network, listener.address, "engine", "e", random.Random(1))
    client.start()
    await client.wait_connected(T)

    async def call(timeout_s: float) -> None:
        with pytest.raises(DeadlineExceeded, match=f"did not answer within {timeout_s:g} s"):
            await client.call(GetStatistics(), Statistics, timeout_s)

    patient = asyncio.create_task(client.call(GetStatistics(), Statistics, 10 * T))
    await until(lambda: received)
    async with asyncio.timeout(T):
        await call(0.01)
        await asyncio.gather(*map(call, (0.03, 0.01, 0.02)))
        await call(0.01)
    assert not patient.done() and "1 pending" in repr(client)
    await until(lambda: len([kind for kind, _ in received if kind is Kind.CANCEL]) == 5)
    assert received[0] == (Kind.REQUEST, 2) and (Kind.CANCEL, 2) not in received
    await client.close()
    with pytest.raises(Unavailable):
        await patient
    await listener.close()


async def test_calls_share_one_timer_and_leave_none(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []
    call_at = loop.call_at

    def counted(*args: Any, **options: Any) -> asyncio.TimerHandle:
        timers.append(call_at(*args, **options))
        return timers[-1]

    monkeypatch.setattr(loop, "call_at", counted)
    client = await pair.connected()
    before = len(timers)
    for _ in range(100):
        await client.call(GetStatistics(), Statistics, T)
    assert len(timers) - before <= 3, "one for the calls, and the pings"
    await client.close()
    assert [timer for timer in timers if not timer.cancelled() and timer.when() > loop.time()] == []


async def test_a_call_that_is_cancelled_is_cancelled_on_the_server(pair: Pair) -> None:
    client = await pair.connected()
    task = asyncio.create_task(client.call(lookup("gone"), LookupResult, T))
    await until(lambda: pair.service.started)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: pair.service.cancelled == ["gone"])
    assert "0 pending" in repr(client)


async def test_cancelled_before_the_handler_began(pair: Pair) -> None:
    stream = await pair.raw()
    await hello(stream)
    await frame(stream)
    # Both in one piece: the handler's task has not had its first step when the cancel arrives.
    stream.write(encode_frame(Kind.REQUEST, 2, encode(lookup("never"))) + encode_frame(Kind.CANCEL, 2, b""))
    stream.write(encode_frame(Kind.REQUEST, 3, encode(GetStatistics())))
    assert (await frame(stream))[:2] == (Kind.REPLY, 3)
    stream.close()


@pytest.mark.slow
async def test_a_busy_server_that_answers_pings_is_not_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_client, "PING_INTERVAL_S", 0.02)
    monkeypatch.setattr(rpc_client, "SILENCE_MAX_S", 0.2)
    client = await pair.connected()
    with pytest.raises(DeadlineExceeded):
        await client.call(lookup("slow"), LookupResult, 0.5)
    assert client.connected


async def test_a_broken_connection_fails_pending_calls_at_once(pair: Pair) -> None:
    lost: list[str] = []
    client = await pair.connected(on_disconnected=lambda error: lost.append(str(error)))
    calls = [asyncio.create_task(client.call(lookup(str(n)), LookupResult, T)) for n in range(3)]
    await until(lambda: len(pair.service.started) == 3)
    pair.service.streams[0].close()
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert type(result) is Unavailable
    await until(lambda: len(lost) == 1)
    await until(lambda: sorted(pair.service.cancelled) == ["0", "1", "2"] and pair.service.closed)


async def test_cancelled_and_broken_in_the_same_moment(pair: Pair) -> None:
    client = await pair.connected()
    call = asyncio.create_task(client.call(lookup("x"), LookupResult, T))
    await until(lambda: pair.service.started)
    pair.service.streams[0].close()
    while client.connected:  # noqa: ASYNC110 - in that very turn
        await asyncio.sleep(0)
    call.cancel()  # its future has failed already; nobody will read that
    assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], asyncio.CancelledError | Unavailable)


async def test_reconnects_after_the_server_restarted(pair: Pair) -> None:
    client = await pair.connected()
    await pair.stop()
    await until(lambda: not client.connected)
    with pytest.raises(Unavailable):
        await client.call(GetStatistics(), Statistics, T)
    await pair.listen()
    await client.wait_connected(T)
    assert await client.call(GetStatistics(), Statistics, T) == Statistics({})


async def test_the_delay_between_attempts_grows_to_a_limit(monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    slept: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds:
            slept.append(seconds)
        await real_sleep(0)

    nobody = Address("tcp", host="127.0.0.1", port=1) if place.address.scheme == "tcp" else place.address
    client = RpcClient(place.network, nobody, "engine", "e", random.Random(1))
    monkeypatch.setattr(rpc_client.asyncio, "sleep", sleep)
    client.start()
    while len(slept) < 9:
        await real_sleep(0.001)
    await client.close()
    ceilings = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    assert all(top / 2 <= each <= top for each, top in zip(slept, ceilings, strict=False)), slept
    with pytest.raises(Unavailable, match=r"cannot connect|closed"):
        await client.wait_connected(0.01)


async def test_not_patient(place: Place) -> None:
    nobody = Address("tcp", host="127.0.0.1", port=1) if place.address.scheme == "tcp" else place.address
    client = RpcClient(place.network, nobody, "client", "c", random.Random(1))
    client.start()
    with pytest.raises(Unavailable, match="cannot connect"):
        await client.wait_connected(T, patient=False)
    await client.close()


async def test_the_version_is_negotiated_or_both_ranges_are_named(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for theirs, spoken in (((1, 9), b"\x02"), ((2, 2), b"\x02"), ((1, 1), b"\x01")):
        stream = await pair.raw()
        await hello(stream, *theirs)
        assert b"Welcome" + spoken in (await frame(stream))[2]
        stream.close()
    monkeypatch.setattr(rpc_client, "PROTOCOL_VERSION_MIN", 3)
    monkeypatch.setattr(rpc_client, "PROTOCOL_VERSION", 4)
    client = pair.client()
    with pytest.raises(
        ProtocolError, match=r"versions 3-4 of 'e' and 1-2 of this worker do not overlap; upgrade the older"
    ):
        await client.wait_connected(T, patient=False)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "one byte": b"x",
    "zeros": bytes(4096),
    "no hello": encode_frame(Kind.REQUEST, 1, encode(GetStatistics())),
    "a reply": encode_frame(Kind.REPLY, 1, encode(Ok())),
    "no message": encode_frame(Kind.REQUEST, 1, b"\xc1"),
    "half a hello": encode_frame(Kind.REQUEST, 1, encode(Hello(1, 1, "r", "n")))[:-3],
    "lists in lists": encode_frame(Kind.REQUEST, 1, b"\x96\xa5Hello\x01\x01\xa1r\xa1n" + b"\x91" * 50_000 + b"\xc0"),
    "a long hello": encode_frame(Kind.REQUEST, 1, encode(Hello(1, 1, "r", "n" * 100_000))),
    "impatient": encode_frame(Kind.REQUEST, 1, encode(Hello(1, 1, "r", "n"))) * 2,
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_leaves_the_server_serving_and_is_one_line(
    pair: Pair, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    stream = await pair.raw()
    stream.write(GARBAGE[name])
    if name == "half a hello":
        stream.close()
    else:
        answer = b""
        try:
            while piece := await stream.receive():
                answer += piece
        except Unavailable:
            pass  # reset, since some of the garbage was never read
        if answer:
            assert failure_decoder.decode(answer[HEADER_BYTES:]).code == "protocol"
        stream.close()
    await until(lambda: caplog.records)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and lines[0].startswith("connection from ") and "\n" not in lines[0]
    client = await pair.connected()
    assert await client.call(GetStatistics(), Statistics, T) == Statistics({})


async def test_garbage_after_the_hello_ends_the_connection_and_says_why(pair: Pair) -> None:
    stream = await pair.raw()
    await hello(stream)
    await frame(stream)
    stream.write(encode_frame(Kind.REPLY, 5, encode(Ok())))
    kind, request_id, body = await frame(stream)
    assert (kind, request_id) == (Kind.ERROR, 0) and "not REPLY" in failure_decoder.decode(body).message
    stream.close()


async def test_a_message_that_is_not_understood_fails_only_itself(pair: Pair) -> None:
    stream = await pair.raw()
    await hello(stream)
    await frame(stream)
    stream.write(
        encode_frame(Kind.REQUEST, 2, b"\x91\xa4Nope") + encode_frame(Kind.REQUEST, 3, encode(GetStatistics()))
    )
    kind, request_id, body = await frame(stream)
    assert (kind, request_id) == (Kind.ERROR, 2) and "not understood" in failure_decoder.decode(body).message
    assert (await frame(stream))[:2] == (Kind.REPLY, 3)
    stream.close()


async def test_lists_in_lists_in_lists_are_not_understood(pair: Pair) -> None:
    deep = b"\x91" * 200_000 + b"\xc0"
    stream = await pair.raw()
    await hello(stream)
    await frame(stream)
    stream.write(encode_frame(Kind.REQUEST, 2, b"\x92\xadGetStatistics" + deep))
    kind, _, body = await frame(stream)
    assert kind is Kind.ERROR and "not understood: maximum recursion" in failure_decoder.decode(body).message
    stream.close()


async def test_a_request_id_that_is_in_use_ends_the_connection(pair: Pair) -> None:
    stream = await pair.raw()
    await hello(stream)
    await frame(stream)
    stream.write(encode_frame(Kind.REQUEST, 2, encode(lookup("a"))) * 2)
    assert "request id 2 is in use" in failure_decoder.decode((await frame(stream))[2]).message
    stream.close()


async def test_too_many_requests_in_flight(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "REQUESTS_IN_FLIGHT_MAX", 2)
    client = await pair.connected()
    calls = [asyncio.create_task(client.call(lookup("x"), LookupResult, T)) for _ in range(2)]
    await until(lambda: len(pair.service.started) == 2)
    with pytest.raises(Exhausted, match="more than 2 requests in flight"):
        await client.call(lookup("y"), LookupResult, T)
    pair.service.open("x")
    assert len(await asyncio.gather(*calls)) == 2
    pair.service.open("y")
    assert await client.call(lookup("y"), LookupResult, T) == LookupResult(1, 0)


async def test_the_callers_mistake_arrives_as_its_class(pair: Pair) -> None:
    client = await pair.connected()
    with pytest.raises(NotFound, match=r"no hold \['h'\]"):
        await client.call(Release(["h"]), Ok, T)


async def raises() -> Message:
    raise ZeroDivisionError("division by zero")


def raises_at_once() -> Message:
    raise ZeroDivisionError("division by zero")


def not_encodable() -> Message:
    return Statistics({"number": 1 << 100})


def too_large() -> Message:
    return Statistics({"text": "x" * FRAME_BODY_BYTES_MAX})


async def too_large_later() -> Message:
    return too_large()


@pytest.mark.parametrize(
    ("handler", "why"),
    [(raises, "ZeroDivisionError: division"), (raises_at_once, "ZeroDivisionError: division"), (not_encodable, "Overflow"),
     (too_large, "exceeds the frame limit"), (too_large_later, "exceeds the frame limit")],
)  # fmt: skip
async def test_a_handler_that_fails_fails_one_call(
    pair: Pair, handler: Callable[[], Message | Awaitable[Message]], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = await pair.connected()
    pair.service.on_statistics = handler
    with pytest.raises(TensorcastError, match=why), caplog.at_level(logging.CRITICAL):
        await client.call(GetStatistics(), Statistics, T)
    pair.service.on_statistics = lambda: Statistics({"fine": 1})
    assert await client.call(GetStatistics(), Statistics, T) == Statistics({"fine": 1})


async def test_a_huge_message_is_refused_before_it_is_sent(pair: Pair) -> None:
    client = await pair.connected()
    with pytest.raises(ProtocolError, match="exceeds the frame limit"):
        await client.call(Release(["x" * FRAME_BODY_BYTES_MAX]), Ok, T)
    assert await client.call(GetStatistics(), Statistics, T) == Statistics({})
    assert "0 pending" in repr(client)


async def test_a_reply_of_another_type_is_a_protocol_error(pair: Pair) -> None:
    client = await pair.connected()
    with pytest.raises(ProtocolError, match="expected LookupResult, got Statistics"):
        await client.call(GetStatistics(), LookupResult, T)


async def test_a_peer_that_does_not_read_is_not_read(pair: Pair) -> None:
    """Replies of 4 MB each to somebody who never reads them: the server stops reading instead of piling them up."""
    stream = await pair.raw()
    await hello(stream)
    await frame(stream)
    answered = 0
    big = Statistics({"text": "x" * 4_000_000})

    def answer() -> Message:
        nonlocal answered
        answered += 1
        return big

    pair.service.on_statistics = answer
    request = encode(GetStatistics())
    stream.write(b"".join(encode_frame(Kind.REQUEST, number, request) for number in range(2, 202)))
    seen = -1
    while seen != answered:
        seen = answered
        for _ in range(20):
            await asyncio.sleep(0.001)
    assert 0 < answered < 20
    stream.close()


async def test_closed_while_connecting(pair: Pair) -> None:
    for turns in range(12):
        client = pair.client()
        for _ in range(turns):
            await asyncio.sleep(0)
        await client.close()
        assert not client.connected
        with pytest.raises(Unavailable):
            await client.call(GetStatistics(), Statistics, T)


async def test_what_must_happen_first_may_call_and_may_fail(pair: Pair) -> None:
    attempts: list[bool] = []

    async def first(client: RpcClient) -> None:
        attempts.append(client.connected)
        await client.call(GetStatistics(), Statistics, T)
        if len(attempts) == 1:
            raise ValueError("not one of our own errors")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc_client.logger, "exception", lambda *args, **kwargs: None)
        client = await pair.connected(on_connected=first)
    assert attempts == [False, False]
    assert await client.call(GetStatistics(), Statistics, T) == Statistics({})


async def test_a_server_that_never_answers_hello(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_client, "HELLO_TIMEOUT_S", 0.02)
    dialled = 0

    async def mute(stream: Stream) -> None:
        nonlocal dialled
        dialled += 1
        while await stream.receive():
            pass

    listener = await place.network.listen(place.address, mute)
    client = RpcClient(place.network, listener.address, "engine", "e", random.Random(1))
    client.start()
    await until(lambda: dialled == 1)
    with pytest.raises(Unavailable, match="not yet connected"):
        await client.call(GetStatistics(), Statistics, T)  # at once, not after its deadline
    with pytest.raises(DeadlineExceeded, match="did not answer within"):
        await client.wait_connected(T, patient=False)
    await client.close()
    await listener.close()


async def test_a_caller_that_never_says_hello(pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(rpc, "HELLO_TIMEOUT_S", 0.02)
    stream = await pair.raw()
    assert await stream.receive() == b""
    assert ["no hello within 0.02 s" in record.getMessage() for record in caplog.records] == [True]
    stream.close()


async def test_a_server_that_speaks_nonsense(place: Place) -> None:
    async def nonsense(stream: Stream) -> None:
        await stream.receive()
        stream.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await stream.receive()

    listener = await place.network.listen(place.address, nonsense)
    client = RpcClient(place.network, listener.address, "engine", "e", random.Random(1))
    client.start()
    with pytest.raises(ProtocolError, match="not a tensorcast connection"):
        await client.wait_connected(T, patient=False)
    await client.close()
    await listener.close()


async def test_a_server_that_answers_with_a_request(place: Place) -> None:
    async def odd(stream: Stream) -> None:
        await rpc.accept(stream, "worker", "odd")
        _, got = await rpc.receive_frame(stream)
        stream.write(encode_frame(Kind.REQUEST, got.request_id, encode(Ok())))
        await stream.receive()

    listener = await place.network.listen(place.address, odd)
    client = RpcClient(place.network, listener.address, "engine", "e", random.Random(1))
    client.start()
    await client.wait_connected(T)
    with pytest.raises(ProtocolError, match="not REQUEST"):
        await client.call(GetStatistics(), Statistics, T)
    await client.close()
    await listener.close()


async def test_a_listener_that_closes_cancels_what_it_serves(pair: Pair) -> None:
    client = await pair.connected()
    call = asyncio.create_task(client.call(lookup("x"), LookupResult, T))
    await until(lambda: pair.service.started)
    await pair.stop()
    assert pair.service.cancelled == ["x"] and pair.service.closed == 1
    with pytest.raises(Unavailable):
        await call


@pytest.mark.parametrize("turns", range(8))
async def test_closed_in_the_moment_the_connection_breaks(pair: Pair, turns: int) -> None:
    """Python 3.11's TaskGroup would swallow the cancellation, and the client would live for ever."""
    client = await pair.connected()
    pair.service.streams[0].close()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(T):
        await client.close()
    assert not client.connected
