"""Rendezvous hashing: the same for everybody, even, and stable when members come and go."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcast_connector.core.placement import choose_source, home_of_pages, hrw_rank
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
    assert home_of_pages([]) is None and choose_source(b"k", []) is None and hrw_rank(b"k", []) == []


def test_literal_ranking() -> None:
    """All workers of a cluster must agree, whatever their version: this may not change by accident."""
    assert [each[:6] for each in hrw_rank(b"shard/0", WORKERS)] == ["host-4", "host-2", "host-3", "host-0", "host-1"]
    assert home_of_pages(WORKERS) == hrw_rank(b"shard/0", WORKERS)[0]
