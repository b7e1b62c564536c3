"""Shared memory mapped where the kernel can back it with huge pages, which Python's mmap does not offer.

The first touch of memory costs: whoever writes to a page first waits until it is zeroed, and each process that maps it takes a
fault of its own for every page. With small pages that is slower than the copy itself. So memory is zeroed before it is handed
out (`allocate`), in pages of 2 MiB, which every process maps by one fault instead of 512. That needs Linux 6.1, and is
done also where `shmem_enabled` is `never`. Where the kernel cannot, pages are small, and who writes maps them ahead
(`FirstTouch`).
"""

import ctypes
import errno
import gc
import mmap
import os
import weakref
from collections.abc import Iterable
from typing import Any

HUGE_PAGE_BYTES = 2 << 20
_PROT_NONE = 0
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23
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

    def let_go(self) -> bool:
        """Unmaps it if nobody else refers to the buffer; whether that was so."""
        del self.buffer
        if self._ending.alive:
            gc.collect()  # what only a cycle of garbage still holds is nobody's
        return not self._ending.alive


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


def collapse(descriptor: int, size: int, start: int = 0) -> bool:
    """Makes huge pages of what is behind a descriptor, as far as whole ones fit; whether that could be done.

    Args:
        start: of the first, in whole huge pages.
    """
    whole = size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if not whole:
        return False
    mapped = map_memory(descriptor, whole, start)
    try:
        return bool(_libc.madvise(ctypes.addressof(mapped.buffer), whole, _MADV_COLLAPSE) == 0)
    finally:
        mapped.close()


def map_shared(descriptor: int, size: int) -> memoryview:
    """`size` bytes behind a descriptor, writable, as plain bytes; from a place where huge pages can be mapped as such.

    Unmapped when nothing refers to it or a part of it any more.

    Raises:
        OSError: the kernel does not map it.
        ValueError: there is not so much behind the descriptor, and to touch what is missing would end the process.
    """
    if not 0 < size <= os.fstat(descriptor).st_size:
        raise ValueError(f"{size} bytes of {os.fstat(descriptor).st_size}")
    try:
        # Python's object owns a larger range of addresses, which it gives back, and the memory is mapped in the middle of it.
        whole = mmap.mmap(-1, size + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError:  # such a range is taken for memory where the kernel counts strictly
        return memoryview(mmap.mmap(descriptor, size))
    base = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    start = -base % HUGE_PAGE_BYTES
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(base + start, size, protection, flags, descriptor, 0) == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    return memoryview(whole)[start : start + size]


def allocate(descriptor: int, start: int, size: int) -> bool:
    """Memory for `size` bytes (at least 1) of a descriptor, zeroed; whether it is of huge pages, as far as whole ones fit.

    It counts as memory of this process's cgroup, whoever maps it later.

    Args:
        start: of the first, in whole pages. Huge pages are made only if it is the start of one.

    Raises:
        OSError: there is no memory.
    """
    whole = 0 if start % HUGE_PAGE_BYTES else size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    # A huge page made around one small page is zeroed and filled at once; of 512 small ones it would be copied.
    for at in range(start, start + whole, HUGE_PAGE_BYTES):
        os.posix_fallocate(descriptor, at, mmap.PAGESIZE)
    huge = collapse(descriptor, whole, start)
    os.posix_fallocate(descriptor, start, size)  # what is still missing
    if not huge:
        mapped = map_memory(descriptor, size, start)
        populate(ctypes.addressof(mapped.buffer), size)
        mapped.close()
    return huge


def populate(address: int, size: int) -> int:
    """Maps memory that is there for writing, as if every page had been written to; 0, or the kernel's error, and all goes on.

    Needs Linux 5.14. Memory that is not there would be allocated.
    """
    at = address // mmap.PAGESIZE * mmap.PAGESIZE
    done = _libc.madvise(at, address + size - at, _MADV_POPULATE_WRITE) == 0
    return 0 if done else ctypes.get_errno()


class FirstTouch:
    """Maps what is about to be written to, 2 MiB by one call instead of 512 faults, and each only once.

    Of huge pages there is one fault in either way. What is only read needs no help: the kernel then maps 16 pages by a fault.
    Nothing is mapped that nobody writes to, so a process's resident memory does not grow by what it does not use.

    Args:
        memory: as `map_shared` gives it.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._ahead = bytearray(b"\1") * -(-memory.nbytes // HUGE_PAGE_BYTES)  # by 2 MiB; 0: is mapped
        self._left = len(self._ahead)

    def __repr__(self) -> str:
        return f"<FirstTouch {self._left} of {len(self._ahead)} left>"

    def write(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Before bytes are written, on any thread.

        Args:
            ranges: (offset, length) in the memory, with memory behind all of the 2 MiB that they begin and end in.
        """
        if not self._left:
            return
        new = sorted(
            {
                place
                for offset, length in ranges
                for place in range(offset // HUGE_PAGE_BYTES, -(-(offset + length) // HUGE_PAGE_BYTES))
                if self._ahead[place]
            }
        )
        first = 0
        for index, place in enumerate(new, 1):
            if index == len(new) or new[index] != place + 1:
                self._map(new[first], place + 1)
                first = index

    def _map(self, first: int, end: int) -> None:
        start = first * HUGE_PAGE_BYTES
        size = min(end * HUGE_PAGE_BYTES, self._memory.nbytes) - start
        error = populate(ctypes.addressof(ctypes.c_char.from_buffer(self._memory, start)), size)
        if error == errno.EINVAL:  # this kernel cannot
            self._left = 0
            return
        self._left -= sum(self._ahead[first:end])
        self._ahead[first:end] = bytes(end - first)  # also after another error: who writes finds out
