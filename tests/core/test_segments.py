"""The allocator against a model that keeps everything in plain dicts and searches."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tensorcast_connector.core.segments import Segments
from tensorcast_connector.errors import ProtocolError

ALIGN = 16
KEYS = [bytes([65 + i]) for i in range(12)]
OWNERS = ["one", "two", 3]
keys, owners, holders = st.sampled_from(KEYS), st.sampled_from(OWNERS), st.sampled_from(["x", "y", ("z", 1)])


class AgainstModel(RuleBasedStateMachine):
    """Reserved and held pages stay, bytes are never shared, and only committed pages nobody holds ever disappear."""

    @initialize(arena=st.integers(16, 400), slab=st.integers(2 * ALIGN, 128))
    def start(self, arena: int, slab: int) -> None:
        self.segments = Segments(arena, slab, ALIGN)
        self.arena = arena
        self.slabs = -(-arena // slab)
        self.page_max = self.segments.statistics()["bytes_total"] // self.slabs
        self.reserved: dict[bytes, object] = {}
        self.committed: dict[bytes, int] = {}
        self.ranges: dict[bytes, tuple[int, int]] = {}
        self.holds: dict[object, set[bytes]] = {}

    def slot(self, key: bytes) -> int:
        start, end = self.ranges[key]
        return -(-(end - start) // ALIGN)

    def held(self) -> set[bytes]:
        return set().union(*self.holds.values()) if self.holds else set()

    @rule(owner=owners, key=keys, length=st.one_of(st.integers(1, 40), st.integers(1, 130)))
    def reserve(self, owner: object, key: bytes, length: int) -> None:
        if length > self.page_max:
            with pytest.raises(ProtocolError, match=f"a page of {length} bytes"):
                self.segments.reserve(owner, key, length)
            return
        got = self.segments.reserve(owner, key, length)
        evicted = self.segments.take_evicted()
        assert not set(evicted) & self.held(), "a held page was evicted"
        assert not set(evicted) & set(self.reserved), "a reserved page was evicted"
        for each in evicted:
            del self.committed[each], self.ranges[each]
        if key in self.reserved or key in self.committed:
            assert got is None and not evicted
        elif got is None:
            # Only if every slab has a page in use, and no page of this size could have gone.
            busy = self.held() | set(self.reserved)
            assert {self.ranges[each][0] // self.page_max for each in busy} == set(range(self.slabs)) and not evicted
            assert not any(self.slot(each) == -(-length // ALIGN) for each in set(self.committed) - busy)
        else:
            assert got.length == length and got.offset >= 0 and got.end <= self.arena
            self.reserved[key] = owner
            self.ranges[key] = (got.offset, got.end)

    @rule(owner=owners, key=keys, digest=st.integers(0, 2**64 - 1))
    def commit(self, owner: object, key: bytes, digest: int) -> None:
        mine = self.reserved.get(key) == owner and key in self.reserved
        assert self.segments.commit(owner, key, digest) == mine
        if mine:
            del self.reserved[key]
            self.committed[key] = digest

    @rule(owner=owners, key=keys)
    def abort(self, owner: object, key: bytes) -> None:
        mine = self.reserved.get(key) == owner and key in self.reserved
        assert self.segments.abort(owner, key) == mine
        if mine:
            del self.reserved[key], self.ranges[key]

    @rule(owner=owners)
    def owner_ends(self, owner: object) -> None:
        self.segments.abort_all(owner)
        for key in [key for key, each in self.reserved.items() if each == owner]:
            del self.reserved[key], self.ranges[key]

    @rule(holder=holders, some=st.lists(keys, max_size=3))
    def hold(self, holder: object, some: list[bytes]) -> None:
        missing = self.segments.hold(holder, some)
        assert missing == [key for key in some if key not in self.committed]
        if here := set(some) & set(self.committed):
            self.holds.setdefault(holder, set()).update(here)

    @rule(holder=holders)
    def release(self, holder: object) -> None:
        self.segments.release(holder)
        self.holds.pop(holder, None)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "segments"):
            return
        self.segments.check()
        assert sorted(self.segments.keys()) == sorted(self.committed)
        for key in KEYS:
            assert self.segments.resident(key) == (key in self.committed)
            assert self.segments.owner(key) == self.reserved.get(key)
        for key, digest in self.committed.items():
            assert self.segments.digest(key) == digest
            where = self.segments.range(key)
            assert (where.offset, where.end) == self.ranges[key], "a page moved"
        for (_, end), (start, _) in itertools.pairwise(sorted(self.ranges.values())):
            assert end <= start, "two pages share bytes"
        counts = self.segments.statistics()
        assert counts["pages"] == len(self.committed) and counts["pages_reserved"] == len(self.reserved)
        assert counts["pages_held"] == len(self.held())
        align = self.segments._slot_align_bytes
        slots = [-(-(end - start) // align) * align for start, end in self.ranges.values()]
        assert counts["bytes_used"] == sum(slots)


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, derandomize=True, deadline=None)
TestAgainstModel = pytest.mark.slow(TestAgainstModel)


def saved(segments: Segments, *names: str, length: int = 16) -> None:
    for name in names:
        assert segments.reserve("o", name.encode(), length) is not None, name
        assert segments.commit("o", name.encode(), 0)
    segments.check()


def keys_of(segments: Segments) -> list[bytes]:
    return segments.keys()


def names(segments: Segments) -> str:
    return "".join(sorted(key.decode() for key in keys_of(segments)))


def test_the_page_used_longest_ago_goes_first() -> None:
    segments = Segments(64, 64, 16)
    saved(segments, "a", "b", "c", "d")
    segments.hold("h", [b"a"])
    segments.release("h")
    saved(segments, "e")
    assert segments.take_evicted() == [b"b"] and names(segments) == "acde"


def test_of_pages_released_together_the_last_goes_first() -> None:
    segments = Segments(64, 64, 16)
    saved(segments, "a", "b", "c", "d")
    assert segments.hold("chain", [b"a", b"b", b"x", b"c", b"d"]) == [b"x"]
    segments.release("chain")
    saved(segments, "e", "f")
    assert segments.take_evicted() == [b"d", b"c"]


def test_a_slab_of_another_size_is_turned_over_only_when_all_of_it_is_older() -> None:
    segments = Segments(128, 64, 16)
    saved(segments, "a", "b", "c", "d")  # one slab
    saved(segments, "L", length=64)  # the other
    saved(segments, "M", length=64)  # a..d are older than L: their slab goes
    assert names(segments) == "LM"
    saved(segments, "N", length=64)  # no other size is left: the oldest of its own
    assert names(segments) == "MN"
    saved(segments, "e")  # another size, all slabs taken: M's goes
    assert names(segments) == "Ne"
    segments.hold("h", [b"N"])
    segments.release("h")
    saved(segments, "f", "g", "h")
    assert names(segments) == "Nefgh"
    saved(segments, "O", length=64)  # its own N is older than the slab of e, f, g, h
    assert names(segments) == "Oefgh"


def test_a_size_is_not_kept_small_by_pages_nobody_uses_any_more() -> None:
    segments = Segments(1024, 64, 16)
    for number in range(64):
        saved(segments, f"old{number}")
    for number in range(16):
        saved(segments, f"new{number}", length=64)
    assert len(keys_of(segments)) == 16 and all(key.startswith(b"new") for key in keys_of(segments))


def test_a_slab_with_one_page_in_use_is_not_turned_over() -> None:
    segments = Segments(64, 64, 16)
    saved(segments, "a", "b", "c", "d")
    segments.hold("h", [b"c"])
    assert segments.reserve("o", b"L", 64) is None
    assert names(segments) == "abcd"
    segments.release("h")
    assert segments.reserve("o", b"L", 64) is not None


def test_everything_reserved_or_held_leaves_no_room_and_changes_nothing() -> None:
    segments = Segments(64, 64, 32)
    saved(segments, "a")
    segments.hold("h", [b"a"])
    assert segments.reserve("o", b"b", 32) is not None
    assert segments.reserve("o", b"c", 32) is None
    segments.check()
    segments.abort_all("o")
    assert segments.reserve("p", b"c", 32) is not None


@pytest.mark.parametrize(
    ("arena", "slab", "total"), [(48, 64, 48), (100, 64, 96), (129, 64, 96), (128, 64, 128), (16, 64, 16)]
)
def test_little_of_an_arena_is_wasted_by_slabs(arena: int, slab: int, total: int) -> None:
    assert Segments(arena, slab, 16).statistics()["bytes_total"] == total


def test_put_if_absent() -> None:
    segments = Segments(64, 64, 16)
    assert segments.reserve("one", b"a", 16) is not None
    assert segments.reserve("one", b"a", 16) is None, "it is being written"
    assert segments.reserve("two", b"a", 16) is None
    assert not segments.commit("two", b"a", 1) and not segments.abort("two", b"a")
    assert not segments.resident(b"a") and segments.hold("h", [b"a"]) == [b"a"]
    assert segments.commit("one", b"a", 1)
    assert not segments.commit("one", b"a", 2), "once"
    assert segments.digest(b"a") == 1
    assert segments.reserve("two", b"a", 16) is None, "it exists"


def test_holding_twice_is_holding_once() -> None:
    segments = Segments(64, 64, 16)
    saved(segments, "a")
    for _ in range(3):
        segments.hold("h", [b"a"])
    segments.release("h")
    assert segments.reserve("o", b"L", 64) is not None, "nobody holds it any more"
    assert segments.take_evicted() == [b"a"]
    assert repr(segments) == "<Segments 1 pages, 0 of 1 slabs free, 0 holders>"


def test_memory_that_is_not_ready_is_not_handed_out() -> None:
    segments = Segments(256, 64, 16, ready_bytes=130)
    segments.check()
    ranges = [segments.reserve("a", bytes([each]) * 20, 64) for each in range(4)]
    assert [each.offset if each else None for each in ranges] == [0, 64, None, None]
    segments.extend(200)
    segments.extend(100)
    late = segments.reserve("a", b"l" * 20, 64)
    assert late is not None and late.offset == 128
    assert segments.reserve("a", b"m" * 20, 64) is None
    assert segments.statistics()["bytes_total"] == 192
    segments.check()
