"""A compact table from fingerprints of pages to small numbers, for hundreds of pages at once.

Buckets of four slots. A page is in one of two buckets that its fingerprint names, so a lookup reads two, and a page that is
removed leaves an empty slot and nothing else. A new page goes where more room is, which keeps the buckets evenly full.

The table grows by linear hashing: with `count` buckets, of which `half` is the power of two below, the next one to be added
takes over those pages of bucket `count - half` that belong to it, each in the slot of the same column. So growth costs a
batch of new pages as much as the batch has, and never a stall; the memory is enlarged by an eighth at a time. It shrinks the
other way round, a step with each change.
"""

import numpy as np
from numpy.typing import NDArray

from tensorcast_connector.core.fingerprints import Fingerprints, distinct, last_bytes

Slots = NDArray[np.int64]
Values = NDArray[np.uint32]

BUCKET_SLOTS = 4
BUCKETS_MIN = 128
FULL = 0.45  # of all slots; fuller, and too often both buckets of a new page are full
EMPTY = 0.2
SHRINK_BUCKETS = 4096  # in one step
SCAN_SLOTS = 1 << 14  # looked at in one go, so that what is between stays in the processor's cache
ENLARGE_SHARE = 8  # memory is taken in such parts of what there is
_COLUMN_BITS = 2
_COLUMN = BUCKET_SLOTS - 1


def _choices(fingerprints: Fingerprints, count: int) -> Slots:
    """For each two of so many buckets, a power of two: one by either half of the fingerprint."""
    halves = fingerprints.view(np.uint32).reshape(*fingerprints.shape, 2)
    return np.bitwise_and(halves, count - 1, dtype=np.int64)


