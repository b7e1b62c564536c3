"""The copy of the store's metadata: complete, then changes, another life of the store, and records that make no sense."""

import pytest

from tensorcast_connector.core.cluster import (
    ClusterView,
    ShardHolder,
    instance_key,
    replica_key,
    shard_key,
    worker_key,
)
from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.wire.store_messages import Changes, Entry
from tests.core.made import A, B, delta, entry, everything, instance, lease, replica, shard_count, token, worker


def full() -> ClusterView:
    """One of everything, at revision 100."""
    view = ClusterView()
    view.apply(everything([A, B], {0: (A, 7), 3: (B, 9)}))
    view.apply(delta(entry(instance("i")), entry(replica("m")), entry(replica("m", B)), revision=110))
    view.check()
    return view


def test_everything_and_then_what_changes() -> None:
    view = full()
    assert view.workers == {A: worker(A), B: worker(B)} and view.instances == {"i": instance("i")}
    assert view.shards == {0: ShardHolder(A, 101, token(7)), 3: ShardHolder(B, 102, token(9))}
    assert view.replicas == {"m": {A: replica("m"), B: replica("m", B)}}
    assert (view.incarnation, view.revision, view.shard_count) == (1, 110, 4)
    gone = [worker_key(B), instance_key("i"), shard_key(3), replica_key("m", B)]
    view.apply(delta(lease(0, B, 120), deleted=gone, revision=120))
    view.check()
    assert view.workers == {A: worker(A)} and not view.instances and view.replicas == {"m": {A: replica("m")}}
    assert view.shards == {0: ShardHolder(B, 102, token(120))} and view.revision == 120
    view.apply(delta(deleted=[replica_key("m", A)], revision=121))
    view.check()
    assert view.replicas == {}
    assert repr(view) == "<ClusterView at 1/121: 1 workers, 1 shards>"


def test_what_a_complete_answer_does_not_name_is_gone() -> None:
    view = full()
    view.apply(everything([B], {1: (B, 130)}, revision=130))
    view.check()
    assert set(view.workers) == {B} and set(view.shards) == {1} and not view.instances and not view.replicas


def test_what_was_never_there_can_be_deleted() -> None:
    view = full()
    keys = [
        "cluster/workers/x",
        "cluster/shards/2",
        "cluster/shards/x",
        "cluster/replicas/x/y",
        "cluster/else",
        "other",
    ]
    view.apply(delta(deleted=keys))
    view.check()
    assert set(view.workers) == {A, B} and set(view.shards) == {0, 3}


def test_a_key_that_is_of_a_later_version_is_skipped() -> None:
    view = full()
    view.apply(delta(Entry("cluster/plans/1", b"?", 111), entry(instance("j"))))
    assert set(view.instances) == {"i", "j"}


@pytest.mark.parametrize("revision", [3, 110, 500])
def test_a_restored_store_has_a_higher_incarnation_and_wins_at_any_revision(revision: int) -> None:
    view = full()
    view.apply(everything([B], {0: (B, 2)}, revision=revision, incarnation=2))
    assert view.shards == {0: ShardHolder(B, 102, token(2, incarnation=2))}
    assert view.shards[0].token > token(10**9), "whatever was granted in the earlier life"
    assert (view.incarnation, view.revision) == (2, revision)


def test_an_earlier_life_of_the_store_is_refused_in_one_line_and_changes_nothing() -> None:
    view = ClusterView()
    view.apply(everything([A], {0: (A, 7)}, incarnation=5))
    with pytest.raises(ProtocolError) as error:
        view.apply(everything([B], {0: (B, 900)}, revision=900, incarnation=4))
    assert str(error.value) == (
        "the store's database is of an earlier life (4) than the one known here (5); "
        "restore it with `tensorcast store restore`, or restart the workers"
    )
    assert set(view.workers) == {A} and view.shards[0].worker_id == A
    assert (view.incarnation, view.revision) == (5, 100)


NONSENSE = {
    "no JSON": (Entry(worker_key("x/1"), b"\xff", 111), "'cluster/workers/x/1' in the store makes no sense"),
    "no record": (Entry(instance_key("x"), b"[]", 111), "'cluster/instances/x' in the store makes no sense"),
    "a home without a name": (Entry(shard_key(1), b"{}", 111), "'cluster/shards/1' in the store makes no sense"),
    "no shard": (Entry("cluster/shards/x", lease(1, A, 1).value, 111), "no shard has that name"),
    "a shard below 0": (Entry("cluster/shards/-1", lease(1, A, 1).value, 111), "no shard has that name"),
    "another's replica": (Entry(replica_key("m", A), entry(replica("m", B)).value, 111), "it is of 'm' at 'b/1'"),
    "no count": (Entry("cluster/shard-count", b"many", 111), "'cluster/shard-count' in the store makes no sense"),
    "no power of two": (shard_count(3), "3 shards"),
    "too many shards": (shard_count(512), "512 shards"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_record_that_makes_no_sense_is_named_and_the_others_count(name: str) -> None:
    odd, why = NONSENSE[name]
    view = full()
    with pytest.raises(ProtocolError, match=why):
        view.apply(delta(odd, entry(worker("late/1")), revision=111))
    view.check()
    assert "late/1" in view.workers and view.revision == 111, "nothing is asked for twice"
    assert "x/1" not in view.workers and view.shard_count == 4


def test_a_record_that_stops_making_sense_counts_as_gone() -> None:
    view = full()
    for odd in (worker_key(A), instance_key("i"), shard_key(0), replica_key("m", A)):
        with pytest.raises(ProtocolError):
            view.apply(delta(Entry(odd, b"?", 111)))
        view.check()
    assert set(view.workers) == {B} and set(view.shards) == {3} and view.replicas == {"m": {B: replica("m", B)}}


def test_ids_may_hold_slashes() -> None:
    view = ClusterView()
    model = replica("org/model@rev", A)
    view.apply(Changes(1, 5, True, [entry(model), entry(worker("x/y/z"))], []))
    assert view.replicas == {"org/model@rev": {A: model}} and set(view.workers) == {"x/y/z"}
    view.apply(delta(deleted=[replica_key("org/model@rev", A)]))
    view.check()
    assert not view.replicas
