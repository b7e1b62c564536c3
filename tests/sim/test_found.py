"""Faults that the simulation has found, each as a small world of its own that does not depend on a seed."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tensorcast_connector.errors import TensorcastError
from tensorcast_connector.wire.codec import encode
from tensorcast_connector.wire.messages import Message
from tensorcast_connector.wire.store_messages import (
    PutReplica,
    RegisterInstance,
    ReleaseShards,
    RemoveInstance,
    RemoveReplica,
    ReplicaRecord,
)
from tests.sim.cluster import Cluster, Shape, limits
from tests.sim.invariants.base import Violation
from tests.sim.invariants.every import every_invariant
from tests.sim.invariants.settled import unsettled
from tests.sim.mutants import release_of_a_later_grant
from tests.sim.world import Process

WATCH_S = 1.0
LIMITS = {
    "tensorcast_connector.core.leases:HANDOVER_AFTER_S": 1.0,
    "tensorcast_connector.core.member:WATCH_WAIT_S": WATCH_S,
}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three workers, each with an idle engine, for some seconds; nothing goes wrong by itself."""
    with limits(LIMITS), closing(Cluster(1, Shape(shards=8), every_invariant())) as cluster:
        for engine in cluster.engines():
            engine.idle = True
        cluster.world.run(4.0)
        assert not unsettled(cluster.world)
        yield cluster


def arrives(cluster: Cluster, message: Message) -> None:
    """A request of long ago comes to the store: its caller has given up, or it is a second copy."""
    cluster.world.enter(cluster.store, cluster.store.receive, encode(message), lambda *_: None)


def test_a_late_request_to_list_an_engine_is_undone(cluster: Cluster) -> None:
    engine = cluster.engines()[0]
    worker = cluster.worker_on(engine.host)
    assert worker is not None
    [record] = [each.listed for each in worker.sessions.values() if each.listed]
    lease_id = worker.metadata.member.lease_id
    engine.die()
    cluster.world.run(6.0)
    assert not unsettled(cluster.world)
    arrives(cluster, RegisterInstance(record, lease_id))
    assert "lists the engines" in unsettled(cluster.world)
    cluster.world.run(6.5)
    assert not unsettled(cluster.world)


def test_a_late_request_to_forget_an_engine_is_undone(cluster: Cluster) -> None:
    arrives(cluster, RemoveInstance(cluster.engines()[0].name))
    assert "lists the engines" in unsettled(cluster.world)
    cluster.world.run(4.5)
    assert not unsettled(cluster.world)


def test_a_late_request_about_a_copy_of_an_artifact_is_undone(cluster: Cluster) -> None:
    worker = cluster.workers()[0]
    worker.put_artifact("weights")
    cluster.world.run(6.0)
    for late in (
        RemoveReplica("weights", worker.name),
        PutReplica(ReplicaRecord("other", worker.name, "disk", 7), worker.metadata.member.lease_id),
        PutReplica(ReplicaRecord("weights", worker.name, "disk", 7), worker.metadata.member.lease_id),
    ):
        arrives(cluster, late)
        cluster.world.run(cluster.world.now + 0.5)
        assert not unsettled(cluster.world)
        [(key, (value, _, _))] = [each for each in cluster.store.read().rows.items() if "replicas" in each[0]]
        assert key.endswith(f"weights/{worker.name}") and b"memory" in value


def regains_a_shard_and_then_hears_its_own_release(cluster: Cluster, patch: pytest.MonkeyPatch) -> None:
    """A home gave a shard back, got it again under the same lease, and then its first message comes once more."""
    sent: list[tuple[str, ReleaseShards]] = []
    call = cluster.network.call

    def noted(caller: Process, to: str, message: Message, *rest: object) -> None:
        if isinstance(message, ReleaseShards):
            sent.append((caller.host, message))
        call(caller, to, message, *rest)  # type: ignore[arg-type]

    patch.setattr(cluster.network, "call", noted)
    world = cluster.world

    def kill(host: str) -> None:
        worker = cluster.worker_on(host)
        assert worker is not None
        worker.die()
        world.run(world.now + 9.0)  # its shards are with the others

    kill("host0")
    cluster.start_worker("host0")
    world.run(world.now + 4.0)  # and given back to its new run
    host, release = sent[0]
    kill("host0")
    home = cluster.worker_on(host)
    assert home is not None and set(release.shards) <= set(home.metadata.leases.held)
    assert release.lease_id == home.metadata.member.lease_id
    cluster.network.cuts["store", host] = 1  # it would not hear that others have its shards
    arrives(cluster, release)
    world.run(world.now + 2.0)
    cluster.network.cuts.clear()
    world.run(world.now + 4.0)
    assert set(release.shards) <= set(home.metadata.leases.held)


def test_a_late_release_does_not_take_a_later_grant(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    regains_a_shard_and_then_hears_its_own_release(cluster, monkeypatch)
    cluster.start_worker("host0")
    cluster.world.run(cluster.world.now + 6.0)
    assert not unsettled(cluster.world)


def test_without_the_revisions_of_the_grants_it_would(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    release_of_a_later_grant(monkeypatch)
    with pytest.raises(Violation, match="takes shard"):
        regains_a_shard_and_then_hears_its_own_release(cluster, monkeypatch)


def test_a_release_without_revisions_gives_back_whatever_the_lease_holds(cluster: Cluster) -> None:
    """As an older worker says it."""
    worker = next(each for each in cluster.workers() if each.metadata.leases.held)
    shard = min(worker.metadata.leases.held)
    token = worker.metadata.leases.held[shard]
    worker.metadata.leases.given_back([shard], worker.clock())
    arrives(cluster, ReleaseShards(worker.metadata.member.lease_id, [shard]))
    cluster.world.run(cluster.world.now + 3.0)
    assert cluster.store.read().shards()[shard][0] > token


def test_a_release_that_contradicts_itself_is_refused(cluster: Cluster) -> None:
    refused: list[TensorcastError | Message] = []
    worker = cluster.workers()[0]
    message = ReleaseShards(worker.metadata.member.lease_id, [0, 1], [5])
    cluster.network.call(worker, "store", message, 1.0, lambda result, _: refused.append(result))
    cluster.world.run(cluster.world.now + 1.0)
    assert "1 revisions of 2 shards" in str(refused[0])
