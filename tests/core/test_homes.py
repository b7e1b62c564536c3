"""Fence and routing: the highest (token, home) seen per shard, by whatever way it came."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcast_connector.core.homes import Homes
from tensorcast_connector.core.placement import BYTE_VALUES
from tensorcast_connector.types import Token, WorkerId
from tests.core.made import SHARDS, A, B, C, token

STEPS = {
    "the first": ([(token(5), A, True)], A),
    "again": ([(token(5), A, True), (token(5), A, True)], A),
    "a later grant": ([(token(5), A, True), (token(6), B, True)], B),
    "an earlier grant that comes late": ([(token(6), B, True), (token(5), A, False)], B),
    "the same token for somebody else": ([(token(5), A, True), (token(5), B, False)], A),
    "back and forth": ([(token(5), A, True), (token(6), B, True), (token(7), A, True), (token(6), B, False)], A),
    "a restored store": ([(token(900), A, True), (token(2, incarnation=2), B, True)], B),
    "before it was restored": ([(token(2, incarnation=2), B, True), (token(900), A, False)], B),
}


@pytest.mark.parametrize("name", STEPS)
def test_only_a_higher_token_counts(name: str) -> None:
    steps, home = STEPS[name]
    homes = Homes(SHARDS)
    for seen, who, accepted in steps:
        assert homes.observe(1, seen, who) is accepted
        homes.check()
    assert homes.home(1) == home and homes.home(0) is None
    assert homes.token(1) == max(seen for seen, _, _ in steps) and homes.token(0) is None


def test_what_is_told_in_a_redirect() -> None:
    homes = Homes(SHARDS)
    homes.observe(2, token(5), A)
    assert homes.at(2) == (2, 1, 5, A)
    assert homes.at(3) == (3, 0, 0, ""), "an empty home: nothing is known"
    homes.observe_all([(2, 1, 6, B), (3, 1, 4, C), (1, 9, 9, ""), (2, 1, 5, A)])
    homes.check()
    assert [homes.home(shard) for shard in range(SHARDS)] == [None, None, B, C], "an empty home says nothing"


def test_who_holds_what() -> None:
    homes = Homes(SHARDS)
    homes.observe_all([(0, 1, 5, A), (1, 1, 6, B), (2, 1, 7, A)])
    assert homes.of(A) == {0: token(5), 2: token(7)} and homes.of(C) == {}
    assert homes.workers() == {A, B}
    homes.observe(1, token(8), A)
    assert homes.workers() == {A}, "nobody reports to a former home"
    assert repr(homes) == "<Homes of 3 of 4 shards>"


@pytest.mark.parametrize("shard", [-1, SHARDS, 10**6])
def test_a_shard_that_does_not_exist(shard: int) -> None:
    homes = Homes(SHARDS)
    assert not homes.observe(shard, token(5), A)
    assert homes.home(shard) is None and not homes.workers()


def test_while_the_number_of_shards_is_unknown_nothing_is_learnt() -> None:
    homes = Homes(0)
    assert not homes.observe(0, token(5), A)
    homes.observe_all([(0, 1, 5, A)])
    homes.check()
    assert set(homes.by_byte) == {None}


@settings(derandomize=True, max_examples=40)
@given(
    st.sampled_from([1, 4, 64, 256]),
    st.lists(
        st.tuples(st.integers(0, 255), st.integers(1, 3), st.integers(1, 9), st.sampled_from([A, B, C])), max_size=20
    ),
)
def test_whatever_the_order_the_highest_token_wins(count: int, seen: list[tuple[int, int, int, WorkerId]]) -> None:
    unique = {(shard % count, Token(life, revision)): who for shard, life, revision, who in seen}
    best: dict[int, tuple[Token, WorkerId]] = {}
    homes = Homes(count)
    for (shard, at), who in unique.items():
        highest = best.get(shard)
        assert homes.observe(shard, at, who) is (highest is None or at > highest[0])
        if highest is None or at > highest[0]:
            best[shard] = at, who
    homes.check()
    for byte in range(BYTE_VALUES):
        assert homes.by_byte[byte] == best.get(byte % count, (None, None))[1]
