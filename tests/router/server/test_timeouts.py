"""Engines that fall silent, and engines that fail again and again."""

import asyncio
import json

import pytest
from aiohttp import web

from ..conftest import until
from ..fake_engine import drop, hang, send_event, start_stream, status
from .test_failures import headers_only, stall


@pytest.mark.parametrize(("behaviour", "stream"), [(hang, False), (hang, True), (headers_only, True)])
async def test_an_engine_that_is_silent_before_the_first_byte(engines, route, behaviour, stream):
    one, other = await engines(2)
    router = await route(one, other, first_byte_timeout_s=0.1)
    one.behaviour = other.behaviour = behaviour
    answer = await router.chat("x", stream=stream)
    assert (answer.status, answer.json()["error"]["code"]) == (504, "upstream_timeout")
    assert len(one.requests) + len(other.requests) == 1, "it may still be at work on it: nobody else is asked"
    async with asyncio.timeout(1):
        await until(lambda: one.running + other.running == 0)
    assert router.healthy() == 2


async def test_a_stream_that_stalls_ends_with_an_error_event(engines, route):
    (engine,) = await engines()
    router = await route(engine, stream_stall_timeout_s=0.1)
    engine.behaviour = stall
    answer = await router.chat("x", stream=True)
    events = answer.body.split(b"\n\n")
    error = json.loads(events[1].removeprefix(b"data: "))["error"]
    assert (answer.status, error["code"]) == (200, "upstream_timeout")
    assert b"[DONE]" not in answer.body
    await until(lambda: engine.running == 0)


@pytest.mark.slow
async def test_a_slow_stream_is_none_that_stalls(engines, route):
    (engine,) = await engines()
    router = await route(engine, stream_stall_timeout_s=0.5, first_byte_timeout_s=0.5)

    async def slow(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        for n in range(10):
            await send_event(response, {"n": n})
            await asyncio.sleep(0.1)
        await response.write(b"data: [DONE]\n\n")
        return response

    engine.behaviour = slow
    assert (await router.chat("x", stream=True)).body.endswith(b"[DONE]\n\n")


@pytest.mark.slow
async def test_a_client_that_reads_slowly_is_no_engine_that_stalls(engines, route):
    (engine,) = await engines()
    router = await route(engine, stream_stall_timeout_s=0.2)
    size, sent = 64, asyncio.Event()

    async def much(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        for _ in range(size):
            await response.write(b"data: " + b"x" * 262_144 + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        sent.set()
        return response

    engine.behaviour = much
    body = {"messages": [], "stream": True}
    async with router.client.post(f"{router.url}/v1/chat/completions", json=body) as answer:
        await answer.content.readany()
        await asyncio.sleep(0.6)
        assert not sent.is_set(), "the engine is held back too"
        rest = await answer.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    again = await router.chat("x", stream=True, headers={"x-request-id": "again"})
    assert again.status == 200, "the connection to the engine is of use again"


@pytest.mark.slow
async def test_a_breaker_opens_and_one_request_tries(engines, route):
    one, other = await engines(2)
    router = await route(one, other, breaker_failures_min=3, breaker_open_s=0.3, policies={})
    one.behaviour = status(500)
    while not router.state.statistics(0).instances[one.url].breaker_open:
        await router.chat("x", headers={"x-smetric-policy": "round-robin"})
    assert len(one.requests) == 3
    answers = [await router.chat("x", headers={"x-smetric-policy": "round-robin"}) for _ in range(6)]
    assert {answer.headers["x-smetric-instance"] for answer in answers} == {other.url}
    text = (await router.get("/metrics")).body.decode()
    assert f'smetric_router_breaker_open{{engine="{one.url}"}} 1.0' in text
    assert router.healthy() == 2
    await until(lambda: not router.state.statistics(0).instances[one.url].breaker_open)
    one.behaviour = hang
    call = asyncio.create_task(router.chat("x", headers={"x-smetric-policy": "round-robin"}))
    more = [asyncio.create_task(router.chat("x", headers={"x-smetric-policy": "round-robin"})) for _ in range(4)]
    await until(lambda: one.running == 1 and sum(each.done() for each in (call, *more)) == 4)
    assert len(one.requests) == 4, "one request tries"
    one.behaviour = None
    for each in (call, *more):
        each.cancel()
    await until(lambda: one.running == 0)
    await until(lambda: not router.state.statistics(0).instances[one.url].breaker_open)
    for _ in range(4):
        assert (await router.chat("x", headers={"x-smetric-policy": "round-robin"})).status == 200
    assert len(one.requests) > 5, "its success closes it"


async def test_a_breaker_never_takes_the_last_engine(engines, route):
    (engine,) = await engines()
    router = await route(engine, breaker_failures_min=2)
    engine.behaviour = status(500)
    for _ in range(6):
        assert (await router.chat("x")).json() == {"error": {"message": "engine says 500"}}
    assert len(engine.requests) == 6


async def test_client_errors_and_clients_that_leave_open_no_breaker(engines, route):
    one, other = await engines(2)
    router = await route(one, other, breaker_failures_min=1)
    one.behaviour = other.behaviour = status(400)
    for _ in range(6):
        await router.chat("x")
    one.behaviour = other.behaviour = hang
    calls = [asyncio.create_task(router.chat("x")) for _ in range(6)]
    await until(lambda: one.running + other.running == 6)
    for call in calls:
        call.cancel()
    await until(lambda: router.inflight() == 0)
    assert not any(each.breaker_open for each in router.state.statistics(0).instances.values())
    one.behaviour = other.behaviour = drop
    for _ in range(10):
        await router.chat("x")
    assert any(each.breaker_open for each in router.state.statistics(0).instances.values())


@pytest.mark.slow
async def test_an_engine_that_restarts_under_a_kept_connection_gets_nothing_twice(route):
    """It takes a request on a connection that was used before, thinks, and dies."""
    asked = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            if head.startswith(b"GET "):
                break
            asked.append(await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0])))
            if len(asked) > 1:
                await asyncio.sleep(1.1)
                writer.transport.abort()
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    router = await route(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert (await router.chat("x")).status == 200
    assert (await router.chat("x")).status == 502
    assert len(asked) == 2
    server.close()
