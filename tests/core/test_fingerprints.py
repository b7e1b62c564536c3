"""Fingerprints of keys: one for each key, spread over all bits, the same for packed and listed keys, with the key's last byte."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcast_connector.core.fingerprints import distinct, of
from tensorcast_connector.core.page_table import PageTable
from tensorcast_connector.wire.keys import pack

keys = st.lists(st.binary(min_size=1, max_size=90), max_size=20)
COUNT = 20_000


@settings(derandomize=True, max_examples=100)
@given(keys)
def test_the_same_of_listed_and_packed_keys_and_one_for_each_key(keys: list[bytes]) -> None:
    found = of(keys).tolist()
    assert found == [int(of(pack([key]))[0]) for key in keys]
    assert len(set(found)) == len(set(keys))
    assert [page >> 56 for page in found] == [key[-1] for key in keys]


@settings(derandomize=True, max_examples=100)
@given(st.binary(min_size=1, max_size=80), st.integers(0, 79), st.integers(1, 255))
def test_every_byte_counts(key: bytes, at: int, change: int) -> None:
    at %= len(key)
    other = key[:at] + bytes([key[at] ^ change]) + key[at + 1 :]
    for pair in ([key, other], [key, key + b"\0"], [key, b"\0" + key]):
        assert len(set(of(pair).tolist())) == 2


ALIKE = {
    "counters at the end": [b"k" * 16 + number.to_bytes(32, "big") for number in range(COUNT)],
    "counters before the shard": [b"k" * 16 + number.to_bytes(31, "big") + b"s" for number in range(COUNT)],
    "counters at the beginning": [b"k" * 16 + number.to_bytes(31, "little") + b"s" for number in range(COUNT)],
    "short hashes": [b"k" * 16 + number.to_bytes(8, "big") for number in range(COUNT)],
    "of odd length": [b"page-%d" % number for number in range(COUNT)],
    "decimal": [b"k" * 16 + b"%031d" % number + b"s" for number in range(COUNT)],
    "keyspaces": [number.to_bytes(16, "big") + b"h" * 32 for number in range(COUNT)],
    "keyspaces and counters": [
        space.to_bytes(16, "big") + number.to_bytes(8, "big") for space in range(4) for number in range(COUNT // 4)
    ],
    "digests": [random.Random(number).randbytes(48) for number in range(COUNT)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALIKE)
def test_keys_that_are_alike_have_fingerprints_that_are_not(name: str) -> None:
    """None twice; the upper half as even as by chance, when chi-squared per degree of freedom is 1; and there is room for all."""
    found = of(ALIKE[name])
    assert len(distinct(found)) == COUNT
    expected = COUNT / 1024
    counts = np.bincount(((found >> np.uint64(32)) & np.uint64(1023)).astype(int), minlength=1024)
    assert ((counts - expected) ** 2).sum() / expected / 1023 < 1.3
    table = PageTable()
    table.add(distinct(found), np.ones(COUNT, dtype=np.uint32))
    assert table.pages == COUNT


def test_each_once_in_order_and_none_that_stands_for_no_page() -> None:
    assert distinct(np.array([5, 0, 7, 5, 5, 0, 1], dtype=np.uint64)).tolist() == [1, 5, 7]
    assert distinct(of([])).tolist() == [] == distinct(np.zeros(3, dtype=np.uint64)).tolist()
