"""The benchmark of weights: its loads fill parameters and notice when they did not; its rows say what they are held against."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import weights, weights_engine, weights_pool
from benchmarks.driver import python_path
from benchmarks.face import LIMIT, OURS, BenchError, Figure, Target
from benchmarks.programs import loads
from benchmarks.weights_engine import WARM, Way
from benchmarks.weights_run import Run, Size, available_memory
from demo.processes import DemoError

from tensorcast_connector.client.checkpoint import Checkpoint

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def test_a_file_that_is_made_is_a_checkpoint(tmp_path: Path) -> None:
    made = weights.make_file(tmp_path / "x", 60 * MIB)
    with Checkpoint.open(tmp_path / "x") as checkpoint:
        assert sum(each.bytes for each in checkpoint.tensors.values()) == made >= 60 * MIB
        assert {each.dtype for each in checkpoint.tensors.values()} == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ours", "ours_stream", "raw", "load_file", "safe_open"])
def test_a_load_fills_the_parameters(method: str, tmp_path: Path) -> None:
    if method in ("load_file", "safe_open"):
        pytest.importorskip("safetensors.torch")
    path = str(tmp_path / "x")
    made = weights.make_file(Path(path), 10 * MIB)
    told = [{"do": "load", "method": method, "path": where, "cold": False, "threads": 2} for where in (path, "none")]
    answers = subprocess.run(
        [sys.executable, "-m", "benchmarks.programs.loads", method],
        input="".join(json.dumps(each) + "\n" for each in told),
        capture_output=True, text=True, check=True, cwd=ROOT,
        env={**os.environ, **python_path(), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"},
    ).stdout.splitlines()  # fmt: skip
    ready, good, bad = map(json.loads, answers)
    assert ready == {} and good["seconds"] > 0 and good["bytes"] == made and "No such file" in bad["error"]


def test_a_loader_that_loads_nothing_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    weights.make_file(path, MIB)
    monkeypatch.setitem(loads.METHODS, "raw", lambda *_: None)
    with pytest.raises(ValueError, match="is not what the file has"):
        loads.load("raw", str(path), cold=False, threads=1)


@pytest.mark.slow
def test_a_method_whose_library_is_absent_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['fastsafetensors'] = None\n"
         "from benchmarks.programs import loads; sys.argv = ['x', 'fastsafetensors']; loads.main()"],
        input='{"do": "load", "method": "fastsafetensors", "path": "x", "cold": false, "threads": 1}\n',
        capture_output=True, text=True, check=True, env={**os.environ, **python_path()},
    ).stdout.splitlines()  # fmt: skip
    assert "Error: " in json.loads(answers[1])["error"]


@pytest.mark.slow
def test_a_file_that_was_forgotten_is_not_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(MIB))
    loads.warm(str(path))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert loads._cached(descriptor)
        try:
            loads.forget(str(path))
        except ValueError:
            pytest.skip("this file system is in memory")
        assert not loads._cached(descriptor)
    finally:
        os.close(descriptor)


def test_peers_are_judged_one_by_one_and_run_by_run() -> None:
    figure = Figure("row", "GB/s", (Target("peers", ">=", 1), Target("ratio", ">=", 0.9)))
    for ours, limit, peer in ((10, 10, 9), (1, 1, 0.9), (5, 5, 8)):
        figure.add(OURS, ours)
        figure.add(LIMIT, limit)
        figure.add("peer", peer)
    figure.beside["ours, otherwise"] = [100]
    row = figure.made({})
    assert row.holds and row.target == "each ratio to a peer >= 1 and ratio >= 0.9"
    assert row.peers == {"peer": 8, "ours, otherwise": 100}, "what is ours is shown, and not judged"
    figure.peers["other"] = [5.1]  # ran once
    assert not figure.made({}).holds


def test_a_run_without_room_says_what_it_needs(tmp_path: Path) -> None:
    run = Run(Size((), 1, 1, 1, 1), print, tmp_path)
    run.need(available_memory() // 2, 1)
    with pytest.raises(BenchError, match=r"GiB of memory are needed, .* are free; try --quick"):
        run.need(1 << 60, 0)
    with pytest.raises(BenchError, match=r"GiB on .* are needed"):
        run.need(0, 1 << 60)


def test_a_peer_whose_server_does_not_start_is_missing_from_then_on_and_ends_nothing() -> None:
    """One did, after half an hour: its loader asks a CPU for `cuda:cpu`."""
    started: list[str] = []

    def seconds(way: Way) -> float:
        started.append(way.name)
        if way.load_format == broken:
            raise DemoError(
                f"{way.name} ended with status 1; the end of its log:\n  | Invalid device string: 'cuda:cpu'"
            )
        return 2.0

    broken = weights_engine.PEERS[1]
    ways, missing = (
        [Way("default", "auto"), *(Way(each, each) for each in weights_engine.PEERS), WARM],
        {"other": "why"},
    )
    for _ in range(2):
        row = weights_engine.ready_row("ready", ways, missing, seconds)
        assert row.peers[broken] == missing[broken] == f"{broken} ended with status 1; the end of its log:"
        assert (row.ours, row.peers["default"], row.peers["other"]) == (2.0, 2.0, "why")
    assert started.count(broken) == 1 and started.count(WARM.name) == 2
    broken = WARM.load_format
    with pytest.raises(DemoError):
        weights_engine.ready_row("ready", ways, {}, seconds)


@pytest.mark.slow
async def test_rows_of_artifacts_are_measured_on_real_workers(tmp_path: Path) -> None:
    size = weights_pool.TENSOR_BYTES
    run = Run(Size((), 1, 1, size, size), lambda _: None, tmp_path)
    opened, readers = await asyncio.to_thread(weights_pool.reader_rows, run)
    assert opened.ours > 0 and readers.unit == "% of its bytes" and readers.ours < 10
    program, worker = await asyncio.to_thread(weights_pool.second_host_rows, run)
    assert all(row.ours > 0 and row.limit and row.target is None for row in (program, worker))
