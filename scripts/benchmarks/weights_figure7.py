"""Figure 7 of the paper: new weights for a running engine, by the pool and by files; one rank and two, two model sizes.

Every round begins with the trainer's tensors in its memory and ends when an engine serves them. Ours publishes a version and
updates its engine. The others write a checkpoint and let vLLM reload it (`reload_weights`) in an engine that knows nothing of us:
one finds the files in the page cache; with the other they go to the disk and are read from there, as by an engine on another host
that shares a file system. All in turns, on one machine, with engines on its CPUs: there is no network, which the paper has, and
the packing that vLLM's CPU backend does is in all of them.
"""

import asyncio
import os
import statistics
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from demo import engine, model, pool
from demo.engine import EngineOptions
from demo.processes import Supervisor
from examples.running import RunningEngine

import tensorcast_connector as tensorcast
from benchmarks.face import OURS, Figure, Row
from benchmarks.weights_engine import uncache
from benchmarks.weights_run import Run

SIZES = ("medium", "large")
SIZES_QUICK = ("tiny", "small")
RANKS = (1, 2)
PAPER = "1.14 to 2.63 times faster"
RELOAD, RELOAD_DISK = "by files in the page cache", "by files on the disk"
START_TIMEOUT_S = 900.0
TRANSFER = ("--weight-transfer-config", '{"backend": "tensorcast"}')
NAME = "figure7"
ARTIFACTS = "4GiB"  # of the larger model two versions that are kept, and one that is put
CHANGED_SHARE = 0.1  # of the tensors, in the rows about a version that is mostly the one before
REST_S = 2.0  # before each way: an engine that has just worked keeps its cores for a moment


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one way: until the engine serves the weights, and how long of that it stood still."""

    whole: float
    still: float


class Updates:
    """Two engines, and the ways to give them weights.

    Args:
        url: of the one that takes versions.
        plain: of the one that reloads files.
        folder: the model that both were started from.
        files: where checkpoints are written.
    """

    def __init__(self, url: str, plain: str, worker: str, folder: Path, files: Path) -> None:
        self._worker = worker
        self._files = files
        self._engine = RunningEngine(url, worker)
        self._plain = plain
        self._tensors = _checkpoint(folder)
        self._version = 0
        for each in folder.iterdir():
            if each.suffix != ".safetensors":
                (files / each.name).write_bytes(each.read_bytes())
        self._engine.attach(NAME)

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(int(each.nbytes) for each in self._tensors.values())

    def change(self, share: float = 1.0) -> None:
        """The trainer has other values in so many of its tensors, spread over the model."""
        step = max(1, round(1 / share))
        self._version += 1
        for number, name in enumerate(sorted(self._tensors)):
            if (number + self._version) % step == 0:
                self._tensors[name] = self._tensors[name] * 1.01

    def by_pool(self) -> Round:
        """Ours."""
        return asyncio.run(self._publish_and_update())

    async def _publish_and_update(self) -> Round:
        async with await tensorcast.connect(self._worker) as session:
            publisher = tensorcast.WeightPublisher(session, NAME)
            start = time.perf_counter()
            await publisher.publish(self._tensors, version=self._version)
            published = time.perf_counter()
            await asyncio.to_thread(self._engine.update, self._version, False)
            end = time.perf_counter()
        return Round(end - start, end - published)

    def by_disk(self) -> Round:
        """The same through the disk."""
        return self.by_files(disk=True)

    def by_files(self, disk: bool = False) -> Round:
        """A checkpoint is written, and vLLM's own reloading reads it; from the disk, if it is to."""
        from safetensors.torch import save_file

        start = time.perf_counter()
        save_file(self._tensors, self._files / "model.safetensors")
        if disk:
            with (self._files / "model.safetensors").open("rb") as file:
                os.fsync(file.fileno())
            uncache(self._files)
        saved = time.perf_counter()
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(self._files)}}
        request = urllib.request.Request(
            f"{self._plain}/collective_rpc", msgspec.json.encode(body), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            answer.read()
        end = time.perf_counter()
        return Round(end - start, end - saved)


def _checkpoint(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def figure7_rows(run: Run, quick: bool = False) -> list[Row]:
    """Of each engine: the whole way, how long it stands still, and the whole way of a version of which a tenth is new."""
    rows: list[Row] = []
    for size in SIZES_QUICK if quick else SIZES:
        for ranks in RANKS:
            run.say(f"figure 7: {size} model, {ranks} rank{'s' if ranks > 1 else ''}")
            with _updates(run.folder / f"figure7-{size}-{ranks}", size, ranks) as updates:
                rows += _measured(updates, f"{updates.bytes / 1e6:,.0f} MB, TP {ranks}", run.size.runs)
    return rows


def _measured(updates: Updates, what: str, runs: int) -> list[Row]:
    whole, still, tenth = (
        Figure(f"{name}, {what}", "ms", None)
        for name in ("new weights served", "engine stands still", "a tenth is new: served")
    )
    ways = {OURS: updates.by_pool, RELOAD: updates.by_files, RELOAD_DISK: updates.by_disk}
    for share in (1.0, CHANGED_SHARE):
        for number in range(runs + 1):
            updates.change(share)
            for system in sorted(ways, reverse=bool(number % 2)):
                time.sleep(REST_S)
                took = ways[system]()
                if not number:
                    continue  # the first round of each is warming up
                if share == 1.0:
                    whole.add(system, 1e3 * took.whole)
                    still.add(system, 1e3 * took.still)
                else:
                    tenth.add(system, 1e3 * took.whole)
    for figure in (whole, still, tenth):
        cache, disk = (
            statistics.median(figure.peers[each]) / statistics.median(figure.ours) for each in ways if each != OURS
        )
        figure.row += f" ({cache:.2f} times as fast as the page cache, {disk:.2f} times as the disk; paper {PAPER})"
    return [each.made({}) for each in (whole, still, tenth)]


@contextmanager
def _updates(folder: Path, size: str, ranks: int) -> Iterator[Updates]:
    files = folder / "files"
    files.mkdir(parents=True)
    made = model.make(size)
    with Supervisor(folder / "logs") as supervisor:
        store = pool.store(supervisor)
        worker = pool.worker(supervisor, store["store"], arena="64MiB", options=("--artifacts", ARTIFACTS))["worker"]
        engines = [
            engine.start(
                supervisor, name,
                EngineOptions(
                    made, tensor_parallel=ranks, cpus="0|1" if ranks == 2 else None, max_model_len=2048,
                    env={"VLLM_SERVER_DEV_MODE": "1"}, args=args,
                ),
            )
            for name, args in (("updated", TRANSFER), ("reloaded", ()))
        ]  # fmt: skip
        for each in engines:
            each.wait(START_TIMEOUT_S)
        yield Updates(engines[0].url, engines[1].url, worker, made, files)
