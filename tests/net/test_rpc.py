"""Requests and replies on the real networks and on the fake one: deadlines, cancelling, errors, back-pressure."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tensorcast_connector.errors import (
    DeadlineExceeded,
    NotFound,
    ProtocolError,
    TensorcastError,
    Unavailable,
)
from tensorcast_connector.net import rpc
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.wire.codec import (
    encode,
)
from tensorcast_connector.wire.frames import FRAME_BODY_BYTES_MAX, Kind, encode_frame
from tensorcast_connector.wire.messages import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    GetStatistics,
    Hello,
    LookupResult,
    Message,
    Ok,
    Release,
    Statistics,
)
from tests.net.conftest import Place
from tests.net.pair import Pair, T, frame, hello
from tests.net.service import lookup
from tests.waiting import until


async def test_a_call_and_its_reply(pair: Pair) -> None:
    client = await pair.connected()
    pair.service.open("four")
    assert await client.call(lookup("four"), LookupResult, T) == LookupResult(4, 0)
    assert client.server_id == "scripted" and pair.service.hellos == [
        Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION, "engine", "e")
    ]
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


async def test_what_is_sent_without_waiting_is_told_once(pair: Pair) -> None:
    client = await pair.connected()
    told: list[Any] = []
    pair.service.open("four")
    take_back = client.send(lookup("four"), LookupResult, T, told.append)
    assert told == [], "not before it returns"
    await until(lambda: told)
    assert told == [LookupResult(4, 0)] and take_back() is False
    client.send(Release(["h"]), Ok, T, told.append)
    client.send(GetStatistics(), LookupResult, T, told.append)  # another kind of answer than was expected
    client.send(lookup("slow"), LookupResult, 0.01, told.append)
    await until(lambda: len(told) == 4)
    assert sorted(type(each).__name__ for each in told[1:]) == ["DeadlineExceeded", "NotFound", "ProtocolError"]
    await until(lambda: pair.service.cancelled == ["slow"])
    assert "0 pending" in repr(client)


async def test_what_is_sent_can_be_taken_back(pair: Pair) -> None:
    client = await pair.connected()
    told: list[Any] = []
    take_back = client.send(lookup("gone"), LookupResult, T, told.append)
    await until(lambda: pair.service.started)
    assert take_back() is True and take_back() is False
    await until(lambda: pair.service.cancelled == ["gone"])
    assert told == [] and "0 pending" in repr(client)


async def test_what_is_sent_fails_with_its_connection(pair: Pair) -> None:
    client = await pair.connected()
    told: list[Any] = []

    def again(result: Any) -> None:
        told.append(result)
        if len(told) == 1:  # its connection is at its end: this one is told as well, or refused
            try:
                client.send(lookup("again"), LookupResult, T, told.append)
            except Unavailable as error:
                told.append(error)

    client.send(lookup("x"), LookupResult, T, again)
    await until(lambda: pair.service.started)
    pair.service.streams[0].close()
    await until(lambda: len(told) == 2)
    assert [type(each) for each in told] == [Unavailable, Unavailable]
    await client.close()
    with pytest.raises(Unavailable):
        client.send(lookup("x"), LookupResult, T, told.append)


async def test_who_is_told_may_take_others_back(pair: Pair) -> None:
    """Also while all of them fail with their connection: who was taken back is not told."""
    client = await pair.connected()
    told: list[str] = []

    def first(_: Any) -> None:
        told.append("first")
        assert take_back() is True

    client.send(lookup("x"), LookupResult, T, first)
    take_back = client.send(lookup("y"), LookupResult, T, lambda _: told.append("second"))
    client.send(lookup("z"), LookupResult, T, lambda _: told.append("third"))
    await until(lambda: len(pair.service.started) == 3)
    pair.service.streams[0].close()
    await until(lambda: len(told) == 2)
    assert told == ["first", "third"]


async def test_who_fails_at_an_answer_breaks_nothing(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    client = await pair.connected()

    def fail(_: Any) -> None:
        raise ZeroDivisionError("division by zero")

    client.send(GetStatistics(), Statistics, T, fail)
    await client.call(GetStatistics(), Statistics, T)
    assert "the answer to GetStatistics was not taken" in caplog.text and client.connected


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
