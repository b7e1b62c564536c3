"""The compact table against a dictionary: whatever is added, changed and removed, in batches of any size, and however full."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcast_connector.core import page_table
from tensorcast_connector.core.fingerprints import Fingerprints
from tensorcast_connector.core.page_table import BUCKET_SLOTS, BUCKETS_MIN, PageTable, Values


def fingerprints(numbers: Iterable[int]) -> Fingerprints:
    return np.array(list(numbers), dtype=np.uint64)


def values(numbers: Iterable[int]) -> Values:
    return np.array(list(numbers), dtype=np.uint32)


class Driven:
    """A table and the dictionary it has to agree with."""

    def __init__(self) -> None:
        self.table = PageTable()
        self.model: dict[int, int] = {}

    def put(self, pages: Iterable[int], value: int) -> None:
        """Gives pages this value, whether they are there or not; 0 removes them."""
        wanted = sorted(set(pages))
        slots, absent = self.table.find(fingerprints(wanted))
        assert set(absent.tolist()) == set(wanted) - set(self.model)
        assert set(self.table.fingerprints(slots).tolist()) == set(wanted) & set(self.model)
        self.table.set(slots, np.full(len(slots), value, dtype=np.uint32))
        if value:
            self.table.add(absent, np.full(len(absent), value, dtype=np.uint32))
            self.model.update(dict.fromkeys(wanted, value))
        else:
            for page in wanted:
                self.model.pop(page, None)
        self.table.shrink()

    def forget(self, last_bytes: set[int]) -> None:
        """Removes all pages whose keys end with one of these bytes."""
        slots = self.table.of_last_bytes(np.array([byte in last_bytes for byte in range(256)]))
        assert set(self.table.fingerprints(slots).tolist()) == {page for page in self.model if page >> 56 in last_bytes}
        self.table.set(slots, np.zeros(len(slots), dtype=np.uint32))
        self.model = {page: value for page, value in self.model.items() if page >> 56 not in last_bytes}
        self.table.shrink()

    def check(self, asked: Iterable[int] = ()) -> None:
        """They agree about all pages and about those that are `asked`, one of them twice."""
        pages = [*self.model, *asked]
        pages += pages[:1]
        assert self.table.get(fingerprints(pages)).tolist() == [self.model.get(page, 0) for page in pages]
        assert self.table.pages == len(self.model)
        self.table.check()


def strange(chance: random.Random, count: int) -> list[int]:
    return [chance.getrandbits(64) | 1 for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_random_batches(seed: int) -> None:
    """Grows and shrinks over and over; what is asked is sometimes there, sometimes was, and sometimes never was."""
    chance = random.Random(seed)
    driven, known = Driven(), strange(chance, 20)
    for step in range(1500):
        growing = step % 500 < 250
        if growing and len(driven.model) < 20_000:
            known += strange(chance, int(chance.paretovariate(0.7)) % 2000)
        batch = chance.sample(known, min(len(known), 1 + int(chance.paretovariate(0.5)) % 3000))
        driven.put(batch, chance.randrange(1, 9) if chance.random() < (0.8 if growing else 0.2) else 0)
        if chance.random() < 0.02:
            driven.forget(set(chance.sample(range(256), chance.choice([1, 20, 250]))))
        if step % 25 == 0:
            driven.check(chance.sample(known, 10) + strange(chance, 10))
    driven.check(known)


few = st.lists(st.integers(0, 40).map(lambda number: (number * 0x9E3779B97F4A7C15 + 1) % 2**64), max_size=30)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.tuples(few, st.integers(0, 3)), st.sets(st.integers(0, 255), max_size=100)), max_size=10))
def test_against_a_dictionary(steps: list[tuple[list[int], int] | set[int]]) -> None:
    driven = Driven()
    for step in steps:
        if isinstance(step, set):
            driven.forget(step)
        else:
            driven.put(*step)
        driven.check([1 << 60])


def test_nothing_is_found_in_an_empty_table() -> None:
    driven = Driven()
    driven.put([], 1)
    driven.check([256, 2**64 - 1])
    assert repr(driven.table) == f"<PageTable of 0 pages in {BUCKETS_MIN} buckets>"


@pytest.mark.slow
def test_memory_follows_the_pages_and_is_given_back() -> None:
    chance = random.Random(1)
    driven, pages = Driven(), strange(chance, 100_000)
    empty = driven.table.memory_bytes
    for first in range(0, len(pages), 4096):
        driven.put(pages[first : first + 4096], 1)
        assert driven.table.memory_bytes < 34 * len(driven.model) + 4 * empty
    for first in range(0, 90_000, 1000):
        driven.put(pages[first : first + 1000], 0)
    driven.check(pages)
    assert driven.table.memory_bytes < 90 * len(driven.model)
    driven.put(pages, 0)
    assert driven.table.memory_bytes < 2 * empty


@pytest.mark.slow
def test_removing_and_adding_for_ever_takes_no_more_memory_and_finds_no_more_slowly() -> None:
    """There are no remains of removed pages: as many buckets are read for a lookup after a thousand generations."""
    chance = random.Random(2)
    driven, generations = Driven(), [strange(chance, 100) for _ in range(10)]
    for generation in generations:
        driven.put(generation, 1)
    before = driven.table.memory_bytes
    for number in range(1000):
        driven.put(generations[number % 10], 0)
        generations[number % 10] = strange(chance, 100)
        driven.put(generations[number % 10], 1)
    driven.check()
    assert driven.table.memory_bytes == before


def crowd(count: int) -> list[int]:
    """Pages that all want the same two buckets, however many there are."""
    return [last << 56 | 5 << 32 | 3 for last in range(count)]


def test_pages_that_all_want_the_same_buckets_are_missed_and_harm_no_others() -> None:
    driven, others = Driven(), strange(random.Random(3), 1000)
    driven.put(others, 7)
    pages = crowd(200)
    driven.table.add(fingerprints(pages), values([1] * 200))
    listed = driven.table.get(fingerprints(pages)).astype(bool).sum()
    assert BUCKET_SLOTS < listed <= 2 * BUCKET_SLOTS, "as many as there is room for"
    driven.table.check()
    assert driven.table.pages == len(others) + listed
    assert driven.table.take_lost() == [1] * int(200 - listed) and driven.table.take_lost() == []
    assert driven.table.get(fingerprints(others)).tolist() == [7] * 1000


def test_a_page_finds_room_in_full_buckets_if_another_can_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_table, "FULL", 0.5)
    squeezed: list[bool] = []
    squeeze = PageTable._squeeze

    def counted(*args: Any) -> bool:
        squeezed.append(squeeze(*args))
        return squeezed[-1]

    monkeypatch.setattr(PageTable, "_squeeze", counted)
    driven, chance = Driven(), random.Random(4)
    for _ in range(50):
        driven.put(strange(chance, 100), 1)
    driven.check()
    assert len(squeezed) > 10 and all(squeezed)
