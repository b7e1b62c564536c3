"""Rows of `scripts/bench weights` on a real vLLM: `load_weights` of a rank, further engines, whole starts; figures 5 and 6.

A model of random weights is made on the spot. Times inside `load_weights` are of ranks that load as an engine's worker process
does (demo/ranks.py), the ways taking turns; what the engine does with weights afterwards is printed apart. Whole starts are of
servers.
"""

import json
import os
import random
import shutil
import sysconfig
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from demo import pool
from demo.engine import Engine, EngineOptions, start
from demo.processes import DemoError, Supervisor
from demo.ranks import Ranks, published

from benchmarks.environments import python_of
from benchmarks.face import OURS, BenchError, Figure, Row, Target
from benchmarks.weights_model import make_model
from benchmarks.weights_run import GIB, Run
from tensorcast_connector.client.blocking import connect_blocking

MAPPED, SHARED, PUBLISHED = "from the pool, mapped", "being shared", "shared from now on"
OURS_FORMAT = "tensorcast"
PEERS = ("runai_streamer", "fastsafetensors")
REQUIREMENTS = Path(__file__).with_name("weights.requirements.txt")
ALONE = ("runai-model-streamer==0.17.1", "fastsafetensors==0.5.0")
READY_S = 60.0
FREE_S = 5.0
START_RUNS = 1  # of servers: a start takes a minute


@dataclass(frozen=True, slots=True)
class Way:
    """One way of loading.

    Attributes:
        cold: the files are taken out of the page cache before.
        pool: with a worker.
        forget: what was loaded before is taken out of the pool first.
    """

    name: str
    load_format: str = OURS_FORMAT
    cold: bool = False
    pool: bool = False
    forget: bool = False


DEFAULT, DEFAULT_COLD = Way("default", "auto"), Way("default, cold", "auto", cold=True)
ALONE_CACHED, ALONE_COLD = Way("no worker"), Way("no worker, cold", cold=True)
SHARING, SHARING_COLD = (
    Way("into the pool", pool=True, forget=True),
    Way("into the pool, cold", cold=True, pool=True, forget=True),
)
WARM = Way("mapped", pool=True)


def uncache(folder: Path) -> None:
    """Takes the weights out of the page cache, as far as the kernel lets go of them."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


class Loads:
    """Loads of one model by ranks that are there already."""

    def __init__(self, ranks: Ranks, folder: Path, worker: str) -> None:
        self._ranks = ranks
        self._folder = folder
        self._worker = worker

    def load(self, way: Way, **asked: Any) -> dict[str, Any]:
        """What the slowest rank answers, once what it is sharing is in the pool and disturbs nothing any more.

        Raises:
            BenchError: it was loaded in another way than was asked for.
        """
        if way.forget:
            forget(self._worker)
        if way.cold:
            uncache(self._folder)
        extra = {"worker": self._worker} if way.pool else {}
        answers = self._ranks.load(self._folder, way.load_format, extra=extra, digests=False, **asked)
        for each in answers:
            if "error" in each:
                raise BenchError(f"{way.name}: {each['error']}")
            wanted = (
                (MAPPED if way == WARM else SHARED if way.pool else "from files")
                if way.load_format == OURS_FORMAT
                else ""
            )
            if wanted and not any(wanted in line for line in each["said"]):
                raise BenchError(f"{way.name}: {each['said']}")
        slowest = max(answers, key=lambda each: float(each["seconds"]["load"]))
        if way.pool and way != WARM:
            slowest["seconds"]["published"] = published(answers, self._worker)
        return slowest


def forget(worker: str) -> None:
    """Deletes everything that was materialised, and waits until the worker is done with giving the memory back."""
    with connect_blocking(worker) as session:
        for each in session.list_artifacts("weights/"):
            session.delete(each.artifact_id)
    before, deadline = -1, time.monotonic() + FREE_S
    while time.monotonic() < deadline and (now := _shared_memory()) != before:
        before = now
        time.sleep(0.1)


def _shared_memory() -> int:
    """Of the machine, in KiB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:"))


