"""A real SGLang server on the CPU whose hierarchical cache is stored in the pool."""

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from demo import model, pool, sglang_engine
from demo.pool import Started
from demo.processes import ROOT, Supervisor, run_id
from demo.sglang_engine import Answer, SglangOptions, SglangServer, storage

from tensorcast_connector.config import parse_address
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.wire.messages import GetStatistics, Statistics
from tests.waiting import until_blocking

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
PROMPT_TOKENS = 1500
PAGES = PROMPT_TOKENS // 64
WHOLE = PAGES * 64
SERVERS = ("first", "second", "survivor", "two-ranks")


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    """Owns the programs of these tests."""
    with Supervisor(ROOT / ".out" / f"sglang-{run_id()}") as made:
        yield made


@pytest.fixture(scope="module")
def tiny() -> Path:
    """The model."""
    return model.make("tiny")


@pytest.fixture(scope="module")
def worker(supervisor: Supervisor) -> Started:
    """A store and a worker."""
    return pool.up(supervisor, arena="256MiB")


@pytest.fixture(scope="module")
def server(supervisor: Supervisor, tiny: Path, worker: Started) -> SglangServer:
    """A server at that worker."""
    made = sglang_engine.start(
        supervisor,
        "first",
        SglangOptions(tiny, storage(worker["worker"]), admin_key="secret-of-the-test", args=("--enable-metrics",)),
    )
    made.wait()
    return made


@contextmanager
def alone(supervisor: Supervisor) -> Iterator[None]:
    """The servers that run already stand still meanwhile: with nothing to do each would keep a core busy."""
    with supervisor.standing_still(*(each for each in supervisor.running if each.name in SERVERS)):
        yield


def prompt(seed: int) -> list[int]:
    """Token ids that nobody else has."""
    return random.Random(seed).choices(range(10, 2000), k=PROMPT_TOKENS)


def saved(worker: Started) -> int:
    """How many pages engines have stored at the worker in its life."""
    return int(asyncio.run(_statistics(worker))["pages_saved"])


async def _statistics(worker: Started) -> dict[str, Any]:
    address = parse_address(worker["worker"], "worker")
    client = RpcClient(SocketNetwork(), address, "engine", "test", random.Random())
    client.start()
    try:
        await client.wait_connected(10.0)
        return (await client.call(GetStatistics(), Statistics, 10.0)).values
    finally:
        await client.close()


def generate_and_store(server: SglangServer, worker: Started, text: list[int]) -> Answer:
    """The answer to a prompt that is new to the pool, once the pool has its pages: SGLang stores them behind the answer.

    Every test waits so for what it causes, so that the count says which pages have come.
    """
    before = saved(worker)
    answer = server.generate(text)
    until_blocking(lambda: saved(worker) >= before + PAGES, 30.0)
    return answer


def test_every_source_gives_the_same(server: SglangServer, worker: Started) -> None:
    text = prompt(1)
    cold = generate_and_store(server, worker, text)
    assert not cold.cached
    again = server.generate(text)
    assert again == Answer(cold.tokens, {"device": WHOLE})
    for seed in range(100, 104):  # more than the device pool holds
        generate_and_store(server, worker, prompt(seed))
    assert server.generate(text) == Answer(cold.tokens, {"host": WHOLE})
    server.flush()
    assert server.generate(text) == Answer(cold.tokens, {"storage": WHOLE})
    until_blocking(lambda: _counted(server, "sglang:prefetch_bandwidth_count") >= 1, 10.0)
    assert _counted(server, "sglang:backup_bandwidth_count") >= 5


def _counted(server: SglangServer, name: str) -> float:
    lines = server.ask("/metrics", method="GET")[1].splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_another_server_reads_what_the_first_stored(
    server: SglangServer, worker: Started, supervisor: Supervisor, tiny: Path
) -> None:
    text = prompt(2)
    cold = generate_and_store(server, worker, text)
    with alone(supervisor):
        other = sglang_engine.start(supervisor, "second", SglangOptions(tiny, storage(worker["worker"])))
        other.wait()
        assert other.generate(text) == Answer(cold.tokens, {"storage": WHOLE})
        supervisor.stop(other.running)


