"""`scripts/bench service`: what plans cost, how fast tensors are put, how fast they are there for a reader on the same host.

A store and a worker as `tensorcast` starts them, and the SDK in this process. The limit of a plan of one step is what it cannot
do without (plan_limit.py). The limit of putting is one thread that
copies the same tensors into memory that it has copied them to a moment ago, so that both are mapped and in the caches. A put
copies them on two threads into memory that is not, digests every byte, and is in the store's database, on disk, when it
returns. The peers: ray's object store, and safetensors files on a memory file system. What is put is deleted again before
the next put; the systems take turns within each run.
"""

import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from demo import pool
from demo.processes import DemoError, Supervisor

from benchmarks.driver import Driver
from benchmarks.environments import python_of
from benchmarks.face import LIMIT, OURS, BenchError, Figure, Row, Target
from benchmarks.plan_limit import COMMITS, EXCHANGES, PlanLimit, plan_limit
from tensorcast_connector.client.session import Session, connect

REQUIREMENTS = Path(__file__).with_suffix(".requirements.txt")
PUT_BYTES = 64 << 20
PUT_TENSORS = 64
TENSORS = 1000
STEPS = 100
SETTLE_S = 0.4  # after a deletion: what is allocated ahead, by ours and by peers, is there again
MS = 1e3


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: so many runs, each of so many plans and reads."""

    runs: int
    calls: int


FULL = Size(runs=9, calls=60)
QUICK = Size(runs=3, calls=20)


def put_tensors(number: int) -> dict[str, Any]:
    """What is put in run `number`: PUT_BYTES in PUT_TENSORS tensors, other bytes each time."""
    made = {f"layer.{index}": np.full(PUT_BYTES // PUT_TENSORS // 4, index, np.float32) for index in range(PUT_TENSORS)}
    made["layer.0"][0] = number
    return made


def read_tensors() -> dict[str, Any]:
    """What is read: TENSORS of 16 KiB."""
    return {f"tensor.{index}": np.full(4096, index, np.float32) for index in range(TENSORS)}


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds."""
    before = time.perf_counter()
    await work()
    return time.perf_counter() - before


def copy_seconds(tensors: Mapping[str, Any], target: Any) -> float:
    """Copying tensors into memory that was touched before."""
    before = time.perf_counter()
    at = 0
    for tensor in tensors.values():
        target[at : at + tensor.size] = tensor
        at += tensor.size
    return time.perf_counter() - before


