"""Every process of a small cluster is restarted, one after the other, under traffic: no request fails and no token differs."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from demo import engine, pool
from demo.compare import CANDIDATES, Api, Comparison, Reference, client
from demo.engine import EngineOptions
from demo.processes import ROOT, DemoError, Running, Supervisor, run_id

from tests.e2e.probe import follow, patient, referred, statistics, tokens, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
PROMPTS = 4
POSITIONS = 8


@dataclass
class Traffic:
    """Requests through the router, one at a time, for as long as the processes behind it are restarted."""

    url: str
    references: list[Reference]
    answers: int = 0
    comparison: Comparison = field(default_factory=Comparison)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until told to stop."""
        while not self.stop.is_set():
            index = self.answers % len(self.references)
            start = time.monotonic()
            try:
                asyncio.run(self.one(index))
            except Exception as error:
                self.failures.append(f"request {self.answers}: {error!r}")
            self.slowest_s = max(self.slowest_s, time.monotonic() - start)
            self.answers += 1

    async def one(self, index: int) -> None:
        """Asks for a continuation and compares it with the plain engine's."""
        reference = self.references[index]
        asked = Api(self.url, "demo", f"rolling-{self.answers // 8}")
        while True:
            try:
                async with client() as http:
                    answer = await asked.complete(http, [reference.prompt], POSITIONS, CANDIDATES)
                break
            except DemoError as error:
                # Nobody listens while the router itself is restarted: a load balancer, or the client, asks again.
                if "ClientConnectorError" not in str(error) or self.stop.is_set():
                    raise
                await asyncio.sleep(0.05)
        self.comparison += follow(f"prompt {index}", reference, answer[0][0])


@contextmanager
def traffic(url: str, references: list[Reference]) -> Iterator[Traffic]:
    made = Traffic(url, references)
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        yield made
    finally:
        made.stop.set()
        thread.join()


def answered(made: Traffic, more: int = 8) -> None:
    """Waits until so many more requests were answered."""
    before = made.answers
    until(lambda: made.answers >= before + more, "traffic goes on", 120)


def stopped(supervisor: Supervisor, running: Running) -> None:
    """Asks the program alone to stop, as a service manager does, so that vLLM's engine process can finish its work."""
    running.process.terminate()
    running.process.wait(60)
    supervisor.stop(running)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    """Owns the programs of this test, which ends them and starts others in their place."""
    with Supervisor(ROOT / ".out" / f"rolling-{run_id()}", grace_s=60.0) as made:
        yield made


@pytest.mark.long
def test_everything_is_restarted_under_traffic(supervisor: Supervisor, tiny: Path) -> None:
    store = pool.store(supervisor, "rolling-store")
    workers = [pool.worker(supervisor, store["store"], f"rolling-{name}", "256MiB") for name in "ab"]
    # Told to stop, vLLM finishes what it is computing only if it is given the time.
    drain = ("--shutdown-timeout", "30")
    options = [EngineOptions(tiny, kv_transfer=patient(each["worker"]), args=drain) for each in workers]
    engines = [engine.start(supervisor, f"rolling-engine-{at}", each) for at, each in enumerate(options)]
    plain = engine.start(supervisor, "rolling-plain", EngineOptions(tiny))
    for each in (*engines, plain):
        each.wait()
    references = referred(plain, [tokens(900 + each, 600) for each in range(PROMPTS)], "rolling", POSITIONS)
    supervisor.stop(plain.running)
    router = pool.router(supervisor, [each.url for each in engines], "smetric", "rolling-router")
    with traffic(router["url"], references) as made:
        answered(made)
        supervisor.stop(store.running)
        answered(made)
        store = pool.store(supervisor, "rolling-store", store["store"])
        answered(made)
        for at, name in enumerate("ab"):
            supervisor.stop(workers[at].running)
            answered(made)
            workers[at] = pool.worker(supervisor, store["store"], f"rolling-{name}", "256MiB", workers[at]["worker"])
            saved = statistics(workers[at])["pages_saved"]
            answered(made)
            until(lambda at=at, saved=saved: statistics(workers[at])["pages_saved"] > saved, "saved again", 60)
        for at, former in enumerate(engines):
            stopped(supervisor, former.running)
            answered(made)
            again = engine.start(supervisor, former.name, options[at], port_of(former.url))
            again.wait()
            answered(made)
            until(lambda again=again: again.metrics()["vllm:prompt_tokens_total"] > 0, "it is used again", 60)
        supervisor.stop(router.running)
        router = pool.router(
            supervisor, [each.url for each in engines], "smetric", "rolling-router", port_of(router["url"])
        )
        answered(made)
        held = [int(statistics(each)["shards_held"]) for each in workers]
        assert sum(held) == 64
    print(
        f"\n{made.answers} requests over restarts of the store, both workers, both engines and the router: "
        f"{len(made.failures)} failed, slowest {made.slowest_s:.2f} s; tokens: {made.comparison}"
    )
    assert not made.failures, made.failures[:3]
    assert made.comparison.same, made.comparison.differences
    assert made.comparison.compared_share > 0.5
