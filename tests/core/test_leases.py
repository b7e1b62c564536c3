"""Shard leases of one worker: until when they hold, what it claims and when, and how it hands over."""

import math

import pytest

from tensorcast_connector.config import (
    CLAIM_RETRY_S,
    CLAIM_STAGGER_S,
    CLOCK_DRIFT_MAX,
    HANDOVER_AFTER_S,
    HANDOVER_SHARDS_MAX,
    MEMBER_TTL_S,
)
from tensorcast_connector.core.cluster import ClusterView, shard_key
from tensorcast_connector.core.leases import ShardLeases
from tensorcast_connector.core.placement import shard_ranking
from tensorcast_connector.types import WorkerId
from tests.core.made import LEASES, A, B, C, D, delta, everything, lease, token, worker

SHARDS = 16
TTL = 6
VALID_S = TTL * (1 - 2 * CLOCK_DRIFT_MAX)


class Member:
    """One worker's leases, and the view that it follows."""

    def __init__(self, me: WorkerId, workers: list[WorkerId], homes: dict[int, WorkerId], now: float = 0.0) -> None:
        self.view = ClusterView()
        self.leases = ShardLeases(me)
        self.leases.renewed(LEASES[me], now, 10**6)
        self.revision = 100
        self.view.apply(everything(workers, {shard: (home, 50) for shard, home in homes.items()}, shards=SHARDS))
        self.update(now)

    def update(self, now: float) -> None:
        self.leases.update(self.view, now)
        self.leases.check()

    def see(self, now: float, granted: dict[int, WorkerId] | None = None, ended: list[int] | None = None) -> None:
        self.revision += 1
        entries = [lease(shard, home, self.revision) for shard, home in (granted or {}).items()]
        self.view.apply(delta(*entries, deleted=[shard_key(shard) for shard in ended or []], revision=self.revision))
        self.update(now)


def ranked(who: WorkerId, workers: list[WorkerId], place: int) -> list[int]:
    """The shards for which `who` has this place."""
    return [shard for shard in range(SHARDS) if shard_ranking(shard, workers)[place] == who]


ALL = [A, B, C, D]


# --- until when ---

AFTER_SENT = {
    "at once": (0.0, True),
    "shortly before it could have ended": (VALID_S - 0.01, True),
    "when it could have ended on a fast clock": (VALID_S, False),
    "when it has ended": (TTL, False),
}


@pytest.mark.parametrize("name", AFTER_SENT)
def test_a_lease_counts_from_before_it_was_asked_for(name: str) -> None:
    passed_s, valid = AFTER_SENT[name]
    leases = ShardLeases(A)
    assert not leases.may_write(1000.0)
    leases.renewed(7, 1000.0, TTL)
    assert leases.may_write(1000.0 + passed_s) is valid
    leases.renewed(7, 1003.0, TTL)
    assert leases.may_write(1003.0 + passed_s) is valid


def test_nobody_else_can_hold_a_shard_while_its_home_may_write() -> None:
    """The store's clock may run faster and ours slower by CLOCK_DRIFT_MAX, and nothing is known of the message's way."""
    fast, slow = 1 + CLOCK_DRIFT_MAX, 1 - CLOCK_DRIFT_MAX
    ends_after_true_s = MEMBER_TTL_S / fast
    leases = ShardLeases(A)
    leases.renewed(7, 0.0, MEMBER_TTL_S)
    assert not leases.may_write(ends_after_true_s * slow)


def test_an_answer_that_comes_late_shortens_nothing() -> None:
    leases = ShardLeases(A)
    leases.renewed(7, 1003.0, TTL)
    leases.renewed(7, 1001.0, TTL)
    assert leases.may_write(1003.0 + VALID_S - 0.01)


def test_another_lease_is_another_life() -> None:
    one = Member(A, [A], {0: A})
    assert one.leases.held == {0: token(50)}
    one.leases.renewed(999, 5.0, TTL)
    one.leases.check()
    assert one.leases.held == {} and one.leases.lease_id == 999
    assert one.leases.may_write(5.0 + VALID_S - 0.01) and not one.leases.may_write(5.0 + VALID_S)
    one.update(5.0)
    assert one.leases.held == {}, "what hangs on the former lease is not ours, also where our name is on it"


def test_a_lost_lease_holds_nothing_and_asks_for_nothing() -> None:
    one = Member(A, [A], {0: A})
    one.leases.lost()
    one.update(1.0)
    assert one.leases.held == {} and not one.leases.may_write(0.0)
    assert one.leases.claims(10**9) == one.leases.handovers(10**9) == []
    assert one.leases.wake_at(1.0) == math.inf


def test_what_is_held_is_what_hangs_on_the_lease_by_the_view() -> None:
    one = Member(A, [A, B], {0: A, 1: B})
    one.see(1.0, {2: A, 3: B})
    assert one.leases.held == {0: token(50), 2: token(101)}
    one.see(2.0, {2: B}, ended=[0])
    assert one.leases.held == {}
    assert repr(one.leases) == f"<ShardLeases 0 held by lease 101 until {10**6 * 0.98:g}>"


