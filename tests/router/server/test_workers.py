"""Several processes on one port, as the command starts them."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ..conftest import until
from ..fake_engine import hang
from ..workload import SESSIONS, TURNS, converse


class Command:
    """`smetric-router serve --workers N`, running."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, temporary: Path) -> None:
        self.process = process
        self.url = url
        self.temporary = temporary
        # A connection each, so that the kernel chooses a process for each request.
        self.client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0))

    def pids(self) -> set[int]:
        return children(self.process.pid)

    async def chat(self, *contents: str) -> tuple[int, Any]:
        messages = [{"role": ("user", "assistant")[at % 2], "content": each} for at, each in enumerate(contents)]
        body = {"model": "fake", "messages": messages}
        async with self.client.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            await answer.read()
            return answer.status, answer.headers

    async def figures(self) -> Counter[str]:
        async with self.client.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] += sample.value
        return found

    async def inflight(self) -> int:
        async with self.client.get(f"{self.url}/admin/state") as answer:
            return sum(each["inflight"] for each in (await answer.json())["instances"].values())


def children(pid: int) -> set[int]:
    try:
        return {int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except OSError:
        return set()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
async def command(tmp_path: Path):
    """Starts the command; it is ended with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*engines: Any, workers: int = 2) -> Command:
            ready = tmp_path / "ready.json"
            # Paths of Unix sockets are short.
            temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="router-")))
            line = [
                "-m",
                "smetric_router.cli",
                "serve",
                "--port",
                "0",
                "--workers",
                str(workers),
                "--ready-file",
                str(ready),
            ]
            for engine in engines:
                line += ["--engine", engine.url]
            line += ["--set", "health_interval_s=0.2", "--set", "health_recheck_s=0.05", "--log-level", "warning"]
            environment = {**os.environ, "TMPDIR": str(temporary)}
            process = await asyncio.create_subprocess_exec(sys.executable, *line, env=environment)

            async def end() -> None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

            stack.push_async_callback(end)
            await until(lambda: ready.exists() or process.returncode is not None, 30)
            made = Command(process, json.loads(ready.read_text())["url"], temporary)
            stack.push_async_callback(made.client.close)
            return made

        yield start


pytestmark = pytest.mark.slow


async def test_metrics_and_requests_in_flight_are_those_of_all(engines, command) -> None:
    (engine,) = await engines(1)
    running = await command(engine)
    assert len(running.pids()) == 2
    for status, _ in await asyncio.gather(*(running.chat(f"{at} hello") for at in range(40))):
        assert status == 200
    for _ in range(6):  # whichever process is asked
        assert (await running.figures())["smetric_router_decisions_total"] == 40
    engine.behaviour = hang
    hanging = [asyncio.create_task(running.chat(f"{at} hello")) for at in range(20)]
    await until(lambda: engine.running == 20)
    for _ in range(6):
        assert await running.inflight() == 20
    for each in hanging:
        each.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    await until(lambda: engine.running == 0)
    async with asyncio.timeout(5):
        while await running.inflight():  # noqa: ASYNC110 - another process has it
            await asyncio.sleep(0.01)


async def test_a_process_that_dies_is_replaced_and_its_requests_do_not_count(engines, command) -> None:
    (engine,) = await engines(1)
    running = await command(engine)
    before = running.pids()
    first = [await running.chat(f"{at} hello " * 300) for at in range(8)]
    assert {status for status, _ in first} == {200}
    engine.behaviour = hang
    hanging = [asyncio.create_task(running.chat(f"{at} hello")) for at in range(24)]
    await until(lambda: engine.running == 24)
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    await until(lambda: len(running.pids()) == 2 and victim not in running.pids(), 30)
    await asyncio.wait(hanging, return_when=asyncio.FIRST_COMPLETED)
    await until(lambda: engine.running == sum(not each.done() for each in hanging))
    assert 0 < engine.running < 24, "both had some"
    for _ in range(6):
        assert await running.inflight() == engine.running
    for each in hanging:
        each.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    engine.behaviour = None
    decided = (await running.figures())["smetric_router_decisions_total"]
    # The one that is new has learnt what the other one knew: whichever is asked, follow-ups stick.
    for at in range(8):
        for _ in range(3):
            status, headers = await running.chat(f"{at} hello " * 300, "answer", "and now")
            assert (status, headers["x-smetric-reason"]) == (200, "sticky")
    assert (await running.figures())["smetric_router_decisions_total"] == decided + 24, "what it counted is not lost"


async def test_stickiness_with_two_processes(engines, command) -> None:
    four = await engines(4)
    for engine in four:
        answer = engine.answer

        async def delayed(request, answer=answer):
            await asyncio.sleep(0.06)
            return await answer(request, await request.read())

        engine.behaviour = delayed
    running = await command(*four)
    tally = await converse(running.client, [running.url], 1, 0.05)
    print(f"two processes: sticky {tally.sticky:.1%}, max/mean {tally.imbalance(4):.2f}")
    assert sum(tally.served.values()) == SESSIONS * TURNS
    assert tally.sticky >= 0.98
    assert tally.imbalance(4) <= 1.3


async def test_it_ends_quietly_with_what_it_made(engines, command) -> None:
    (engine,) = await engines(1)
    running = await command(engine, workers=3)
    pids = running.pids()
    assert len(pids) == 3
    running.process.terminate()
    async with asyncio.timeout(20):
        assert await running.process.wait() == 0
    assert not any(map(is_alive, pids))
    assert list(running.temporary.iterdir()) == []


async def test_a_port_that_another_router_has_is_not_shared(engines, command) -> None:
    (engine,) = await engines(1)
    running = await command(engine)
    port = running.url.rpartition(":")[2]
    line = ["-m", "smetric_router.cli", "serve", "--port", port, "--workers", "2", "--engine", engine.url]
    environment = {**os.environ, "TMPDIR": str(running.temporary)}
    before = set(running.temporary.iterdir())
    other = await asyncio.create_subprocess_exec(sys.executable, *line, env=environment, stderr=asyncio.subprocess.PIPE)
    _, said = await other.communicate()
    assert other.returncode == 2
    assert said.decode().strip().splitlines()[-1].endswith(f"cannot listen on 127.0.0.1:{port}: Address already in use")
    assert set(running.temporary.iterdir()) == before


async def test_without_its_supervisor_nobody_stays(engines, command) -> None:
    (engine,) = await engines(1)
    running = await command(engine)
    pids = running.pids()
    running.process.kill()
    await until(lambda: not any(map(is_alive, pids)), 30)


async def test_while_it_drains_who_connects_is_refused(engines, command) -> None:
    """And does not wait for processes that take no more."""
    (engine,) = await engines(1)
    running = await command(engine)
    engine.behaviour = hang
    waiting = asyncio.create_task(running.chat("hello"))
    await until(lambda: engine.running == 1)
    running.process.send_signal(signal.SIGTERM)
    host, port = running.url.removeprefix("http://").split(":")

    def refused() -> bool:
        try:
            socket.create_connection((host, int(port)), 5).close()
        except ConnectionRefusedError:
            return True
        return False

    await until(refused)
    assert running.process.returncode is None, "a request is under way still"
    running.process.send_signal(signal.SIGTERM)
    assert await running.process.wait() == 0
    await asyncio.gather(waiting, return_exceptions=True)
