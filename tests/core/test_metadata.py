"""One worker's metadata plane put together: fencing, what it answers, whom it asks, and a few of them talking to each other."""

import pytest

from tensorcast_connector.config import (
    ASK_INVENTORY_INTERVAL_S,
    CLOCK_DRIFT_MAX,
    HEARTBEAT_INTERVAL_S,
    MEMBER_TTL_S,
    REPORT_INTERVAL_S,
    REPORT_RETRY_S,
)
from tensorcast_connector.core.cluster import worker_key
from tensorcast_connector.core.member import StoreCall
from tensorcast_connector.core.metadata import ANSWERS, Metadata, PeerCall
from tensorcast_connector.errors import NotFound, ProtocolError, TensorcastError, Unavailable
from tensorcast_connector.types import Token, WorkerId
from tensorcast_connector.wire.codec import unpack_indexes
from tensorcast_connector.wire.messages import (
    AskInventory,
    Fenced,
    Message,
    Ok,
    PagesFound,
    Ping,
    Reported,
    ReportKeys,
)
from tensorcast_connector.wire.store_messages import (
    Alive,
    Changes,
    KeepAlive,
    LeaseGranted,
    RegisterWorker,
    Watch,
)
from tests.core.made import LEASES, SHARDS, A, B, C, delta, entry, everything, find, key, lease, report, token, worker

ALL = tuple(range(SHARDS))
VALID_S = MEMBER_TTL_S * (1 - 2 * CLOCK_DRIFT_MAX)


class Plane:
    """The plane of one worker, its pages, and the store's answers, played by the test."""

    def __init__(self, me: WorkerId) -> None:
        self.me = me
        self.pages: dict[bytes, None] = {}
        self.metadata = Metadata(worker(me), self)
        self.now = 100.0

    def inventory(self) -> list[bytes]:
        return list(self.pages)

    def resident(self, page: bytes) -> bool:
        return page in self.pages

    def save(self, *pages: bytes) -> None:
        self.pages |= dict.fromkeys(pages)
        self.metadata.changed(pages)

    def sees(self, changes: Changes) -> list[PeerCall]:
        """The store's watch tells, and keeps the lease alive; returns what the plane then says to other workers."""
        said: list[PeerCall] = []
        told = False
        for _ in range(10):
            for call in self.metadata.poll(self.now):
                if isinstance(call, PeerCall):
                    said.append(call)
                elif isinstance(call.message, RegisterWorker):
                    self.metadata.answered(call, LeaseGranted(LEASES[self.me], 1), self.now)
                elif not isinstance(call.message, Watch):
                    reply = Alive(1) if isinstance(call.message, KeepAlive) else Ok()
                    self.metadata.answered(call, reply, self.now)
            watch = self.metadata.member._watch_call
            if not told and watch is not None:
                told = True
                self.metadata.answered(watch, changes, self.now)
            self.metadata.check()
        assert told
        return said

    def poll(self, after_s: float = 0.0) -> list[PeerCall]:
        """What it says to other workers; the store is silent."""
        self.now += after_s
        calls = self.metadata.poll(self.now)
        self.metadata.check()
        assert self.metadata.wake_at() > self.now
        return [call for call in calls if isinstance(call, PeerCall)]

    def serve(self, message: Message) -> Message:
        reply = self.metadata.serve(message, self.now)
        self.metadata.check()
        return reply

    def report(self, who: WorkerId, number: int, grants: dict[int, int], *added: bytes, life: int = 1) -> Reported:
        """Somebody's whole inventory of shards, under tokens with these revisions."""
        shards = [(shard, life, revision) for shard, revision in grants.items()]
        reply = self.serve(report(who, number, shards, list(grants), added))
        assert isinstance(reply, Reported)
        return reply

    def find(self, *keys: bytes, shards: tuple[int, ...] = ALL) -> tuple[list[set[str]], dict[int, tuple[int, str]]]:
        """The holders of each key; and per shard that has moved the revision of the grant and the home."""
        reply = self.serve(find(shards, keys))
        assert isinstance(reply, PagesFound)
        moved = {shard: (revision, home) for shard, _, revision, home in reply.moved}
        return [set(reply.holders[index]) for index in unpack_indexes(reply.which)], moved


@pytest.fixture
def home() -> Plane:
    """A is the home of shards 0 and 1, B of the others; nobody has reported."""
    plane = Plane(A)
    plane.sees(everything([A, B, C], {0: (A, 10), 1: (A, 11), 2: (B, 12), 3: (B, 13)}))
    return plane