@contextmanager
def _prepared(run: Run, size: int) -> Iterator[tuple[Supervisor, Path, int, str]]:
    """A model, and a worker with room for its parameters."""
    run.need(4 * size, 2 * size)
    where = run.folder / f"engine-{size}"
    try:
        with Supervisor(where) as supervisor:
            run.say(f"making a model of {size / GIB:.1f} GiB")
            folder, made = make_model(where / "model", size)
            store = pool.store(supervisor)["store"]
            started = pool.worker(supervisor, store, arena="64MiB", options=["--artifacts", str(3 * size)])
            yield supervisor, folder, made, started["worker"]
    except DemoError as error:
        raise BenchError(str(error)) from error
    finally:
        shutil.rmtree(where / "model", ignore_errors=True)


def engine_rows(run: Run) -> list[Row]:
    """`load_weights` by every way, what it costs to map, and in full runs whole starts."""
    quick = run.size.runs <= 3
    size = GIB // 4 if quick else GIB * 8 // 5
    rows: list[Row] = []
    with _prepared(run, size) as (supervisor, folder, made, worker):
        with Ranks(1, supervisor.folder / "rank.log", threads=len(os.sched_getaffinity(0))) as ranks:
            rows += _load_rows(run, Loads(ranks, folder, worker), made)
        rows += _sharing_rows(run, supervisor, folder, made, worker)
        if not quick:
            rows.append(_start_row(run, supervisor, folder, made, worker))
    if not quick:
        rows.append(_mapping_row(run))
    return rows


def _load_rows(run: Run, loads: Loads, made: int) -> list[Row]:
    size = f"{made / GIB:.2f} GiB"
    warm = Figure(f"vLLM load_weights of {size}, mapped: times as fast as default", "x", Target("ours", ">=", 20))
    cold = Figure(f"vLLM load_weights of {size}, cold files: times as fast as default", "x", Target("ours", ">=", 1.3))
    cached = Figure(f"vLLM load_weights of {size}, files in the page cache: times as fast as default", "x", None)
    seconds = Figure(f"vLLM load_weights of {size}: mapped", "s", None)
    pool_cold = Figure(
        f"vLLM load_weights of {size}, cold files, into the pool: times as fast as default",
        "x",
        Target("ours", ">=", 1.3),
    )
    published = Figure(f"vLLM load_weights of {size}, into the pool: published after the load", "s", None)
    after = Figure(f"vLLM process_weights_after_loading of {size}: after mapping", "s", None)
    ways = [DEFAULT, DEFAULT_COLD, ALONE_CACHED, ALONE_COLD, SHARING, SHARING_COLD]
    loads.load(SHARING)  # everything was imported and touched once
    for number in range(run.size.runs):
        run.say(f"vLLM load_weights of {size}, run {number + 1} of {run.size.runs}")
        order = list(ways)
        random.Random(number).shuffle(order)
        answers = {way: loads.load(way)["seconds"] for way in order}
        found = {way: each["load"] for way, each in answers.items()}
        answer = loads.load(WARM, process=True)
        mapped = answer["seconds"]["load"]
        warm.add(OURS, found[DEFAULT] / mapped)
        cold.add(OURS, found[DEFAULT_COLD] / found[ALONE_COLD])
        pool_cold.add(OURS, found[DEFAULT_COLD] / found[SHARING_COLD])
        published.add(OURS, answers[SHARING]["published"])
        published.beside.setdefault("cold", []).append(answers[SHARING_COLD]["published"])
        cached.add(OURS, found[DEFAULT] / found[ALONE_CACHED])
        cached.beside.setdefault(SHARING.name, []).append(found[DEFAULT] / found[SHARING])
        seconds.add(OURS, mapped)
        for way in ways:
            seconds.beside.setdefault(way.name, []).append(found[way])
        after.add(OURS, answer["seconds"]["process"])
    return [each.made({}) for each in (warm, cold, pool_cold, cached, seconds, published, after)]


