"""An engine that is down but leaves its connections open."""

import asyncio

import pytest
from aiohttp import web

from ..conftest import until
from ..fake_engine import hang, send_event, start_stream
from .test_failures import headers_only, stall


@pytest.mark.parametrize(("behaviour", "stream"), [(hang, False), (headers_only, True)])
async def test_a_silent_engine_that_is_down_is_replaced_before_the_first_byte(engines, route, behaviour, stream):
    one, other = await engines(2)
    router = await route(one, other, down_grace_s=0.05, health_interval_s=0.05)
    one.behaviour = behaviour
    call = asyncio.create_task(router.chat("x", stream=stream))
    await until(lambda: one.running == 1)
    one.health_status = 503
    answer = await asyncio.wait_for(call, 5)
    assert (answer.status, answer.headers["x-smetric-instance"]) == (200, other.url)
    await until(lambda: one.running == 0)


async def test_a_silent_engine_that_is_down_ends_its_streams(engines, route):
    one, other = await engines(2)
    router = await route(one, other, down_grace_s=0.05, health_interval_s=0.05)
    one.behaviour = stall
    call = asyncio.create_task(router.chat("x", stream=True))
    await until(lambda: one.running == 1)
    one.health_status = 503
    answer = await asyncio.wait_for(call, 5)
    assert b'"upstream_disconnected"' in answer.body.split(b"\n\n")[1]
    assert not other.requests


@pytest.mark.slow
async def test_what_still_arrives_from_an_engine_that_is_down_is_passed_on(engines, route):
    (engine,) = await engines()
    router = await route(engine, down_grace_s=0.5)

    async def behave(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        await send_event(response, {"n": 0})
        await until(lambda: router.healthy() == 0)
        for n in range(12):
            await asyncio.sleep(0.05)
            await send_event(response, {"n": n})
        await response.write(b"data: [DONE]\n\n")
        return response

    engine.behaviour = behave
    call = asyncio.create_task(router.chat("x", stream=True))
    await until(lambda: engine.running == 1)
    engine.health_status = 503
    assert (await call).body.endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
async def test_an_engine_that_comes_back_in_time_keeps_its_requests(engines, route):
    (engine,) = await engines()
    router = await route(engine, down_grace_s=0.4)
    go_on = asyncio.Event()

    async def behave(request: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return web.json_response({})

    engine.behaviour = behave
    call = asyncio.create_task(router.chat("x"))
    await until(lambda: engine.running == 1)
    engine.health_status = 503
    await until(lambda: router.healthy() == 0)
    engine.health_status = 200
    await until(lambda: router.healthy() == 1)
    await asyncio.sleep(0.5)
    go_on.set()
    assert (await call).status == 200
