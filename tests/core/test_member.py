"""A worker's conversation with the store: what it says in which order, and what it makes of answers and failures."""

from typing import Any

import pytest

from tensorcast_connector.config import (
    CLAIM_RETRY_S,
    CLOCK_DRIFT_MAX,
    HANDOVER_AFTER_S,
    HEARTBEAT_INTERVAL_S,
    MEMBER_TTL_S,
    STORE_TIMEOUT_S,
    WATCH_WAIT_S,
)
from tensorcast_connector.core.cluster import RESTORED, SHARD_COUNT, ClusterView, shard_key, worker_key
from tensorcast_connector.core.leases import ShardLeases
from tensorcast_connector.core.member import Member, StoreCall
from tensorcast_connector.core.placement import shard_ranking
from tensorcast_connector.errors import (
    Conflict,
    DeadlineExceeded,
    Exhausted,
    NotFound,
    ProtocolError,
    TensorcastError,
    Unavailable,
)
from tensorcast_connector.types import WorkerId
from tensorcast_connector.wire.messages import Ok
from tensorcast_connector.wire.store_messages import (
    Alive,
    Changes,
    ClaimShards,
    Entry,
    InstanceRecord,
    KeepAlive,
    LeaseGranted,
    PutReplica,
    RegisterInstance,
    RegisterWorker,
    ReleaseShards,
    RemoveInstance,
    RemoveReplica,
    Watch,
)
from tests.core.made import (
    LEASES,
    SHARDS,
    A,
    B,
    delta,
    entry,
    everything,
    instance,
    lease,
    replica,
    shard_count,
    worker,
)

LEASE = LEASES[A]
AWAY = Unavailable("the store is away")


class Talk:
    """A member, and the store's side of the conversation, played by the test."""

    def __init__(self, roles: tuple[str, ...] = ("basic",)) -> None:
        self.view = ClusterView()
        self.leases = ShardLeases(A)
        self.me = worker(A, roles)
        self.member = Member(self.me, self.view, self.leases)
        self.now = 100.0
        self._said: list[StoreCall] = []

    def poll(self, after_s: float = 0.0) -> list[StoreCall]:
        self.now += after_s
        calls = self.member.poll(self.now)
        assert self.member.wake_at() > self.now, "it would be polled for ever"
        assert all(call.sent_at == self.now for call in calls)
        return calls

    def says(self, after_s: float = 0.0) -> StoreCall:
        """The one thing it says now, besides the watch."""
        assert not self.silent(after_s)
        [call] = self._said
        self._said = []
        return call

    def silent(self, after_s: float = 0.0) -> bool:
        self._said += [call for call in self.poll(after_s) if not isinstance(call.message, Watch)]
        return not self._said

    def answer(self, call: StoreCall, reply: Any = None) -> None:
        self.member.answered(call, reply or Ok(), self.now)
        self.leases.check()

    def fail(self, call: StoreCall, error: TensorcastError = AWAY) -> None:
        self.member.failed(call, error, self.now)
        self.leases.check()

    def join(self, seen: Changes | None = None) -> StoreCall:
        """Registered, and has seen the cluster; the watch that goes on then."""
        calls = {type(call.message): call for call in self.poll()}
        self.answer(calls[RegisterWorker], LeaseGranted(LEASE, 90))
        self.answer(calls[Watch], seen or everything([self.me], {}))
        self.silent()
        watch = self.member._watch_call
        assert watch is not None and isinstance(watch.message, Watch)
        return watch


@pytest.fixture
def talk() -> Talk:
    """Nothing was said yet."""
    return Talk()


# --- joining and staying ---


def test_it_registers_and_watches_from_the_start(talk: Talk) -> None:
    register, watch = talk.poll()
    assert register.message == RegisterWorker(worker(A, ("basic",)), MEMBER_TTL_S)
    assert register.timeout_s == STORE_TIMEOUT_S
    assert watch.message == Watch(0, 0, 0, ""), "at once, with everything"
    assert talk.poll(after_s=60) == [], "one request of each kind at a time"
    talk.answer(register, LeaseGranted(LEASE, 90))
    assert talk.member.lease_id == LEASE == talk.leases.lease_id
    assert repr(talk.member) == "<Member a/1, lease 101, 0 to be listed>"


