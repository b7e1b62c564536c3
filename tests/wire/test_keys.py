"""Packed keys are a sequence of keys, and nothing that is not whole is one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.wire.keys import Keys, by_length, pack
from tensorcast_connector.wire.messages import FindKeys, FindPages, Ping, ReportKeys, ReportPages, in_version

some = st.integers(1, 40).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), max_size=20))


@settings(derandomize=True, max_examples=100)
@given(some)
def test_what_was_packed_is_there(keys: list[bytes]) -> None:
    packed = pack(keys)
    assert list(packed) == keys and len(packed) == len(keys)
    assert [packed[at] for at in range(-len(keys), len(keys))] == keys * 2
    assert packed[1:3] == keys[1:3] and packed[::-1] == keys[::-1]
    assert packed.last_bytes() == {key[-1] for key in keys}
    assert Keys(packed.packed, packed.key_bytes)[:] == keys
    for beyond in (len(keys), -len(keys) - 1):
        with pytest.raises(IndexError):
            packed[beyond]


BROKEN = {
    "half a key": (b"12345", 4),
    "no length": (b"1234", 0),
    "less than none": (b"1234", -2),
    "too long": (b"1234", 5),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_whole_is_no_key(name: str) -> None:
    packed, size = BROKEN[name]
    with pytest.raises(ProtocolError, match=rf"{len(packed)} bytes are no whole number of page keys of {size} bytes"):
        Keys(packed, size)


def test_without_keys_the_length_does_not_matter() -> None:
    for size in (0, -1, 48):
        assert list(Keys(b"", size)) == [] and Keys(b"", size).last_bytes() == set()
    assert repr(Keys(b"abcd", 2)) == "<2 keys of 2 bytes>"


@pytest.mark.parametrize("keys", [[b"a", b"bc"], [b"abc", b"d"], [b"ab", b"c", b"de"], [b"", b"ab"], [b"", b""]])
def test_keys_of_several_lengths_are_not_packed(keys: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        pack(keys)


@settings(derandomize=True, max_examples=100)
@given(st.lists(st.binary(min_size=1, max_size=4), max_size=20))
def test_every_key_is_in_the_group_of_its_length(keys: list[bytes]) -> None:
    groups = by_length(keys)
    assert sorted(at for group in groups for at in group) == list(range(len(keys)))
    lengths = [{len(keys[at]) for at in group} for group in groups]
    assert all(len(each) == 1 for each in lengths) and len(set().union(*lengths)) == len(groups)


def test_the_former_version_is_told_the_same_in_its_words() -> None:
    find, report = FindKeys([1, 2], 2, b"aabb"), ReportKeys("a/1", 5, [(1, 7, 9)], [1], 2, b"aabb", b"cc")
    assert in_version(2, find) == FindPages([1, 2], [b"aa", b"bb"])
    assert in_version(2, report) == ReportPages("a/1", 5, [(1, 7, 9)], [1], [b"aa", b"bb"], [b"cc"])
    assert in_version(3, find) is find and in_version(3, report) is report
    ping = Ping()
    assert in_version(2, ping) is ping