def _sharing_rows(run: Run, supervisor: Supervisor, folder: Path, made: int, worker: str) -> list[Row]:
    """What mapped parameters add to the memory of the host, read from end to end, for each of two engines at once."""
    row = f"two engines' parameters of {made / GIB:.2f} GiB, mapped: what the worst adds"
    figure = Figure(row, "% of its bytes", Target("ours", "<=", 1))
    with ExitStack() as stack:
        readers = [stack.enter_context(Ranks(1, supervisor.folder / f"reader-{number}.log")) for number in range(2)]
        loads = [Loads(each, folder, worker) for each in readers]
        for _ in range(min(run.size.runs, 3)):
            answers = [each.load(WARM, read=True) for each in loads]
            figure.add(OURS, max(float(each["memory"]["Anonymous"]) for each in answers) / made * 100)
    return [figure.made({})]


def _mapping_row(run: Run) -> Row:
    """3 GiB of parameters, mapped."""
    figure = Figure("vLLM load_weights of 3 GiB, mapped", "ms", Target("ours", "<=", 50))
    with (
        _prepared(run, 3 * GIB) as (supervisor, folder, made, worker),
        Ranks(1, supervisor.folder / "rank.log") as ranks,
    ):
        loads = Loads(ranks, folder, worker)
        loads.load(SHARING)
        for _ in range(run.size.runs + 1):
            answer = loads.load(WARM)
            figure.add(OURS, answer["seconds"]["load"] * 1e3)
            figure.beside.setdefault("copied, %", []).append(float(answer["memory"]["Anonymous"]) / made * 100)
    figure.ours.pop(0)  # it imports
    return figure.made({})


def _start_row(run: Run, supervisor: Supervisor, folder: Path, made: int, worker: str) -> Row:
    figure = Figure(f"vLLM serve, {made / GIB:.2f} GiB: from its start to its first answer, mapped", "s", None)
    for number in range(START_RUNS):
        for way in (DEFAULT, DEFAULT_COLD, ALONE_COLD, SHARING_COLD, WARM):
            value = ready(run, supervisor, folder, worker, way, f"{way.name}-{number}")[1]
            (figure.ours if way == WARM else figure.beside.setdefault(way.name, [])).append(value)
    return figure.made({})


def ready(
    run: Run, supervisor: Supervisor, folder: Path, worker: str, way: Way, name: str, env: Mapping[str, str] | None = None
) -> tuple[float, float]:  # fmt: skip
    """Seconds until a server says that it is ready, and until its first answer."""
    run.say(f"a server: {way.name}")
    if way.forget:
        forget(worker)
    if way.cold:
        uncache(folder)
    extra = ["--model-loader-extra-config", json.dumps({"worker": worker})] if way.pool else []
    options = EngineOptions(
        folder, max_model_len=512, args=("--load-format", way.load_format, *extra), env=env or {}
    )  # fmt: skip
    begun = time.perf_counter()
    engine = start(supervisor, name.replace(", ", "-").replace(" ", "-"), options)
    engine.wait()
    serving = time.perf_counter() - begun
    _answer(engine)
    answered = time.perf_counter() - begun
    said = MAPPED if way == WARM else PUBLISHED if way.pool else ""
    while said not in engine.running.log.read_text():  # what is being shared is there for the next one
        if time.perf_counter() > begun + answered + READY_S:
            raise BenchError(f"{way.name}: {engine.running.log} does not say {said!r}")
        time.sleep(0.05)
    supervisor.stop(engine.running)
    return serving, answered


