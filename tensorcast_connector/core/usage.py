"""How full an arena is, as core/segments counts it."""

from dataclasses import dataclass


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