def test_the_watch_goes_on_from_where_it_was(talk: Talk) -> None:
    watch = talk.join(everything([talk.me], {}, revision=120, incarnation=3))
    assert watch.message == Watch(3, 120, int(WATCH_WAIT_S * 1000), "")
    assert watch.timeout_s == WATCH_WAIT_S + STORE_TIMEOUT_S, "longer than the store waits"
    talk.answer(watch, delta(entry(worker(B)), revision=130, incarnation=3))
    assert B in talk.view.workers
    [watch] = talk.poll()
    assert watch.message == Watch(3, 130, int(WATCH_WAIT_S * 1000), "")
    talk.answer(watch, delta(revision=130, incarnation=3))
    assert talk.poll()[0].message == watch.message, "at once, also if there was nothing to tell"


def test_the_lease_is_renewed_before_it_ends_and_counts_from_before_that(talk: Talk) -> None:
    talk.join()
    assert talk.silent(HEARTBEAT_INTERVAL_S - 0.01)
    renew = talk.says(0.01)
    assert renew.message == KeepAlive(LEASE)
    talk.now += 1.5
    talk.answer(renew, Alive(95))
    valid_s = MEMBER_TTL_S * (1 - 2 * CLOCK_DRIFT_MAX)
    assert talk.leases.may_write(renew.sent_at + valid_s - 0.01)
    assert not talk.leases.may_write(renew.sent_at + valid_s)
    assert isinstance(talk.says().message, KeepAlive), "the next is due already"


FAILED_RENEWALS = {
    "the store is away": (AWAY, True),
    "no answer in time": (DeadlineExceeded("late"), True),
    "something else": (ProtocolError("?"), True),
    "the lease has ended": (NotFound("lease 101 has expired"), False),
}


@pytest.mark.parametrize("name", FAILED_RENEWALS)
def test_a_renewal_that_fails(talk: Talk, name: str) -> None:
    error, stays = FAILED_RENEWALS[name]
    talk.join()
    talk.fail(talk.says(HEARTBEAT_INTERVAL_S), error)
    if stays:
        assert talk.member.lease_id == LEASE and talk.silent()
        assert talk.says(HEARTBEAT_INTERVAL_S).message == KeepAlive(LEASE)
    else:
        assert talk.member.lease_id == 0 and not talk.leases.may_write(talk.now)
        assert isinstance(talk.says().message, RegisterWorker), "at once"
    assert (talk.member.store_error is error) is stays


def test_a_registration_that_fails_is_repeated_and_told(talk: Talk) -> None:
    """An earlier one may have been done all the same: then the former lease has to end first."""
    register, _ = talk.poll()
    for error in (AWAY, Conflict("worker a/1 is registered already"), ProtocolError("address='x' is not an address")):
        talk.fail(register, error)
        assert talk.member.store_error is error
        assert talk.silent(HEARTBEAT_INTERVAL_S - 0.01)
        register = talk.says(0.01)
        assert isinstance(register.message, RegisterWorker)
    talk.answer(register, LeaseGranted(LEASE, 90))
    assert talk.member.store_error is None and talk.member.lease_id == LEASE


def test_a_store_that_can_be_reached_again_is_asked_at_once(talk: Talk) -> None:
    watch = talk.join()
    talk.member.add(instance("i"))
    for after_s in (0.0, HEARTBEAT_INTERVAL_S, 0.0):
        talk.fail(talk.says(after_s))
    talk.fail(watch)
    assert talk.poll(0.1) == []
    talk.member.connected(talk.now)
    assert {type(call.message) for call in talk.poll()} == {KeepAlive, Watch}


# --- the lease is lost ---


def test_it_is_lost_when_the_store_lists_us_no_more(talk: Talk) -> None:
    """As after an old database was put in place, where the lease of that number is another worker's."""
    watch = talk.join()
    talk.answer(watch, delta(deleted=[worker_key(A)], revision=130))
    assert talk.member.lease_id == 0
    assert isinstance(talk.says().message, RegisterWorker)


def test_a_list_from_before_we_were_on_it_is_no_loss(talk: Talk) -> None:
    register, watch = talk.poll()
    talk.answer(register, LeaseGranted(LEASE, 90))
    talk.answer(watch, everything([B], {}, revision=89))
    assert talk.member.lease_id == LEASE
    [watch] = talk.poll()
    talk.answer(watch, delta(entry(worker(B)), revision=90))
    assert talk.member.lease_id == 0, "as of our registration, and we are not on it"