def _answer(engine: Engine) -> None:
    asked = {"model": engine.served_name, "prompt": "hello", "max_tokens": 1}
    request = urllib.request.Request(
        f"{engine.url}/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        response.read()


# --- the paper's figures ----------------------------------------------------------------------------------------------

PAPER = (
    "the paper's factors over the default loader (8 GPUs, JuiceFS): cold 60.7 in load and 28.5 until ready with "
    "Qwen3-30B-A3B (figure 5), warm 228.6 with Qwen3-235B-A22B (figure 6)"
)


def figure_rows(run: Run, quick: bool = False) -> list[Row]:
    """Figures 5 (a smaller model) and 6 (a larger one): storage x way of loading; (a) load_weights, (b) ready."""
    sizes = {"5": GIB // 8} if quick else {"5": GIB // 2, "6": GIB * 8 // 5}
    run.say(PAPER)
    peers, missing, packages = _peers(run)
    env = {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), sysconfig.get_path("purelib"), packages])}
    rows: list[Row] = []
    for figure, size in sizes.items():
        with _prepared(run, size) as (supervisor, folder, made, worker):
            for storage in ("disk, cold", "page cache", "tmpfs"):
                with ExitStack() as stack:
                    if storage == "tmpfs":
                        folder = _in_memory(stack, folder)
                    cold = storage == "disk, cold"
                    ways = [Way("default", "auto", cold=cold)]
                    ways += [Way(each, each, cold=cold) for each in peers]
                    ways += [
                        Way("ours, cold", cold=cold, pool=True, forget=True),
                        Way("ours, no worker", cold=cold),
                        WARM,
                    ]
                    title = f"figure {figure}, {made / GIB:.2f} GiB, {storage}"
                    ranks = stack.enter_context(Ranks(1, supervisor.folder / "rank.log", packages=packages))
                    loads = Loads(ranks, folder, worker)
                    rows.append(_figure(f"{title}: load, warm", ways, missing, run.size.runs, loads))
                    if not quick:
                        rows.append(
                            ready_row(
                                f"{title}: ready, warm",
                                ways,
                                missing,
                                partial(_ready, run, supervisor, folder, worker, env, f"{figure}-{storage}"),
                            )
                        )
    return rows


def _ready(
    run: Run, supervisor: Supervisor, folder: Path, worker: str, env: Mapping[str, str], name: str, way: Way
) -> float:  # fmt: skip
    return ready(run, supervisor, folder, worker, way, f"{name}-{way.name}", env)[0]


def _figure(row: str, ways: Sequence[Way], missing: dict[str, str], runs: int, loads: Loads) -> Row:
    made = Figure(row, "s", None)
    for _ in range(runs):
        for way in ways:
            try:
                value = float(loads.load(way)["seconds"]["load"])
            except BenchError as error:
                if way.load_format not in PEERS:
                    raise
                missing.setdefault(way.name, str(error))
                continue
            if way == WARM:
                made.add(OURS, value)
            else:
                made.beside.setdefault(way.name, []).append(value)
    return made.made({name: why for name, why in missing.items() if name not in made.beside})


def ready_row(row: str, ways: Sequence[Way], missing: dict[str, str], seconds: Callable[[Way], float]) -> Row:
    """Seconds until a server is ready, by each of the ways.

    Args:
        missing: ways that do not run here, and why; a peer whose server does not start is put into it.
        seconds: starts a server.

    Raises:
        BenchError, DemoError: a server that is no peer's does not start.
    """
    made = Figure(row, "s", None)
    for way in ways:
        if way.name in missing:
            continue
        try:
            value = seconds(way)
        except (BenchError, DemoError) as error:
            if way.load_format not in PEERS:
                raise
            missing[way.name] = str(error).partition("\n")[0]
            continue
        if way == WARM:
            made.add(OURS, value)
        else:
            made.beside[way.name] = [value]
    return made.made({name: why for name, why in missing.items() if name not in made.beside})


def _in_memory(stack: ExitStack, folder: Path) -> Path:
    target = Path("/dev/shm") / f"tensorcast-bench-{os.getpid()}"
    stack.callback(shutil.rmtree, target, ignore_errors=True)
    return Path(shutil.copytree(folder, target))


def _peers(run: Run) -> tuple[list[str], dict[str, str], str]:
    """Load formats of vLLM that run here, why others do not, and the folder of their packages."""
    missing = {"instanttensor": "it runs on CUDA only"}
    try:
        python = python_of("loaders", REQUIREMENTS, alone=ALONE)
    except BenchError as error:
        run.say(f"no peer runs: {error}")
        return [], missing | dict.fromkeys(PEERS, str(error)), ""
    packages = next((python.parents[1] / "lib").glob("python*/site-packages"))
    return list(PEERS), missing, str(packages)
