"""Connections of requests and replies: how they begin, which version they speak, how they end, and how they come back."""

import asyncio
import random
import time
from typing import Any

import pytest

from tensorcast_connector.errors import (
    DeadlineExceeded,
    ProtocolError,
    Unavailable,
)
from tensorcast_connector.net import rpc, rpc_client
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.types import Address
from tensorcast_connector.wire.messages import (
    GetStatistics,
    LookupResult,
    Statistics,
)
from tests.net.conftest import Place
from tests.net.pair import Pair, T, frame, hello
from tests.net.service import lookup
from tests.waiting import until


@pytest.mark.slow
async def test_a_busy_server_that_answers_pings_is_not_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_client, "PING_INTERVAL_S", 0.02)
    monkeypatch.setattr(rpc_client, "SILENCE_MAX_S", 0.2)
    client = await pair.connected()
    with pytest.raises(DeadlineExceeded):
        await client.call(lookup("slow"), LookupResult, 0.5)
    assert client.connected


@pytest.mark.slow
async def test_a_client_that_stood_still_does_not_take_the_server_for_silent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still for longer than silence may last, between two pings, and the answers take their time."""
    monkeypatch.setattr(rpc_client, "PING_INTERVAL_S", 0.1)
    monkeypatch.setattr(rpc_client, "SILENCE_MAX_S", 0.3)
    client = await pair.connected()
    stream, loop = client._stream, asyncio.get_running_loop()
    assert stream is not None
    write = type(stream).write
    monkeypatch.setattr(
        type(stream), "write",
        lambda self, data: loop.call_later(0.05, write, self, data) if self is stream else write(self, data),
    )  # fmt: skip
    for _ in range(3):
        heard_s = client._heard_s
        await until(lambda before=heard_s: client._heard_s > before)
        time.sleep(0.5)  # noqa: ASYNC251 - all that is on this loop stands still
        await asyncio.sleep(0.15)
        assert client.connected and client._stream is stream, "it was not given up"


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
    for theirs, spoken in (((1, 9), b"\x03"), ((3, 3), b"\x03"), ((1, 2), b"\x02")):
        stream = await pair.raw()
        await hello(stream, *theirs)
        assert b"Welcome" + spoken in (await frame(stream))[2]
        stream.close()
    monkeypatch.setattr(rpc_client, "PROTOCOL_VERSION_MIN", 4)
    monkeypatch.setattr(rpc_client, "PROTOCOL_VERSION", 5)
    client = pair.client()
    with pytest.raises(
        ProtocolError, match=r"versions 4-5 of 'e' and 2-3 of this worker do not overlap; upgrade the older"
    ):
        await client.wait_connected(T, patient=False)


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


async def test_a_connection_that_ends_while_its_beginning_is_done_is_told_to_have_ended(pair: Pair) -> None:
    told: list[str] = []

    async def first(client: RpcClient) -> None:
        told.append("there")
        if len(told) == 1:
            pair.service.streams[-1].close()
            with pytest.raises(Unavailable):
                await client.call(GetStatistics(), Statistics, T)

    await pair.connected(on_connected=first, on_disconnected=lambda _: told.append("gone"))
    assert told == ["there", "gone", "there"]


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
