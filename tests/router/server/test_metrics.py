"""The router's metrics are what the documents say, and count what happens."""

import asyncio
import contextlib
import threading

from smetric_router.server.metrics import Metrics
from smetric_router.state.load import RATE_SAMPLES_MIN
from smetric_router.types import EngineReport, EngineReported
from tests.documented import check_documented
from tests.scrape import Scraped

from ..conftest import until
from ..fake_engine import drop, hang, status
from .test_messages import conversation, post

R = "smetric_router_"


async def scraped(router) -> Scraped:
    return Scraped((await router.get("/metrics")).body.decode())


async def test_attempts_that_fail_are_counted_by_engine_and_cause_retried_or_not(engines, route):
    one, other = await engines(2)
    router = await route(one, other, breaker_failures_min=0, health_interval_s=60, first_byte_timeout_s=0.3)

    def failed(found: Scraped, engine, cause: str) -> float:
        return found.samples.get(
            (R + "failed_attempts_total", frozenset({("engine", engine.url), ("cause", cause)})), 0
        )

    one.behaviour = other.behaviour = status(503)
    assert (await router.chat("x")).status == 503
    found = await scraped(router)
    assert failed(found, one, "status_503") == failed(found, other, "status_503") == 1
    one.behaviour = other.behaviour = hang
    assert (await router.chat("y")).status == 504
    found = await scraped(router)
    assert failed(found, one, "timeout") + failed(found, other, "timeout") == 1
    await one.stop()
    await other.stop()
    assert (await router.chat("z")).status == 502
    found = await scraped(router)
    assert failed(found, one, "unreachable") == failed(found, other, "unreachable") == 1


async def test_nothing_that_a_client_sends_becomes_a_label(engines, route):
    (engine,) = await engines()
    router = await route(engine, index_chunks_max=10_000)
    before = await series(router)
    for at in range(50):
        await router.chat(
            "x", model=f"model-{at}", headers={"x-smetric-tenant": f"t{at}", "x-smetric-policy": f"p{at}"}
        )
        await router.chat("x", model=f"model-{at}", user=f"u{at}", headers={"x-session-id": f"s{at}"})
        await router.get(f"/path/{at}?q={at}")
        async with router.client.request("GET", f"{router.url}/v1/models/m{at}") as answer:
            assert answer.status == 404
    await router.chat("x")
    after = await series(router)
    await router.chat("x")
    assert len(after - before) < 60
    assert not [each for each in after if any(word in each for word in ("model-", "t1", "p1", "path"))]


async def series(router) -> set[str]:
    text = (await router.get("/metrics")).body.decode()
    return {line.rpartition(" ")[0] for line in text.splitlines() if line.startswith(R)}


async def test_connections_over_the_limit_are_closed_at_once_and_counted(engines, route):
    (engine,) = await engines()
    router = await route(engine, connections_max=3)
    host, port = router.url.removeprefix("http://").split(":")
    kept = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
    assert (await router.chat("x")).status == 200  # the client's own connection is the third
    for _ in range(5):
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
    found = await scraped(router)
    assert (found.value(R + "connections"), found.value(R + "refused_connections_total")) == (3, 5)
    kept.pop()[1].close()
    await until(lambda: len(router.app._connections) == 2)
    assert (await router.chat("x")).status == 200
    kept.pop()[1].close()


async def test_a_router_exports_what_is_documented(engines, route):
    one, other = await engines(2)
    router = await route(one, other, breaker_failures_min=0)
    one.behaviour = status(503)
    for at in range(RATE_SAMPLES_MIN):
        await router.chat(f"{at}" * 3000, stream=True)
    report = EngineReport(running=1, kv_usage=0.5)
    router.state.apply(EngineReported(other.url, report, own=0), router.app._clock())
    found = await scraped(router)
    check_documented(found, "Router", R)
    assert found.value("process_open_fds") > 0


async def test_what_is_counted(engines, route):
    one, other = await engines(2)
    router = await route(one, other, inflight_max=3, queue_max=1, breaker_failures_min=0)
    one.behaviour = status(429)
    while not one.requests:
        await router.chat("x")
    one.behaviour = drop
    one.requests.clear()
    while not one.requests:
        await router.chat("x")
    found = await scraped(router)
    assert found.value(R + "retries_total", engine=other.url, cause="status_429") == 1
    assert found.value(R + "retries_total", engine=other.url, cause="disconnected") == 1
    one.behaviour = other.behaviour = hang
    calls = [asyncio.create_task(router.chat("x")) for _ in range(4)]
    await until(lambda: one.running + other.running == 3 and router.app._proxy.waiting == 1)
    assert (await router.chat("x")).status == 429
    code, _, _ = await post(router, "/v1/messages", conversation("x"))
    assert code == 429
    found = await scraped(router)
    assert found.value(R + "queued_requests") == 1
    assert sum(found.value(R + "inflight_requests", engine=each.url) for each in (one, other)) == 3
    assert found.value(R + "requests_total", engine="none", policy="none", status="429") == 2
    for call in calls:
        call.cancel()
    await until(lambda: router.inflight() == 0 and router.app._proxy.waiting == 0)


async def test_a_scrape_holds_up_no_request_and_many_at_once_are_one(engines, route, monkeypatch):
    (engine,) = await engines()
    router = await route(engine)
    rendered = []
    go_on = threading.Event()

    def slow(self, present=None) -> bytes:
        rendered.append(threading.current_thread())
        assert go_on.wait(10)
        return render(self, present)

    render = Metrics.render
    monkeypatch.setattr(Metrics, "render", slow)
    scrapes = [asyncio.create_task(scraped(router)) for _ in range(5)]
    await until(lambda: len(rendered) == 1)
    left = asyncio.create_task(scraped(router))
    await until(lambda: len(router.app._connections) == 6)
    left.cancel()  # and takes nothing away from the others
    assert (await router.chat("x")).status == 200
    go_on.set()
    for each in await asyncio.gather(*scrapes):
        assert each.value("process_open_fds") > 0
    assert len(rendered) <= 2 and threading.main_thread() not in rendered
    assert (await scraped(router)).value(R + "requests_total", engine=engine.url, policy="smetric", status="200") == 1
