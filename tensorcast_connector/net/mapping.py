"""Shared memory mapped where the kernel can back it with huge pages, which Python's mmap does not offer.

Memory of 2 MiB pages is mapped by one fault instead of 512. Where a Linux (6.1 or later) can do it, `collapse` makes such
pages of memory that is there; where it cannot, everything works with small ones.
"""

import ctypes
import mmap
import weakref
from typing import Any

HUGE_PAGE_BYTES = 2 << 20
_PROT_NONE = 0
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapped:
    """Mapped memory: `buffer`, writable. Unmapped by `close`, or when nothing refers to the buffer any more."""

    def __init__(self, buffer: Any, ending: "weakref.finalize[Any, Any]") -> None:
        self.buffer = buffer
        self._ending = ending

    def close(self) -> None:
        """Unmaps it now. Nothing may touch the buffer, or what was made of it, after that."""
        self._ending()


def map_memory(descriptor: int, size: int, start: int = 0, *, private: bool = False) -> Mapped:
    """`size` bytes (at least 1) behind a descriptor.

    Args:
        start: of the first, in whole huge pages.
        private: what is written is seen by nobody else, and copied page by page.

    Raises:
        OSError: the kernel does not map it.
    """
    reserved = size + HUGE_PAGE_BYTES
    base = _libc.mmap(None, reserved, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    if base == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    at = -(-base // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    flags = (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED) | _MAP_FIXED
    if _libc.mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, start) == _FAILED:
        error = ctypes.get_errno()
        _libc.munmap(base, reserved)
        raise OSError(error, "mmap")
    buffer = (ctypes.c_uint8 * size).from_address(at)
    ending = weakref.finalize(buffer, _libc.munmap, base, reserved)
    ending.atexit = False  # the process is about to lose its mappings anyhow, and somebody may still look at the memory
    return Mapped(buffer, ending)


def collapse(descriptor: int, size: int) -> bool:
    """Makes huge pages of what is behind a descriptor, as far as whole ones fit; whether that could be done."""
    whole = size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if not whole:
        return False
    mapped = map_memory(descriptor, whole)
    try:
        return bool(_libc.madvise(ctypes.addressof(mapped.buffer), whole, _MADV_COLLAPSE) == 0)
    finally:
        mapped.close()
