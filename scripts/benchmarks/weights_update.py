"""Rows of `scripts/bench weights` about versions: what an update moves, and how long it takes until a consumer has it.

A trainer with a worker of its own publishes a model, and then versions of which a tenth of the tensors are others. An engine at
another worker and a program far from both have the former version. Bytes are those that the workers' metrics count.
"""

import asyncio
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

import numpy as np
from demo import pool
from demo.pool import Started
from demo.processes import DemoError, Supervisor

from benchmarks.face import LIMIT, OURS, BenchError, Figure, Row, Target
from benchmarks.weights_run import GIB, Run
from tensorcast_connector.client.publisher import WeightPublisher
from tensorcast_connector.client.session import Session, connect

TENSORS = 200
CHANGED = TENSORS // 10
APART = 1 << 20  # equal tensors would be put once
JOIN_S = 15.0
MODEL = "policy"
PUT, FETCHED, SENT = "publisher to worker", "worker to worker", "worker to a program elsewhere"
MS = 1e3


def update_rows(run: Run) -> list[Row]:
    """Publisher to worker, worker to worker, worker to a consumer elsewhere: the share of the bytes; and the time."""
    size = run.size.artifact
    run.need(5 * size, 0)
    told = f"update of {CHANGED / TENSORS:.0%} of the tensors of {size / GIB:g} GiB"
    most = Target("ours", "<=", 11)
    moved = {step: Figure(f"{told}: {step}", "% of its bytes", most) for step in (PUT, FETCHED, SENT)}
    times = Figure(f"{told}, from publish to a subscriber's tensors; limit: all of them", "ms", None)
    try:
        with Supervisor(run.folder) as supervisor:
            store = pool.store(supervisor, "store-update")
            room = ["--artifacts", f"{3 * size // (1 << 20) + 256}MiB", "--metrics", "127.0.0.1:0"]
            workers = [
                pool.worker(supervisor, store["store"], f"update-{number}", arena="16MiB", options=room)
                for number in range(2)
            ]
            asyncio.run(_measure(run, workers, size, moved, times))
    except DemoError as error:
        raise BenchError(str(error)) from error
    return [*(each.made({}) for each in moved.values()), times.made({})]


def _tensors(size: int) -> dict[str, Any]:
    each = size // TENSORS // 4
    return {f"layer.{number:03}": np.full(each, APART * number, np.uint32) for number in range(TENSORS)}


async def _measure(run: Run, workers: list[Started], size: int, moved: Mapping[str, Figure], times: Figure) -> None:
    trainer, engine = await connect(workers[0]["worker"]), await connect(workers[1]["worker"])
    remote = await connect(workers[1]["peer"])
    try:
        await _joined(trainer)
        tensors = _tensors(size)
        total = sum(each.nbytes for each in tensors.values())
        publisher, subscription = WeightPublisher(trainer, MODEL), engine.subscribe(MODEL)
        for number in range(max(3, run.size.runs)):
            run.say(f"updates of {MODEL}, run {number + 1}")
            for each in tensors.values():
                each += 1
            began = time.perf_counter()
            await publisher.publish(tensors, 2 * number)
            await anext(subscription)
            former = await engine.weights(MODEL)
            await former.tensor_dict()
            times.add(LIMIT, (time.perf_counter() - began) * MS)
            for name in list(tensors)[:: TENSORS // CHANGED]:
                tensors[name] += 1
            before = [_counted(each) for each in workers]
            began = time.perf_counter()
            await publisher.publish(tensors, 2 * number + 1)
            await anext(subscription)
            now = await engine.weights(MODEL)
            got = await now.tensor_dict()
            times.add(OURS, (time.perf_counter() - began) * MS)
            after = [_counted(each) for each in workers]
            moved[PUT].add(OURS, (after[0]["put"] - before[0]["put"]) / total * 100)
            moved[FETCHED].add(OURS, (after[1]["fetched"] - before[1]["fetched"]) / total * 100)
            _check(got, tensors)
            changed = now.changed_since(former)
            _check(await (await remote.weights(MODEL)).view(names=changed).tensor_dict(), tensors)
            moved[SENT].add(OURS, (_counted(workers[1])["sent"] - after[1]["sent"]) / total * 100)
    finally:
        for session in (trainer, engine, remote):
            await session.close()


def _check(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    if len(got) not in (CHANGED, TENSORS) or any((got[name] != wanted[name]).any() for name in got):
        raise BenchError("what was read is not what was published")


def _counted(worker: Started) -> dict[str, float]:
    """Bytes of artifacts that were put there, fetched from other workers, and sent, as its metrics say."""
    with urllib.request.urlopen(f"http://{worker['metrics']}/metrics", timeout=JOIN_S) as answer:
        lines = answer.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("tensorcast_worker_artifact_"))
    return {
        each: float(values[f"tensorcast_worker_artifact_{each}_bytes_total"]) for each in ("put", "fetched", "sent")
    }


async def _joined(session: Session) -> None:
    """Until the worker knows its cluster."""
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            await session.put({"first": np.zeros(1)})
            return
        except Exception as error:
            if time.monotonic() > deadline:
                raise BenchError(f"nothing can be put: {error}") from error
            await asyncio.sleep(0.1)
