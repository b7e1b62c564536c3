"""`scripts/bench weights`: how fast parameters are filled from safetensors files, and what an artifact's readers cost.

Files of bf16 tensors are made on the spot. What counts is when every parameter is filled, in memory that was touched before, each
load in a process of its own, the systems taking turns. The limit is positioned reads by plain threads. Rows come from the
functions of PARTS, in that order; each is given the run and may be in a module of its own (weights_*.py).
"""

import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks import weights_engine, weights_figure7, weights_pool, weights_update
from benchmarks.driver import Driver
from benchmarks.environments import ROOT, python_of
from benchmarks.face import LIMIT, OURS, BenchError, Figure, Row, Target
from benchmarks.weights_run import GIB, Run, Say, Size, own_python
from tensorcast_connector.core.artifact import layout
from tensorcast_connector.core.safetensors import encode_file_header

REQUIREMENTS = Path(__file__).with_suffix(".requirements.txt")
ALONE = ("runai-model-streamer==0.17.1", "fastsafetensors==0.5.0")
PEERS = ("load_file", "safe_open", "runai", "fastsafetensors")
STREAM = "ours_stream"
MISSING = {"instanttensor": "it runs on CUDA only"}
TIE = 0.1  # of what the disk gives, which differs by more from one run to the next
MEMORY_TIMES = 4  # of a file: its page cache, parameters, and a second copy that some peers make; and some room
FULL = Size(files=(GIB, 3 * GIB), cold_runs=9, runs=5, artifact=GIB, remote=3 * GIB)
QUICK = Size(files=(GIB // 8,), cold_runs=3, runs=3, artifact=GIB // 8, remote=GIB // 8)
PLACES = {
    "disk, cold": (Target("peers", ">=", 1, tie=TIE),),
    "page cache": (Target("peers", ">=", 0.95), Target("ratio", ">=", 0.95)),
    "tmpfs": (Target("peers", ">=", 1), Target("ratio", ">=", 0.9)),
}


def make_file(path: Path, size: int) -> int:
    """A file with about `size` bytes of tensors with the shapes of a small dense model; returns its tensors' bytes."""
    hidden, inner, small = 2048, 6144, 512
    layer = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (small, hidden), "self_attn.v_proj": (small, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    shapes: list[tuple[str, str, tuple[int, ...]]] = [("model.embed_tokens.weight", "bfloat16", (8192, hidden))]
    while sum(2 * _count(shape) for _, _, shape in shapes) < size:
        number = len(shapes) // len(layer)
        shapes += [(f"model.layers.{number}.{name}.weight", "bfloat16", shape) for name, shape in layer.items()]
    header, order = encode_file_header(layout(shapes)[0])
    made = sum(each.bytes for each in order)
    block = random.Random(0).randbytes(8 << 20)
    with path.open("wb") as file:
        file.write(header)
        for at in range(0, made, len(block)):
            file.write(block[: made - at])
        file.flush()
        os.fsync(file.fileno())
    return made


def _count(shape: Sequence[int]) -> int:
    count = 1
    for each in shape:
        count *= each
    return count


class Loads:
    """Loads by every method that runs here.

    Attributes:
        missing: peers that do not run, and why.
    """

    def __init__(self, stack: ExitStack, folder: Path, say: Say) -> None:
        self.missing: dict[str, str] = dict(MISSING)
        self._cpus = os.sched_getaffinity(0)
        self._drivers: dict[str, Driver] = {}
        ours = [own_python(), "-m", "benchmarks.programs.loads", f"{OURS},{STREAM},raw"]
        driver = stack.enter_context(Driver(OURS, ours, folder / "ours.log", self._cpus)).ready()
        self._drivers |= dict.fromkeys((OURS, STREAM, LIMIT), driver)
        try:
            python = python_of("loaders", REQUIREMENTS, alone=ALONE)
        except BenchError as error:
            say(f"no peer runs: {error}")
            self.missing |= dict.fromkeys(PEERS, str(error))
            return
        command = [str(python), "-m", "benchmarks.programs.loads", ",".join(PEERS)]
        driver = stack.enter_context(Driver("peers", command, folder / "peers.log", self._cpus)).ready()
        self._drivers |= dict.fromkeys(PEERS, driver)

    def measure(self, figure: Figure, path: Path, cold: bool, run: int) -> None:
        """GB/s of each of them, in an order that changes from run to run."""
        order = list(self._drivers)
        random.Random(run).shuffle(order)
        for name in order:
            answer = self._drivers[name].ask(
                "load", method="raw" if name == LIMIT else name, path=str(path), cold=cold, threads=len(self._cpus)
            )
            if "error" not in answer:
                value = answer["bytes"] / 1e9 / answer["seconds"]
                if name == STREAM:
                    figure.beside.setdefault(STREAM, []).append(value)
                else:
                    figure.add(name, value)
            elif name in (OURS, STREAM, LIMIT):
                raise BenchError(f"{figure.row}: {name}: {answer['error']}")
            else:
                self.missing.setdefault(name, answer["error"])


def load_rows(run: Run) -> list[Row]:
    """Filled parameters from the disk, from the page cache, and from a memory file system."""
    rows: list[Row] = []
    with ExitStack() as stack:
        loads = Loads(stack, run.folder, run.say)
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weights-", dir=run.folder)))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorcast-bench-", dir="/dev/shm")))
        for size in run.size.files:
            run.need(MEMORY_TIMES * size, 2 * size)
            path = disk / "model.safetensors"
            run.say(f"making a file of {size / GIB:g} GiB")
            make_file(path, size)
            for place, targets in PLACES.items():
                if place == "tmpfs":  # memory is not for two copies of it
                    path = Path(shutil.move(path, memory / path.name))
                rows.append(_row(run, loads, path, place, targets, size))
            path.unlink()
    return rows


