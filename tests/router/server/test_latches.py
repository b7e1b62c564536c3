"""What a bad moment leaves behind passes: an engine that was full or broken gets requests again, and soon."""

import asyncio
import time

import pytest
from aiohttp import web

from ..conftest import until
from ..fake_engine import hang, send_event, start_stream, status


@pytest.mark.parametrize(
    ("said", "for_s"),
    [("1", 1), ("7", 7), ("86400", 10), ("Wed, 21 Oct 2026 07:28:00 GMT", 1), ("0", 1), ("9" * 12, 1)],
)
@pytest.mark.parametrize("code", [429, 503])
async def test_an_engine_that_was_full_is_asked_instead_of_another_again(engines, route, code, said, for_s):
    one, other = await engines(2)
    router = await route(one, other, breaker_failures_min=0, health_interval_s=60)
    ahead_s = 0.0
    router.app._proxy.clock = lambda: time.monotonic() + ahead_s
    one.behaviour = other.behaviour = status(code, **{"retry-after": said})

    async def asked() -> int:
        before = len(one.requests) + len(other.requests)
        assert (await router.chat("x")).status == code
        return len(one.requests) + len(other.requests) - before

    assert await asked() == 2, "the second was not known to be full"
    assert await asked() == 1
    ahead_s = for_s - 0.5
    assert await asked() == 1
    ahead_s = 2 * for_s + 0.1  # the last one to refuse has done so just now
    assert await asked() == 2, "it may have room by now"
    one.behaviour = None
    ahead_s += for_s + 0.1
    for _ in range(2):
        assert (await router.chat("x")).status == 200


async def test_an_engine_is_back_as_soon_as_it_answers_however_long_the_answer(engines, route):
    """The request by which a breaker tries may run for minutes."""
    one, other = await engines(2)
    router = await route(one, other, breaker_failures_min=2, breaker_open_s=0.05, policy="round-robin")
    one.behaviour = status(500)
    while not is_open(router, one):
        await router.chat("x")
    go_on, beginning = asyncio.Event(), asyncio.Event()

    async def long(request: web.Request) -> web.StreamResponse:
        await beginning.wait()
        response = await start_stream(request)
        await send_event(response, {"n": 1})
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    one.behaviour = long
    one.requests.clear()
    tries = []
    while not one.requests:
        tries.append(asyncio.create_task(router.chat("x", stream=True)))
        await asyncio.sleep(0.01)
    assert is_open(router, one), "one request at a time until it has begun to answer"
    beginning.set()
    await until(lambda: not is_open(router, one))
    one.behaviour = None
    assert {(await router.chat("x")).headers["x-smetric-instance"] for _ in range(4)} == {one.url, other.url}
    go_on.set()
    assert {answer.status for answer in await asyncio.gather(*tries)} == {200}


def is_open(router, engine) -> bool:
    return router.state.statistics(0).instances[engine.url].breaker_open


@pytest.mark.parametrize("code", [400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 499])
async def test_no_4xx_counts_against_an_engine(engines, route, code):
    one, other = await engines(2)
    router = await route(one, other, breaker_failures_min=1, policy="round-robin")
    one.behaviour = other.behaviour = status(code)
    for _ in range(4):
        assert (await router.chat("x")).status == code
    assert one.requests and other.requests
    assert not is_open(router, one) and not is_open(router, other)
    assert router.healthy() == 2


@pytest.mark.slow
async def test_a_recovered_engine_gets_its_share_of_first_turns_step_by_step(engines, route):
    one, other = await engines(2)
    router = await route(one, other, slow_start_s=2)
    while router.state._slow_start:  # until both are old
        await router.chat("x")
        await asyncio.sleep(0.02)
    await one.stop()
    await until(lambda: router.healthy() == 1)
    await one.start()
    one.requests.clear()
    other.requests.clear()
    begun = time.monotonic()
    await until(lambda: router.healthy() == 2)
    for n in range(40):
        assert (await router.chat(f"{n}")).status == 200
    passed = (time.monotonic() - begun) / 2
    assert len(one.requests) <= max(0.1, passed) * 20 + 1, "of an even share, which is 20"
    while len(one.requests) < len(other.requests) / 2:  # and is there soon
        assert (await router.chat("x")).status == 200
        assert time.monotonic() - begun < 10
        await asyncio.sleep(0.005)


async def test_an_engine_that_takes_no_connection_holds_nobody_up(engines, route, monkeypatch):
    one, other = await engines(2)
    router = await route(one, other, connect_timeout_s=0.1, health_interval_s=60, health_recheck_s=60)
    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def create_connection(protocol, host=None, port=None, **options):
        if port == one.port:
            await asyncio.Event().wait()  # as if packets to it were lost
        return await connect(protocol, host, port, **options)

    monkeypatch.setattr(loop, "create_connection", create_connection)
    async with asyncio.timeout(5):
        answers = await asyncio.gather(*(router.chat(f"{n}") for n in range(6)))
    assert {(each.status, each.headers["x-smetric-instance"]) for each in answers} == {(200, other.url)}
    assert router.healthy() == 1 and "none within 0.1 s" in router.state.statistics(0).instances[one.url].cause


async def test_requests_that_hang_at_one_engine_hold_nobody_else_up(engines, route):
    one, other = await engines(2)
    router = await route(one, other)
    one.behaviour = hang
    calls = [asyncio.create_task(router.chat(f"{n}")) for n in range(20)]
    async with asyncio.timeout(5):
        await until(lambda: one.running + sum(each.done() for each in calls) == 20)
    assert one.running >= 1 and {each.result().status for each in calls if each.done()} == {200}
    hanging, answered = one.running, len(other.requests)
    for n in range(10):
        assert (await router.chat(f"later {n}")).headers["x-smetric-instance"] == other.url, "it is less loaded"
    assert (one.running, len(other.requests)) == (hanging, answered + 10)
    for call in calls:
        call.cancel()
    await until(lambda: one.running == 0)