K = [key(shard) for shard in range(SHARDS)]


# --- what a home answers ---


def test_a_home_lists_what_it_is_told_and_says_who_has_the_rest(home: Plane) -> None:
    assert home.report(B, 1, {0: 10, 1: 11}, K[0], K[1]) == Reported([], [])
    found, moved = home.find(*K)
    assert found == [{B}, {B}, set(), set()] and moved == {2: (12, B), 3: (13, B)}
    assert home.find(K[0], shards=(0,)) == ([{B}], {})
    assert home.metadata.statistics() == {
        "catalog_pages": 2, "catalog_workers": 1, "shards_held": 2, "workers": 3, "shards": 4,
        "shards_without_home": 0, "store_revision": 100,
    }  # fmt: skip
    assert repr(home.metadata).startswith("<Metadata of a/1: <ClusterView at 1/100: 3 workers")


def test_it_names_the_shards_of_which_nobody_is_the_home(home: Plane) -> None:
    lonely = Plane(A)
    lonely.sees(everything([A], {0: (A, 10)}))
    assert lonely.find(K[1], shards=(0, 1)) == ([set()], {1: (0, "")})


def test_a_stranger_reports_when_the_store_has_told_of_it(home: Plane) -> None:
    with pytest.raises(Unavailable, match="new/1 is not known here yet"):
        home.report(WorkerId("new/1"), 1, {0: 10}, K[0])
    home.sees(delta(entry(worker("new/1"))))
    home.report(WorkerId("new/1"), 2, {0: 10}, K[0])
    assert home.find(K[0], shards=(0,)) == ([{"new/1"}], {})


def test_what_is_no_request_about_metadata_is_refused(home: Plane) -> None:
    with pytest.raises(ProtocolError, match="a worker does not take Ping here"):
        home.serve(Ping())


# --- fencing ---

UNDER = {
    "the current token": (10, 1, True),
    "an earlier one": (9, 1, False),
    "a later one, that this home does not know of": (20, 1, False),
    "one of the next life of the store": (10, 2, False),
}


@pytest.mark.parametrize("name", UNDER)
def test_only_what_comes_under_the_current_token_has_an_effect(home: Plane, name: str) -> None:
    revision, life, accepted = UNDER[name]
    reply = home.report(B, 1, {0: revision}, K[0], life=life)
    assert reply.moved == ([] if accepted else [(0, 1, 10, A)])
    assert home.find(K[0], shards=(0,)) == ([{B} if accepted else set()], {})
    home.report(B, 2, {1: 11}, K[1])
    assert home.find(K[1], shards=(1,)) == ([{B}], {}), "each shard by its own"


HIGHER = {
    "a new home asks for inventories": lambda plane: plane.serve(AskInventory(C, [(0, 1, 20)])),
    "a home of a restored store does": lambda plane: plane.serve(AskInventory(C, [(0, 2, 3)])),
    "the store tells": lambda plane: plane.sees(delta(lease(0, C, 20))),
}


@pytest.mark.parametrize("name", HIGHER)
def test_once_a_higher_token_was_seen_nothing_under_a_lower_one_has_an_effect(home: Plane, name: str) -> None:
    """Also at the former home itself, whose own list may say for a while that it has the shard."""
    home.report(B, 1, {0: 10, 1: 11}, K[0], K[1])
    HIGHER[name](home)
    reply = home.report(B, 2, {0: 10, 1: 11}, key(0, 7), key(1, 7))
    assert [(shard, who) for shard, _, _, who in reply.moved] == [(0, C)]
    found, moved = home.find(K[0], key(0, 7), K[1], key(1, 7), shards=(0, 1))
    assert found == [set(), set(), set(), {B}], "and shard 1 began anew"
    assert moved.keys() == {0} and moved[0][1] == C


def test_a_redirect_that_a_lookup_met_fences_as_well(home: Plane) -> None:
    home.report(B, 1, {0: 10}, K[0])
    lookup = home.metadata.lookup([K[2]])
    [ask] = lookup.first()
    lookup.answered(ask, PagesFound([[]], bytes(4), [(0, 1, 20, C)]))
    assert home.report(B, 2, {0: 10}, key(0, 7)).moved == [(0, 1, 20, C)]


def test_a_redirect_in_the_answer_to_a_report_fences_as_well(home: Plane) -> None:
    home.report(B, 1, {0: 10}, K[0])
    sent = home.metadata.reporter._streams[B].sent
    assert sent is not None
    home.metadata.answered(PeerCall(B, sent, 2.0), Reported([(0, 1, 20, C)], []), home.now)
    assert home.find(K[0], shards=(0,)) == ([set()], {0: (20, C)})


