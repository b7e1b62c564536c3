"""Bytes of pages between an engine's host memory and memory of the pool.

A large batch is copied by several threads, which let go of the GIL for each part. A small one is copied by its caller alone, who
keeps it: SGLang's scheduler never rests, so whoever has let go of the GIL may wait for it for sys.getswitchinterval(), which is
longer than the whole copy.
"""

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from tensorcast_connector.config import STORAGE_COPY_SHARED_BYTES, STORAGE_COPY_THREADS
from tensorcast_connector.errors import Unavailable


class Span(NamedTuple):
    """Bytes of this process's memory."""

    address: int
    length: int


# Where one page lies: its parts, in the order in which the pool keeps them.
Parts = Sequence[Span]


def size_of(parts: Parts) -> int:
    """Bytes of a page."""
    return sum(part.length for part in parts)


# What copies one part: (to, from, bytes).
Move = Callable[[int, int, int], object]
_keeping_the_gil = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.pythonapi)
)


def move_of(size: int) -> Move:
    """What copies the parts of a batch of so many bytes."""
    return ctypes.memmove if size >= STORAGE_COPY_SHARED_BYTES else _keeping_the_gil


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def copy_out(parts: Parts, slot: memoryview, move: Move) -> None:
    """Host memory -> pool.

    Raises:
        Unavailable: the slot is for a page of another size.
    """
    at = _address(slot)
    if slot.nbytes != size_of(parts):
        raise Unavailable(f"a page has {size_of(parts)} bytes where the others have {slot.nbytes}")
    for part in parts:
        move(at, part.address, part.length)
        at += part.length


def copy_in(slot: memoryview, parts: Parts, move: Move) -> None:
    """Pool -> host memory; the slot has as many bytes as the parts."""
    at = _address(slot)
    for part in parts:
        move(part.address, at, part.length)
        at += part.length


class Together:
    """Threads that help who has a batch to copy: one alone does not get all that memory gives. They end with this object."""

    def __init__(self) -> None:
        self._helpers = ThreadPoolExecutor(STORAGE_COPY_THREADS - 1, "tensorcast-copy")

    def __repr__(self) -> str:
        return f"<Together {STORAGE_COPY_THREADS} threads>"

    def run(self, copy: Callable[[int], None], count: int, size: int) -> None:
        """Copies 0 to `count - 1`, `size` bytes in all; when it returns or raises, no thread copies any more.

        Raises:
            Exception: what `copy` has raised; not everything was copied.
        """
        # Each thread takes the next one, so the caller's does it all while the others help somebody else.
        left = iter(range(count))

        def some() -> None:
            for number in left:
                copy(number)

        threads = STORAGE_COPY_THREADS if size >= STORAGE_COPY_SHARED_BYTES else 1
        helping: list[Future[None]] = []
        try:
            with contextlib.suppress(RuntimeError):  # the process is ending: no thread is started any more
                helping += [self._helpers.submit(some) for _ in range(threads - 1)]
            some()
        finally:
            helping = [each for each in helping if not each.cancel()]
            wait(helping)
        for each in helping:
            each.result()
