"""The observed hit index: which instance should hold which prompt prefix, learnt from where requests were sent.

A prompt is a chain of digests, each standing for everything up to its chunk. One dictionary maps a digest to a bit mask
of the instances that hold it, so a lookup walks the chain once for all instances and ends where the mask is empty.
Per instance, the digests lie in order of last use. A use touches the leaf first and the root last, so a parent is
always younger than its children: dropping the oldest drops leaves, and what is left is closed under prefixes.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from smetric_router.types import Chain

# The stamp of a chunk whose last user has not ended yet: nothing follows from missing it.
UNSURE = 0


@dataclass(frozen=True, slots=True)
class Use:
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


@dataclass(slots=True)
class _Residence:
    """What one instance is believed to hold."""

    bit: int
    entries: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """digest -> stamp of its last use, oldest first."""
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
        self._residences = {name: _Residence(1 << slot) for slot, name in enumerate(self._ids)}
        self._masks: dict[int, int] = {}
        self._stamp = UNSURE
        self._dropped = 0

    def __repr__(self) -> str:
        sizes = " ".join(f"{name}={len(residence.entries)}" for name, residence in self._residences.items())
        return f"<PrefixIndex {len(self._masks)} digests, {sizes}>"

    def match(self, chain: Chain) -> dict[str, int]:
        """Hit length in bytes per instance that holds a prefix of the chain. Changes nothing."""
        hits: dict[str, int] = {}
        masks, ends = self._masks, chain.ends
        alive = 0
        for position, digest in enumerate(chain.digests):
            mask = masks.get(digest, 0)
            if position == 0:
                alive = mask
            elif mask & alive != alive:
                for name in self._named(alive & ~mask):
                    hits[name] = ends[position - 1]
                alive &= mask
            if not alive:
                return hits
        for name in self._named(alive):
            hits[name] = ends[-1]
        return hits

    def record(self, instance: str, chain: Chain) -> Use:
        """The chain is sent to the instance, which is expected to hold all of it from now on."""
        residence = self._residences[instance]
        entries = residence.entries
        self._stamp += 1
        stamp = self._stamp
        known, runs, last = 0, [], -1
        for digest in chain.digests:
            seen = entries.get(digest)
            if seen is None:
                break
            if seen != last:
                runs.append((known, UNSURE if seen in residence.unsettled else seen))
                last = seen
            known += 1
        for digest in reversed(chain.digests[known:]):
            entries[digest] = stamp
            self._masks[digest] = self._masks.get(digest, 0) | residence.bit
        for digest in reversed(chain.digests[:known]):
            entries[digest] = stamp
            entries.move_to_end(digest)
        while len(entries) > self.chunks_per_instance_max:
            self._drop_oldest(residence)
        residence.unsettled.add(stamp)
        return Use(instance, stamp, chain, known, tuple(runs))

    def settle(self, use: Use, *, computed: bool, resident: int | None = None) -> int:
        """The answer is in. Returns how many chunks were dropped.

        `computed` is False when the instance never got to the prompt: what this use added is taken back. `resident`
        is the length the instance proved to hold beforehand. When it is less than expected the instance has evicted,
        and by the order of eviction everything that was last used no later than the lost part is gone as well.
        """
        residence = self._residences[use.instance]
        residence.unsettled.discard(use.stamp)
        before = len(residence.entries)
        if not computed:
            for digest in use.chain.digests[use.known :]:
                if residence.entries.get(digest) == use.stamp:
                    del residence.entries[digest]
                    self._clear_bit(digest, residence.bit)
        elif resident is not None:
            lost = use.chain.chunks_within(resident)
            stamp = use.last_used(lost) if lost < use.known else UNSURE
            while residence.entries and next(iter(residence.entries.values())) <= stamp:
                self._drop_oldest(residence)
        return before - len(residence.entries)

    def forget(self, instance: str) -> int:
        """The instance lost its cache. Returns how many chunks were dropped."""
        residence = self._residences[instance]
        count = len(residence.entries)
        for digest in residence.entries:
            self._clear_bit(digest, residence.bit)
        residence.entries.clear()
        residence.unsettled.clear()
        self._dropped += count
        return count

    def statistics(self) -> IndexStatistics:
        """Sizes now, and chunks dropped since the start."""
        sizes = {name: len(residence.entries) for name, residence in self._residences.items()}
        return IndexStatistics(len(self._masks), sizes, self._dropped)

    def check(self) -> None:
        """Both directions agree, every order and bound holds."""
        pairs = 0
        for name, residence in self._residences.items():
            assert len(residence.entries) <= self.chunks_per_instance_max, name
            stamps = list(residence.entries.values())
            assert stamps == sorted(stamps), f"{name}: not in order of last use"
            assert all(UNSURE < stamp <= self._stamp for stamp in [*stamps, *residence.unsettled]), name
            assert all(self._masks[digest] & residence.bit for digest in residence.entries), name
            pairs += len(residence.entries)
        assert pairs == sum(mask.bit_count() for mask in self._masks.values())
        assert all(self._masks.values()), "an empty mask was kept"

    def _named(self, mask: int) -> Iterator[str]:
        while mask:
            lowest = mask & -mask
            yield self._ids[lowest.bit_length() - 1]
            mask ^= lowest

    def _drop_oldest(self, residence: _Residence) -> None:
        digest, _ = residence.entries.popitem(last=False)
        self._clear_bit(digest, residence.bit)
        self._dropped += 1

    def _clear_bit(self, digest: int, bit: int) -> None:
        left = self._masks[digest] & ~bit
        if left:
            self._masks[digest] = left
        else:
            del self._masks[digest]
