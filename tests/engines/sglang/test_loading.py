"""`--load-format tensorcast` and updates from published versions by SGLang's real loaders and weight updater; no server runs."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from demo import model, pool
from demo.pool import Started
from demo.processes import ROOT, Supervisor, run_id

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    """Owns the programs of these tests."""
    with Supervisor(ROOT / ".out" / f"sglang-loading-{run_id()}") as made:
        yield made


@pytest.fixture(scope="module")
def worker(supervisor: Supervisor) -> Started:
    """A store and a worker."""
    return pool.up(supervisor, arena="64MiB")


@pytest.fixture(scope="module")
def tiny() -> Path:
    """The model."""
    return model.make("tiny")


@pytest.fixture(scope="module")
def other() -> Path:
    """The same shape with other weights."""
    return model.make("tiny", seed=1)


def run(*arguments: object) -> list[dict[str, Any]]:
    """What tests.engines.sglang.loading says of each step."""
    (said,) = run_ranks(arguments)
    return said


def run_ranks(*ranks: tuple[object, ...]) -> list[list[dict[str, Any]]]:
    """The same for several ranks at once, by their arguments."""
    line = [sys.executable, "-m", "tests.engines.sglang.loading"]
    running = [
        subprocess.Popen([*line, *map(str, each)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for each in ranks
    ]
    said = []
    try:
        for each in running:
            out, error = each.communicate(timeout=240)
            assert each.returncode == 0, error[-3000:]
            said.append([json.loads(line) for line in out.splitlines() if line.startswith('{"step"')])
    finally:
        for each in running:
            each.kill()
            each.wait()
    return said


def versions(worker: str, folder: Path) -> None:
    """Publishes `policy`: 1 is what is in the folder; the others are each wrong in one way."""
    import torch
    from safetensors.torch import load_file

    from tensorcast_connector.client.blocking import connect_blocking

    whole = load_file(folder / "model.safetensors")
    name = "model.layers.3.mlp.down_proj.weight"
    wrong = {
        "short": {key: each for key, each in whole.items() if key != name},
        "shape": {**whole, name: whole[name][:-1].clone()},
        "more": {**whole, "model.layers.4.mlp.down_proj.weight": torch.zeros(2, 2)},
    }
    with connect_blocking(worker) as session:
        publisher = session.weight_publisher("policy", keep_last=10)
        for order, (version, tensors) in enumerate(wrong.items()):
            publisher.publish(tensors, version, order=order)
        publisher.publish(whole, 10)


def test_cold_warm_and_updates_are_what_sglang_itself_loads(worker: Started, tiny: Path, other: Path) -> None:
    versions(worker["worker"], other)
    auto, cold, _, warm, short, shape, more, from_files, _, newest, absent, _, back, flushed, again = run(
        "--model", tiny, "--worker", worker["worker"], "auto", "tensorcast", "wait", "tensorcast",
        "update=tensorcast:policy:short", "update=tensorcast:policy:shape", "update=tensorcast:policy:more",
        f"update=auto,{other}", "flush", f"update=tensorcast,{tiny}", "update=tensorcast:policy:11", "flush",
        "update=tensorcast:policy,a-name", "flush", "update=tensorcast:policy:shape,a-name",
    )  # fmt: skip
    assert auto["loader"] == "DefaultModelLoader" and not auto["lines"]
    assert cold["loader"] == warm["loader"] == "TensorcastModelLoader"
    assert cold["digest"] == warm["digest"] == auto["digest"]
    assert "from files, being shared" in cold["lines"][-1] and "from the pool, mapped" in warm["lines"][-1]
    for refused, why in (
        (short, "tensor 'model.layers.3.mlp.down_proj.weight' is missing"),
        (shape, "tensor 'model.layers.3.mlp.down_proj.weight' has shape [255, 768], and the model needs [256, 768]"),
        (more, "tensor 'model.layers.4.mlp.down_proj.weight' is unknown to the model"),
    ):
        assert not refused["ok"] and why in refused["message"], refused
        assert (refused["digest"], refused["live"]) == (auto["digest"], "files"), "all or nothing"
    assert from_files["ok"] and from_files["digest"] != auto["digest"]
    assert newest["ok"] and newest["digest"] == auto["digest"], "files again, by the same load format"
    assert not absent["ok"] and absent["digest"] == auto["digest"]
    assert back["ok"] and back["digest"] == from_files["digest"]
    assert "policy version 10 now: 47 tensors" in back["lines"][-1]
    assert back["live"] is None, "what is cached is of the former weights"
    assert flushed["live"].startswith("version:")
    assert "the model needs [256, 768]" in again["message"], "it still knows the files that it was started from"
    assert again["live"] == flushed["live"]


def test_a_model_that_computes_while_it_loads_gets_a_version_as_a_whole_too(
    worker: Started, tiny: Path, other: Path
) -> None:
    versions(worker["worker"], other)
    before, _, _, failed, _, taken = run(
        "--model", tiny, "--worker", worker["worker"], "tensorcast", "wait", "failing", "update=tensorcast:policy",
        "computing", "update=tensorcast:policy",
    )  # fmt: skip
    assert not failed["ok"] and "nothing has changed" in failed["message"] and "half way" in failed["message"]
    assert (failed["digest"], failed["live"]) == (before["digest"], "files")
    assert taken["ok"] and taken["digest"] != before["digest"]


def test_ranks_share_what_ranks_like_them_loaded_and_take_a_version_together_or_not_at_all(
    worker: Started, tiny: Path, other: Path, tmp_path: Path
) -> None:
    versions(worker["worker"], other)

    def ranks(name: str, workers: tuple[str, str], *steps: str) -> list[list[dict[str, Any]]]:
        meet = ("--model", tiny, "--size", 2, "--meet", tmp_path / name)
        return run_ranks(*((*meet, "--rank", rank, "--worker", each, *steps) for rank, each in enumerate(workers)))

    here = worker["worker"]
    steps = ("auto", "tensorcast", "wait", "tensorcast", "update=tensorcast:policy", "update=auto," + str(other))
    for rank, (auto, cold, _, warm, taken, files) in enumerate(ranks("first", (here, here), *steps)):
        assert "being shared" in cold["lines"][-1] and "from the pool, mapped" in warm["lines"][-1], rank
        assert cold["digest"] == warm["digest"] == auto["digest"]
        assert taken["ok"] and taken["digest"] == files["digest"] != auto["digest"]
    both = ranks("second", (here, here + ".not"), "tensorcast", "update=tensorcast:policy")
    assert both[0][0]["digest"] != both[1][0]["digest"], "each has its own part"
    for before, refused in both:
        assert not refused["ok"] and ".not" in refused["message"]
        assert (refused["digest"], refused["live"]) == (before["digest"], "files")


def test_without_a_pool_the_files_are_read(tiny: Path, worker: Started) -> None:
    auto, nobody = run("--model", tiny, "--worker", f"{worker['worker']}.not", "auto", "tensorcast")
    assert nobody["digest"] == auto["digest"]
    assert "no pool" in nobody["lines"][0] and "from files:" in nobody["lines"][-1]