def test_a_renewal_under_way_does_not_revive_a_lease_that_was_found_lost(talk: Talk) -> None:
    watch = talk.join()
    renew = talk.says(HEARTBEAT_INTERVAL_S)
    talk.answer(watch, delta(deleted=[worker_key(A)], revision=130))
    talk.answer(renew, Alive(131))
    assert talk.member.lease_id == 0 and not talk.leases.may_write(talk.now)
    assert isinstance(talk.says().message, RegisterWorker)


def test_everything_is_listed_again_after_it_registered_anew(talk: Talk) -> None:
    talk.join()
    for record in (instance("one"), instance("two"), replica("m")):
        talk.member.add(record)
        talk.answer(talk.says())
    talk.member.remove(instance("one"))
    talk.fail(talk.says(), NotFound("lease 101 has expired"))
    talk.answer(talk.says(), LeaseGranted(777, 140))
    said = []
    for _ in range(2):
        call = talk.says()
        said.append(call.message)
        talk.answer(call)
    assert said == [RegisterInstance(instance("two"), 777), PutReplica(replica("m"), 777)]
    assert talk.silent()


# --- a cluster larger than one answer ---


def test_a_part_of_the_listing_says_nothing_of_who_is_not_on_it() -> None:
    """Neither that we were taken off the list, nor that a shard is vacant, nor that a listing is missing."""
    talk = Talk(roles=("basic", "shard-home"))
    watch = talk.join(everything([A, B], dict.fromkeys(range(SHARDS), (A, 50))))
    talk.member.add(instance("i"))
    talk.answer(talk.says())
    talk.answer(watch, Changes(1, 300, True, [shard_count()], [], more=True))
    assert talk.member.lease_id == LEASE and set(talk.leases.held) == set(range(SHARDS))
    [watch] = talk.poll()
    assert watch.message == Watch(1, 300, 0, SHARD_COUNT), "the next page at once, and no claims"
    talk.fail(watch)
    renew, watch = talk.poll(HEARTBEAT_INTERVAL_S)
    talk.answer(renew, Alive(301))
    assert watch.message == Watch(1, 300, 0, SHARD_COUNT), "from where it was"
    leases = [lease(shard, A, 50) for shard in range(SHARDS)]
    talk.answer(watch, Changes(1, 300, False, leases, [], SHARD_COUNT, more=True))
    [watch] = talk.poll()
    assert watch.message == Watch(1, 300, 0, leases[-1].key), "nothing is listed anew for what was not to be seen yet"
    talk.answer(watch, Changes(1, 300, False, [entry(talk.me)], [], leases[-1].key, more=False))
    assert (
        talk.member.lease_id == LEASE and set(talk.view.workers) == {A} and set(talk.leases.held) == set(range(SHARDS))
    )
    assert talk.says().message == RegisterInstance(instance("i"), LEASE), "now it is known that this is missing"


# --- what hangs on the lease ---


def test_listings_wait_for_the_lease_and_are_told_one_after_the_other(talk: Talk) -> None:
    talk.member.add(instance("one"))
    talk.member.add(replica("m"))
    talk.join()
    first = talk.says()
    assert first.message == RegisterInstance(instance("one"), LEASE)
    assert talk.silent()
    talk.answer(first)
    second = talk.says()
    assert second.message == PutReplica(replica("m"), LEASE)
    talk.answer(second)
    talk.member.remove(instance("one"))
    talk.member.remove(replica("m"))
    said = [talk.says()]
    talk.answer(said[0])
    said.append(talk.says())
    assert [call.message for call in said] == [RemoveInstance("one"), RemoveReplica("m", A)]


def test_what_was_never_listed_is_not_taken_off(talk: Talk) -> None:
    talk.join()
    talk.member.remove(instance("never there"))
    assert talk.silent()
    talk.member.add(instance("one"))
    talk.member.remove(instance("one"))
    assert talk.says().message == RemoveInstance("one")


def test_a_change_while_one_is_being_told_is_told_after_it(talk: Talk) -> None:
    talk.join()
    talk.member.add(instance("one"))
    told = talk.says()
    talk.member.remove(instance("one"))
    talk.answer(told)
    told = talk.says()
    assert told.message == RemoveInstance("one")
    again = InstanceRecord("one", A, "vllm", "m", "another namespace")
    talk.member.add(again)
    talk.answer(told)
    assert talk.says().message == RegisterInstance(again, LEASE)


