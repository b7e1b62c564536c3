"""Real engines on this machine's CPUs, and the pool they attach to: a module of tests starts its own, since it may kill them."""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from demo import engine, model, pool
from demo.engine import Engine, EngineOptions
from demo.pool import Started
from demo.processes import ROOT, Running, Supervisor, run_id

from tests.e2e.probe import patient

# vLLM's own routes for tests: /reset_prefix_cache.
RESETTABLE = {"VLLM_SERVER_DEV_MODE": "1"}


@dataclass(frozen=True, slots=True)
class System:
    """A store, two workers as on two hosts, an engine on each, and a plain engine without the connector."""

    store: Started
    workers: tuple[Started, Started]
    a: Engine
    b: Engine
    plain: Engine


@pytest.fixture(scope="module")
def supervisor(request: pytest.FixtureRequest) -> Iterator[Supervisor]:
    """Owns the programs of a module's tests, which may kill them; their logs are in its folder."""
    with Supervisor(ROOT / ".out" / f"{request.module.__name__.rpartition('.')[2]}-{run_id()}") as made:
        yield made


@pytest.fixture(scope="session")
def tiny() -> Path:
    """A model that prefills thousands of tokens in a second."""
    return model.make("tiny")


@pytest.fixture(scope="session")
def small() -> Path:
    """26 M parameters: prefills thousands of tokens in seconds, so that reuse is worth something."""
    return model.make("small")


@pytest.fixture(scope="session")
def other_tiny() -> Path:
    """The same shape with other weights: its pages must never be taken for those of `tiny`."""
    return model.make("tiny", seed=1)


@pytest.fixture(scope="module")
def store(supervisor: Supervisor) -> Started:
    """The store of a module's tests."""
    return pool.store(supervisor)


@pytest.fixture(scope="module")
def workers(supervisor: Supervisor, store: Started) -> tuple[Started, Started]:
    """Two workers of that store, each with its own arena and socket."""
    first, second = (pool.worker(supervisor, store["store"], f"worker-{name}") for name in "ab")
    return first, second


@pytest.fixture(scope="module")
def system(supervisor: Supervisor, small: Path, store: Started, workers: tuple[Started, Started]) -> System:
    """Everything, its engines started side by side: that takes a minute, one after the other would take two."""
    transfers = (*(patient(worker["worker"]) for worker in workers), None)
    a, b, plain = (
        engine.start(
            supervisor, name, EngineOptions(small, kv_transfer=transfer, cpus=engine.cpus_of(index, 2), env=RESETTABLE)
        )
        for index, (name, transfer) in enumerate(zip(("engine-a", "engine-b", "plain"), transfers, strict=True))
    )
    for each in (a, b, plain):
        each.wait()
    return System(store, workers, a, b, plain)


@pytest.fixture
def start_engine(supervisor: Supervisor) -> Iterator[Callable[[str, EngineOptions], Engine]]:
    """Start an engine of a test's own; it is stopped with the test. Call `wait()` on what is returned."""
    started: list[Running] = []

    def start(name: str, options: EngineOptions) -> Engine:
        made = engine.start(supervisor, name, options)
        started.append(made.running)
        return made

    yield start
    supervisor.stop(*started)


@pytest.fixture
def start_worker(supervisor: Supervisor, store: Started) -> Iterator[Callable[[str, str], Started]]:
    """Start a worker at a socket, `start_worker(name, socket)`; it is stopped with the test."""
    started: list[Running] = []

    def start(name: str, socket: str) -> Started:
        made = pool.worker(supervisor, store["store"], name, socket=socket)
        started.append(made.running)
        return made

    yield start
    supervisor.stop(*started)


@pytest.fixture
def start_router(supervisor: Supervisor) -> Iterator[Callable[..., Started]]:
    """Start a router in front of engines, `start_router(engines, policy)`; it is stopped with the test."""
    started: list[Running] = []

    def start(engines: list[Engine], policy: str = "smetric") -> Started:
        made = pool.router(supervisor, [each.url for each in engines], policy, f"router-{uuid.uuid4().hex[:8]}")
        started.append(made.running)
        return made

    yield start
    supervisor.stop(*started)


@pytest.fixture
def salt() -> str:
    """A `cache_salt` of the test's own: it finds no pages of other tests, and they find none of its."""
    return uuid.uuid4().hex
