"""Allocator of pages in a fixed arena: slabs of equal slots, holds, put-if-absent and least-recently-used eviction.

A page is *reserved* by one owner (an engine's connection, or a fetch) until it is committed or aborted, then *committed* and
readable. Holds are counted per holder and end with `release` or with the holder. Eviction takes committed pages
nobody holds, oldest first; it never takes a reserved or a held page. A slab belongs to one slot size; when a size runs out
of slabs, the slab of another size whose pages are all evictable and least recently used is turned over.

No I/O, no clock: recency is the order of calls. The bytes themselves are not touched here.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from tensorcast_connector.config import PAGE_BYTES_MAX, SLAB_BYTES, SLOT_ALIGN_BYTES
from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.types import ByteRange


@dataclass(slots=True)
class _Page:
    key: bytes
    offset: int
    length: int
    slab: int
    owner: Hashable | None  # set while reserved
    digest: int = 0
    holds: int = 0


@dataclass(slots=True)
class _Slab:
    slot_bytes: int = 0  # 0: unassigned
    free: list[int] = field(default_factory=list)
    pages: set[bytes] = field(default_factory=set)


class Segments:
    """See the module. Every method is atomic; `check` states the invariants."""

    def __init__(self, arena_bytes: int, slab_bytes: int = SLAB_BYTES) -> None:
        # A small arena is one slab, so that it can hold at least something of every size up to its own.
        slab_bytes = min(slab_bytes, arena_bytes // SLOT_ALIGN_BYTES * SLOT_ALIGN_BYTES)
        self._slab_bytes = slab_bytes
        self._slabs = [_Slab() for _ in range(arena_bytes // slab_bytes)]
        self._free_slabs = list(range(len(self._slabs) - 1, -1, -1))
        self._sizes: dict[int, set[int]] = {}  # slot size -> slabs with a free slot
        self._pages: dict[bytes, _Page] = {}
        self._evictable: dict[int, OrderedDict[bytes, None]] = {}  # slot size -> committed, unheld pages, oldest first
        self._holds: dict[Hashable, list[bytes]] = {}
        self._evicted: list[bytes] = []
        self.evictions = 0

    def __repr__(self) -> str:
        free = f"{len(self._free_slabs)} of {len(self._slabs)} slabs free"
        return f"<Segments {len(self._pages)} pages, {free}, {len(self._holds)} holders>"

    # --- reading ---

    def resident(self, key: bytes) -> bool:
        """Whether the page is committed."""
        page = self._pages.get(key)
        return page is not None and page.owner is None

    def owner(self, key: bytes) -> Hashable | None:
        """Who is writing the page; None if nobody is."""
        page = self._pages.get(key)
        return None if page is None else page.owner

    def hold(self, holder: Hashable, key: bytes) -> ByteRange | None:
        """Keeps a committed page in place for `holder` and marks it used; None if it is not committed."""
        page = self._pages.get(key)
        if page is None or page.owner is not None:
            return None
        if page.holds == 0:
            del self._evictable[self._slabs[page.slab].slot_bytes][key]
        page.holds += 1
        self._holds.setdefault(holder, []).append(key)
        return ByteRange(page.offset, page.length)

    def release(self, holder: Hashable) -> None:
        """Ends all holds of `holder`; unknown holders are fine."""
        for key in self._holds.pop(holder, ()):
            page = self._pages[key]
            page.holds -= 1
            if page.holds == 0:
                self._evictable[self._slabs[page.slab].slot_bytes][key] = None

    def digest(self, key: bytes) -> int:
        """The digest given at commit."""
        return self._pages[key].digest

    def keys(self) -> list[bytes]:
        """All committed pages."""
        return [key for key, page in self._pages.items() if page.owner is None]

    # --- writing ---

    def reserve(self, owner: Hashable, key: bytes, length: int) -> ByteRange | None:
        """A range to write the page into; None if the page exists or is being written, or nothing can be evicted.

        Raises:
            ProtocolError: `length` is not a possible page size.
        """
        if not 0 < length <= min(PAGE_BYTES_MAX, self._slab_bytes):
            raise ProtocolError(
                f"a page of {length} bytes; this arena takes 1 to {min(PAGE_BYTES_MAX, self._slab_bytes)}"
            )
        if key in self._pages:
            return None
        slot_bytes = -(-length // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
        slab_index = self._slab_with_room(slot_bytes)
        if slab_index is None:
            return None
        slab = self._slabs[slab_index]
        offset = slab.free.pop()
        if not slab.free:
            self._sizes[slot_bytes].discard(slab_index)
        slab.pages.add(key)
        self._pages[key] = _Page(key, offset, length, slab_index, owner)
        return ByteRange(offset, length)

    def commit(self, owner: Hashable, key: bytes, digest: int) -> bool:
        """The page is completely written; False (and nothing happens) if `owner` has not reserved it."""
        page = self._pages.get(key)
        if page is None or page.owner is None or page.owner != owner:
            return False
        page.owner = None
        page.digest = digest
        self._evictable.setdefault(self._slabs[page.slab].slot_bytes, OrderedDict())[key] = None
        return True

    def abort(self, owner: Hashable, key: bytes) -> bool:
        """The page will not be written; False if `owner` has not reserved it."""
        page = self._pages.get(key)
        if page is None or page.owner is None or page.owner != owner:
            return False
        self._free(page)
        return True

    def abort_all(self, owners: Iterable[Hashable]) -> None:
        """Gives back everything these owners have reserved."""
        gone = set(owners)
        for page in [page for page in self._pages.values() if page.owner in gone]:
            self._free(page)

    def drop(self, key: bytes) -> bool:
        """Removes a committed page that nobody holds."""
        page = self._pages.get(key)
        if page is None or page.owner is not None or page.holds:
            return False
        self._evict(page)
        return True

    def take_evicted(self) -> list[bytes]:
        """Pages evicted since the last call, for announcing."""
        evicted, self._evicted = self._evicted, []
        return evicted

    # --- inside ---

    def _slab_with_room(self, slot_bytes: int) -> int | None:
        with_room = self._sizes.setdefault(slot_bytes, set())
        if with_room:
            return next(iter(with_room))
        if self._free_slabs:
            return self._assign(self._free_slabs.pop(), slot_bytes)
        evictable = self._evictable.get(slot_bytes)
        if evictable:
            page = self._pages[next(iter(evictable))]
            self._evict(page)
            return page.slab if self._slabs[page.slab].slot_bytes else self._assign(self._free_slabs.pop(), slot_bytes)
        return self._turn_over(slot_bytes)

    def _turn_over(self, slot_bytes: int) -> int | None:
        """Empties a slab of another size: the first one, by the recency of its oldest page, that nobody needs."""
        for size, evictable in self._evictable.items():
            if size == slot_bytes:
                continue
            tried: set[int] = set()
            for key in evictable:
                index = self._pages[key].slab
                if index in tried:
                    continue
                tried.add(index)
                pages = [self._pages[each] for each in self._slabs[index].pages]
                if all(page.owner is None and page.holds == 0 for page in pages):
                    for page in pages:
                        self._evict(page)
                    self._free_slabs.remove(index)
                    return self._assign(index, slot_bytes)
        return None

    def _assign(self, index: int, slot_bytes: int) -> int:
        slab = self._slabs[index]
        slab.slot_bytes = slot_bytes
        start = index * self._slab_bytes
        slots = self._slab_bytes // slot_bytes
        slab.free = [start + slot * slot_bytes for slot in range(slots - 1, -1, -1)]
        self._sizes.setdefault(slot_bytes, set()).add(index)
        return index

    def _evict(self, page: _Page) -> None:
        del self._evictable[self._slabs[page.slab].slot_bytes][page.key]
        self._evicted.append(page.key)
        self.evictions += 1
        self._free(page)

    def _free(self, page: _Page) -> None:
        del self._pages[page.key]
        slab = self._slabs[page.slab]
        slab.pages.discard(page.key)
        slab.free.append(page.offset)
        with_room = self._sizes.setdefault(slab.slot_bytes, set())
        if slab.pages:
            with_room.add(page.slab)
        else:
            with_room.discard(page.slab)
            slab.slot_bytes = 0
            slab.free = []
            self._free_slabs.append(page.slab)

    def statistics(self) -> dict[str, int]:
        """Counts for people and metrics."""
        committed = [page for page in self._pages.values() if page.owner is None]
        return {
            "pages": len(committed),
            "pages_reserved": len(self._pages) - len(committed),
            "pages_held": sum(1 for page in committed if page.holds),
            "bytes_used": sum(page.length for page in self._pages.values()),
            "bytes_total": self._slab_bytes * len(self._slabs),
            "evictions": self.evictions,
        }

    def check(self) -> None:
        """Raises AssertionError unless every slot is free or one page's, and the indexes agree with the pages."""
        held: dict[bytes, int] = {}
        for keys in self._holds.values():
            for key in keys:
                held[key] = held.get(key, 0) + 1
        for key, page in self._pages.items():
            slab = self._slabs[page.slab]
            assert key in slab.pages and page.length <= slab.slot_bytes
            assert page.slab * self._slab_bytes <= page.offset <= (page.slab + 1) * self._slab_bytes - slab.slot_bytes
            assert page.holds == held.get(key, 0) and not (page.holds and page.owner is not None)
            evictable = page.owner is None and page.holds == 0
            assert (key in self._evictable.get(slab.slot_bytes, ())) == evictable
        assert sum(len(each) for each in self._evictable.values()) <= len(self._pages)
        for index, slab in enumerate(self._slabs):
            offsets = [*slab.free, *(self._pages[key].offset for key in slab.pages)]
            assert len(set(offsets)) == len(offsets), "two pages share a slot"
            assert bool(slab.slot_bytes) == bool(slab.pages) == (index not in self._free_slabs)
            if slab.slot_bytes:
                assert len(offsets) == self._slab_bytes // slab.slot_bytes
                assert bool(slab.free) == (index in self._sizes[slab.slot_bytes])