# --- claiming ---


def test_vacant_shards_are_claimed_by_rank_and_no_other_worker_asks() -> None:
    times: dict[int, dict[WorkerId, float]] = {shard: {} for shard in range(SHARDS)}
    members = {who: Member(who, ALL, {}, now=20.0) for who in ALL}
    for who, one in members.items():
        for place in range(4):
            now = 20.0 + place * CLAIM_STAGGER_S
            for shard in one.leases.claims(now):
                times[shard].setdefault(who, now)
    for shard in range(SHARDS):
        first, second, third, _ = shard_ranking(shard, ALL)
        assert times[shard] == {first: 20.0, second: 20.0 + CLAIM_STAGGER_S, third: 20.0 + 2 * CLAIM_STAGGER_S}


def test_it_wakes_for_its_turn() -> None:
    one = Member(A, ALL, dict.fromkeys(range(SHARDS), B))
    assert one.leases.wake_at(0.0) == math.inf, "others hold everything"
    second = ranked(A, ALL, 1)[0]
    one.see(3.0, ended=[second])
    assert one.leases.claims(3.0) == []
    assert one.leases.wake_at(3.0) == 3.0 + CLAIM_STAGGER_S
    assert one.leases.claims(3.0 + CLAIM_STAGGER_S) == [second]


def test_what_somebody_else_got_meanwhile_is_not_claimed() -> None:
    one = Member(A, ALL, dict.fromkeys(range(SHARDS), B))
    second = ranked(A, ALL, 1)[0]
    one.see(3.0, ended=[second])
    one.see(3.1, {second: B})
    assert one.leases.claims(3.0 + CLAIM_STAGGER_S) == []
    one.see(8.0, ended=[second])
    assert one.leases.claims(8.0) == [], "the time counts from when it became vacant this time"


def test_a_claim_without_an_effect_is_repeated_later() -> None:
    one = Member(A, [A], {})
    assert one.leases.claims(1.0) == list(range(SHARDS))
    one.leases.claimed(range(SHARDS), 1.0)
    assert one.leases.claims(1.0) == [] and one.leases.wake_at(1.0) == 1.0 + CLAIM_RETRY_S
    assert one.leases.claims(1.0 + CLAIM_RETRY_S) == list(range(SHARDS))
    one.see(1.5, dict.fromkeys(range(SHARDS), A))
    assert one.leases.claims(1.0 + CLAIM_RETRY_S) == []
    one.see(1.6, ended=[4])
    assert one.leases.claims(1.6) == [4], "granted and gone: a new vacancy"


def test_who_cannot_be_a_home_neither_ranks_nor_claims() -> None:
    view = ClusterView()
    view.apply(everything([worker(A, roles=("basic", "gateway")), worker(B)], {}, shards=SHARDS))
    one, other = ShardLeases(A), ShardLeases(B)
    for leases, who in ((one, A), (other, B)):
        leases.renewed(LEASES[who], 0.0, TTL)
        leases.update(view, 0.0)
    assert one.claims(5.0) == [] and one.wake_at(0.0) == math.inf
    assert other.claims(0.0) == list(range(SHARDS))


def test_without_a_valid_lease_it_claims_nothing_and_does_not_wake_for_it() -> None:
    one = Member(A, [A], {})
    one.leases.renewed(900, 0.0, TTL)
    one.update(0.0)
    assert one.leases.claims(VALID_S) == [] and one.leases.wake_at(VALID_S) == math.inf
    one.leases.renewed(900, 7.0, TTL)
    assert one.leases.wake_at(7.0) <= 7.0 and one.leases.claims(7.0) == list(range(SHARDS))


# --- handing over ---


def overfull(now: float = 0.0) -> tuple[Member, list[int]]:
    """A holds everything when B comes; and the shards for which B is the better home."""
    one = Member(A, [A], dict.fromkeys(range(SHARDS), A), now)
    one.view.apply(everything([A, B], dict.fromkeys(range(SHARDS), (A, 50)), shards=SHARDS))
    one.update(now)
    return one, ranked(B, [A, B], 0)


def test_a_better_worker_gets_its_shards_after_a_while() -> None:
    one, better = overfull(now=30.0)
    assert better and one.leases.wake_at(30.0) == 30.0 + HANDOVER_AFTER_S
    assert one.leases.handovers(30.0 + HANDOVER_AFTER_S - 0.01) == []
    assert one.leases.handovers(30.0 + HANDOVER_AFTER_S) == better[:HANDOVER_SHARDS_MAX]


def test_one_that_leaves_and_comes_back_waits_anew() -> None:
    one, better = overfull()
    one.view.apply(everything([A], dict.fromkeys(range(SHARDS), (A, 50)), shards=SHARDS))
    one.update(5.0)
    one.view.apply(everything([A, B], dict.fromkeys(range(SHARDS), (A, 50)), shards=SHARDS))
    one.update(6.0)
    assert one.leases.handovers(5.9 + HANDOVER_AFTER_S) == []
    assert one.leases.handovers(6.0 + HANDOVER_AFTER_S) == better[:HANDOVER_SHARDS_MAX]


