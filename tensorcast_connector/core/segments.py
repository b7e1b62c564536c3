"""Allocator of pages in a fixed arena: slabs of equal slots, holds, put-if-absent and least-recently-used eviction.

A page is *reserved* by one owner (an engine's connection, or a fetch) until it is committed or aborted, then *committed*
and readable. A holder keeps committed pages in place until it releases them all at once. Eviction takes committed pages
nobody holds, the least recently used first; it never takes a reserved or a held page.

A slab belongs to one slot size while it has pages. A size that needs room takes, in this order: a free slot, a free slab,
and then whatever was used longest ago, its own oldest page or a whole slab of another size whose every page is older.

No I/O, no clock: recency is the order of calls. The bytes themselves are not touched here.
"""

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable
from dataclasses import asdict, dataclass, field

from tensorcast_connector.core.usage import Usage
from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.types import KEYSPACE_BYTES, ByteRange


@dataclass(slots=True)
class _Page:
    key: bytes
    offset: int
    length: int
    slab: int
    owner: Hashable | None  # set while reserved
    digest: int = 0
    holds: int = 0
    used: int = 0  # when it was committed or last let go
    born: int = 0  # which of all pages that were ever reserved it is


@dataclass(slots=True)
class _Slab:
    slot_bytes: int = 0  # 0: unassigned
    free: list[int] = field(default_factory=list)
    pages: set[bytes] = field(default_factory=set)
    busy: int = 0  # pages that are reserved or held
    used: int = 0  # the latest `used` of its pages


