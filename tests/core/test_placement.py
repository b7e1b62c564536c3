"""Rendezvous hashing: the same for everybody, even, and stable when members come and go."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcast_connector.core.placement import (
    choose_source,
    hrw_rank,
    shard_of,
    shard_ranking,
    valid_shard_count,
)
from tensorcast_connector.types import WorkerId

WORKERS = [WorkerId(f"host-{i}/0000000{i}") for i in range(5)]
members = st.lists(st.text(max_size=6).map(WorkerId), unique=True, min_size=1, max_size=6)


@settings(derandomize=True, max_examples=40)
@given(st.binary(max_size=8), members, st.randoms(use_true_random=False))
def test_the_order_of_the_members_does_not_matter(what: bytes, workers: list[WorkerId], chance: object) -> None:
    shuffled = list(workers)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert hrw_rank(what, shuffled) == hrw_rank(what, workers)
    assert sorted(hrw_rank(what, workers)) == sorted(workers)
    assert choose_source(what, shuffled) == hrw_rank(what, workers)[0]


@settings(derandomize=True, max_examples=40)
@given(st.binary(max_size=8), members)
def test_when_a_member_leaves_only_what_it_had_moves(what: bytes, workers: list[WorkerId]) -> None:
    ranked = hrw_rank(what, workers)
    for gone in workers:
        assert hrw_rank(what, set(workers) - {gone}) == [each for each in ranked if each != gone]


def test_sources_are_spread() -> None:
    counts = Counter(choose_source(i.to_bytes(4, "big"), WORKERS) for i in range(5000))
    assert set(counts) == set(WORKERS) and min(counts.values()) > 850


def test_nobody_there() -> None:
    assert shard_ranking(0, []) == [] and choose_source(b"k", []) is None and hrw_rank(b"k", []) == []


def test_literal_ranking() -> None:
    """All workers of a cluster must agree, whatever their version: this may not change by accident."""
    assert [each[:6] for each in hrw_rank(b"shard/0", WORKERS)] == ["host-4", "host-2", "host-3", "host-0", "host-1"]
    assert shard_ranking(0, WORKERS) == hrw_rank(b"shard/0", WORKERS)
    firsts = [shard_ranking(shard, WORKERS)[0][:6] for shard in range(1, 6)]
    assert firsts == ["host-2", "host-0", "host-3", "host-4", "host-0"]


def test_shards_are_spread_over_the_workers() -> None:
    firsts = Counter(shard_ranking(shard, WORKERS)[0] for shard in range(256))
    assert set(firsts) == set(WORKERS) and min(firsts.values()) > 30


@pytest.mark.parametrize(("key", "shards", "shard"), [(b"\x05\xff", 64, 63), (b"\x05\x00", 64, 0), (b"\x41", 64, 1),
                                                      (b"x\xff", 256, 255), (b"\x07", 1, 0)])  # fmt: skip
def test_a_pages_shard_comes_from_its_last_byte(key: bytes, shards: int, shard: int) -> None:
    assert shard_of(key, shards) == shard


def test_the_number_of_shards_is_a_power_of_two_up_to_a_byte() -> None:
    assert [count for count in range(-1, 1025) if valid_shard_count(count)] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
