"""The benchmark's load generator and engine against a router in this process: counts are right, nothing is left behind."""

import asyncio
import contextlib
import gc
import re
from collections.abc import AsyncIterator, Callable

import pytest
from benchmarks.programs import engine as fake
from benchmarks.programs.load import Answer, bodies, connect, converse, load, unique

from smetric_router.server.connection import ClientConnection
from smetric_router.server.exchange import Exchange
from smetric_router.server.links import EngineLink, EngineLinks

from .conftest import until


@pytest.fixture
async def fakes() -> AsyncIterator[Callable[..., list[tuple[fake.Engine, str]]]]:
    """Starts the benchmark's engines."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(count: int) -> list[tuple[fake.Engine, str]]:
            made = []
            for number in range(count):
                engine = fake.Engine(f"engine-{number}")
                loop = asyncio.get_running_loop()
                server = await loop.create_server(lambda engine=engine: fake.Connection(engine), "127.0.0.1", 0)
                stack.callback(server.close)
                made.append((engine, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
            return made

        yield start


def told(url: str, **more: object) -> dict[str, object]:
    return {
        "urls": [url], "bytes": 2000, "stream": False, "concurrency": 4, "control": "[[chunks=7]]", "seconds": 0.2,
        "pids": [], **more,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_counted_is_what_the_engines_answered(fakes, route, stream: bool) -> None:
    engines = await fakes(2)
    router = await route(*(url for _, url in engines))
    got = await load(told(router.url, stream=stream))
    assert got["failed"] == 0 and got["requests"] > 4 and 0 < got["first_p50"] <= got["p50"] <= got["p99"]
    counted = re.findall(r'requests_total\{.*status="200"\} (\d+)', router.app.metrics.render().decode())
    started = sum(engine.started for engine, _ in engines)
    assert started == sum(map(int, counted)) >= got["requests"]
    assert not any(engine.aborted for engine, _ in engines)


@pytest.mark.slow
async def test_what_fails_is_counted_and_nobody_waits_for_ever(fakes, route, monkeypatch) -> None:
    engines = await fakes(1)
    router = await route(engines[0][1])
    got = await load(told(router.url, control="[[status=400]]"))
    assert got["failed"] == got["requests"] > 0
    monkeypatch.setattr("benchmarks.programs.load.PATIENCE_S", 0.1)
    got = await load(told(router.url, control="[[first_ms=60000]]", seconds=0.05))
    assert got["failed"] >= 4


async def test_an_answer_that_breaks_off_is_a_failure(fakes) -> None:
    [(engine, url)] = await fakes(1)
    connection = await connect(url)
    answer: Answer = await connection.ask(bodies(2000, True, "[[chunks=9 cut_after=3]]")[0])
    assert answer.status == 0 and not connection.open and engine.started == 1


@pytest.mark.slow
def test_bodies_have_the_size_and_one_beginning() -> None:
    for size in (2_000, 200_000):
        made = bodies(size, True, "[[chunks=50]]")
        assert len(set(made)) == len(made) == 64
        assert all(0.9 * size < len(each) < 1.1 * size for each in made)
        assert all(each[: int(0.45 * size)] == made[0][: int(0.45 * size)] for each in made)


@pytest.mark.slow
async def test_conversations_stay_and_are_even(fakes, route) -> None:
    engines = await fakes(4)
    router = await route(*(url for _, url in engines))
    got = await converse(
        {
            "seed": 1, "urls": [router.url], "sessions": 32, "turns": 5, "live": 8, "system_bytes": 6144,
            "turn_bytes": 2048, "control": "[[first_ms=20 chunks=4]]",
        }
    )  # fmt: skip
    assert got["failed"] == 0 and got["follow_ups"] == 32 * 4
    assert got["stuck"] >= 0.99 * got["follow_ups"]
    assert sum(got["served"].values()) == 160 and len(got["served"]) == 4
    # A session more on one engine than on the others is 1.125, and real time makes chance of their order.
    assert max(got["served"].values()) * 4 / 160 <= 1.25


async def test_connections_of_health_checks_are_not_used_for_requests(fakes, route, monkeypatch) -> None:
    """The engine keeps them open though it is asked to close. A check ends its own, whoever had got it meanwhile."""
    given_back: list[EngineLink] = []
    monkeypatch.setattr(EngineLinks, "give_back", lambda _, link: given_back.append(link))
    engines = await fakes(2)
    router = await route(*(url for _, url in engines))
    await until(lambda: router.healthy() == 2)
    assert not given_back
    assert (await router.chat("hi")).status == 200
    assert len(given_back) == 1


async def test_requests_without_an_id_get_one_each(fakes, route) -> None:
    engines = await fakes(1)
    router, other = await route(engines[0][1]), await route(engines[0][1])
    answers = [await each.chat("hi") for each in (router, router, other)]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 3 and {len(each) for each in ids} == {32}


def alive(kind: type) -> int:
    return sum(issubclass(type(each), kind) for each in gc.get_objects())  # isinstance would ask proxies what they are


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_20000_requests_leave_nothing_behind(fakes, route) -> None:
    engines = await fakes(2)
    router = await route(*(url for _, url in engines), index_chunks_max=1000)

    async def ask(first: int, count: int) -> int:
        """All objects there are once so many more prompts are answered, from that number on."""
        told = {
            "url": router.url,
            "bytes": 2000,
            "concurrency": 8,
            "requests": count,
            "first": first,
            "different": count,
        }
        got = await unique(told)
        assert got == {"requests": count, "failed": 0}
        await until(lambda: alive(ClientConnection) == 0)
        gc.collect()
        assert alive(Exchange) == 0
        assert alive(EngineLink) <= 32
        statistics = router.state.statistics(0)
        assert sum(each.chunks for each in statistics.instances.values()) <= 1000
        return len(gc.get_objects())

    full = await ask(0, 4000)
    assert await ask(4000, 16_000) - full < 500
    router.state.check()