def test_a_former_home_cannot_ask_for_inventories(home: Plane) -> None:
    home.serve(AskInventory(C, [(2, 1, 30)]))
    assert home.serve(AskInventory(B, [(2, 1, 12), (3, 1, 13)])) == Fenced([(2, 1, 30, C)])
    assert home.serve(AskInventory(B, [(9, 1, 99)])) == Fenced([(9, 0, 0, "")]), "no shard of that number"
    assert home.metadata.homes.home(2) == C


def test_a_shard_that_came_back_under_a_higher_token_begins_empty(home: Plane) -> None:
    home.report(B, 1, {0: 10, 1: 11}, K[0], K[1])
    home.sees(delta(lease(0, A, 50)))
    assert home.find(K[0], K[1], shards=(0, 1)) == ([set(), {B}], {})
    assert home.report(B, 2, {0: 10}, K[0]).moved == [(0, 1, 50, A)]
    assert home.report(B, 3, {0: 50}, K[0]).moved == []


# --- the lease ---


def test_a_home_takes_no_reports_once_its_lease_could_have_ended_but_answers_lookups(home: Plane) -> None:
    home.report(B, 1, {0: 10}, K[0])
    home.now += VALID_S - 0.01
    home.report(B, 2, {0: 10}, key(0, 1))
    home.now += 0.01
    assert home.report(B, 3, {0: 10}, key(0, 2)).moved == [(0, 1, 10, A)], "it knows nobody better"
    assert home.find(key(0, 1), key(0, 2), shards=(0,)) == ([{B}, set()], {})
    home.sees(delta(revision=210))
    assert home.report(B, 4, {0: 10}, key(0, 2)).moved == [], "renewed"


def test_a_home_whose_lease_is_lost_takes_no_report_and_answers_lookups_until_another_is_known(home: Plane) -> None:
    home.report(B, 1, {0: 10}, K[0])
    [renew] = [call for call in home.metadata.poll(home.now + HEARTBEAT_INTERVAL_S) if isinstance(call, StoreCall)]
    home.metadata.failed(renew, NotFound("lease 101 has expired"), home.now)
    assert home.find(K[0], shards=(0,)) == ([{B}], {})
    assert home.report(B, 2, {0: 10}, K[0]).moved == [(0, 1, 10, A)]
    assert home.metadata.statistics()["shards_held"] == 0 and not asks(home.poll(after_s=ASK_INVENTORY_INTERVAL_S))
    home.metadata.homes.observe(0, Token(1, 20), B)
    home.poll()
    assert home.find(K[0], shards=(0,)) == ([set()], {0: (20, B)})


def test_handing_over_ends_taking_reports_at_once_and_lookups_with_the_next_home(home: Plane) -> None:
    home.report(B, 1, {0: 10}, K[0])
    home.metadata.leases.given_back([0], home.now)
    home.poll()
    assert home.find(K[0], shards=(0, 1)) == ([{B}], {})
    assert home.report(B, 2, {0: 10}, K[0]).moved == [(0, 1, 10, A)]
    home.metadata.homes.observe(0, Token(1, 20), B)
    home.poll()
    assert home.find(K[0], shards=(0, 1)) == ([set()], {0: (20, B)})


def test_a_stranger_cannot_ask_for_inventories(home: Plane) -> None:
    with pytest.raises(Unavailable, match="x/1 is not known here yet"):
        home.metadata.serve(AskInventory("x/1", [(0, 1, 99)]), home.now)
    assert home.metadata.homes.home(0) == A


# --- asking for inventories ---


def asks(calls: list[PeerCall]) -> dict[WorkerId, PeerCall]:
    return {call.to: call for call in calls if isinstance(call.message, AskInventory)}


def test_a_new_home_asks_all_others_for_what_it_has_not_been_told() -> None:
    plane = Plane(A)
    said = asks(plane.sees(everything([A, B, C], {0: (A, 10), 1: (A, 11), 2: (B, 12)})))
    assert set(said) == {B, C}
    assert said[B].message == AskInventory(A, [(0, 1, 10), (1, 1, 11)])
    for call in said.values():
        plane.metadata.answered(call, Fenced([]), plane.now)
    plane.report(B, 1, {0: 10, 1: 11})
    plane.report(C, 1, {0: 10})
    again = asks(plane.poll(after_s=ASK_INVENTORY_INTERVAL_S))
    assert set(again) == {C} and again[C].message == AskInventory(A, [(1, 1, 11)])