class Bench:
    """Everything that runs, and what is measured of it."""

    def __init__(self, session: Session, worker: str, peers: Mapping[str, Driver], folder: Path, size: Size) -> None:
        self._session = session
        self._worker = worker
        self._peers = peers
        self._folder = folder
        self._size = size
        self._target = np.ones(PUT_BYTES // 4, np.float32)

    async def plan(self, steps: int) -> float:
        """Milliseconds of a plan of so many steps that have nothing to do, the median of some."""

        async def run() -> None:
            plan = self._session.plan()
            for _ in range(steps):
                plan.on_worker(self._worker).unpin("read")
            await plan.run().result()

        await run()
        return statistics.median([await timed(run) for _ in range(max(5, self._size.calls // steps))]) * MS

    async def put(self, number: int, figure: Figure) -> None:
        """GB/s of each system."""
        tensors = put_tensors(number)
        copy_seconds(tensors, self._target)
        figure.add(LIMIT, PUT_BYTES / 1e9 / copy_seconds(tensors, self._target))
        seconds = await timed(lambda: self._session.put(tensors, name="put"))
        figure.add(OURS, PUT_BYTES / 1e9 / seconds)
        await self._session.delete("put")
        await asyncio.sleep(SETTLE_S)
        for name, driver in self._peers.items():
            answer = await asyncio.to_thread(driver.ask, "put", number=number)
            figure.add(name, PUT_BYTES / 1e9 / answer["seconds"])
            await asyncio.sleep(SETTLE_S)

    async def read(self, figure: Figure) -> None:
        """Milliseconds of each system, the median of some."""

        async def read() -> None:
            tensors = await self._session.artifact("read").tensor_dict()
            if len(tensors) != TENSORS or tensors["tensor.7"][5] != 7:
                raise BenchError("what was read is not what was put")

        await read()
        figure.add(OURS, statistics.median([await timed(read) for _ in range(self._size.calls // 2)]) * MS)
        for name, driver in self._peers.items():
            answer = await asyncio.to_thread(driver.ask, "read", calls=self._size.calls // 2)
            figure.add(name, answer["seconds"] * MS)

    async def rows(self, limit: PlanLimit, missing: Mapping[str, str], say: Callable[[str], None]) -> list[Row]:
        """All of them."""
        one = Figure(
            f"plan of 1 step that does nothing, p50 (limit: {EXCHANGES} bare exchanges, {COMMITS} commits)",
            "ms",
            Target("ours", "<=", 2),
        )
        many = Figure(f"plan of {STEPS} steps that do nothing, p50", "ms", Target("ours", "<=", 40))
        put = Figure(
            f"put of {PUT_BYTES >> 20} MiB in {PUT_TENSORS} tensors (limit: copied by one thread)",
            "GB/s",
            Target("ratio", ">=", 0.7),
        )
        read = Figure(f"tensor_dict of {TENSORS} tensors on the same host", "ms", Target("ours", "<=", 5))
        await self._session.put(read_tensors(), name="read")
        await self.put(-1, Figure("", "", None))
        for run in range(self._size.runs):
            say(f"run {run + 1} of {self._size.runs}")
            one.add(OURS, await self.plan(1))
            one.add(LIMIT, await limit.measure(self._size.calls))
            many.add(OURS, await self.plan(STEPS))
            await self.put(run, put)
            await self.read(read)
        return [one.made({}), many.made({}), put.made(missing), read.made(missing)]


def start_peers(
    stack: ExitStack, supervisor: Supervisor, say: Callable[[str], None]
) -> tuple[dict[str, Driver], dict[str, str]]:
    """The peers that run here, and why others do not."""
    peers: dict[str, Driver] = {}
    missing: dict[str, str] = {}
    memory = Path(tempfile.mkdtemp(prefix="tensorcast-bench-", dir="/dev/shm"))
    stack.callback(shutil.rmtree, memory, ignore_errors=True)
    for name in ("ray", "safetensors"):
        say(f"{name}: starting")
        try:
            python = python_of("service", REQUIREMENTS)
            command = [str(python), "-m", "benchmarks.programs.store_peer", name, str(memory)]
            log = supervisor.folder / f"{name}.log"
            peers[name] = stack.enter_context(Driver(name, command, log, os.sched_getaffinity(0))).ready()
        except BenchError as error:
            missing[name] = str(error)
            say(f"{name} does not run: {error}")
    return peers, missing


def run(size: Size, say: Callable[[str], None], folder: Path | None = None) -> list[Row]:
    """All rows.

    Raises:
        BenchError: ours cannot run here; a peer that cannot is named in the rows.
    """
    with ExitStack() as stack:
        try:
            supervisor = stack.enter_context(Supervisor(folder))
            store = pool.store(supervisor)
            worker = pool.worker(supervisor, store["store"], "worker", arena="16MiB")
            peers, missing = start_peers(stack, supervisor, say)

            async def measure() -> list[Row]:
                async with await connect(worker["worker"]) as session, plan_limit(supervisor) as limit:
                    await _registered(session)
                    bench = Bench(session, session.worker_id, peers, supervisor.folder, size)
                    return await bench.rows(limit, missing, say)

            return asyncio.run(measure())
        except DemoError as error:
            raise BenchError(str(error)) from error


async def _registered(session: Session) -> None:
    """Until the worker is known to the store, and so to itself."""
    for _ in range(100):
        try:
            await session.put({"first": np.zeros(1)}, name="first")
            return
        except Exception as error:
            last = error
            await asyncio.sleep(0.1)
    raise BenchError(f"the worker does not join its cluster: {last}")