class Segments:
    """See the module. Every method is atomic; `check` states the invariants.

    Args:
        arena_bytes: what there is to share out.
        slab_bytes: the largest slab, and so the largest page; slabs are a little smaller where that wastes less.
        slot_align_bytes: a slot's size is a multiple of it.
        ready_bytes: how much of the arena may be used yet, from its start; all of it unless told. See `extend`.
    """

    def __init__(
        self, arena_bytes: int, slab_bytes: int, slot_align_bytes: int, ready_bytes: int | None = None
    ) -> None:
        count = -(-arena_bytes // slab_bytes)
        self._slot_align_bytes = slot_align_bytes
        self._slab_bytes = arena_bytes // count // slot_align_bytes * slot_align_bytes
        assert self._slab_bytes > 0
        self._slabs = [_Slab() for _ in range(count)]
        self._free_slabs: list[int] = []
        self._ready_slabs = 0
        self._with_room: dict[int, set[int]] = {}  # slot size -> slabs with a free slot
        self._pages: dict[bytes, _Page] = {}
        self._evictable: dict[int, OrderedDict[bytes, None]] = {}  # slot size -> committed, unheld pages, oldest first
        self._holds: dict[Hashable, dict[bytes, None]] = {}
        self._reserved: dict[Hashable, dict[bytes, None]] = {}
        self._evicted: list[bytes] = []
        self._uses = 0
        self.born = 0  # how many pages were ever reserved
        self.evictions = 0
        self.extend(arena_bytes if ready_bytes is None else ready_bytes)

    def __repr__(self) -> str:
        free = f"{len(self._free_slabs)} of {len(self._slabs)} slabs free"
        return f"<Segments {len(self._pages)} pages, {free}, {len(self._holds)} holders>"

    def extend(self, ready_bytes: int) -> None:
        """The first `ready_bytes` of the arena may be used now: there is memory behind them."""
        ready = min(ready_bytes // self._slab_bytes, len(self._slabs))
        for index in range(self._ready_slabs, ready):
            self._free_slabs.insert(0, index)  # taken from the end: lower slabs first
        self._ready_slabs = max(self._ready_slabs, ready)

    # --- reading ---

    def resident(self, key: bytes) -> bool:
        """Whether the page is committed."""
        page = self._pages.get(key)
        return page is not None and page.owner is None

    def owner(self, key: bytes) -> Hashable | None:
        """Who is writing the page; None if nobody is."""
        page = self._pages.get(key)
        return None if page is None else page.owner

    def hold(self, holder: Hashable, keys: Iterable[bytes]) -> list[bytes]:
        """Keeps committed pages in place for `holder`, once however often it asks; returns those that are not committed."""
        held = self._holds.get(holder, {})
        missing: list[bytes] = []
        for key in keys:  # hundreds of them in a lookup
            page = self._pages.get(key)
            if page is None or page.owner is not None:
                missing.append(key)
            elif key not in held:
                held[key] = None
                if page.holds == 0:
                    slab = self._slabs[page.slab]
                    del self._evictable[slab.slot_bytes][key]
                    slab.busy += 1
                page.holds += 1
        if held:
            self._holds[holder] = held
        return missing

    def range(self, key: bytes) -> ByteRange:
        """Where a committed page is; it stays there while it is held."""
        page = self._pages[key]
        assert page.owner is None
        return ByteRange(page.offset, page.length)

    def release(self, holder: Hashable) -> None:
        """Ends all holds of `holder`; unknown holders are fine."""
        # Last page first: of a chain of blocks the end goes before the start, without which it is of no use.
        for key in reversed(self._holds.pop(holder, {})):
            page = self._pages[key]
            page.holds -= 1
            if page.holds == 0:
                self._idle(page)

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
        if not 0 < length <= self._slab_bytes:
            raise ProtocolError(f"a page of {length} bytes; this arena takes 1 to {self._slab_bytes}")
        if key in self._pages:
            return None
        slot_bytes = -(-length // self._slot_align_bytes) * self._slot_align_bytes
        index = self._slab_with_room(slot_bytes)
        if index is None:
            return None
        slab = self._slabs[index]
        offset = slab.free.pop()
        if not slab.free:
            self._with_room[slot_bytes].discard(index)
        slab.pages.add(key)
        slab.busy += 1
        self.born += 1
        self._pages[key] = _Page(key, offset, length, index, owner, born=self.born)
        self._reserved.setdefault(owner, {})[key] = None
        return ByteRange(offset, length)

    def commit(self, owner: Hashable, key: bytes, digest: int) -> bool:
        """The page is completely written; False (and nothing happens) if `owner` has not reserved it."""
        page = self._unreserve(owner, key)
        if page is None:
            return False
        page.digest = digest
        self._idle(page)
        return True

    def abort(self, owner: Hashable, key: bytes) -> bool:
        """The page will not be written; False if `owner` has not reserved it."""
        page = self._unreserve(owner, key)
        if page is None:
            return False
        self._slabs[page.slab].busy -= 1
        self._free(page)
        return True

    def abort_all(self, owner: Hashable) -> None:
        """Gives back everything `owner` has reserved."""
        for key in list(self._reserved.get(owner, ())):
            self.abort(owner, key)

    def evict_older(self, born: int) -> None:
        """Evicts the pages that were reserved when `self.born` was not above that; those in use stay."""
        old = []
        for page in self._pages.values():  # the oldest first
            if page.born > born:
                break
            if page.owner is None and not page.holds:
                old.append(page)
        for page in old:
            self._evict(page)

    def born_of(self, key: bytes) -> int:
        """Which of all pages that were ever reserved that page is; 0: it is not here."""
        page = self._pages.get(key)
        return page.born if page is not None else 0

    def evict_page(self, key: bytes) -> bool:
        """Evicts a page; False if it is in use."""
        page = self._pages.get(key)
        if page is not None and (page.owner is not None or page.holds):
            return False
        if page is not None:
            self._evict(page)
        return True

    def evict_of(self, keyspaces: Container[bytes]) -> tuple[int, int]:
        """Evicts the pages of some keyspaces; how many, and how many stay because they are in use."""
        of = [page for page in self._pages.values() if page.key[:KEYSPACE_BYTES] in keyspaces]
        idle = [page for page in of if page.owner is None and not page.holds]
        for page in idle:
            self._evict(page)
        return len(idle), len(of) - len(idle)

    def take_evicted(self) -> list[bytes]:
        """Pages evicted since the last call, for announcing."""
        evicted, self._evicted = self._evicted, []
        return evicted

    # --- inside ---

    def _unreserve(self, owner: Hashable, key: bytes) -> _Page | None:
        page = self._pages.get(key)
        if page is None or page.owner is None or page.owner != owner:
            return None
        page.owner = None
        reserved = self._reserved[owner]
        del reserved[key]
        if not reserved:
            del self._reserved[owner]
        return page

    def _idle(self, page: _Page) -> None:
        """Nobody writes or holds the page any more: from now on it may be evicted."""
        slab = self._slabs[page.slab]
        slab.busy -= 1
        self._uses += 1
        page.used = slab.used = self._uses
        self._evictable.setdefault(slab.slot_bytes, OrderedDict())[page.key] = None

    def _slab_with_room(self, slot_bytes: int) -> int | None:
        with_room = self._with_room.get(slot_bytes)
        if with_room:
            return next(iter(with_room))
        if not self._free_slabs:
            own = self._evictable.get(slot_bytes)
            oldest = self._pages[next(iter(own))] if own else None
            other = self._oldest_slab_of_others(slot_bytes)
            if other is not None and (oldest is None or self._slabs[other].used < oldest.used):
                for key in sorted(self._slabs[other].pages):  # a set's own order is another one in every process
                    self._evict(self._pages[key])
            elif oldest is not None:
                self._evict(oldest)
                if self._slabs[oldest.slab].pages:
                    return oldest.slab
            else:
                return None
        return self._assign(self._free_slabs.pop(), slot_bytes)

    def _oldest_slab_of_others(self, slot_bytes: int) -> int | None:
        """The slab of another size, with no page in use, that was used longest ago."""
        if not any(pages for size, pages in self._evictable.items() if size != slot_bytes):
            return None
        idle = [
            index for index, slab in enumerate(self._slabs) if slab.slot_bytes not in (0, slot_bytes) and not slab.busy
        ]
        return min(idle, key=lambda index: self._slabs[index].used, default=None)

    def _assign(self, index: int, slot_bytes: int) -> int:
        slab = self._slabs[index]
        slab.slot_bytes = slot_bytes
        start = index * self._slab_bytes
        slots = self._slab_bytes // slot_bytes
        slab.free = [start + slot * slot_bytes for slot in range(slots - 1, -1, -1)]
        self._with_room.setdefault(slot_bytes, set()).add(index)
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
        if slab.pages:
            slab.free.append(page.offset)
            self._with_room[slab.slot_bytes].add(page.slab)
        else:
            self._with_room[slab.slot_bytes].discard(page.slab)
            self._slabs[page.slab] = _Slab()
            self._free_slabs.append(page.slab)

    def usage(self) -> Usage:
        """How full it is: counted by slabs, so that asking costs the same with a thousand pages and with a million."""
        reserved = sum(map(len, self._reserved.values()))
        pages = len(self._pages) - reserved
        used = pinned = 0
        for slab in self._slabs:
            used += slab.slot_bytes * len(slab.pages)
            pinned += slab.slot_bytes * slab.busy
        total = self._slab_bytes * self._ready_slabs
        held = pages - sum(map(len, self._evictable.values()))
        return Usage(pages, reserved, held, used, pinned, total, self.evictions)

    def statistics(self) -> dict[str, int]:
        """Counts for people and metrics."""
        return asdict(self.usage())

    def check(self) -> None:
        """Raises AssertionError unless every slot is free or one page's, and the indexes agree with the pages."""
        births = [page.born for page in self._pages.values()]
        assert births == sorted(births), "the oldest page is the first"
        held: dict[bytes, int] = {}
        for keys in self._holds.values():
            for key in keys:
                held[key] = held.get(key, 0) + 1
        for key, page in self._pages.items():
            slab = self._slabs[page.slab]
            assert key in slab.pages and page.length <= slab.slot_bytes
            assert page.slab * self._slab_bytes <= page.offset <= (page.slab + 1) * self._slab_bytes - slab.slot_bytes
            assert page.holds == held.get(key, 0) and not (page.holds and page.owner is not None)
            assert (page.owner is not None) == (key in self._reserved.get(page.owner, ()))
            evictable = page.owner is None and page.holds == 0
            assert (key in self._evictable.get(slab.slot_bytes, ())) == evictable
            assert not evictable or page.used <= slab.used
        assert all(self._reserved.values()) and sum(len(each) for each in self._reserved.values()) <= len(self._pages)
        assert sum(len(each) for each in self._evictable.values()) <= len(self._pages)
        for pages in self._evictable.values():
            uses = [self._pages[key].used for key in pages]
            assert uses == sorted(uses), "recency is the order of the index"
        assert len(self._free_slabs) == len(set(self._free_slabs))
        for index, slab in enumerate(self._slabs):
            mine = [self._pages[key] for key in slab.pages]
            offsets = [*slab.free, *(page.offset for page in mine)]
            assert len(set(offsets)) == len(offsets), "two pages share a slot"
            usable = index in self._free_slabs or index >= self._ready_slabs
            assert bool(slab.slot_bytes) == bool(slab.pages) == (not usable)
            assert slab.busy == sum(1 for page in mine if page.owner is not None or page.holds)
            if slab.slot_bytes:
                assert len(offsets) == self._slab_bytes // slab.slot_bytes
                assert bool(slab.free) == (index in self._with_room[slab.slot_bytes])
