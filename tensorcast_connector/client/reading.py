"""Files into memory as fast as both are: positioned reads by several threads, straight to where the bytes belong.

`read_all` reads into memory that is given. `stream` gives a checkpoint's tensors one after the other out of memory that is used
again and again, for those who have to do something else with each. Reads let go of the GIL. A disk is asked ahead of them
(read_ahead.py).
"""

import contextlib
import itertools
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from tensorcast_connector.client.checkpoint import Checkpoint, FileTensor
from tensorcast_connector.client.read_ahead import ReadAhead, Span, read_cached
from tensorcast_connector.config import READ_BUFFERS_MAX, READ_THREADS, STREAM_RING_BYTES, TENSOR_READ_BYTES
from tensorcast_connector.errors import InvalidArgument

Progress = Callable[[int, int], None]
"""Told the bytes that are read, and those that are to be."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file from `offset` on, as many as `target` has, and where they go.

    Attributes:
        target: of bytes, contiguous, writable.
        label: the file and the tensor, for messages.
    """

    descriptor: int
    offset: int
    target: memoryview
    label: str

    @classmethod
    def of(cls, checkpoint: Checkpoint, tensor: FileTensor, target: memoryview, start: int = 0) -> Self:
        """The bytes of a tensor from `start` on, as many as `target` has."""
        assert start + target.nbytes <= tensor.bytes
        descriptor = checkpoint.descriptor(tensor.file)
        return cls(descriptor, tensor.offset + start, target, checkpoint.label(tensor))


def read_all(pieces: Iterable[Piece], *, threads: int = READ_THREADS, progress: Progress | None = None) -> int:
    """Reads all of them, in about that order. Returns how many bytes they have.

    Args:
        progress: is called by one thread at a time, not always the same; what it raises ends the reading.

    Raises:
        InvalidArgument: a file ends too early or cannot be read; names the file and the tensor. What was read is not to be used.
    """
    parts = _parts(pieces)
    work = _Work(parts, progress)
    others: list[threading.Thread] = []
    try:
        for _ in range(min(threads, len(parts)) - 1):
            other = threading.Thread(target=work.run, name="reading")
            other.start()
            others.append(other)
        work.run()
    except BaseException as error:  # Ctrl-C comes to the main thread only; or there are too many threads
        work.fail(error)
    finally:
        for other in others:
            other.join()
    if work.failed is not None:
        raise work.failed
    return work.total


class _Part:
    """What one call reads: neighbours of one file, `at` so many bytes after the first that is read at all."""

    __slots__ = ("at", "bytes", "descriptor", "offset", "pieces")

    def __init__(self, piece: Piece, at: int) -> None:
        self.at, self.bytes = at, len(piece.target)
        self.descriptor, self.offset, self.pieces = piece.descriptor, piece.offset, [piece]

    def takes(self, piece: Piece) -> bool:
        """Takes it in, if it is a small neighbour."""
        if (
            piece.descriptor != self.descriptor
            or piece.offset != self.offset + self.bytes
            or self.bytes + len(piece.target) > TENSOR_READ_BYTES
            or len(self.pieces) == READ_BUFFERS_MAX
        ):
            return False
        self.pieces.append(piece)
        self.bytes += len(piece.target)
        return True


def _parts(pieces: Iterable[Piece]) -> list[_Part]:
    parts: list[_Part] = []
    at = 0
    for whole in pieces:
        target = whole.target.cast("B") if whole.target.nbytes else whole.target
        for start in range(0, whole.target.nbytes, TENSOR_READ_BYTES):
            piece = Piece(
                whole.descriptor, whole.offset + start, target[start : start + TENSOR_READ_BYTES], whole.label
            )
            if not parts or not parts[-1].takes(piece):
                parts.append(_Part(piece, at))
            at += len(piece.target)
    return parts


class _Work:
    """Parts that several threads read."""

    def __init__(self, parts: Sequence[_Part], progress: Progress | None) -> None:
        self.total = sum(each.bytes for each in parts)
        self.failed: BaseException | None = None
        self._left = iter(parts)
        self._ahead = ReadAhead(Span(each.at, each.descriptor, each.offset, each.bytes) for each in parts)
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def fail(self, error: BaseException) -> None:
        """Nothing more is begun."""
        with self._lock:
            self.failed = self.failed or error

    def run(self) -> None:
        """Reads until nothing is left."""
        try:
            while True:
                with self._lock:
                    part = None if self.failed is not None else next(self._left, None)
                if part is None:
                    return
                read_next(self._ahead, part.at, part.descriptor, part.offset, part.pieces)
                if self._progress is not None:
                    with self._lock:
                        self._done += part.bytes
                        self._progress(self._done, self.total)
        except BaseException as error:
            self.fail(error)


def read_part(descriptor: int, offset: int, pieces: Sequence[Piece]) -> bool:
    """Pieces that are neighbours in a file, the first of which begins at `offset`, at most READ_BUFFERS_MAX.

    Returns:
        Whether it had to wait for a disk, as far as that can be told.

    Raises:
        InvalidArgument: see `read_all`.
    """
    left = deque(pieces)
    buffers = [each.target for each in pieces]
    waits = cold = False
    while buffers:
        try:
            if waits:
                count = os.preadv(descriptor, buffers, offset)
            elif cached := read_cached(descriptor, buffers, offset):
                count = cached
            else:
                waits, cold = True, cached == 0
                continue
        except OSError as error:
            raise InvalidArgument(f"{left[0].label} cannot be read: {error.strerror}") from error
        if not count:
            raise InvalidArgument(f"{left[0].label}: the file ends at byte {offset}, and was longer when it was opened")
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
            left.popleft()
        if count:
            buffers[0] = buffers[0][count:]
    return cold


