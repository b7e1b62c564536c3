"""Engines in processes of their own that are killed, stopped, and started again."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from ..conftest import until

ROOT = Path(__file__).parents[3]
Start = Callable[[str], Awaitable[tuple[asyncio.subprocess.Process, str]]]
pytestmark = pytest.mark.slow


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts an engine that behaves like that; returns its process and address."""
    started: list[asyncio.subprocess.Process] = []

    async def start(behaviour: str) -> tuple[asyncio.subprocess.Process, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.router.engine_process", behaviour, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        started.append(process)
        return process, (await line(process)).strip()

    yield start
    for process in started:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.communicate()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), 30)).decode()


@pytest.mark.parametrize("behaviour", ["hang", "headers_only"])
async def test_killed_before_the_first_byte(engines, route, start, behaviour):
    process, url = await start(behaviour)
    (other,) = await engines()
    other.behaviour = None
    router = await route(url, other)
    # Ties go in the order of the instances.
    call = asyncio.create_task(router.chat("x", stream=True))
    assert await line(process) == "asked\n"
    process.kill()
    answer = await call
    assert (answer.status, answer.headers["x-smetric-instance"]) == (200, other.url)
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert len(other.requests) == 1
    await until(lambda: router.healthy() == 1)


async def test_killed_after_the_first_byte(engines, route, start):
    process, url = await start("stall")
    (other,) = await engines()
    router = await route(url, other)
    call = asyncio.create_task(router.chat("x", stream=True))
    assert await line(process) == "asked\n"
    await until(lambda: any(each.started for each in router.app._proxy._active))
    process.kill()
    answer = await call
    assert answer.status == 200
    assert b'"upstream_disconnected"' in answer.body and b"[DONE]" not in answer.body
    assert other.requests == [], "no retry after the first byte"


async def test_an_engine_that_is_stopped_holds_nobody_up_for_long(engines, route, start):
    process, url = await start("answer")
    (other,) = await engines()
    router = await route(
        url, other, health_timeout_s=0.3, health_interval_s=0.1, health_failures_max=2, down_grace_s=0.2
    )
    assert (await router.chat("x")).headers["x-smetric-instance"] == url
    process.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(10):
        answers = await asyncio.gather(*(router.chat(str(n), stream=True) for n in range(6)))
    assert {answer.headers["x-smetric-instance"] for answer in answers} == {other.url}
    assert router.healthy() == 1
    process.send_signal(signal.SIGCONT)
    await until(lambda: router.healthy() == 2)
    seen = {(await router.chat(str(n))).headers["x-smetric-instance"] for n in range(8)}
    assert seen == {url, other.url}
