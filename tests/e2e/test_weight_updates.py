"""Running engines get other weights: all of a version or nothing, and never KV of another one. In this order: each test goes on
from the weights that the one before left."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from demo import engine
from demo.compare import Reference
from demo.engine import Engine, EngineOptions
from demo.pool import Started
from demo.processes import ROOT, Supervisor
from examples.running import POLICY, Refused, RunningEngine

import tensorcast_connector as tensorcast
from tests.e2e.conftest import RESETTABLE
from tests.e2e.probe import (
    OUT_OF_POOL,
    checked,
    located,
    patient,
    post,
    referred,
    saved,
    statistics,
    tokens,
    until,
    wait_saved,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
TRANSFER = ("--weight-transfer-config", '{"backend": "tensorcast"}')
PROMPT = 1000
BLOCKS = PROMPT // 128
SECOND, LAST = 2, 4  # the versions that the trainer publishes
UP = "model.layers.1.mlp.up_proj.weight"


@dataclass(slots=True)
class Fleet:
    """Two engines with the same weights on two workers, and later one that was started from what the trainer saved."""

    workers: tuple[Started, Started]
    a: Engine
    b: Engine
    folder: Path
    references: list[Reference]  # of an engine started from the last version

    def updater(self, which: str) -> RunningEngine:
        """How it is given a version."""
        number = "ab".index(which)
        return RunningEngine((self.a, self.b)[number].url, self.workers[number]["worker"])


@pytest.fixture(scope="module")
def fleet(supervisor: Supervisor, workers: tuple[Started, Started], tiny: Path) -> Fleet:
    """The engines, started side by side."""
    a, b = (
        engine.start(
            supervisor,
            f"updated-{name}",
            EngineOptions(tiny, kv_transfer=patient(worker["worker"]), cpus=engine.cpus_of(index, 2),
                          env=RESETTABLE, args=TRANSFER),
        )
        for index, (name, worker) in enumerate(zip("ab", workers, strict=True))
    )  # fmt: skip
    for each in (a, b):
        each.wait(600)
    return Fleet(workers, a, b, tiny, [])


def publish(worker: str, model: str, tensors: Mapping[str, Any], version: int = 1) -> None:
    async def put() -> None:
        async with await tensorcast.connect(worker) as session:
            await tensorcast.WeightPublisher(session, model).publish(tensors, version)

    asyncio.run(put())


def checkpoint(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def share(fleet: Fleet, prompt: list[int], salt: str) -> int:
    """A computes and saves a prompt; how many of its tokens B then takes from the pool."""
    known, before = located(fleet.workers), fleet.b.sources()
    saved(fleet.a, [prompt], salt)
    wait_saved(fleet.workers, known, BLOCKS)
    saved(fleet.b, [prompt], salt)
    return (fleet.b.sources() - before).pool


def refused(target: RunningEngine, *words: str, model: str, version: int | None = None) -> None:
    target.attach(model)
    with pytest.raises(Refused) as caught:
        target.update(version, pause=False)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_version_that_cannot_be_taken_is_refused_by_name_and_changes_nothing(
    fleet: Fleet, start_worker: Callable[[str, str], Started], tmp_path: Path, salt: str
) -> None:
    target, worker = fleet.updater("a"), fleet.workers[0]["worker"]
    prompts = [tokens(seed, PROMPT) for seed in (1, 2)]
    before = _continued(fleet.a, prompts, f"{salt}-before")
    whole = checkpoint(fleet.folder)
    spoilt: dict[str, tuple[dict[str, Any], list[str]]] = {
        "missing": ({name: each for name, each in whole.items() if name != UP}, [UP, "missing"]),
        "unknown": ({**whole, "model.layers.9.mlp.up_proj.weight": whole[UP]}, ["model.layers.9.mlp.up_proj.weight"]),
        "shape": ({**whole, UP: whole[UP][:-1]}, [UP, "shape", "[767, 256]", "[768, 256]"]),
        "dtype": ({**whole, UP: whole[UP].float()}, [UP, "float32", "bfloat16"]),
    }
    for kind, (tensors, words) in spoilt.items():
        publish(worker, f"spoilt-{kind}", tensors)
        refused(target, *words, model=f"spoilt-{kind}", version=1)
    refused(target, "version 9", model="spoilt-dtype", version=9)
    refused(target, "newest version", "nobody", model="nobody")
    _refused_by_a_dying_worker(fleet, start_worker, tmp_path, whole)
    assert _continued(fleet.a, prompts, f"{salt}-after") == before, "the weights are as they were"
    assert share(fleet, tokens(3, PROMPT), salt) == BLOCKS * 128, "and so is the namespace of their KV"


def _refused_by_a_dying_worker(
    fleet: Fleet, start_worker: Callable[[str, str], Started], folder: Path, tensors: Mapping[str, Any]
) -> None:
    socket = f"unix:{folder}/w.sock"
    worker = start_worker("dying", socket)
    publish(socket, "good", tensors)
    target = RunningEngine(fleet.a.url, socket)
    target.attach("good")
    os.kill(worker.running.process.pid, signal.SIGSTOP)  # it takes the connection and never answers
    timer = threading.Timer(1.0, os.kill, (worker.running.process.pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(Refused):
        target.update(1, pause=False)
    timer.join()
    with pytest.raises(Refused, match="cannot connect"):
        target.update(1, pause=False)


def _continued(asked: Engine, prompts: list[list[int]], salt: str) -> list[list[int]]:
    """What an engine says, computed by itself alone."""
    answers = []
    for prompt in prompts:
        body = {"model": asked.served_name, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        body |= {"cache_salt": salt, "return_token_ids": True, **OUT_OF_POOL}
        answers.append(post(f"{asked.url}/v1/completions", body)["choices"][0]["token_ids"])
    return answers


def test_versions_of_a_trainer_are_served_as_by_an_engine_started_from_them(
    fleet: Fleet, start_engine: Callable[[str, EngineOptions], Engine], tmp_path: Path, salt: str
) -> None:
    prompts = [tokens(seed, PROMPT) for seed in (11, 12)]
    assert share(fleet, prompts[0], salt) == BLOCKS * 128, "before it they share KV"
    done = subprocess.run(
        [sys.executable, "-m", "examples.rollouts", fleet.workers[0]["worker"], "--model", str(fleet.folder),
         "--engine", fleet.a.url, "--steps", str(LAST), "--every", str(SECOND), "--save", str(tmp_path / "last")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    print(f"\n{done.stdout}")
    assert done.stdout.splitlines()[-1] == "2 of 2 versions were served by 1 engines"
    plain = start_engine("started-from-it", EngineOptions(tmp_path / "last"))
    plain.wait(600)
    fleet.references = referred(plain, prompts, salt)
    before = fleet.a.sources()
    known = located(fleet.workers)
    comparison = checked(fleet.a, fleet.references, salt)
    print(f"updated engine: {comparison}")
    assert comparison.same, comparison.differences
    assert (fleet.a.sources() - before).pool == 0, "KV of before is never used"
    assert not checked(fleet.b, fleet.references, f"{salt}-b").same, "the other engine has other weights"
    wait_saved(fleet.workers, known, 2 * BLOCKS)
    before = fleet.b.sources()
    saved(fleet.b, [prompts[1]], salt)
    assert (fleet.b.sources() - before).pool == 0, "nor is that of after it by an engine with the weights of before"


def test_engines_with_the_same_version_share_kv_again(fleet: Fleet, salt: str) -> None:
    target = fleet.updater("b")
    target.attach(POLICY)
    target.update()
    prompt = tokens(21, PROMPT)
    assert share(fleet, prompt, salt) == BLOCKS * 128
    comparison = checked(fleet.b, fleet.references, salt)
    assert comparison.same, comparison.differences


def test_without_a_pause_nothing_of_former_weights_is_saved_or_loaded_either(fleet: Fleet, salt: str) -> None:
    """The caller breaks vLLM's contract: its own cache then holds KV of former weights, which goes no further."""
    target = fleet.updater("a")
    target.attach(POLICY)
    old = tokens(31, PROMPT)
    saved(fleet.a, [old], salt)
    body = {
        "model": fleet.a.served_name,
        "prompt": tokens(32, PROMPT),
        "max_tokens": 400,
        "ignore_eos": True,
        "cache_salt": salt,
    }
    alive = threading.Thread(target=post, args=(f"{fleet.a.url}/v1/completions", body))
    alive.start()
    until(lambda: fleet.a.metrics()["vllm:num_requests_running"] == 1, "a request under way")
    target.update(SECOND, pause=False)
    until(lambda: fleet.a.metrics()["vllm:num_requests_running"] == 1, "it goes on")
    saved(fleet.a, [tokens(33, 10)], salt)  # a step after the change, so that the scheduler knows of it
    settled = int(statistics(fleet.workers[0])["pages_saved"])
    alive.join()
    before = fleet.a.sources()
    saved(fleet.a, [old + tokens(34, 2 * 128)], salt)
    assert (fleet.a.sources() - before).local >= BLOCKS * 128, "vLLM's own cache was not emptied"
    assert int(statistics(fleet.workers[0])["pages_saved"]) == settled, "what was computed from it is not saved"
    assert share(fleet, tokens(35, PROMPT), salt) == 0, "the other engine has another version"


def test_ranks_that_run_in_parallel_take_a_version_together(
    fleet: Fleet, start_engine: Callable[[str, EngineOptions], Engine], salt: str
) -> None:
    worker = fleet.workers[0]["worker"]
    options = EngineOptions(
        fleet.folder, kv_transfer=patient(worker), tensor_parallel=2, cpus="0|1", env=RESETTABLE, args=TRANSFER
    )
    parallel = start_engine("parallel", options)
    parallel.wait(600)
    target = RunningEngine(parallel.url, worker)
    refused(target, UP, "shape", model="spoilt-shape", version=1)
    saved(parallel, [tokens(41, 200)], salt)  # it still serves
    target.attach(POLICY)
    target.update(LAST)
    comparison = checked(parallel, fleet.references, salt)
    print(f"\ntwo ranks: {comparison}")
    assert comparison.same, comparison.differences
