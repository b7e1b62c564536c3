"""Requests in flight are limited, and the rest waits in a queue with a deadline."""

import asyncio
import time

from aiohttp import web

from ..conftest import until
from ..fake_engine import hang
from ..raw_engine import CHAT, answer_to, request


class Gate:
    """An engine's behaviour that answers when it is told to."""

    def __init__(self) -> None:
        self.tokens = asyncio.Semaphore(0)
        self.order: list[str] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.order.append(request.headers["x-request-id"])
        await self.tokens.acquire()
        return web.json_response({})


def ask(router, name: str, **options):
    return asyncio.create_task(router.chat("x", headers={"x-request-id": name}, **options))


async def test_the_router_waits_and_serves_in_order(engines, route):
    (engine,) = await engines()
    router = await route(engine, inflight_max=2)
    engine.behaviour = gate = Gate()
    calls = []
    for n in range(6):
        calls.append(ask(router, f"r{n}"))
        await until(lambda n=n: engine.running + len(router.app._proxy._waiting) == n + 1)
    assert (engine.running, router.inflight(), router.app._proxy.waiting) == (2, 2, 4)
    assert "smetric_router_queued_requests 4.0" in (await router.get("/metrics")).body.decode()
    for _ in range(6):
        gate.tokens.release()
        assert engine.running <= 2
    assert [answer.status for answer in await asyncio.gather(*calls)] == [200] * 6
    assert gate.order == [f"r{n}" for n in range(6)]
    text = (await router.get("/metrics")).body.decode()
    assert "smetric_router_queue_seconds_count 4.0" in text


async def test_each_engine_has_its_limit(engines, route):
    one, other = await engines(2)
    router = await route(one, other, engine_inflight_max=2)
    gate = one.behaviour = other.behaviour = Gate()
    calls = [ask(router, f"r{n}") for n in range(7)]
    await until(lambda: router.app._proxy.waiting == 3)
    await until(lambda: (one.running, other.running) == (2, 2))
    for _ in range(7):
        gate.tokens.release()
        assert max(one.running, other.running) <= 2
    assert [answer.status for answer in await asyncio.gather(*calls)] == [200] * 7


async def test_a_full_queue_and_a_long_wait_are_429(engines, route):
    (engine,) = await engines()
    router = await route(engine, engine_inflight_max=1, queue_max=1, queue_timeout_s=0.2)
    engine.behaviour = gate = Gate()
    first = ask(router, "first")
    await until(lambda: engine.running == 1)
    begun = time.monotonic()
    second = ask(router, "second")
    await until(lambda: router.app._proxy.waiting == 1)
    third = await router.chat("x")
    assert (third.status, third.headers["retry-after"]) == (429, "1")
    error = third.json()["error"]
    assert (error["code"], error["type"]) == ("overloaded", "rate_limit_error")
    assert error["message"] == "no instance has room for another request, and 1 wait already"
    late = await second
    assert time.monotonic() - begun >= 0.2
    assert (late.status, late.headers["retry-after"]) == (429, "1")
    assert late.json()["error"]["message"] == "no instance had room for it within 0.2 s"
    gate.tokens.release()
    assert (await first).status == 200
    assert len(engine.requests) == 1


async def test_without_a_queue_nobody_waits(engines, route):
    (engine,) = await engines()
    router = await route(engine, inflight_max=1, queue_max=0)
    engine.behaviour = gate = Gate()
    first = ask(router, "first")
    await until(lambda: engine.running == 1)
    assert (await router.chat("x")).status == 429
    gate.tokens.release()
    assert (await first).status == 200