def _row(run: Run, loads: Loads, path: Path, place: str, targets: tuple[Target, ...], size: int) -> Row:
    cold = place == "disk, cold"
    figure = Figure(f"{size / GIB:g} GiB into parameters: {place}", "GB/s", targets)
    count = run.size.cold_runs if cold else run.size.runs
    for number in range(count):
        run.say(f"{figure.row}, run {number + 1} of {count}")
        try:
            loads.measure(figure, path, cold, number)
        except BenchError as error:
            if not cold:
                raise
            run.say(str(error))  # a cold file cannot be had everywhere
            return Row(figure.row, "GB/s", 0.0, {"all": str(error)}, None, None, None, True, 0, 0.0)
    beside = "".join(f", {name} {statistics.median(values):.2f}" for name, values in figure.peers.items())
    run.say(f"{figure.row}: {statistics.median(figure.ours):.2f} GB/s{beside}")
    return figure.made({name: why for name, why in loads.missing.items() if name not in figure.peers})


PARTS: dict[str, Callable[[Run], list[Row]]] = {
    "files": load_rows,
    "readers": weights_pool.reader_rows,
    "second-host": weights_pool.second_host_rows,
    "update": weights_update.update_rows,
    "engine": weights_engine.engine_rows,
}
"""What can be run by itself; a new row is in one of them."""


FIGURES: list[Callable[[Run, bool], list[Row]]] = [weights_engine.figure_rows, weights_figure7.figure7_rows]
"""The paper's figures in its shape; (run, quick) -> rows."""


def figures(quick: bool, say: Say, folder: Path | None = None) -> list[Row]:
    """The paper's figures instead of the rows with targets.

    Raises: as `run`.
    """
    where = folder or ROOT / ".out" / f"weights-{os.getpid()}"
    where.mkdir(parents=True, exist_ok=True)
    made = Run(QUICK if quick else FULL, say, where)
    return [row for rows in FIGURES for row in rows(made, quick)]


def run(size: Size, say: Say, parts: Collection[str] = (), folder: Path | None = None) -> list[Row]:
    """The rows of these PARTS, or of all.

    Raises:
        BenchError: ours cannot run here; a peer that cannot is named in the rows.
    """
    where = folder or ROOT / ".out" / f"weights-{os.getpid()}"
    where.mkdir(parents=True, exist_ok=True)
    made = Run(size, say, where)
    return [row for name in parts or PARTS for row in PARTS[name](made)]