def test_who_does_not_answer_is_asked_again_and_nobody_twice_at_once() -> None:
    plane = Plane(A)
    said = asks(plane.sees(everything([A, B], {0: (A, 10)})))
    assert asks(plane.poll(after_s=ASK_INVENTORY_INTERVAL_S)) == {}, "under way"
    plane.metadata.failed(said[B], Unavailable("cut"), plane.now)
    again = asks(plane.poll())
    assert set(again) == {B}
    plane.metadata.failed(again[B], Unavailable("cut"), plane.now)
    assert asks(plane.poll()) == {}
    assert plane.metadata.wake_at() <= plane.now + ASK_INVENTORY_INTERVAL_S
    assert set(asks(plane.poll(after_s=ASK_INVENTORY_INTERVAL_S))) == {B}


def test_an_ask_that_is_fenced_ends_being_the_home() -> None:
    plane = Plane(A)
    said = asks(plane.sees(everything([A, B], {0: (A, 10), 1: (A, 11)})))
    plane.metadata.answered(said[B], Fenced([(0, 1, 20, C)]), plane.now)
    assert plane.find(K[0], shards=(0, 1)) == ([set()], {0: (20, C)})
    assert asks(plane.poll(after_s=ASK_INVENTORY_INTERVAL_S))[B].message == AskInventory(A, [(1, 1, 11)])


def test_who_is_asked_tells_everything_again() -> None:
    plane = Plane(B)
    plane.save(K[0])
    plane.sees(everything([A, B], {0: (A, 10)}))
    sent = plane.metadata.reporter._streams[A].sent
    assert sent is not None and list(sent.listed_added) == [K[0]]
    assert plane.serve(AskInventory(A, [(0, 1, 10)])) == Fenced([])
    plane.metadata.answered(PeerCall(A, sent, 2.0), Reported([], []), plane.now)
    [call] = plane.poll()
    assert isinstance(call.message, ReportKeys) and (call.message.reset, list(call.message.listed_added)) == (
        [0],
        [K[0]],
    )


def test_a_worker_that_left_and_came_back_is_asked_anew(home: Plane) -> None:
    for call in list(home.metadata._asked.values()):
        home.metadata.answered(call, Fenced([]), home.now)
    home.report(B, 1, {0: 10, 1: 11}, K[0])
    home.sees(delta(deleted=[worker_key(B)], revision=201))
    assert home.find(K[0], shards=(0,)) == ([set()], {})
    with pytest.raises(Unavailable, match="b/1 is not known here yet"):
        home.report(B, 2, {0: 10}, K[0])
    said = home.sees(delta(entry(worker(B)), revision=202))
    assert B in asks(said)
    home.report(B, 3, {0: 10}, K[0])
    assert home.find(K[0], shards=(0,)) == ([{B}], {})


# --- another life of the store ---


def test_an_earlier_life_of_the_store_changes_nothing_and_is_one_line(home: Plane) -> None:
    home.sees(everything([A, B, C], {0: (A, 5), 2: (B, 6)}, revision=7, incarnation=3))
    with pytest.raises(ProtocolError, match=r"of an earlier life \(2\) than the one known here \(3\)"):
        home.sees(everything([A, B], {0: (B, 900)}, revision=900, incarnation=2))
    assert home.metadata.leases.held == {0: token(5, 3)} and home.metadata.homes.home(0) == A


def test_a_cluster_that_is_cut_otherwise_begins_anew_and_reports_are_not_taken_for_late_ones() -> None:
    plane = Plane(A)
    plane.save(K[0])
    plane.sees(everything([A, B], {0: (B, 10)}))
    for _ in range(3):
        sent = plane.metadata.reporter._streams[B].sent
        assert sent is not None
        plane.metadata.answered(PeerCall(B, sent, 2.0), Reported([], []), plane.now)
        plane.poll(after_s=REPORT_INTERVAL_S)
    before = plane.metadata.reporter._streams[B].sent
    plane.sees(everything([A, B], {0: (B, 5), 5: (A, 6)}, revision=7, incarnation=2, shards=8))
    after = plane.metadata.reporter._streams[B].sent
    assert before is not None and after is not None
    assert after.number > before.number and after.shards == [(0, 2, 5)] and after.reset == [0]
    assert plane.find(K[1], shards=(5, 1)) == ([set()], {1: (0, "")})
    assert plane.metadata.statistics()["shards"] == 8


