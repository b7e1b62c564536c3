"""The link between two workers is cut, one way and both ways, while both reach the store: hosts are network namespaces."""

from collections.abc import Iterator

import pytest
from demo import pool
from demo.processes import Supervisor

from tests.faults.conftest import settled
from tests.faults.host import Host, fresh, watching
from tests.faults.namespaces import Switch, possible
from tests.waiting import until_blocking

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]


@pytest.fixture
def switch() -> Iterator[Switch]:
    """Two hosts and the store's address on one switch."""
    if reason := possible():
        pytest.skip(reason)
    made = Switch(2)
    yield made
    made.close()


@pytest.fixture
def pair(switch: Switch, supervisor: Supervisor) -> Iterator[tuple[Host, Host]]:
    """A worker on each host."""
    store = pool.store(supervisor, address=f"{switch.address}:0")
    made = []
    for name, where in zip("ab", switch.hosts, strict=True):
        started = pool.worker(
            supervisor, store["store"], name, "64MiB", listen=f"{where.address}:0", prefix=where.prefix
        )
        made.append(Host(started))
    settled(*made)
    yield made[0], made[1]
    for each in made:
        each.close()
    supervisor.stop(*supervisor.running)


@pytest.mark.parametrize("both_ways", [False, True], ids=["one way", "both ways"])
def test_a_cut_between_two_workers(switch: Switch, pair: tuple[Host, Host], both_ways: bool) -> None:
    a, b = pair
    at_a, at_b = switch.hosts
    pages, half = fresh(), fresh()
    a.save(pages)
    b.finds(pages)
    b.loads(pages[:20])
    switch.cut(at_a, at_b)
    if both_ways:
        switch.cut(at_b, at_a)
    until_blocking(lambda: b.found(pages) < len(pages), 30.0)
    assert b.load(pages[:20]) == 20, "what is here needs nobody"
    assert b.load(pages[20:]) == 0, "the rest is a miss, and says so in time"
    a.save(half)
    assert a.found(half) == len(half)
    assert a.shards_held + b.shards_held == 64, "both are alive for the store, so nothing changes hands"
    with watching("a cut between two workers that is mended", lambda: b.found(half) == len(half), lambda: True):
        switch.heal(at_a, at_b)
        if both_ways:
            switch.heal(at_b, at_a)
    b.finds(pages)
    b.loads([*pages, *half])