async def test_who_leaves_the_queue_is_forgotten(engines, route):
    (engine,) = await engines()
    router = await route(engine, inflight_max=1)
    engine.behaviour = gate = Gate()
    first, leaver, last = ask(router, "first"), None, None
    await until(lambda: engine.running == 1)
    leaver = ask(router, "leaver")
    await until(lambda: router.app._proxy.waiting == 1)
    last = ask(router, "last")
    await until(lambda: router.app._proxy.waiting == 2)
    leaver.cancel()
    await until(lambda: router.app._proxy.waiting == 1)
    gate.tokens.release()
    gate.tokens.release()
    assert [(await first).status, (await last).status] == [200, 200]
    assert gate.order == ["first", "last"]


async def test_one_model_does_not_hold_up_another(engines, route):
    (one,) = await engines(models=("a",))
    (other,) = await engines(models=("b",))
    router = await route(one, other, engine_inflight_max=1)
    one.behaviour = gate = Gate()
    calls = [ask(router, f"r{n}", model="a") for n in range(2)]
    await until(lambda: router.app._proxy.waiting == 1)
    assert (await router.chat("x", model="b")).status == 200
    for _ in range(2):
        gate.tokens.release()
    assert [answer.status for answer in await asyncio.gather(*calls)] == [200, 200]


async def test_those_who_wait_for_an_engine_that_dies_are_answered(engines, route):
    (engine,) = await engines()
    router = await route(engine, inflight_max=1, retries_max=0)
    engine.behaviour = hang
    first = ask(router, "first")
    await until(lambda: engine.running == 1)
    second = ask(router, "second")
    await until(lambda: router.app._proxy.waiting == 1)
    await engine.stop()
    assert (await first).status == 502
    assert (await second).status in (502, 503)


async def test_an_engine_at_its_limit_is_no_place_for_a_retry(engines, route):
    one, other = await engines(2)
    router = await route(one, other, engine_inflight_max=1)
    other.behaviour = one.behaviour = gate = Gate()
    both = [ask(router, f"r{n}") for n in range(2)]
    await until(lambda: one.running == other.running == 1)
    failing = one
    assert failing._runner is not None
    await failing.stop()
    answers = {(await both[0]).status, gate.tokens.release() or (await both[1]).status}
    assert answers == {200, 502}, "the other had no room"


async def test_limits_at_their_edges(engines, route):
    """As much as is allowed is taken, and one byte more is not."""
    (engine,) = await engines()
    router = await route(engine, body_bytes_max=5000, head_bytes_max=2000)

    async def status(size: int, *, chunked: bool = False, head: int = 0) -> int:
        framing = "transfer-encoding: chunked" if chunked else f"content-length: {size}"
        line = f"POST /v1/x HTTP/1.1\r\nhost: h\r\nconnection: close\r\n{framing}\r\nx: "
        text = line + "y" * max(0, head - len(line)) + "\r\n\r\n"
        body = b"z" * size
        sent = b"%x\r\n%b\r\n0\r\n\r\n" % (size, body) if chunked else body
        return int((await answer_to(router.url, text.encode() + sent))[9:12])

    for chunked in (False, True):
        assert await status(5000, chunked=chunked) == 200
        assert len(engine.bodies[-1]) == 5000
        assert await status(5001, chunked=chunked) == 413
    assert (await status(1, head=2000), await status(1, head=2001)) == (200, 431)


async def test_what_all_requests_hold_has_a_limit_and_is_given_back(engines, route):
    (engine,) = await engines()
    router = await route(engine, requests_bytes_max=1_000_000, breaker_failures_min=0)
    engine.behaviour = hang
    large = request(CHAT.replace(b'"x"', b'"' + b"x" * 600_000 + b'"'))
    first = asyncio.create_task(answer_to(router.url, large, until=b"never"))
    await until(lambda: engine.running == 1)
    refused = await answer_to(router.url, large)
    assert refused.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in refused and b"out_of_resources" in refused
    first.cancel()
    await until(lambda: engine.running == 0)
    engine.behaviour = None
    assert (await answer_to(router.url, large, until=b"hello")).startswith(b"HTTP/1.1 200 ")
    assert router.app._held.count == 0
