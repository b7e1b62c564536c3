"""The observed hit index: which instance should hold which prompt prefix, learnt from where requests were sent.

A prompt is a chain of digests, each standing for everything up to its chunk. All chains together are a tree, kept as
*segments*: runs of chunks without a branch. A session is one segment that grows, and what sessions share is the segment above.
Whoever holds a chunk holds all before it, so an instance has per segment one number, how far it goes, and the longest known
prefix of a prompt is found by bisection. One table finds a digest's segment.

Per instance, what it holds lies in order of last use. A use touches the leaf first and the root last, so a parent is never
older than its children: dropping the oldest drops leaves, and what is left is closed under prefixes.

An index may have millions of segments, and Python's collector of cycles stops everything while it looks at all objects that
it knows. So it does not know these (`gc=False`): whoever drops a segment or a holder cuts the references to it, which frees it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from smetric_router.state.digest_map import LOW, DigestMap
from smetric_router.state.use_order import UseOrder
from smetric_router.types import Chain

# The stamp of a chunk whose last user has not ended yet: nothing follows from missing it.
UNSURE = 0
# Holders of a segment from which on it is worth to keep them as arrays.
HOLDERS_MANY = 32


class Use(msgspec.Struct, frozen=True):
    """One recorded use of a chain on an instance, to be settled when the answer is in."""

    instance: str
    stamp: int
    chain: Chain
    known: int
    """How many leading chunks the instance was expected to hold."""
    runs: tuple[tuple[int, int], ...]
    """(first chunk, stamp of its last use before this one) for the known chunks, in runs of equal stamps."""

    def last_used(self, position: int) -> int:
        """The stamp at which the known chunk at this position was last used before."""
        stamp = UNSURE
        for first, seen in self.runs:
            if first > position:
                break
            stamp = seen
        return stamp


class _Segment(msgspec.Struct, gc=False, eq=False):
    """Chunks `start` to `end` of all chains that go through it; its children begin at its end."""

    parent: "_Segment | None"
    start: int
    digests: tuple[int, ...]  # of which the collector lets go too, once it has seen what is in it
    children: int = 0
    holders: "dict[int, _Held]" = {}
    columns: tuple[NDArray[np.intp], NDArray[np.float64]] | None = None
    """Who holds it, and how many bytes up to where, once asked for and until that changes."""

    @property
    def end(self) -> int:
        return self.start + len(self.digests)


class _Held(msgspec.Struct, gc=False, eq=False):
    """What one instance holds of a segment: the chunks up to `extent`, last used at `stamp`."""

    segment: _Segment
    extent: int
    stamp: int
    older: "_Held | None" = None
    newer: "_Held | None" = None


@dataclass(slots=True)
class _Residence:
    """What one instance is believed to hold."""

    ordinal: int
    entries: UseOrder[_Held] = field(default_factory=UseOrder)
    """One that is not in here is as old as the one below it, into whose place it comes when that goes."""
    chunks: int = 0
    unsettled: set[int] = field(default_factory=set)
    """Stamps of uses whose answers are not in."""


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    """Figures of the index."""

    digests: int
    entries: dict[str, int]
    dropped: int


class PrefixIndex:
    """Prefix -> instances. Bounded: at most `chunks_per_instance_max` chunks are remembered per instance."""

    def __init__(self, instances: Iterable[str], chunks_per_instance_max: int) -> None:
        assert chunks_per_instance_max > 0
        self.chunks_per_instance_max = chunks_per_instance_max
        self._ids = list(instances)
        self._residences = {name: _Residence(at) for at, name in enumerate(self._ids)}
        self._segments: DigestMap[_Segment] = DigestMap()
        self._found: tuple[Chain, list[tuple[_Segment, int]], int] | None = None
        """What `_path` found last, until a segment changes: a prompt is recorded right after it was matched."""
        self._stamp = UNSURE
        self._dropped = 0

    def __repr__(self) -> str:
        sizes = " ".join(f"{name}={each.chunks}" for name, each in self._residences.items())
        return f"<PrefixIndex {len(self._segments)} digests, {sizes}>"

    def _path(self, chain: Chain) -> tuple[list[tuple[_Segment, int]], int]:
        """The segments of the known prefix, leaf first, each with how far the prefix goes in it; and its length."""
        if self._found is not None and self._found[0] is chain:
            return self._found[1:]
        digests, parts = chain.digests, self._segments.parts
        low, high = 0, len(digests)
        while low < high:
            middle = (low + high) // 2
            if (digest := digests[middle]) in parts[digest & LOW]:
                low = middle + 1
            else:
                high = middle
        path: list[tuple[_Segment, int]] = []
        end = low
        segment = self._segments.get(digests[low - 1]) if low else None
        while segment is not None:
            path.append((segment, end))
            end, segment = segment.start, segment.parent
        self._found = (chain, path, low)
        return path, low

    def match(self, chain: Chain) -> dict[str, int]:
        """Hit length in bytes per instance that holds a prefix of the chain. Changes nothing."""
        return {name: int(hit) for name, hit in zip(self._ids, self.match_column(chain).tolist(), strict=True) if hit}

    def match_column(self, chain: Chain) -> NDArray[np.float64]:
        """The same for all instances, in their order; 0 without a hit."""
        column, ends = np.zeros(len(self._ids)), chain.ends
        for segment, end in reversed(self._path(chain)[0]):
            holders = segment.holders
            # What everybody holds, a system prompt, is looked at with every request and changes seldom.
            if len(holders) >= HOLDERS_MANY and end == segment.end:
                if segment.columns is None:
                    lengths = [ends[held.extent - 1] for held in holders.values()]
                    segment.columns = np.array(list(holders), np.intp), np.array(lengths, np.float64)
                ordinals, values = segment.columns
                column[ordinals] = values
            else:
                for ordinal, held in holders.items():
                    column[ordinal] = ends[(held.extent if held.extent < end else end) - 1]
        return column

    def record(self, instance: str, chain: Chain) -> Use:
        """The chain is sent to the instance, which is expected to hold all of it from now on."""
        residence = self._residences[instance]
        ordinal = residence.ordinal
        self._stamp += 1
        stamp = self._stamp
        path, depth = self._path(chain)
        if path:
            path = self._cut_where_it_ends(path, depth, len(chain.digests), ordinal)
        known, runs = 0, []
        for segment, end in reversed(path):
            held = segment.holders.get(ordinal)
            if held is None:
                break
            runs.append((known, UNSURE if held.stamp in residence.unsettled else held.stamp))
            known = min(held.extent, end)
            if known < end:
                break
        if depth < len(chain.digests):
            path = self._grow(path, depth, chain.digests)
        entries = residence.entries
        for segment, end in path:
            held = segment.holders.get(ordinal)
            if held is None:
                held = segment.holders[ordinal] = _Held(segment, end, stamp)
                segment.columns = None
                residence.chunks += end - segment.start
            else:
                if end > held.extent:
                    residence.chunks += end - held.extent
                    held.extent = end
                    segment.columns = None
                held.stamp = stamp
            entries.touch(held)
        self._drop_excess(residence)
        residence.unsettled.add(stamp)
        return Use(instance, stamp, chain, known, tuple(runs))

    def _cut_where_it_ends(
        self, path: list[tuple[_Segment, int]], depth: int, length: int, ordinal: int
    ) -> list[tuple[_Segment, int]]:
        """Chunks of different age, and those behind a branch, are in segments of their own."""
        leaf, end = path[0]
        if end == leaf.end:
            return path
        held = leaf.holders.get(ordinal)
        if depth < length or (held is not None and held.extent > end):
            return [(self._split(leaf, end), end), *path[1:]]
        return path

    def _split(self, lower: _Segment, at: int) -> _Segment:
        """Cuts a segment in two; returns the upper one."""
        self._found = None
        count = at - lower.start
        upper = _Segment(lower.parent, lower.start, lower.digests[:count])
        upper.children = 1
        lower.parent, lower.start, lower.digests = upper, at, lower.digests[count:]
        lower.columns = None
        self._segments.put(upper.digests, upper)
        for ordinal, held in list(lower.holders.items()):
            if held.extent > at:
                upper.holders[ordinal] = _Held(upper, at, held.stamp)
            else:
                del lower.holders[ordinal]
                held.segment = upper
                upper.holders[ordinal] = held
        return upper

    def _grow(
        self, path: list[tuple[_Segment, int]], depth: int, digests: tuple[int, ...]
    ) -> list[tuple[_Segment, int]]:
        """Adds what is new behind the known prefix."""
        self._found = None
        new = digests[depth:]
        leaf = path[0][0] if path else None
        if leaf is not None and not leaf.children:
            leaf.digests += new
            path = [(leaf, len(digests)), *path[1:]]
        else:
            if leaf is not None:
                leaf.children += 1
            leaf = _Segment(leaf, depth, new)
            path = [(leaf, len(digests)), *path]
        self._segments.put(new, leaf)
        return path

    def prefix(self, digest: int) -> tuple[int, ...] | None:
        """All digests up to and with this one; None if it is not known."""
        segment = self._segments.get(digest)
        if segment is None:
            return None
        parts = [segment.digests[: segment.digests.index(digest) + 1]]
        while segment.parent is not None:
            segment = segment.parent
            parts.append(segment.digests)
        return tuple([each for part in reversed(parts) for each in part])

    def chains(self, instance: str, chunks_max: int) -> list[tuple[int, tuple[int, ...]]]:
        """What an instance holds, as (digest before, chunks behind it), the newest `chunks_max` chunks, in an order in which each
        digest before is there already; the last used last."""
        residence = self._residences[instance]
        newest: list[_Held] = []
        for held in residence.entries.newest_first():
            chunks_max -= held.extent - held.segment.start
            if chunks_max < 0:
                break
            newest.append(held)
        told: set[_Segment] = set()
        found: list[tuple[int, tuple[int, ...]]] = []
        for held in reversed(newest):
            segment: _Segment | None = held.segment
            if segment in told:
                continue
            parts = [held.segment.digests[: held.extent - held.segment.start]]
            told.add(held.segment)
            while (segment := segment.parent if segment is not None else None) is not None and segment not in told:
                parts.append(segment.digests)
                told.add(segment)
            before = segment.digests[-1] if segment is not None else 0
            found.append((before, tuple([each for part in reversed(parts) for each in part])))
        return found

    def settle(self, use: Use, *, computed: bool, resident: int | None = None) -> int:
        """The answer is in. Returns how many chunks were dropped.

        `computed` is False when the instance never got to the prompt: what this use added is taken back. `resident`
        is the length the instance proved to hold beforehand. When it is less than expected the instance has evicted,
        and by the order of eviction everything that was last used no later than the lost part is gone as well.
        """
        residence = self._residences[use.instance]
        residence.unsettled.discard(use.stamp)
        before = residence.chunks
        if not computed:
            for segment, end in self._path(use.chain)[0]:
                held = segment.holders.get(residence.ordinal)
                if held is not None and held.stamp == use.stamp and end > use.known:
                    self._cut(residence, held, max(use.known, segment.start))
        elif resident is not None:
            lost = use.chain.chunks_within(resident)
            stamp = use.last_used(lost) if lost < use.known else UNSURE
            while (oldest := residence.entries.oldest) is not None and oldest.stamp <= stamp:
                self._cut(residence, oldest, oldest.segment.start)
        dropped = before - residence.chunks
        self._dropped += dropped
        return dropped

    def forget(self, instance: str) -> int:
        """The instance lost its cache. Returns how many chunks were dropped."""
        residence = self._residences[instance]
        count = residence.chunks
        while (held := residence.entries.oldest) is not None:
            self._cut(residence, held, held.segment.start)
        residence.unsettled.clear()
        self._dropped += count
        return count

    def statistics(self) -> IndexStatistics:
        """Sizes now, and chunks dropped since the start."""
        sizes = {name: residence.chunks for name, residence in self._residences.items()}
        return IndexStatistics(len(self._segments), sizes, self._dropped)

    def _drop_excess(self, residence: _Residence) -> None:
        while residence.chunks > self.chunks_per_instance_max:
            held = residence.entries.oldest
            assert held is not None
            excess = residence.chunks - self.chunks_per_instance_max
            extent = max(held.segment.start, held.extent - excess)
            self._dropped += held.extent - extent
            self._cut(residence, held, extent)

    def _cut(self, residence: _Residence, held: _Held, extent: int) -> None:
        """The instance holds no more than `extent` of that segment, and nothing below it."""
        segment = held.segment
        residence.chunks -= held.extent - extent
        held.extent = extent
        segment.columns = None
        if extent == segment.start:
            del segment.holders[residence.ordinal]
            above = segment.parent.holders[residence.ordinal] if segment.parent is not None else None
            if above is None or above in residence.entries:
                residence.entries.drop(held)
            else:
                assert segment.parent is not None
                held.segment, held.extent, held.stamp = segment.parent, above.extent, above.stamp
                segment.parent.holders[residence.ordinal] = held
        self._shorten(segment)

    def _shorten(self, segment: _Segment) -> None:
        """Lets go of the end that nobody holds any more."""
        end = segment.start
        for held in segment.holders.values():
            if held.extent > end:
                end = held.extent
                if end == segment.end:
                    return
        self._found = None
        self._segments.drop(segment.digests[end - segment.start :])
        segment.digests = segment.digests[: end - segment.start]
        if not segment.digests and segment.parent is not None:
            segment.parent.children -= 1

    def check(self) -> None:
        """The tree is whole, every order and bound holds."""
        segments = set(self._segments.values())
        assert all(self._segments.get(digest) is each for each in segments for digest in each.digests)
        assert sum(len(each.digests) for each in segments) == len(self._segments)
        children = dict.fromkeys(segments, 0)
        for each in segments:
            assert each.holders and max(held.extent for held in each.holders.values()) == each.end
            assert each.columns is None or each.columns[0].tolist() == list(each.holders)
            if each.parent is not None:
                children[each.parent] += 1
                assert each.start == each.parent.end
                assert all(each.parent.holders[ordinal].extent == each.start for ordinal in each.holders)
            else:
                assert each.start == 0
        assert all(count == each.children for each, count in children.items())
        for name, residence in self._residences.items():
            mine = [each.holders[residence.ordinal] for each in segments if residence.ordinal in each.holders]
            assert all(each.segment.start < each.extent for each in mine)
            assert residence.chunks == sum(each.extent - each.segment.start for each in mine), name
            assert residence.chunks <= self.chunks_per_instance_max, name
            entries = list(residence.entries.newest_first())[::-1]
            assert set(entries) <= set(mine) and all(each in residence.entries for each in entries)
            stamps = [each.stamp for each in entries]
            assert stamps == sorted(stamps), f"{name}: not in order of last use"
            assert all(UNSURE < stamp <= self._stamp for stamp in [*stamps, *residence.unsettled]), name
