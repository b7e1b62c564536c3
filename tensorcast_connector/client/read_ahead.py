"""What will be read next, asked of the disk while something else is still on its way.

A disk gives its most when it has many requests at once, and threads that read have one each. So that these can stay as few
as the cores are, the kernel is told what comes next (`posix_fadvise`): what will be read and nothing else, in that order,
READ_AHEAD_BYTES of it. That is done only once a read had to wait for a disk: what is in the page cache is not asked for.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tensorcast_connector.config import READ_AHEAD_BYTES, READ_AHEAD_STEP_BYTES

# Not in the page cache; or the file system (or the kernel) cannot tell, and may be a disk.
_MAY_WAIT = frozenset({errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


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
        """The same in parts that one request has."""
        for start in range(0, self.bytes, READ_AHEAD_STEP_BYTES):
            yield Span(
                self.at + start, self.descriptor, self.offset + start, min(READ_AHEAD_STEP_BYTES, self.bytes - start)
            )


class ReadAhead:
    """See the module. For any number of threads.

    Args:
        spans: what will be read, in about that order.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self._steps = (step for span in spans for step in span.steps())
        self._next: Span | None = next(self._steps, None)
        self._waited = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ReadAhead {'of a disk' if self._waited else 'not needed'}, next {self._next}>"

    def waited(self) -> None:
        """A read had to wait for a disk, or may have had to."""
        self._waited = True

    def reached(self, at: int) -> None:
        """What is behind `at` is not being read yet; the next of it are asked for, if a disk is what is waited for."""
        if not self._waited:
            return
        due: list[Span] = []
        with self._lock:
            while self._next is not None and self._next.at < at + READ_AHEAD_BYTES:
                if self._next.at + self._next.bytes > at:
                    due.append(self._next)
                self._next = next(self._steps, None)
        for each in due:
            with contextlib.suppress(OSError):  # whoever reads it is told
                os.posix_fadvise(each.descriptor, each.offset, each.bytes, os.POSIX_FADV_WILLNEED)


def read_cached(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int | None:
    """As `os.preadv`, as far as that can be had without waiting for a disk; None: not at all, or that cannot be told.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        return (
            os.preadv(descriptor, buffers, offset, os.RWF_NOWAIT) or None
        )  # whether it ends there is for a read to say
    except OSError as error:
        if error.errno in _MAY_WAIT:
            return None
        raise