def test_what_the_store_was_told_by_another_request_is_not_taken_off(talk: Talk) -> None:
    """The watch has shown it before the answer to that request came."""
    watch = talk.join()
    talk.now += HEARTBEAT_INTERVAL_S / 2
    talk.member._watch_call = None
    [watch] = [call for call in talk.poll() if isinstance(call.message, Watch)]
    talk.answer(watch, delta(entry(replica("m")), revision=130))
    talk.member.told(replica("m"))
    assert talk.silent()
    talk.member.remove(replica("m"))
    taken_off = talk.says()
    assert taken_off.message == RemoveReplica("m", A)
    talk.member.told(replica("m"))
    talk.answer(taken_off)
    assert talk.says().message == PutReplica(replica("m"), LEASE), "which of both was last nobody knows"


def test_the_lease_comes_before_listings_and_listings_before_shards() -> None:
    talk = Talk(roles=("basic", "shard-home"))
    talk.member.add(instance("one"))
    talk.join()
    order = []
    for after_s, works in [(0.0, False), (0.0, True), (HEARTBEAT_INTERVAL_S, True), (0.0, True), (0.0, True)]:
        call = talk.says(after_s)
        order.append(type(call.message))
        if works:
            talk.answer(call)
        else:
            talk.fail(call)
    assert order == [RegisterInstance, ClaimShards, KeepAlive, RegisterInstance, ClaimShards]
    assert talk.silent()


