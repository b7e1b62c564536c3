"""What will be read next, asked of the disk while something else is still on its way.

A disk gives its most when it has many requests at once, and threads that read have one each. So that these can stay as few
as the cores are, the kernel is told what comes next (`posix_fadvise`): what will be read and nothing else, in that order,
READ_AHEAD_BYTES of it. That is done only once a read had to wait for a disk: what is in the page cache is not asked for.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorcast_connector.config import READ_AHEAD_BYTES, READ_AHEAD_STEP_MAX_BYTES, READ_AHEAD_STEP_MIN_BYTES

_NOWAIT = getattr(os, "RWF_NOWAIT", None)  # an old C library has none
_DEVICES = Path("/sys/dev/block")


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file.

    Attributes:
        at: how many bytes are read before them, in all.
    """

    at: int
    descriptor: int
    offset: int
    bytes: int

    def steps(self) -> Iterator["Span"]:
        """The same in parts that the kernel takes whole."""
        step = READ_AHEAD_STEP_MIN_BYTES
        with contextlib.suppress(OSError):  # the file was closed, which whoever reads it is told
            step = step_bytes(os.fstat(self.descriptor).st_dev)
        for start in range(0, self.bytes, step):
            yield Span(self.at + start, self.descriptor, self.offset + start, min(step, self.bytes - start))


@functools.cache
def step_bytes(device: int, devices: Path = _DEVICES) -> int:
    """What the kernel takes of one request to read ahead on that device (`st_dev`); the rest of a larger one is lost.

    That is what the device's queue says it reads ahead, or takes in one request if that is more. Where nothing is said, as
    on network file systems, the least that a kernel has by default.
    """
    folder = (devices / f"{os.major(device)}:{os.minor(device)}").resolve()
    found = READ_AHEAD_STEP_MIN_BYTES
    for queue in (folder / "queue", folder.parent / "queue"):  # of a disk; of the disk that a partition is on
        for name in ("read_ahead_kb", "max_sectors_kb"):
            with contextlib.suppress(OSError, ValueError):
                found = max(found, int((queue / name).read_text()) << 10)
    return min(found, READ_AHEAD_STEP_MAX_BYTES)


class ReadAhead:
    """See the module. For any number of threads.

    Args:
        spans: what will be read, in about that order; asked for as it is needed, so it must not hold what holds this.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self._steps = (step for span in spans for step in span.steps())
        self._next: Span | None = None
        self._waited = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ReadAhead {'of a disk' if self._waited else 'not needed'}, next {self._next}>"

    def waited(self) -> None:
        """A read had to wait for a disk."""
        self._waited = True

    def reached(self, at: int) -> None:
        """What is from `at` on will be read next; that, and what follows, is asked for if a disk is what is waited for."""
        if not self._waited:
            return
        due: list[Span] = []
        with self._lock:
            if self._next is None:
                self._next = next(self._steps, None)
            while self._next is not None and self._next.at < at + READ_AHEAD_BYTES:
                if self._next.at + self._next.bytes > at:
                    due.append(self._next)
                self._next = next(self._steps, None)
        for each in due:
            with contextlib.suppress(OSError):  # whoever reads it is told
                os.posix_fadvise(each.descriptor, each.offset, each.bytes, os.POSIX_FADV_WILLNEED)


def read_cached(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int | None:
    """As `os.preadv`, as far as that can be had without waiting for a disk. 0: it cannot; None: that cannot be told.

    Memory file systems cannot tell, and network file systems; these are read as ever. Neither an error nor the end of the file
    is said here: the read that may wait tells them.
    """
    if _NOWAIT is None:
        return None
    try:
        return os.preadv(descriptor, buffers, offset, _NOWAIT) or None
    except BlockingIOError:
        return 0
    except OSError:
        return None
