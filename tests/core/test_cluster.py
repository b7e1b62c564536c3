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
from tensorcast_connector.wire.store_messages import Changes, Entry, Watch
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


# --- a listing in pages ---


def page(*entries: Entry, after: str, more: bool, revision: int = 100, incarnation: int = 1) -> Changes:
    """One behind the first."""
    return Changes(incarnation, revision, False, list(entries), [], after, more)


def first_page(*entries: Entry, revision: int = 100, incarnation: int = 1) -> Changes:
    return Changes(incarnation, revision, True, list(entries), [], more=True)


def test_pages_change_nothing_until_the_last_has_come() -> None:
    view = full()
    assert view.ask(7) == Watch(1, 110, 7, "") and not view.listing
    view.apply(first_page(shard_count(8), lease(1, B, 130), revision=130))
    for after, entries in ((shard_key(1), [entry(worker(A))]), (worker_key(A), [entry(worker(B))])):
        assert view.listing and view.ask(9000) == Watch(1, 130, 0, after), "at once, and behind the last"
        assert set(view.shards) == {0, 3} and view.instances and view.revision == 110 and view.shard_count == 4
        view.apply(page(*entries, after=after, more=True, revision=130))
    view.apply(page(entry(worker("c/1")), after=worker_key(B), more=False, revision=130))
    view.check()
    assert not view.listing and set(view.workers) == {A, B, "c/1"} and view.revision == 130 and view.shard_count == 8
    assert set(view.shards) == {1} and not view.instances and not view.replicas, "what is on no page is gone"
    assert view.ask(7) == Watch(1, 130, 7, "")


def test_what_happened_since_the_first_page_comes_before_the_whole_counts() -> None:
    view = ClusterView()
    view.apply(first_page(shard_count(), entry(instance("i")), lease(0, A, 90)))
    view.apply(page(entry(worker(A), 90), entry(worker(B), 120), after=shard_key(0), more=False, revision=120))
    assert view.listing and view.ask(9000) == Watch(1, 100, 100, ""), "B has come at 120, so there is something to tell"
    view.apply(delta(lease(0, B, 115), deleted=[instance_key("i")], revision=115))
    assert view.listing and not view.workers and view.ask(9000) == Watch(1, 115, 100, "")
    view.apply(delta(entry(worker(B), 120), deleted=[worker_key(A)], revision=121))
    view.check()
    assert not view.listing and set(view.workers) == {B} and view.shards[0].worker_id == B and not view.instances
    assert view.revision == 121


def test_a_change_that_the_pages_do_not_show_is_asked_for_too() -> None:
    """Whoever went after its page was read is on a page that came before."""
    view = ClusterView()
    view.apply(first_page(shard_count(), entry(worker(A))))
    view.apply(page(entry(worker(B)), after=worker_key(A), more=False, revision=105))
    assert view.listing and view.ask(9000) == Watch(1, 100, 0, "")
    view.apply(Changes(1, 103, False, [], [], more=True))
    assert view.listing, "there is more to tell"
    view.apply(delta(deleted=[worker_key(A)], revision=105))
    assert not view.listing and set(view.workers) == {B}


OTHER_ANSWERS = {
    "a store that knows no pages": delta(entry(worker(B)), revision=120),
    "a page of another place": page(entry(worker(B)), after=worker_key(B), more=False),
    "a page of another life": page(entry(worker(B)), after=worker_key(A), more=False, incarnation=2),
    "an empty page with more behind it": page(after=worker_key(A), more=True),
}


@pytest.mark.parametrize("name", OTHER_ANSWERS)
def test_an_answer_that_is_not_the_next_page_begins_anew(name: str) -> None:
    view = full()
    view.apply(first_page(shard_count(), entry(worker(A)), revision=130))
    view.apply(OTHER_ANSWERS[name])
    assert not view.listing and view.ask(7) == Watch(1, 110, 7, "") and set(view.workers) == {A, B}
    view.apply(everything([A], {}, revision=140))
    assert set(view.workers) == {A}


def test_a_listing_that_begins_anew_forgets_the_pages_before() -> None:
    view = ClusterView()
    view.apply(first_page(shard_count(), entry(worker(A)), lease(1, A, 20)))
    view.apply(first_page(shard_count(), entry(worker(B)), revision=8, incarnation=2))
    view.apply(page(entry(worker("c/1")), after=worker_key(B), more=False, revision=8, incarnation=2))
    assert set(view.workers) == {B, "c/1"} and not view.shards and (view.incarnation, view.revision) == (2, 8)


def test_a_listing_of_an_earlier_life_is_refused() -> None:
    view = full()
    view.apply(everything([A], {}, incarnation=5))
    with pytest.raises(ProtocolError, match="of an earlier life"):
        view.apply(first_page(shard_count(), entry(worker(B)), incarnation=4))
    assert not view.listing and set(view.workers) == {A}
