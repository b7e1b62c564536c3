"""The index of page locations: only what was reported, by who has begun to report, under the token that is the current one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcast_connector.core import page_table
from tensorcast_connector.core.catalog import Catalog
from tensorcast_connector.core.fingerprints import of
from tensorcast_connector.types import Token, WorkerId
from tensorcast_connector.wire.codec import unpack_indexes
from tests.core.made import SHARDS, A, B, C, key, token

K = [key(shard) for shard in range(SHARDS)]


class Driven:
    """A catalog that holds all shards, and reports in order."""

    def __init__(self, held: tuple[int, ...] = tuple(range(SHARDS))) -> None:
        self.catalog = Catalog(SHARDS)
        self.catalog.hold({shard: token(5) for shard in held})
        self.number = 0

    def report(
        self, worker: WorkerId, reset: tuple[int, ...] = (), added: tuple[bytes, ...] = (),
        removed: tuple[bytes, ...] = (), shards: tuple[int, ...] = tuple(range(SHARDS)), number: int = 0,
    ) -> list[int]:  # fmt: skip
        self.number += 1
        unknown = self.catalog.report(worker, number or self.number, shards, reset, of(added), of(removed))
        self.catalog.check()
        return unknown

    def where(self, *keys: bytes) -> list[set[str]]:
        holders, which = self.catalog.locate(of(keys))
        assert holders[0] == [], "0 is always nobody"
        return [set(holders[index]) for index in unpack_indexes(which)]


ALL = tuple(range(SHARDS))


def pages(*keys: bytes) -> set[int]:
    """As `holdings` names them."""
    return set(of(keys).tolist())


def test_what_is_reported_is_found_until_it_is_removed() -> None:
    home = Driven()
    assert home.report(A, ALL, (K[0], K[1])) == []
    assert home.report(B, ALL, (K[1],)) == []
    assert home.where(*K) == [{A}, {A, B}, set(), set()]
    home.report(A, (), (K[2],), (K[1],))
    assert home.where(*K) == [{A}, {B}, {A}, set()]
    home.report(B, (), (), (K[1], K[3]))
    assert home.where(*K) == [{A}, set(), {A}, set()]
    assert home.catalog.pages == 2
    assert repr(home.catalog) == "<Catalog 2 pages of 2 workers in 4 shards>"
    assert home.catalog.statistics() == {"catalog_pages": 2, "catalog_workers": 2}


def test_saying_the_same_twice_changes_nothing() -> None:
    home = Driven()
    home.report(A, ALL, (K[0], K[0]))
    home.report(A, (), (K[0],), (K[1],))
    assert home.where(K[0], K[1]) == [{A}, set()] and home.catalog.pages == 1
    home.report(A, (), (), (K[0],))
    home.report(A, (), (), (K[0],))
    assert home.catalog.pages == 0


def test_one_shard_can_begin_anew() -> None:
    home = Driven()
    home.report(A, ALL, tuple(K))
    home.report(B, ALL, tuple(K))
    home.report(A, (1,), (key(1, 7),))
    assert home.where(*K, key(1, 7)) == [{A, B}, {B}, {A, B}, {A, B}, {A}]
    assert home.catalog.holdings()[1] == {A: pages(key(1, 7)), B: pages(K[1])}


def test_who_has_not_begun_must_send_everything() -> None:
    home = Driven()
    assert home.report(A, (), tuple(K)) == [0, 1, 2, 3]
    assert home.catalog.pages == 0, "its beginning is missing"
    assert home.report(A, (1,), tuple(K)) == [0, 2, 3], "what is known of shard 1 counts"
    assert home.where(*K) == [set(), {A}, set(), set()]
    assert home.catalog.missing(A) == {0, 2, 3} and home.catalog.missing(B) == {0, 1, 2, 3}
    assert home.report(A, (0, 2, 3), ()) == []
    assert home.catalog.missing(A) == set()


def test_only_keys_of_shards_under_the_current_token_are_applied() -> None:
    home = Driven(held=(0, 1))
    home.report(A, (0, 1, 2), tuple(K), shards=(0, 2))
    assert home.where(*K) == [{A}, set(), set(), set()]
    assert home.catalog.missing(A) == {1}, "shard 1 came under another token, and 2 is not held here"


LATE = {
    "the same number": 5,
    "an earlier one": 4,
}


@pytest.mark.parametrize("name", LATE)
def test_a_late_report_is_ignored(name: str) -> None:
    home = Driven()
    home.report(A, ALL, (K[0],), number=5)
    assert home.report(A, ALL, (K[1],), (K[0],), number=LATE[name]) == []
    assert home.where(K[0], K[1]) == [{A}, set()]
    home.report(B, ALL, (K[1],), number=1)
    assert home.where(K[1]) == [{B}], "numbers are of each worker"


def test_a_late_report_is_late_also_after_its_worker_left_and_came_back() -> None:
    home = Driven()
    home.report(A, ALL, (K[0],), number=5)
    home.catalog.keep_only([B])
    assert home.where(K[0]) == [set()]
    assert home.report(A, ALL, (K[0],), number=5) == [] and home.where(K[0]) == [set()]
    assert home.report(A, (), (K[1],), number=6) == [0, 1, 2, 3], "it left, so all is forgotten"
    home.report(A, ALL, (K[2],), number=7)
    assert home.where(*K) == [set(), set(), {A}, set()]


def test_another_token_voids_a_shard() -> None:
    home = Driven()
    home.report(A, ALL, tuple(K))
    home.report(B, ALL, (K[1],))
    home.catalog.hold({0: token(5), 1: token(9), 3: token(5)})
    home.catalog.check()
    assert home.where(*K) == [{A}, set(), set(), {A}], "1 came back under another token, 2 is gone"
    assert home.catalog.missing(A) == {1}
    assert home.report(A, (), (K[1],)) == [1]
    home.catalog.hold({})
    home.catalog.check()
    assert home.catalog.pages == 0 and home.catalog.holdings() == {} and home.catalog.missing(A) == set()


def test_holding_the_same_again_forgets_nothing() -> None:
    home = Driven()
    home.report(A, ALL, tuple(K))
    home.catalog.hold({shard: token(5) for shard in range(SHARDS)})
    assert home.where(*K) == [{A}] * 4


def test_workers_that_left_are_forgotten_and_their_place_is_used_again() -> None:
    home = Driven()
    for each in (A, B, C):
        home.report(each, ALL, tuple(K))
    home.catalog.keep_only([A, C])
    home.catalog.check()
    assert home.where(*K) == [{A, C}] * 4
    home.report(WorkerId("new/1"), ALL, (K[0],))
    assert home.where(K[0], K[1]) == [{A, C, "new/1"}, {A, C}]
    home.catalog.keep_only([])
    assert home.catalog.pages == 0


def test_many_workers() -> None:
    """More than fit into a machine word."""
    home = Driven()
    workers = [WorkerId(f"w{number}/1") for number in range(100)]
    for each in workers:
        home.report(each, ALL, (K[0],))
    assert home.where(K[0]) == [set(workers)]
    home.catalog.keep_only(workers[::2])
    assert home.where(K[0]) == [set(workers[::2])]


def test_pages_that_find_no_room_are_missed_and_harm_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_table, "FULL", 10)
    home = Driven()
    many = tuple(key(number % SHARDS, number) for number in range(1600))
    home.report(A, ALL, many[:800])
    home.report(B, ALL, many)
    assert 100 < home.catalog.pages < 800
    assert {frozenset(who) for who in home.where(*many)} == {frozenset(), frozenset([A, B])}, "A's fill everything"
    home.report(A, (), many[800:], many)
    home.report(B, (), (), many)
    assert home.where(*many[:800]) == [set()] * 800
    home.catalog.keep_only([])
    home.catalog.check()
    assert home.catalog.pages == 0


def test_many_sets_of_holders_are_numbered_anew_in_each_answer() -> None:
    """As few as there are: otherwise all sets of the index would be in every answer."""
    home = Driven()
    workers = [WorkerId(f"w{number}/1") for number in range(8)]
    pages = [key(number % SHARDS, number) for number in range(256)]
    for at, each in enumerate(workers):
        home.report(each, ALL, tuple(page for number, page in enumerate(pages) if number >> at & 1))
    assert len(home.catalog.locate(of(pages))[0]) == 256
    assert home.catalog.locate(of(pages[3:5]))[0] == [[], ["w0/1", "w1/1"], ["w2/1"]]
    assert home.where(*pages) == [
        {each for at, each in enumerate(workers) if number >> at & 1} for number in range(256)
    ]
    assert home.catalog.locate(of([]))[0] == [[]]


def test_without_shards_nothing_is_listed() -> None:
    catalog = Catalog(0)
    assert catalog.report(A, 1, [0], [0], of([b"x"]), of([])) == []
    assert catalog.locate(of([b"x"]))[0] == [[]] and catalog.missing(A) == set()


keys = st.lists(st.builds(key, st.integers(0, SHARDS - 1), st.integers(0, 1)), unique=True, max_size=4)
shards = st.frozensets(st.integers(0, SHARDS - 1))
report = st.tuples(st.just("report"), st.sampled_from([A, B, C]), shards, shards, keys, keys)
leave = st.tuples(st.just("leave"), st.sampled_from([A, B, C]), shards, shards, keys, keys)
hold = st.tuples(st.just("hold"), st.sampled_from([A]), shards, shards, keys, keys)


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.lists(st.one_of(report, report, leave, hold), max_size=15))
def test_against_a_set_per_worker_and_shard(
    steps: list[tuple[str, WorkerId, frozenset[int], frozenset[int], list[bytes], list[bytes]]],
) -> None:
    home = Driven(held=())
    held: dict[int, Token] = {}
    model: dict[tuple[WorkerId, int], set[bytes]] = {}  # of those that have begun
    for number, (kind, worker, one, other, added, removed) in enumerate(steps):
        if kind == "leave":
            home.catalog.keep_only({A, B, C} - {worker})
            model = {at: pages for at, pages in model.items() if at[0] != worker}
        elif kind == "hold":
            now = {shard: token(number) if shard in other else held.get(shard, token(number)) for shard in one}
            home.catalog.hold(now)
            model = {at: pages for at, pages in model.items() if now.get(at[1]) == held.get(at[1]) is not None}
            held = now
        else:
            for shard in one & other & set(held):
                model[worker, shard] = set()
            known = {shard for shard in one & set(held) if (worker, shard) in model}
            unknown = home.report(worker, tuple(other), tuple(added), tuple(removed), tuple(one))
            assert unknown == sorted((one & set(held)) - known)
            for shard in known:
                there = model[worker, shard]
                there -= {each for each in removed if each[-1] == shard}
                there |= {each for each in added if each[-1] == shard}
        home.catalog.check()
        assert home.catalog.pages == len(set().union(*model.values()))
        assert home.catalog.holdings() == {
            shard: {who: pages(*model[who, shard]) for who in (A, B, C) if (who, shard) in model} for shard in held
        }
