"""Rows of `scripts/bench weights` about artifacts: what further readers on a host cost, and how fast another host has one.

A store and workers as `tensorcast` starts them, readers in processes of their own.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from demo import pool
from demo.processes import DemoError, Supervisor

from benchmarks.driver import Driver
from benchmarks.face import LIMIT, OURS, BenchError, Figure, Row, Target
from benchmarks.weights_run import GIB, Run, own_python
from tensorcast_connector.client.session import Session, connect

READERS = 3
TENSOR_BYTES = 32 << 20
NAME = "weights"
JOIN_S = 15.0


def tensors(size: int, number: int) -> dict[str, Any]:
    """So many bytes, other ones for each number and in each tensor."""
    count = max(1, size // TENSOR_BYTES)
    return {f"layer.{at}": np.full(TENSOR_BYTES // 4, number * count + at, np.uint32) for at in range(count)}


async def check(session: Session, size: int, number: int) -> None:
    """Reads all of them; the first and the last element of each are right."""
    found = await session.artifact(NAME).tensor_dict()
    count = max(1, size // TENSOR_BYTES)
    for at in range(count):
        tensor = found[f"layer.{at}"]
        if (
            len(found) != count
            or tensor.size != TENSOR_BYTES // 4
            or not tensor[0] == tensor[-1] == number * count + at
        ):
            raise BenchError("what was read is not what was put")


def reader_rows(run: Run) -> list[Row]:
    """What each of several readers of one artifact adds to the memory of the host."""
    size = run.size.artifact
    run.need(3 * size, 0)
    row = f"{READERS} readers of one artifact of {size / GIB:g} GiB on a host: what the worst adds"
    figure = Figure(row, "% of its bytes", Target("ours", "<=", 1))
    first = Figure(f"tensor_dict of {size / GIB:g} GiB on the same host", "ms", Target("ours", "<=", 50))
    with _pool(run, size, workers=1) as (_, started):
        asyncio.run(_put(started[0]["worker"], size, 0))
        for _ in range(run.size.runs):
            with ExitStack() as stack:
                drivers = [stack.enter_context(_reader(run, started[0]["worker"])) for _ in range(READERS)]
                for each in drivers:
                    each.ready()
                answers = [each.ask("read") for each in drivers]
                first.add(OURS, max(answer["seconds"] for answer in answers) * 1e3)
                answers = [each.ask("memory") for each in drivers]  # once all of them have it
                if any(answer["resident"] < size for answer in answers):
                    raise BenchError("a reader has not looked at all of the artifact")
                figure.add(OURS, max(answer["private"] for answer in answers) / size * 100)
    return [first.made({}), figure.made({})]


def second_host_rows(run: Run) -> list[Row]:
    """An artifact read from another host, over TCP on the loopback interface; beside the same bytes over a bare socket."""
    size = run.size.remote
    run.need(4 * size, 0)
    told = f"{size / GIB:g} GiB from a second host, loopback TCP: "
    client = Figure(told + "tensor_dict at a program", "GB/s", None)
    worker = Figure(told + "prefetch by a worker, then tensor_dict", "GB/s", None)
    with _pool(run, size, workers=2) as (supervisor, started):
        command = [own_python(), "-m", "benchmarks.programs.socket_limit", str(size)]
        log = supervisor.folder / "socket.log"
        with Driver(LIMIT, command, log, os.sched_getaffinity(0)).ready() as limit:
            asyncio.run(_second_host(run, [each.addresses for each in started], size, limit, client, worker))
    return [client.made({}), worker.made({})]


async def _second_host(
    run: Run, addresses: list[dict[str, str]], size: int, limit: Driver, client: Figure, worker: Figure
) -> None:
    there, here = await connect(addresses[0]["peer"]), await connect(addresses[1]["worker"])
    try:
        for number in range(max(3, run.size.runs // 2)):
            run.say(f"a second host, run {number + 1}")
            bare = size / 1e9 / (await asyncio.to_thread(limit.ask, "send"))["seconds"]
            await _put(addresses[0]["worker"], size, number)
            for figure, work in (
                (client, check(there, size, number)),
                (worker, _fetch(here, size, number)),
            ):
                figure.add(LIMIT, bare)
                figure.add(OURS, size / 1e9 / await _timed(work))
            await there.delete(NAME)
    finally:
        await there.close()
        await here.close()


async def _fetch(session: Session, size: int, number: int) -> None:
    await session.artifact(NAME).prefetch()
    await check(session, size, number)


async def _timed(work: Awaitable[object]) -> float:
    before = time.perf_counter()
    await work
    return time.perf_counter() - before


async def _put(address: str, size: int, number: int) -> None:
    """Under NAME, once the worker has joined its cluster."""
    async with await connect(address) as session:
        deadline = time.monotonic() + JOIN_S
        while True:
            try:
                await session.put(tensors(size, number), name=NAME)
                return
            except Exception as error:
                if time.monotonic() > deadline:
                    raise BenchError(f"nothing can be put: {error}") from error
                await asyncio.sleep(0.1)


@contextmanager
def _pool(run: Run, size: int, workers: int) -> Iterator[tuple[Supervisor, list[pool.Started]]]:
    """A store and workers with room for an artifact of that size."""
    try:
        with Supervisor(run.folder) as supervisor:
            store = pool.store(supervisor)
            room = ["--artifacts", f"{size // (1 << 20) + 256}MiB"]
            yield (
                supervisor,
                [
                    pool.worker(supervisor, store["store"], f"worker-{number}", arena="16MiB", options=room)
                    for number in range(workers)
                ],
            )
    except DemoError as error:
        raise BenchError(str(error)) from error


def _reader(run: Run, address: str) -> Driver:
    command = [own_python(), "-m", "benchmarks.programs.reader", address, NAME]
    return Driver("reader", command, run.folder / "reader.log", os.sched_getaffinity(0))