REFUSALS = {
    "nonsense": (ProtocolError("is no id"), False),
    "a fault of the store": (TensorcastError("KeyError"), True),
    "its database is full": (Exhausted("etcd is full"), True),
    "the store is away": (AWAY, True),
    "a race": (Conflict("?"), True),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_the_store_will_never_take_is_not_told_again(talk: Talk, name: str) -> None:
    error, again = REFUSALS[name]
    talk.join()
    talk.member.add(instance("one"))
    talk.member.add(instance("two"))
    talk.fail(talk.says(), error)
    talk.answer(talk.says(HEARTBEAT_INTERVAL_S), Alive(100))
    said = talk.says()
    assert said.message == RegisterInstance(instance("two"), LEASE), "one that fails holds no other up"
    talk.answer(said, Ok())
    if again:
        assert talk.says().message == RegisterInstance(instance("one"), LEASE)
    else:
        assert talk.silent()


# --- shards ---


def homes(held: dict[int, WorkerId]) -> Changes:
    """A and B are homes, and who holds what."""
    return everything([A, B], {shard: (who, 50) for shard, who in held.items()})


def test_vacant_shards_are_claimed_and_what_was_granted_is_seen_by_the_watch() -> None:
    talk = Talk(roles=("basic", "shard-home"))
    watch = talk.join()
    claim = talk.says()
    assert claim.message == ClaimShards(A, LEASE, list(range(SHARDS)))
    talk.answer(claim)
    assert talk.leases.held == {} and talk.silent()
    talk.answer(watch, delta(lease(0, A, 131), lease(1, B, 132), revision=132))
    assert set(talk.leases.held) == {0}
    talk.fail(talk.says(CLAIM_RETRY_S))
    again = [call for call in talk.poll(CLAIM_RETRY_S) if isinstance(call.message, ClaimShards | KeepAlive)]
    assert [type(call.message) for call in again] == [KeepAlive]
    talk.answer(again[0], Alive(132))
    assert talk.says().message == ClaimShards(A, LEASE, [2, 3]), "what nobody has yet"


def test_a_better_home_is_given_its_shards() -> None:
    better = [shard for shard in range(SHARDS) if shard_ranking(shard, [A, B])[0] == B]
    assert 0 < len(better) < SHARDS
    talk = Talk(roles=("basic", "shard-home"))
    watch = talk.join(homes(dict.fromkeys(range(SHARDS), A)))
    for _ in range(int(HANDOVER_AFTER_S / HEARTBEAT_INTERVAL_S)):
        assert set(talk.leases.held) == set(range(SHARDS))
        renew = talk.says(HEARTBEAT_INTERVAL_S)
        assert renew.message == KeepAlive(LEASE)
        talk.answer(renew, Alive(100))
    release = talk.says()
    assert release.message == ReleaseShards(LEASE, better, [50] * len(better))
    assert set(talk.leases.held) == set(range(SHARDS)) - set(better), "at once, whatever becomes of the message"
    talk.fail(release, DeadlineExceeded("late"))
    renew = talk.says(CLAIM_RETRY_S)
    talk.answer(renew, Alive(100))
    assert talk.says().message == ReleaseShards(LEASE, better, [50] * len(better)), "told again"
    talk.answer(watch, delta(deleted=[shard_key(shard) for shard in better], revision=150))
    assert set(talk.leases.held) == set(range(SHARDS)) - set(better)


def test_after_a_restore_nothing_is_claimed_until_the_watch_says_so() -> None:
    """Whoever held a shard in the former life may still believe it."""
    talk = Talk(roles=("basic", "shard-home"))
    seen = everything([A], {})
    seen.entries.append(Entry(RESTORED, b"", 100))
    watch = talk.join(seen)
    assert talk.silent() and not talk.leases.held
    renew = talk.says(HEARTBEAT_INTERVAL_S)
    assert renew.message == KeepAlive(LEASE), "all else goes on"
    talk.answer(renew, Alive(100))
    talk.answer(watch, delta(deleted=[RESTORED], revision=101))
    assert talk.says().message == ClaimShards(A, LEASE, list(range(SHARDS)))


# --- trouble ---


def test_while_the_store_is_away_it_is_asked_now_and_then_and_known_members_stay() -> None:
    talk = Talk(roles=("basic", "shard-home"))
    watch = talk.join(everything([A, B], {0: (A, 50)}))
    talk.fail(watch)
    asked = 0
    for _ in range(40):
        talk.now += 0.25
        for call in talk.poll():
            asked += 1
            talk.fail(call)
    assert 10 <= asked <= 40, "no storm: nothing can be claimed without a valid lease either"
    assert set(talk.view.workers) == {A, B} and talk.member.store_error is AWAY
    assert talk.member.lease_id == LEASE and not talk.leases.may_write(talk.now)
    assert set(talk.leases.held) == {0}, "it still answers lookups"


def test_the_two_kinds_of_request_have_their_own_trouble(talk: Talk) -> None:
    watch = talk.join()
    odd = ProtocolError("the store does not take Watch")
    talk.fail(watch, odd)
    assert talk.member.store_error is odd
    renew, watch = talk.poll(HEARTBEAT_INTERVAL_S)
    talk.answer(renew, Alive(100))
    assert talk.member.store_error is odd, "the list of members is still not followed"
    assert watch.message == Watch(1, 100, 0, ""), "answered at once, so that this is over soon"
    talk.answer(watch, delta(revision=140))
    assert talk.member.store_error is None


def test_an_answer_of_the_watch_that_makes_no_sense_is_raised_and_told_and_it_goes_on(talk: Talk) -> None:
    watch = talk.join(everything([talk.me], {}, incarnation=5))
    with pytest.raises(ProtocolError, match="of an earlier life"):
        talk.answer(watch, everything([B], {}, incarnation=4))
    assert "of an earlier life" in str(talk.member.store_error)
    assert set(talk.view.workers) == {A} and talk.member.lease_id == LEASE
    renew, watch = talk.poll(HEARTBEAT_INTERVAL_S)
    assert watch.message == Watch(5, 100, 0, "")
    talk.answer(renew, Alive(100))
    odd = delta(type(entry(worker(B)))(worker_key(B), b"?", 150), revision=150, incarnation=5)
    odd.deleted.append(worker_key(A))
    with pytest.raises(ProtocolError, match="makes no sense"):
        talk.answer(watch, odd)
    assert talk.member.lease_id == 0, "the rest of it counts"


def test_answers_of_calls_that_are_not_under_way_mean_nothing(talk: Talk) -> None:
    watch = talk.join()
    old = talk.says(HEARTBEAT_INTERVAL_S)
    talk.fail(old)
    talk.answer(old, Alive(100))
    assert talk.member.store_error is AWAY
    talk.answer(watch, delta(revision=120))
    talk.fail(watch, AWAY)
    talk.answer(watch, delta(deleted=[worker_key(A)], revision=130))
    assert A in talk.view.workers


def test_in_another_life_of_the_store_our_lease_is_somebody_elses(talk: Talk) -> None:
    """The database went back: its revisions are lower, and it may grant our lease's number again."""
    watch = talk.join()
    talk.answer(watch, everything([worker(B)], {}, revision=8, incarnation=2))
    assert talk.member.lease_id == 0 and not talk.leases.may_write(talk.now)
    assert isinstance(talk.says().message, RegisterWorker)


def test_a_view_from_before_we_registered_says_nothing_of_us(talk: Talk) -> None:
    calls = {type(call.message): call for call in talk.poll()}
    talk.answer(calls[RegisterWorker], LeaseGranted(LEASE, 90))
    talk.answer(calls[Watch], everything([worker(B)], {}, revision=80, incarnation=2))
    assert talk.member.lease_id == LEASE