class PageTable:
    """See the module. A value of 0 stands for pages that are not there.

    A slot is good until the next page is added or the table has shrunk.
    """

    def __init__(self) -> None:
        self._fingerprints = np.zeros(0, dtype=np.uint64)
        self._values = np.zeros(0, dtype=np.uint32)
        self._buckets = self._fingerprints.reshape(-1, BUCKET_SLOTS)
        self._count = 0
        self._half = BUCKETS_MIN
        self._lost: list[int] = []
        self.pages = 0
        self._clear()

    def __repr__(self) -> str:
        return f"<PageTable of {self.pages} pages in {self._count} buckets>"

    def _clear(self) -> None:
        self._set_count(BUCKETS_MIN)
        self._fingerprints.fill(0)
        self._values.fill(0)

    @property
    def memory_bytes(self) -> int:
        """What it takes."""
        return self._fingerprints.nbytes + self._values.nbytes

    # --- finding ---

    def _buckets_of(self, fingerprints: Fingerprints) -> Slots:
        """Both buckets of each."""
        buckets = _choices(fingerprints, 2 * self._half)
        if self._count < 2 * self._half:
            buckets -= (buckets >= self._count) * self._half
        return buckets

    def _matches(self, fingerprints: Fingerprints) -> tuple[Slots, Slots]:
        """Those that are there, by their places in `fingerprints`, and their slots."""
        buckets = self._buckets_of(fingerprints)
        same = self._buckets.take(buckets, axis=0).reshape(-1, 2 * BUCKET_SLOTS) == fingerprints[:, None]
        hits: Slots = same.ravel().nonzero()[0]
        slots = buckets.ravel().take(hits >> _COLUMN_BITS)
        slots <<= _COLUMN_BITS
        slots += hits & _COLUMN
        return hits >> (_COLUMN_BITS + 1), slots

    def get(self, fingerprints: Fingerprints) -> Values:
        """The value of each."""
        places, slots = self._matches(fingerprints)
        values = np.zeros(len(fingerprints), dtype=np.uint32)
        values[places] = self._values.take(slots)
        return values

    def find(self, fingerprints: Fingerprints) -> tuple[Slots, Fingerprints]:
        """The slots of those that are there, and those that are not. Each may be asked for once only."""
        places, slots = self._matches(fingerprints)
        if len(places) > 1:  # a page whose two buckets are one is met twice
            once = np.ones(len(places), dtype=bool)
            np.not_equal(places[1:], places[:-1], out=once[1:])
            places, slots = places[once], slots[once]
        absent = np.ones(len(fingerprints), dtype=bool)
        absent[places] = False
        return slots, fingerprints[absent]

    def of_last_bytes(self, wanted: NDArray[np.bool_]) -> Slots:
        """The slots of all pages whose keys end with a byte that is `wanted`."""
        parts = [np.zeros(0, dtype=np.int64)]
        end = self._count * BUCKET_SLOTS
        for first in range(0, end, SCAN_SLOTS):
            kept = self._fingerprints[first : min(first + SCAN_SLOTS, end)]
            concerned = wanted.take(last_bytes(kept))
            concerned &= kept != 0
            parts.append(concerned.nonzero()[0] + first)
        return np.concatenate(parts)

    def values(self, slots: Slots) -> Values:
        """What is in slots."""
        return self._values.take(slots)

    def fingerprints(self, slots: Slots) -> Fingerprints:
        """Whose they are."""
        return self._fingerprints.take(slots)

    # --- changing ---

    def set(self, slots: Slots, values: Values) -> None:
        """Puts other values into slots; pages whose value is 0 now are removed."""
        self._values[slots] = values
        gone = slots[values == 0]
        self._fingerprints[gone] = 0
        self.pages -= len(gone)

    def add(self, fingerprints: Fingerprints, values: Values) -> None:
        """Lists pages that are not there, each of them once; see `take_lost`."""
        self.pages += len(fingerprints)
        self._grow(int(self.pages / (FULL * BUCKET_SLOTS)) + 1)
        for fingerprint, value in zip(*self._put(fingerprints, values), strict=True):
            if not self._squeeze(fingerprint, value):
                self.pages -= 1
                self._lost.append(int(value))

    def take_lost(self) -> list[int]:
        """The values of pages that found no room since this was last asked, and so are not listed. At this fill that is one
        page in 10**9, or pages that were made for it."""
        lost, self._lost = self._lost, []
        return lost

    def _put(self, fingerprints: Fingerprints, values: Values) -> tuple[Fingerprints, Values]:
        """Puts pages where there is room; returns those that find none."""
        crowded = [fingerprints[:0]], [values[:0]]
        while len(fingerprints):
            buckets = self._buckets_of(fingerprints)
            free = self._buckets.take(buckets, axis=0) == 0
            room = free.sum(axis=2)
            better = (room[:, 1] > room[:, 0]).view(np.int8)
            every = np.arange(len(fingerprints))
            slots = (buckets[every, better] << _COLUMN_BITS) + free[every, better].argmax(axis=1)
            full = room[every, better] == 0
            if full.any():
                crowded[0].append(fingerprints[full])
                crowded[1].append(values[full])
                slots, fingerprints, values = slots[~full], fingerprints[~full], values[~full]
            self._fingerprints[slots] = fingerprints
            first = self._fingerprints.take(slots) == fingerprints  # of those that want the same slot one gets it
            self._values[slots[first]] = values[first]
            fingerprints, values = fingerprints[~first], values[~first]
        return np.concatenate(crowded[0]), np.concatenate(crowded[1])

    def _squeeze(self, fingerprint: np.uint64, value: np.uint32) -> bool:
        """Puts a page whose buckets are both full where another page was that can go to its other bucket."""
        buckets = self._buckets_of(np.array([fingerprint]))
        slots = ((buckets << _COLUMN_BITS).T + np.arange(BUCKET_SLOTS)).ravel()
        others = self._buckets_of(self._fingerprints.take(slots))
        other = np.where(others[:, 0] == slots >> _COLUMN_BITS, others[:, 1], others[:, 0])
        free = self._buckets.take(other, axis=0) == 0
        chosen = int(free.sum(axis=1).argmax())
        if not free[chosen].any():
            return False
        here, there = slots[chosen], (other[chosen] << _COLUMN_BITS) + free[chosen].argmax()
        for table, new in ((self._fingerprints, fingerprint), (self._values, value)):
            table[there], table[here] = table[here], new
        return True

    # --- growing and shrinking ---

    def _set_count(self, count: int) -> None:
        """So many buckets from now on; new memory is empty."""
        while count >= 2 * self._half:
            self._half *= 2
        while count < self._half:
            self._half //= 2
        self._count = count
        room = len(self._buckets)
        if room < count or room > count + 2 * (count // ENLARGE_SHARE) + BUCKETS_MIN:
            slots = (count + count // ENLARGE_SHARE) * BUCKET_SLOTS
            del self._buckets
            self._fingerprints.resize(slots, refcheck=False)
            self._values.resize(slots, refcheck=False)
            self._buckets = self._fingerprints.reshape(-1, BUCKET_SLOTS)

    def _grow(self, count: int) -> None:
        """To at least so many buckets."""
        while self._count < count:
            half, first = self._half, self._count
            last = min(count, 2 * half)
            self._set_count(last)
            old, new = slice(first - half, last - half), slice(first, last)
            pages = self._buckets[old]
            both = _choices(pages, 2 * half)
            here = np.arange(first - half, last - half)[:, None]
            wanted = np.where((both[..., 0] & (half - 1)) == here, both[..., 0], both[..., 1])
            moved = (wanted >= half) & (pages != 0)
            values = self._values.reshape(-1, BUCKET_SLOTS)
            self._buckets[new] = np.where(moved, pages, 0)
            values[new] = np.where(moved, values[old], 0)
            pages[moved] = values[old][moved] = 0

    def shrink(self) -> None:
        """Gives back a little of what is not needed. Call it after each change."""
        if not self.pages:
            self._clear()
        elif self._count > BUCKETS_MIN and self.pages < EMPTY * self._count * BUCKET_SLOTS:
            least = self._half if self._count > self._half else self._half // 2  # pages of one bucket go to one bucket
            count = max(self._count - SHRINK_BUCKETS, least, BUCKETS_MIN)
            slots = np.arange(count * BUCKET_SLOTS, self._count * BUCKET_SLOTS)
            slots = slots[self._fingerprints.take(slots) != 0]
            fingerprints, values = self.fingerprints(slots), self.values(slots)
            self.set(slots, np.zeros(len(slots), dtype=np.uint32))
            self._set_count(count)
            self.add(fingerprints, values)

    def check(self) -> None:
        """Raises AssertionError unless every page is in a bucket of its own, once, and with a value."""
        kept = self._fingerprints[: self._count * BUCKET_SLOTS]
        slots = kept.nonzero()[0]
        assert len(slots) == self.pages == len(distinct(kept[slots])), f"{self} holds {len(slots)} pages"
        assert (self._values[slots] != 0).all() and (self._values != 0).sum() == self.pages
        assert not self._fingerprints[self._count * BUCKET_SLOTS :].any()
        found, absent = self.find(kept[slots])
        assert not len(absent) and (found == slots).all(), "a page in a bucket of another"
