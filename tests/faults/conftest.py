"""Real stores and workers, started anew for each test, because the tests break them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from demo import pool
from demo.pool import Started
from demo.processes import ROOT, Supervisor, run_id

from tests.faults.host import Host
from tests.waiting import until_blocking


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """Owns the programs of one test."""
    with Supervisor(ROOT / ".out" / f"faults-{run_id()}-{tmp_path.name}", grace_s=5.0) as made:
        yield made


@pytest.fixture
def host(supervisor: Supervisor) -> Iterator[Callable[[str, str], Host]]:
    """Start a worker and a client on it: `host(store_address, name)`."""
    made: list[Host] = []

    def start(store: str, name: str) -> Host:
        host = Host(pool.worker(supervisor, store, name, arena="64MiB"))
        made.append(host)
        return host

    yield start
    for each in made:
        each.close()


@pytest.fixture
def store(supervisor: Supervisor) -> Started:
    """One store over SQLite."""
    return pool.store(supervisor)


@pytest.fixture
def trio(store: Started, host: Callable[[str, str], Host]) -> tuple[Host, Host, Host]:
    """Three workers of that store, each the home of some shards."""
    hosts = host(store["store"], "a"), host(store["store"], "b"), host(store["store"], "c")
    settled(*hosts)
    return hosts


def settled(*hosts: Host, shards: int = 64) -> None:
    """Waits until these hold all shards, each some, so that a fault of any of them is felt."""

    def done() -> bool:
        held = [each.shards_held for each in hosts]
        return sum(held) == shards and min(held) > 0

    until_blocking(done, 60.0)