def test_clear_hides_what_was_stored_before(server: SglangServer, worker: Started) -> None:
    text = prompt(3)
    cold = generate_and_store(server, worker, text)
    server.flush()
    assert server.ask("/hicache/storage-backend/clear")[0] == 200
    before = saved(worker)
    assert server.generate(text) == Answer(cold.tokens, {}), "computed again"
    until_blocking(lambda: saved(worker) >= before + PAGES, 30.0)
    server.flush()
    assert server.generate(text) == Answer(cold.tokens, {"storage": WHOLE}), "and stored again"


def test_detached_and_attached_while_it_runs(server: SglangServer, worker: Started) -> None:
    text = prompt(4)
    cold = generate_and_store(server, worker, text)
    path = "/hicache/storage-backend"
    until_blocking(lambda: server.ask(path, method="DELETE")[0] == 200, 30.0)  # it refuses while it is not idle
    server.flush()
    assert server.generate(text) == Answer(cold.tokens, {})
    wrong = {"hicache_storage_backend": "dynamic", "hicache_storage_prefetch_policy": "wait_complete"}
    right = wrong | {"hicache_storage_backend_extra_config_json": json.dumps(storage(worker["worker"]))}
    wrong["hicache_storage_backend_extra_config_json"] = json.dumps(storage(worker["worker"], wroker="x"))
    status, text_of = server.ask(path, wrong, "PUT")
    assert status == 400 and "did you mean" in text_of, text_of
    status, text_of = server.ask(path, right, "PUT")
    assert status == 200, text_of
    server.flush()
    assert server.generate(text) == Answer(cold.tokens, {"storage": WHOLE})


def test_changed_weights_find_nothing_of_the_former(server: SglangServer, worker: Started, tiny: Path) -> None:
    text = prompt(5)
    before = generate_and_store(server, worker, text)
    other = model.make("tiny", seed=1)
    status, answer = server.ask("/update_weights_from_disk", {"model_path": str(other), "weight_version": "two"})
    assert status == 200, answer
    changed = generate_and_store(server, worker, text)
    assert not changed.cached and changed.tokens != before.tokens
    server.flush()
    assert server.generate(text) == Answer(changed.tokens, {"storage": WHOLE}), "those of the new weights are shared"
    status, answer = server.ask("/update_weights_from_disk", {"model_path": str(tiny), "weight_version": "one"})
    assert status == 200, answer
    assert server.generate(text) == Answer(before.tokens, {}), "the same files, but nobody has said so"


def test_answers_go_on_without_a_worker_and_hits_resume_with_the_next(supervisor: Supervisor, tiny: Path) -> None:
    with alone(supervisor):
        store = pool.store(supervisor)
        first = pool.worker(supervisor, store["store"], "mortal", arena="256MiB")
        server = sglang_engine.start(supervisor, "survivor", SglangOptions(tiny, storage(first["worker"])))
        server.wait()
        text = prompt(6)
        cold = generate_and_store(server, first, text)
        first.running.process.kill()
        first.running.process.wait()
        server.flush()
        assert server.generate(text) == Answer(cold.tokens, {})
        supervisor.stop(first.running)
        again = pool.worker(supervisor, store["store"], "reborn", arena="256MiB", socket=first["worker"])
        log = server.running.log
        until_blocking(lambda: log.read_text(errors="replace").count("attached to worker") >= 2, 30.0)
        server.flush()
        warm = generate_and_store(server, again, text)
        assert warm == Answer(cold.tokens, {})
        server.flush()
        assert server.generate(text) == Answer(cold.tokens, {"storage": WHOLE})
        assert server.running.died() is None
        supervisor.stop(server.running, again.running, store.running)


@pytest.mark.long
def test_two_ranks_agree_on_what_the_storage_has(supervisor: Supervisor, tiny: Path, worker: Started) -> None:
    with alone(supervisor):
        server = sglang_engine.start(
            supervisor, "two-ranks", SglangOptions(tiny, storage(worker["worker"]), tensor_parallel=2)
        )
        server.wait()
        text = prompt(7)
        before = saved(worker)
        cold = server.generate(text)
        until_blocking(lambda: saved(worker) >= before + 2 * PAGES, 30.0)  # each rank has its heads
        assert not cold.cached
        server.flush()
        assert server.generate(text) == Answer(cold.tokens, {"storage": WHOLE})
        supervisor.stop(server.running)