# --- several of them ---


class Plant:
    """Planes that talk to each other at once and lose nothing; a plane that is down answers nobody."""

    def __init__(self, *ids: WorkerId) -> None:
        self.planes = {each: Plane(each) for each in ids}
        self.down: set[WorkerId] = set()
        self.asked: list[tuple[WorkerId, WorkerId]] = []

    def see(self, changes: Changes) -> None:
        """A second passes, the store tells, and they talk until nobody has anything more to say."""
        for plane in self.planes.values():
            plane.now += 1.0
        calls = [
            (who, call) for who, plane in self.planes.items() if who not in self.down for call in plane.sees(changes)
        ]
        for _ in range(50):
            for who, call in calls:
                self.carry(who, call)
            calls = [
                (who, call) for who, plane in self.planes.items() if who not in self.down for call in plane.poll(0.02)
            ]
            if not calls:
                return
        raise AssertionError("they talk for ever")

    def carry(self, who: WorkerId, call: PeerCall) -> None:
        caller = self.planes[who]
        try:
            if call.to in self.down or call.to not in self.planes:
                raise Unavailable("down")
            reply = self.planes[call.to].serve(call.message)
            assert type(reply) is ANSWERS[type(call.message)]
        except TensorcastError as error:
            caller.metadata.failed(call, error, caller.now)
        else:
            caller.metadata.answered(call, reply, caller.now)

    def find(self, who: WorkerId, *keys: bytes) -> list[set[str]]:
        lookup = self.planes[who].metadata.lookup(keys)
        pending = lookup.first()
        while pending:
            ask = pending.pop()
            self.asked.append((who, ask.home))
            if ask.home not in self.down:
                reply = self.planes[ask.home].serve(ask.message)
                assert isinstance(reply, PagesFound)
                pending += lookup.answered(ask, reply)
        return [set(holders) for holders in lookup.holders]


def test_everybody_finds_what_everybody_has() -> None:
    plant = Plant(A, B, C)
    plant.planes[B].save(K[0], K[2])
    plant.planes[C].save(K[0], K[1])
    plant.see(everything([A, B, C], {0: (A, 10), 1: (A, 11), 2: (B, 12), 3: (B, 13)}))
    for who in (A, B, C):
        assert plant.find(who, *K) == [{B, C}, {C}, {B}, set()]


def test_a_shard_that_is_taken_over_is_rebuilt_from_the_inventories() -> None:
    plant = Plant(A, B, C)
    plant.planes[B].save(K[0])
    plant.planes[C].save(K[0], K[2])
    plant.see(everything([A, B, C], {0: (A, 10), 2: (B, 12)}))
    plant.down.add(A)
    assert plant.find(B, *K) == [set(), set(), {C}, set()], "nobody to ask"
    plant.see(delta(lease(0, C, 20), deleted=[worker_key(A)], revision=201))
    assert plant.find(B, K[0], K[2]) == [{B, C}, {C}]


def test_a_caller_that_has_not_heard_of_it_is_redirected_once_and_learns() -> None:
    plant = Plant(A, B, C)
    plant.planes[B].save(K[0])
    plant.see(everything([A, B, C], {0: (A, 10)}))
    lagging = plant.planes.pop(C)
    plant.see(delta(lease(0, B, 20), revision=201))
    plant.planes[C] = lagging
    assert plant.find(C, K[0]) == [{B}] and plant.asked == [(C, A), (C, B)]
    assert plant.find(C, K[0]) == [{B}] and plant.asked[2:] == [(C, B)]
    assert lagging.metadata.view.shards[0].worker_id == A


def test_a_home_that_forgot_a_worker_hears_from_it_again() -> None:
    plant = Plant(A, B)
    plant.planes[B].save(K[0])
    plant.see(everything([A, B], {0: (A, 10)}))
    plant.planes[A].metadata.catalog.keep_only([A])
    assert plant.find(B, K[0]) == [set()]
    plant.see(delta(revision=201))
    assert plant.find(B, K[0]) == [{B}]


def test_a_report_to_a_home_that_is_away_arrives_when_it_is_back() -> None:
    plant = Plant(A, B)
    plant.see(everything([A, B], {0: (A, 10)}))
    plant.down.add(A)
    plant.planes[B].save(K[0])
    for _ in range(3):
        for call in plant.planes[B].poll(after_s=REPORT_RETRY_S):
            plant.carry(B, call)
    plant.down.clear()
    plant.see(delta(revision=201))
    assert plant.find(B, K[0]) == [{B}]