def read_next(ahead: ReadAhead, at: int, descriptor: int, offset: int, pieces: Sequence[Piece]) -> None:
    """`read_part` of what lies at `at` in what `ahead` knows, which is told of it.

    Raises:
        InvalidArgument: see `read_all`.
    """
    ahead.reached(at)
    if read_part(descriptor, offset, pieces):
        ahead.waited()


# --- one after the other ----------------------------------------------------------------------------------------------


def stream(
    checkpoint: Checkpoint, names: Iterable[str] | None = None, *, threads: int = READ_THREADS,
    ring_bytes: int = STREAM_RING_BYTES,
) -> Iterator[tuple[FileTensor, memoryview]]:  # fmt: skip
    """Tensors in that order (all of them in the order of the files unless told), each with its bytes.

    The memory of a tensor is another one's as soon as the next one is asked for: copy what is to stay. Threads read ahead
    meanwhile, as far as `ring_bytes` go (more where two tensors that follow one another are larger).

    Raises:
        InvalidArgument: no such tensor, or a file ends too early or cannot be read; names the file and the tensor.
    """
    order = list(checkpoint.tensors.values()) if names is None else [_named(checkpoint, name) for name in names]
    sizes = [max(1, -(-each.bytes // mmap.PAGESIZE)) * mmap.PAGESIZE for each in order]
    pairs = [one + two for one, two in itertools.pairwise(sizes)]
    ring = _Ring(checkpoint, order, sizes, max([min(ring_bytes, sum(sizes)), *sizes, *pairs, mmap.PAGESIZE]))
    readers = [threading.Thread(target=ring.run, name="reading", daemon=True) for _ in range(max(1, threads))]
    for each in readers:
        each.start()
    try:
        for number, tensor in enumerate(order):
            yield tensor, ring.take(number)
            ring.release(number)
    finally:
        ring.stop()
        for each in readers:
            each.join()


def _named(checkpoint: Checkpoint, name: str) -> FileTensor:
    found = checkpoint.tensors.get(name)
    if found is None:
        raise InvalidArgument(f"{checkpoint.path}: it has no tensor {name!r}")
    return found


class _Ring:
    """Memory in which tensors lie one behind the other, begun again at its end."""

    def __init__(
        self, checkpoint: Checkpoint, order: Sequence[FileTensor], sizes: Sequence[int], capacity: int
    ) -> None:
        self._checkpoint = checkpoint
        self._order = order
        self._sizes = sizes
        self._starts = list(itertools.accumulate((each.bytes for each in order), initial=0))  # of each, in what is read
        self._ahead = ReadAhead(
            Span(start, checkpoint.descriptor(each.file), each.offset, each.bytes)
            for start, each in zip(self._starts, order, strict=False)
        )
        memory = mmap.mmap(-1, capacity)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(memory)
        self._capacity = capacity
        self._condition = threading.Condition()
        self._failed: BaseException | None = None
        self._stopped = False
        self._released = 0  # tensors that were given and are done with
        self._placed: list[int] = []  # where each tensor begins that has its place
        self._left: list[int] = []  # bytes of each of these that are still to be read
        self._next = (0, 0)  # the tensor and its byte that is read next

    def take(self, number: int) -> memoryview:
        """The bytes of that tensor, once they are there; reads too until they are, instead of waiting for others to run."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._failed or self._complete(number) or self._claimable())
                if self._failed is not None:
                    raise self._failed
                if self._complete(number):
                    at = self._placed[number]
                    return self._memory[at : at + self._order[number].bytes]
                part = self._claim()
            self._read(*part)

    def _complete(self, number: int) -> bool:
        return number < len(self._left) and not self._left[number]

    def release(self, number: int) -> None:
        """It is done with, and so are those before it."""
        with self._condition:
            self._released = number + 1
            self._condition.notify_all()

    def stop(self) -> None:
        """The readers end."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    def run(self) -> None:
        """One reader."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._ended() or self._claimable())
                if self._ended():
                    return
                part = self._claim()
            self._read(*part)

    def _ended(self) -> bool:
        return self._stopped or self._failed is not None or self._next[0] == len(self._order)

    def _claim(self) -> tuple[int, int, Piece]:
        """What is to be read next: of which tensor, where it begins in all that is read, and the piece."""
        number, start = self._next
        tensor = self._order[number]
        stop = min(start + TENSOR_READ_BYTES, tensor.bytes)
        self._next = (number, stop) if stop < tensor.bytes else (number + 1, 0)
        at = self._placed[number]
        piece = Piece.of(self._checkpoint, tensor, self._memory[at + start : at + stop], start)
        return number, self._starts[number] + start, piece

    def _read(self, number: int, start: int, piece: Piece) -> None:
        failed: BaseException | None = None
        try:
            read_next(self._ahead, start, piece.descriptor, piece.offset, [piece] if len(piece.target) else [])
        except BaseException as error:
            failed = error
        with self._condition:
            self._left[number] -= len(piece.target)
            self._failed = self._failed or failed
            if failed or not self._left[number] or self._next[0] == len(self._order):
                self._condition.notify_all()

    def _claimable(self) -> bool:
        """Whether there is a next tensor and it has its place, which it is given if there is room."""
        number, _ = self._next
        if number == len(self._order):
            return False
        if number < len(self._placed):
            return True
        size = self._sizes[number]
        held = range(self._released, number)
        if not held:
            at = 0
        else:
            first, last = self._placed[held[0]], self._placed[held[-1]] + self._sizes[held[-1]]
            if last > first:  # what is held is in one run: room behind it, or before it
                at = last if last + size <= self._capacity else 0 if size <= first else -1
            else:
                at = last if last + size <= first else -1
            if at < 0:
                return False
        self._placed.append(at)
        self._left.append(self._order[number].bytes)
        return True
