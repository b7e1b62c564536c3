"""A database that turns out to have had a former life: who was a home has stopped before another is one, whatever it hears."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from tensorcast_connector.config import MEMBER_TTL_S
from tensorcast_connector.errors import DeadlineExceeded, TensorcastError
from tensorcast_connector.wire.messages import Message
from tensorcast_connector.wire.store_messages import KeepAlive, Watch
from tests.sim.cluster import Cluster, Shape, limits
from tests.sim.invariants.base import Violation
from tests.sim.invariants.every import every_invariant
from tests.sim.invariants.settled import unsettled
from tests.sim.life_mutants import (
    former_life_is_nothing_to_the_store,
    grants_of_before_stand,
    grants_taken_back_under_a_lease_that_lives,
)
from tests.sim.network import Done
from tests.sim.store_process import StoreProcess
from tests.sim.world import Process

SHARDS = 8
# A watch is asked anew soon after its store has gone.
LIMITS = {"tensorcast_connector.core.member:WATCH_WAIT_S": 1.0}


class Deafness:
    """No answer of a kind reaches the workers of some hosts, and all others do, as when the store's own watch is silent."""

    def __init__(self, cluster: Cluster, patch: pytest.MonkeyPatch) -> None:
        self.hosts: set[str] = set()
        self.messages: tuple[type[Message], ...] = (Watch,)
        self._call = cluster.network.call
        patch.setattr(cluster.network, "call", self.call)

    def call(self, caller: Process, to: str, message: Message, timeout_s: float, done: Done) -> None:
        """As Network.call."""

        def heard(result: Message | TensorcastError, payload: bytes = b"") -> object:
            deaf = caller.host in self.hosts and isinstance(message, self.messages)
            if deaf and not isinstance(result, TensorcastError):
                caller.after(timeout_s, done, DeadlineExceeded("nobody answers"), b"")
                return False
            return done(result, payload)

        self._call(caller, to, message, timeout_s, heard)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three workers with an idle engine each; nothing goes wrong by itself."""
    with limits(LIMITS), closing(Cluster(1, Shape(shards=SHARDS), every_invariant())) as cluster:
        for engine in cluster.engines():
            engine.idle = True
        cluster.world.run(4.0)
        assert not unsettled(cluster.world)
        yield cluster


@pytest.fixture
def deafness(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Deafness:
    """Nobody is deaf yet."""
    return Deafness(cluster, monkeypatch)


def lost_and_taken_for_new(cluster: Cluster) -> None:
    """The database is lost; a worker that is new gets all shards before one that knows better comes to the store."""
    world = cluster.world
    for host in cluster.hosts[1:]:
        cluster.network.cuts[host, "store"] = cluster.network.cuts["store", host] = 1
    former = cluster.worker_on("host0")
    assert former is not None
    former.die()
    cluster.start_worker("host0")
    cluster.start_anew(None)
    world.run(world.now + 1.0)
    assert holds(cluster, "host0") == SHARDS
    cluster.network.cuts.clear()


def gone_back(cluster: Cluster) -> None:
    """The store starts on a copy of its database that is not the latest, and knows nothing of that."""
    store, world = cluster.store, cluster.world
    world.run(2 * MEMBER_TTL_S)  # it is not taken for new any more
    folder = cluster._next_folder()
    store.crash()
    shutil.copytree(store.path.parent, folder)
    cluster.restart_store()
    home = max(cluster.workers(), key=lambda each: len(each.metadata.leases.held))
    home.put_artifact("weights")
    world.run(world.now + 5.0)
    assert home.metadata.view.revision > store.snapshot.revision > 0
    cluster.store.crash()
    cluster.stores = StoreProcess(world, store.clock, folder, SHARDS)
    cluster.store_is_back()


def holds(cluster: Cluster, host: str) -> int:
    worker = cluster.worker_on(host)
    assert worker is not None
    return len(worker.metadata.leases.held)


HOW = pytest.mark.parametrize("how", [lost_and_taken_for_new, gone_back])
AFTERWARDS_S = 2.5 * MEMBER_TTL_S


@pytest.mark.slow
@HOW
@pytest.mark.parametrize("to", [Watch, KeepAlive, (Watch, KeepAlive)], ids=["watch", "renewal", "both"])
def test_a_home_that_is_deaf_stops_before_another_is_one(
    cluster: Cluster, deafness: Deafness, how: Callable[[Cluster], None], to: type[Message] | tuple[type[Message], ...]
) -> None:
    """Every invariant is checked all the time. Afterwards others have the shards, and it has them again when it hears."""
    world = cluster.world
    how(cluster)
    home = max(cluster.hosts, key=lambda host: holds(cluster, host))
    deafness.messages = to if isinstance(to, tuple) else (to,)
    deafness.hosts.add(home)
    before = world.now
    world.run(before + MEMBER_TTL_S)
    assert sum(holds(cluster, host) for host in cluster.hosts) < SHARDS, "nobody is given any for a while"
    world.run(before + AFTERWARDS_S)
    others = sum(holds(cluster, host) for host in cluster.hosts if host != home)
    assert others == (SHARDS if Watch in deafness.messages else others) and others
    assert world.counts["told of a former life"] == (how is lost_and_taken_for_new)
    deafness.hosts.clear()
    world.run(world.now + 20.0)
    assert not unsettled(world)


@HOW
@pytest.mark.parametrize("mutant", [grants_taken_back_under_a_lease_that_lives, grants_of_before_stand])
def test_otherwise_there_would_be_two(
    cluster: Cluster, deafness: Deafness, monkeypatch: pytest.MonkeyPatch, how: Callable[[Cluster], None],
    mutant: Callable[[pytest.MonkeyPatch], None],
) -> None:  # fmt: skip
    mutant(monkeypatch)
    how(cluster)
    deafness.hosts.add(max(cluster.hosts, key=lambda host: holds(cluster, host)))
    with pytest.raises(Violation, match=r"are both the home|takes shard|while nobody is to be a home"):
        cluster.world.run(cluster.world.now + AFTERWARDS_S)


def test_a_store_that_does_not_care_is_noticed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    former_life_is_nothing_to_the_store(monkeypatch)
    lost_and_taken_for_new(cluster)
    with pytest.raises(Violation, match="as if there had been none"):
        cluster.world.run(cluster.world.now + AFTERWARDS_S)
