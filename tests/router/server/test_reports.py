"""The engines' load reports over real sockets."""

import asyncio

import pytest
from aiohttp import web

from ..conftest import until
from ..fake_engine import FakeEngine, start_stream
from ..state.test_engine_reports import LOADS, SGLANG, VLLM


def reporting(engine: FakeEngine, answers: dict[str, bytes]) -> None:
    """The engine answers these paths, as long as they are in `answers`, and requests as usual."""

    async def behaviour(request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            found = answers.get(request.path)
            return web.Response(status=404) if found is None else web.Response(body=found)
        return await engine.answer(request, await request.read())

    engine.behaviour = behaviour


@pytest.mark.slow
@pytest.mark.parametrize(("path", "text"), [("/metrics", VLLM), ("/metrics", SGLANG), ("/v1/loads", LOADS)])
async def test_load_of_others_counts(engines, route, path: str, text: bytes) -> None:
    one, two = await engines(2)
    answers = {path: text}
    reporting(one, answers)
    reporting(two, {})
    router = await route(one, two, policy="least-loaded", report_interval_s=0.02, report_stale_s=0.3)
    await until(lambda: router.state.statistics(0).instances[one.url].load == 6)
    for _ in range(5):
        assert (await router.chat("x")).headers["x-smetric-instance"] == two.url
    metrics = (await router.get("/metrics")).body.decode()
    assert f'smetric_router_load_requests{{engine="{one.url}"}} 6.0' in metrics
    assert f'smetric_router_report_age_seconds{{engine="{one.url}"}}' in metrics
    answers.clear()
    clock = router.app._clock
    await until(lambda: router.state.statistics(clock()).instances[one.url].load == 0)
    assert (await router.chat("x")).headers["x-smetric-instance"] == one.url


@pytest.mark.parametrize("text", [b"\xff" * 1000, b"vllm:num_requests_running 1e999\n" * 100, b"", b"{" * 10_000])
async def test_garbage_is_no_report(engines, route, text: bytes) -> None:
    (engine,) = await engines(1)
    reporting(engine, {"/metrics": text, "/v1/loads": text})
    router = await route(engine, report_interval_s=0.01)
    await until(lambda: len(engine.requests) >= 6)
    assert router.state.statistics(0).instances[engine.url].report_age_s is None
    assert (await router.chat("x")).status == 200
    assert {request.path for request in engine.requests} >= {"/metrics", "/v1/loads"}


async def test_nobody_is_asked_unless_it_is_wanted(engines, route) -> None:
    (engine,) = await engines(1)
    router = await route(engine)
    assert (await router.chat("x")).status == 200
    assert all(request.path != "/metrics" for request in engine.requests)


@pytest.mark.slow
async def test_an_engine_that_is_slow_to_report_is_asked_one_thing_at_a_time(engines, route) -> None:
    """Scrapes that pile up have hung engines."""
    slow, quick = await engines(2)
    asking = most = asked = 0

    async def behaviour(request: web.Request) -> web.StreamResponse:
        nonlocal asking, most, asked
        if request.method != "GET":
            return await slow.answer(request, await request.read())
        asking, asked = asking + 1, asked + 1
        most = max(most, asking)
        try:
            await asyncio.sleep(0.15)
        finally:
            asking -= 1
        return web.Response(body=VLLM)

    slow.behaviour = behaviour
    reporting(quick, {"/metrics": VLLM})
    router = await route(slow, quick, report_interval_s=0.01, health_timeout_s=0.5)
    await until(lambda: router.state.statistics(0).instances[quick.url].report_age_s is not None)
    assert asked == 1, "others are not kept waiting"
    for _ in range(6):
        assert (await router.chat("x")).status == 200
    await until(lambda: asked >= 4)
    assert most == 1


async def test_own_requests_are_not_counted_twice(engines, route) -> None:
    (engine,) = await engines(1)

    async def behaviour(request: web.Request) -> web.StreamResponse:
        if request.path == "/metrics":
            mine = engine.running - 1  # but for this one
            return web.Response(text=f"vllm:num_requests_running {mine}\nvllm:num_requests_waiting 0\n")
        response = await start_stream(request)
        await response.write(b"data: {}\n\n")
        await until(lambda: len([each for each in engine.requests if each.path == "/metrics"]) >= 5)
        return response

    engine.behaviour = behaviour
    router = await route(engine, report_interval_s=0.01)
    async with router.client.post(f"{router.url}/v1/chat/completions", data=b'{"messages":[]}') as answer:
        await until(lambda: router.state.statistics(0).instances[engine.url].report_age_s is not None)
        figures = router.state.statistics(0).instances[engine.url]
        assert (figures.inflight, figures.load) == (1, 1)
        await answer.read()


async def test_a_prompt_is_pending_until_the_first_byte(engines, route) -> None:
    (engine,) = await engines(1)
    begin, end = asyncio.Event(), asyncio.Event()

    async def behaviour(request: web.Request) -> web.StreamResponse:
        await begin.wait()
        response = await start_stream(request)
        await response.write(b"data: {}\n\n")
        await end.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    engine.behaviour = behaviour
    router = await route(engine)

    def figures() -> tuple[int, int]:
        found = router.state.statistics(0).instances[engine.url]
        return found.inflight, found.pending_tokens

    asked = asyncio.create_task(router.chat("x" * 3970, stream=True))
    await engine.started.wait()
    assert figures() == (1, 1000)
    begin.set()
    await until(lambda: figures() == (1, 0))
    end.set()
    assert (await asked).status == 200
    assert figures() == (0, 0)


async def test_session_header_and_reasons(engines, route) -> None:
    router = await route(*await engines(4), policy="session-hash")
    home = {}
    for _ in range(3):
        for key in ("one", "two", "three"):
            answer = await router.chat("x", headers={"x-session-id": key})
            assert answer.headers["x-smetric-reason"] == "session-key"
            assert home.setdefault(key, answer.headers["x-smetric-instance"]) == answer.headers["x-smetric-instance"]
    assert (await router.chat("x")).headers["x-smetric-reason"] == "no-session-key"
    for name, reason in (("bailian", "bailian"), ("smetric-slo", "first-turn"), ("cache-aware", "match")):
        answer = await router.chat("x" * 9000, headers={"x-smetric-policy": name})
        answer = await router.chat("x" * 9000, headers={"x-smetric-policy": name})
        assert answer.headers["x-smetric-reason"] == reason
    metrics = (await router.get("/metrics")).body.decode()
    assert 'smetric_router_decisions_total{policy="session-hash",reason="session-key"} 9.0' in metrics
    assert 'smetric_router_decisions_total{policy="cache-aware",reason="match"}' in metrics
    assert "smetric_router_load_imbalance 1.0" in metrics
    assert "smetric_router_hit_error_tokens_bucket" in metrics
