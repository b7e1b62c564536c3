"""A batch lookup: one question per home, one redirect, answers in the order of the keys, and nonsense is a miss."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcast_connector.core.homes import Homes
from tensorcast_connector.core.lookup import Ask, Lookup
from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.types import WorkerId
from tensorcast_connector.wire.codec import pack_indexes
from tensorcast_connector.wire.messages import PagesFound, ShardAt
from tests.core.made import SHARDS, A, B, C, D, find, key, token


def homes(*ids: WorkerId | None) -> Homes:
    """The home of each shard."""
    known = Homes(SHARDS)
    for shard, home in enumerate(ids):
        if home is not None:
            known.observe(shard, token(10), home)
    return known


def found(holders: Sequence[Sequence[str]], moved: Sequence[ShardAt] = ()) -> PagesFound:
    """An answer with its own holders for every key."""
    return PagesFound([[], *map(list, holders)], pack_indexes(range(1, len(holders) + 1)), list(moved))


def of(asks: Sequence[Ask]) -> dict[WorkerId, Ask]:
    assert len({ask.home for ask in asks}) == len(asks), "one question per home"
    return {ask.home: ask for ask in asks}


KEYS = [key(0), key(1), key(2), key(0, 1), key(3), key(1, 1)]


def test_keys_are_grouped_by_home_and_answers_put_together() -> None:
    lookup = Lookup(KEYS, homes(A, B, A, C))
    asks = of(lookup.first())
    assert {home: list(ask.positions) for home, ask in asks.items()} == {A: [0, 2, 3], B: [1, 5], C: [4]}
    assert list(asks[A].message.listed) == [KEYS[0], KEYS[2], KEYS[3]] and sorted(asks[A].message.shards) == [0, 2]
    assert asks[B].message == find([1], [KEYS[1], KEYS[5]])
    assert lookup.answered(asks[B], found([["x"], ["y", "z"]])) == []
    assert lookup.answered(asks[A], found([[], ["x"], ["y"]])) == []
    assert [list(who) for who in lookup.holders] == [[], ["x"], ["x"], ["y"], [], ["y", "z"]], "C has not answered"


def test_one_home_of_everything() -> None:
    lookup = Lookup(KEYS, homes(B, B, B, B))
    [ask] = lookup.first()
    assert ask.home == B and list(ask.message.listed) == KEYS and sorted(ask.message.shards) == [0, 1, 2, 3]
    lookup.answered(ask, found([[str(number)] for number in range(6)]))
    assert lookup.holders == [[str(number)] for number in range(6)]


def test_shards_whose_home_nobody_knows_are_a_miss() -> None:
    lookup = Lookup(KEYS, homes(A, None, A, None))
    [ask] = lookup.first()
    assert list(ask.positions) == [0, 2, 3]
    assert [list(who) for who in lookup.holders] == [[]] * 6
    assert Lookup(KEYS, homes()).first() == [] and Lookup(KEYS, Homes(0)).first() == []


def test_nothing_to_look_up() -> None:
    assert Lookup([], homes(A, A, A, A)).first() == [] and Lookup([], homes(A, B)).first() == []


def test_a_shard_that_has_moved_is_asked_about_at_its_new_home() -> None:
    known = homes(A, A, A, A)
    lookup = Lookup(KEYS, known)
    [ask] = lookup.first()
    moved = [(1, 1, 20, B), (2, 1, 20, C)]
    again = of(lookup.answered(ask, found([["old"]] * 6, moved)))
    assert {home: list(each.positions) for home, each in again.items()} == {B: [1, 5], C: [2]}
    assert again[B].message == find([1], [KEYS[1], KEYS[5]]) and again[B].redirected
    assert (known.home(1), known.home(2), known.home(0)) == (B, C, A), "and asked there the next time"
    lookup.answered(again[B], found([["new"], []]))
    assert [list(who) for who in lookup.holders] == [["old"], ["new"], ["old"], ["old"], ["old"], []], "C was silent"


def test_keys_of_several_lengths_are_asked_for_by_several_questions() -> None:
    keys = [key(0), b"longer" + key(1), key(2), b"longer" + key(0), b"the longest" + key(3)]
    lookup = Lookup(keys, homes(A, A, A, B))
    asks = lookup.first()
    assert [(ask.home, list(ask.positions)) for ask in asks] == [(A, [0, 2]), (A, [1, 3]), (B, [4])]
    assert [list(ask.message.listed) for ask in asks] == [[keys[0], keys[2]], [keys[1], keys[3]], [keys[4]]]
    assert [sorted(ask.message.shards) for ask in asks] == [[0, 2], [0, 1], [3]]
    assert lookup.answered(asks[1], found([["y"], ["z"]])) == []
    [again] = lookup.answered(asks[0], found([["w"], ["x"]], [(2, 1, 20, C)]))
    assert (again.home, again.positions, list(again.message.listed)) == (C, [2], [keys[2]])
    assert [list(who) for who in lookup.holders] == [["w"], ["y"], ["x"], ["z"], []]


NO_REDIRECT: dict[str, list[ShardAt]] = {
    "nobody is known": [(1, 0, 0, "")],
    "it is waiting for the store": [(1, 1, 10, A)],
    "it knows less than we do": [(1, 1, 5, C)],
    "a shard that does not exist": [(99, 1, 20, C)],
    "a shard that was not asked about": [(3, 1, 20, C)],
}


@pytest.mark.parametrize("name", NO_REDIRECT)
def test_a_redirect_to_nowhere_is_not_followed(name: str) -> None:
    lookup = Lookup([key(1)], homes(A, A, A, A))
    [ask] = lookup.first()
    assert lookup.answered(ask, found([["x"]], NO_REDIRECT[name])) == []
    assert lookup.holders == [["x"]], "its guess is better than nothing"


def test_a_redirect_is_followed_once_and_what_the_second_says_is_learnt() -> None:
    known = homes(A, A, A, A)
    lookup = Lookup([key(1)], known)
    [ask] = lookup.first()
    [again] = lookup.answered(ask, found([[]], [(1, 1, 20, B)]))
    assert lookup.answered(again, found([[]], [(1, 1, 30, C)])) == []
    assert known.home(1) == C
    assert [each.home for each in Lookup([key(1)], known).first()] == [C]


def test_a_home_that_we_know_better_is_asked_instead() -> None:
    """It was learnt while the question was on its way."""
    known = homes(A, A, A, A)
    lookup = Lookup([key(1)], known)
    [ask] = lookup.first()
    known.observe(1, token(30), C)
    [again] = lookup.answered(ask, found([[]], [(1, 1, 20, B)]))
    assert again.home == C


NONSENSE = {
    "too few": found([["x"]]),
    "too many": found([["x"]] * 3),
    "an index that is none": PagesFound([[], ["x"]], pack_indexes([1, 7]), []),
    "half an index": PagesFound([[], ["x"]], pack_indexes([1, 1])[:-1], []),
    "no holders at all": PagesFound([], pack_indexes([0, 0]), []),
    "nonsense with a redirect": PagesFound([], b"x", [(1, 1, 20, B)]),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_an_answer_that_does_not_fit_is_a_miss_and_one_line(name: str) -> None:
    lookup = Lookup([key(1), key(2)], homes(A, A, A, A))
    [ask] = lookup.first()
    with pytest.raises(ProtocolError, match=r"^a/1 answers") as error:
        lookup.answered(ask, NONSENSE[name])
    assert "\n" not in str(error.value) and [list(who) for who in lookup.holders] == [[], []]


@settings(derandomize=True, max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from([A, B, C, D, None]), min_size=SHARDS, max_size=SHARDS),
    st.lists(st.builds(key, st.integers(0, 255), st.integers(0, 3)), max_size=12),
)
def test_whoever_the_homes_are_every_key_is_asked_about_once_at_its_own(
    at: list[WorkerId | None], keys: list[bytes]
) -> None:
    lookup = Lookup(keys, homes(*at))
    asked: list[int] = []
    for ask in lookup.first():
        asked += ask.positions
        assert [keys[position] for position in ask.positions] == list(ask.message.listed)
        assert {each[-1] % SHARDS for each in list(ask.message.listed)} == set(ask.message.shards)
        assert all(at[each[-1] % SHARDS] == ask.home for each in list(ask.message.listed))
        lookup.answered(ask, found([[f"{ask.home} {position}"] for position in ask.positions]))
    assert sorted(asked) == [position for position, each in enumerate(keys) if at[each[-1] % SHARDS]]
    assert [list(who) for who in lookup.holders] == [
        [f"{home} {position}"] if (home := at[each[-1] % SHARDS]) else [] for position, each in enumerate(keys)
    ]
