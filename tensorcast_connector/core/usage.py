"""How full an arena is: counted by its slabs, so that asking costs the same with a thousand pages and with a million."""

from dataclasses import dataclass

from tensorcast_connector.core.segments import Segments


@dataclass(frozen=True, slots=True)
class Usage:
    """An arena at one moment. Bytes are those of slots: a page takes a little more than its own length."""

    pages: int  # that can be read
    pages_reserved: int  # that are being written
    pages_held: int  # of `pages`, those that somebody uses
    bytes_used: int  # by all of these
    bytes_pinned: int  # by those that are being written or used, which cannot be evicted
    bytes_total: int
    evictions: int

    @property
    def pressure(self) -> float:
        """The share of the arena that cannot be evicted, from 0 to 1."""
        return min(1.0, self.bytes_pinned / self.bytes_total) if self.bytes_total else 1.0


class MeteredSegments(Segments):
    """Segments that say how full they are without looking at each page."""

    def usage(self) -> Usage:
        """What there is now."""
        reserved = sum(map(len, self._reserved.values()))
        pages = len(self._pages) - reserved
        used = pinned = 0
        for slab in self._slabs:
            used += slab.slot_bytes * len(slab.pages)
            pinned += slab.slot_bytes * slab.busy
        total = self._slab_bytes * self._ready_slabs
        held = pages - sum(map(len, self._evictable.values()))
        return Usage(pages, reserved, held, used, pinned, total, self.evictions)