def test_a_shard_that_was_just_taken_is_kept_for_a_while() -> None:
    """Else one that is claimed because its best home is slow would go back and forth."""
    one = Member(A, [A, B], {})
    better = ranked(B, [A, B], 0)[0]
    one.see(100.0, {better: A})
    assert one.leases.handovers(99.9 + HANDOVER_AFTER_S) == []
    assert one.leases.handovers(100.0 + HANDOVER_AFTER_S) == [better]


def test_at_most_a_few_at_a_time() -> None:
    ids = [A, *(WorkerId(f"w{number}/1") for number in range(9))]
    one = Member(A, [A], dict.fromkeys(range(SHARDS), A))
    one.view.apply(everything(ids, dict.fromkeys(range(SHARDS), (A, 50)), shards=SHARDS))
    one.update(0.0)
    misplaced = [shard for shard in range(SHARDS) if shard_ranking(shard, ids)[0] != A]
    assert len(misplaced) > HANDOVER_SHARDS_MAX
    now = HANDOVER_AFTER_S
    first = one.leases.handovers(now)
    assert first == misplaced[:HANDOVER_SHARDS_MAX]
    one.leases.given_back(first, now)
    one.see(now, dict.fromkeys(first, ids[1]))
    assert one.leases.handovers(now) == [], "the first are being taken"
    assert one.leases.wake_at(now) == now + CLAIM_RETRY_S
    assert one.leases.handovers(now + CLAIM_RETRY_S) == misplaced[HANDOVER_SHARDS_MAX:][:HANDOVER_SHARDS_MAX]


def test_what_is_given_back_is_not_ours_at_once() -> None:
    one, _ = overfull()
    shards = one.leases.handovers(HANDOVER_AFTER_S)
    one.leases.given_back(shards, HANDOVER_AFTER_S)
    one.leases.check()
    assert set(one.leases.held) == set(range(SHARDS)) - set(shards)
    one.update(HANDOVER_AFTER_S)
    assert set(one.leases.held) == set(range(SHARDS)) - set(shards), "although the store still says so"


def test_it_is_told_again_if_the_message_was_lost() -> None:
    one, _ = overfull()
    now = HANDOVER_AFTER_S
    shards = one.leases.handovers(now)
    one.leases.given_back(shards, now)
    assert not set(one.leases.handovers(now + CLAIM_RETRY_S - 0.01)) & set(shards)
    assert one.leases.handovers(now + CLAIM_RETRY_S)[: len(shards)] == shards
    one.leases.given_back(shards, now + CLAIM_RETRY_S)
    one.see(now + CLAIM_RETRY_S, {shards[0]: B}, ended=shards[1:])
    assert not set(one.leases.handovers(now + 10 * CLAIM_RETRY_S)) & set(shards), "the store has heard it"


def test_what_was_given_back_can_become_ours_again() -> None:
    one, _ = overfull()
    shards = one.leases.handovers(HANDOVER_AFTER_S)
    one.leases.given_back(shards, HANDOVER_AFTER_S)
    one.see(11.0, ended=shards)
    one.see(12.0, {shards[0]: A})
    assert one.leases.held[shards[0]] == token(one.revision), "under a higher token"


def test_without_a_valid_lease_nothing_is_handed_over() -> None:
    one, _ = overfull()
    one.leases.renewed(900, 0.0, TTL)
    one.see(0.0, {})
    one.view.apply(delta(*[lease(shard, A, 300, 900) for shard in range(SHARDS)]))
    one.update(0.0)
    assert len(one.leases.held) == SHARDS
    assert one.leases.handovers(HANDOVER_AFTER_S) == [] and one.leases.wake_at(HANDOVER_AFTER_S) == math.inf


def test_another_number_of_shards_is_another_ranking() -> None:
    one = Member(A, [A, B], {})
    one.view.apply(everything([A, B], {}, revision=500, incarnation=2, shards=4))
    one.update(1.0)
    assert set(one.leases.claims(100.0)) == {0, 1, 2, 3}


def test_who_does_not_take_what_it_is_given_waits_twice_as_long_each_time() -> None:
    one, _ = overfull()
    now = HANDOVER_AFTER_S
    shards = one.leases.handovers(now)
    for times in range(1, 4):
        one.leases.given_back(shards, now)
        one.see(now, ended=shards)
        one.see(now, dict.fromkeys(shards, A))  # nobody else claimed them
        assert not set(one.leases.handovers(now + 2**times * HANDOVER_AFTER_S - 0.01)) & set(shards)
        now += 2**times * HANDOVER_AFTER_S
        one.leases.renewed(LEASES[A], now, TTL)
        assert set(shards) <= set(one.leases.handovers(now))
    one.leases.given_back(shards, now)
    one.see(now, dict.fromkeys(shards, B))
    one.see(now, dict.fromkeys(shards, A))
    now += HANDOVER_AFTER_S
    one.leases.renewed(LEASES[A], now, TTL)
    assert set(shards) <= set(one.leases.handovers(now)), "it took them once: no reason to wait"
