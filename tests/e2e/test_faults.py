"""An engine of its own for each fault: no worker at the start, too few blocks, two ranks."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from demo import pool
from demo.compare import CANDIDATES, Comparison, client
from demo.engine import Engine, EngineOptions
from demo.pool import Started
from demo.processes import Supervisor

from tests.e2e.conftest import RESETTABLE
from tests.e2e.probe import (
    api,
    checked,
    follow,
    idle,
    patient,
    post,
    referred,
    saved,
    seconds,
    statistics,
    tokens,
    until,
)

pytestmark = pytest.mark.engine
Start = Callable[[str, EngineOptions], Engine]


def test_an_engine_whose_worker_comes_late_serves_without_it_and_joins_by_itself(
    supervisor: Supervisor, start_worker: Callable[[str, str], Started], tiny: Path, start_engine: Start, salt: str
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="tensorcast-"))
    supervisor.cleanup(folder)
    address = f"unix:{folder}/worker.sock"
    made = start_engine("late-worker", EngineOptions(tiny, kv_transfer=patient(address), env=RESETTABLE))
    made.wait()
    prompt = tokens(11, 1500)
    seconds(made, prompt, salt)
    warning = "serving without the pool until there is one"
    until(lambda: made.running.log.read_text().count(warning) == 2, "one line per process: scheduler and rank")
    worker = start_worker("late", address)
    until(lambda: made.running.log.read_text().count("attached to worker") == 2, "attached")
    saved(made, [tokens(12, 1500)], salt)
    until(lambda: statistics(worker)["pages_saved"] >= 1500 // 128, "saved")
    assert post(f"{made.url}/reset_prefix_cache")["success"]
    before = made.sources()
    seconds(made, tokens(12, 1500), salt)
    assert (made.sources() - before).pool == 1500 // 128 * 128
    assert "Traceback" not in made.running.log.read_text()


def test_a_worker_that_is_stopped_but_not_dead_does_not_hold_the_engine_up(
    supervisor: Supervisor, start_worker: Callable[[str, str], Started], tiny: Path, start_engine: Start, salt: str
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="tensorcast-"))
    supervisor.cleanup(folder)
    worker = start_worker("stopped", f"unix:{folder}/worker.sock")
    few = ("--num-gpu-blocks-override", "60", "--max-model-len", "4096")
    made = start_engine("frozen-worker", EngineOptions(tiny, kv_transfer=pool.connector(worker["worker"]), args=few))
    made.wait()
    until(lambda: made.running.log.read_text().count("attached to worker") == 2, "attached")
    before = sorted(seconds(made, tokens(600 + each, 1000), salt) for each in range(9))[4]
    os.kill(worker.running.process.pid, signal.SIGSTOP)
    try:
        asked = [seconds(made, tokens(700 + each, 1000), salt) for each in range(30)]
        assert "has been silent for" in made.running.log.read_text()
        late = sorted(asked[15:])[7]
        print(
            f"\nmedian of a request: {before:.2f} s, with a stopped worker {late:.2f} s, the slowest {max(asked):.2f} s"
        )
        assert late < 3 * before
        until(lambda: idle(made), "no block stays pinned")
    finally:
        os.kill(worker.running.process.pid, signal.SIGCONT)
    until(lambda: made.running.log.read_text().count("attached to worker") >= 4, "attached again")
    assert statistics(worker)["pages_reserved"] == 0
    pages = statistics(worker)["pages_saved"]
    saved(made, [tokens(800, 1000)], salt)
    until(lambda: statistics(worker)["pages_saved"] >= pages + 1000 // 128, "saved again")


def test_preempted_requests_save_and_load_the_right_pages(
    workers: tuple[Started, Started], tiny: Path, start_engine: Start, salt: str
) -> None:
    """40 blocks for four requests that need 15 each: some are preempted while their blocks are being saved."""
    plain = start_engine("preempt-plain", EngineOptions(tiny))
    few = ("--num-gpu-blocks-override", "40", "--max-model-len", "4096")
    tight = start_engine(
        "preempt", EngineOptions(tiny, kv_transfer=patient(workers[0]["worker"]), args=few, env=RESETTABLE)
    )
    plain.wait(), tight.wait()
    prompts = [tokens(20 + each, 1100) for each in range(4)]
    references = referred(plain, prompts, salt, positions=700)

    async def together() -> Comparison:
        async with client() as http:
            asked = api(tight, salt)
            answers = await asyncio.gather(*(asked.complete(http, [prompt], 700, CANDIDATES) for prompt in prompts))
        parts = [follow(f"prompt {i}", references[i], answer[0][0]) for i, answer in enumerate(answers)]
        return sum(parts, Comparison())

    comparison = asyncio.run(together())
    preemptions = tight.metrics()["vllm:num_preemptions_total"]
    print(f"\n{preemptions:.0f} preemptions; tokens: {comparison}")
    assert preemptions > 0
    assert comparison.same, comparison.differences
    until(lambda: idle(tight), "no block stays in use")
    # What was saved in the thick of it must be right as well: a fresh lookup of all four prompts and their answers.
    longer = [[*reference.prompt, *reference.tokens[:400]] for reference in references]
    again = referred(plain, longer, salt, positions=4)
    assert post(f"{tight.url}/reset_prefix_cache")["success"]
    before = tight.sources()
    comparison = checked(tight, again, salt)
    assert comparison.same, comparison.differences
    assert (tight.sources() - before).pool > 0


@pytest.mark.long
def test_two_ranks_save_and_load_their_own_halves(
    workers: tuple[Started, Started], tiny: Path, start_engine: Start, salt: str
) -> None:
    transfer = patient(workers[0]["worker"])
    both = EngineOptions(tiny, kv_transfer=transfer, tensor_parallel=2, cpus="0|1", env=RESETTABLE)
    pair = start_engine("tp2", both)
    pair.wait()
    prompts = [tokens(31, 2000)]
    references = referred(pair, prompts, salt)
    before = statistics(workers[0])["pages_saved"]
    saved(pair, [tokens(32, 2000)], salt)
    until(lambda: statistics(workers[0])["pages_saved"] >= before + 2 * (2000 // 128), "both ranks have saved")
    assert post(f"{pair.url}/reset_prefix_cache")["success"]
    counted = pair.sources()
    comparison = checked(pair, references, salt)
    assert (pair.sources() - counted).pool >= 2000 // 128 * 128
    assert comparison.same, comparison.differences
    single = start_engine("tp1", EngineOptions(tiny, kv_transfer=transfer))
    single.wait()
    seconds(single, prompts[0], salt)
    assert single.sources().pool == 0, "pages are not shared across tensor-parallel sizes yet"


def test_a_reset_of_the_connectors_cache_ends_reuse_and_leaves_the_pages_of_others(
    workers: tuple[Started, Started], tiny: Path, start_engine: Start, salt: str
) -> None:
    transfer = patient(workers[0]["worker"])
    made = start_engine("reset", EngineOptions(tiny, kv_transfer=transfer, env=RESETTABLE))
    made.wait()
    prompt = tokens(41, 1500)
    before = statistics(workers[0])["pages_saved"]
    saved(made, [prompt], salt)
    until(lambda: statistics(workers[0])["pages_saved"] >= before + 1500 // 128, "saved")
    pages = statistics(workers[0])["pages"]
    assert post(f"{made.url}/reset_prefix_cache?reset_external=true")["success"]
    seconds(made, prompt, salt)
    assert made.sources().pool == 0, "a new epoch finds nothing of the old one"
    assert statistics(workers[0])["pages"] >= pages
