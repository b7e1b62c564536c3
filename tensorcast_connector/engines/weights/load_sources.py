"""Where a checkpoint's tensors are, and how the copies of a load plan are made from there.

Bytes that follow each other on both sides are read to where they belong. What is cut out in small runs, converted to another
dtype or bound for another device goes through a buffer.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch

from tensorcast_connector.client.checkpoint import Checkpoint
from tensorcast_connector.client.read_ahead import ReadAhead, Span
from tensorcast_connector.client.reading import Piece, read_all, read_next, read_part, stream
from tensorcast_connector.config import LOAD_REPORT_INTERVAL_S, STAGE_BYTES, STAGE_RUN_BYTES
from tensorcast_connector.engines.weights.load_plan import Copy, Given
from tensorcast_connector.errors import InvalidArgument

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Source(Protocol):
    """Where a checkpoint's tensors are."""

    @property
    def what(self) -> str:
        """For people."""

    @property
    def given(self) -> Sequence[Given]:
        """The tensors, in the order in which a model gets them."""

    def read(self, name: str) -> torch.Tensor:
        """One of them."""

    def streamed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them, each in memory that the receiver may keep."""

    def again(self) -> "Source | None":
        """The same, for a second reader that takes no more than one thread; None if that costs as much as the first time did."""

    def fill(self, copies: Sequence[Copy], progress: Callable[[int], None]) -> int:
        """Makes copies; no two have a target in common. Returns how many bytes were read.

        Args:
            progress: told the bytes that are read, again and again, by one thread at a time.
        """

    def check(self) -> None:
        """Raises InvalidArgument if the tensors were changed since the source was opened, as far as that can be told."""


class Files:
    """A checkpoint's files. What cannot be read is an InvalidArgument that names the file and the tensor."""

    def __init__(self, checkpoint: Checkpoint, threads: int) -> None:
        self._checkpoint = checkpoint
        self._threads = threads
        self._order = {name: number for number, name in enumerate(checkpoint.tensors)}

    @property
    def what(self) -> str:
        """See Source."""
        return "files"

    @property
    def given(self) -> Sequence[Given]:
        """See Source."""
        return [
            (each.name, torch_dtype(each.name, each.dtype), each.shape) for each in self._checkpoint.tensors.values()
        ]

    def read(self, name: str) -> torch.Tensor:
        """See Source."""
        tensor = self._checkpoint.tensors[name]
        memory = torch.empty(tensor.bytes, dtype=torch.uint8)
        part = Piece.of(self._checkpoint, tensor, byte_view(memory))
        if tensor.bytes:
            read_part(part.descriptor, part.offset, [part])
        return memory.view(torch_dtype(name, tensor.dtype)).view(tensor.shape)

    def streamed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Source."""
        for tensor, data in stream(self._checkpoint, threads=self._threads):
            memory = torch.empty(tensor.bytes, dtype=torch.uint8)
            if tensor.bytes:
                memory.copy_(torch.frombuffer(data, dtype=torch.uint8))
            yield tensor.name, memory.view(torch_dtype(tensor.name, tensor.dtype)).view(tensor.shape)

    def again(self) -> "Source | None":
        """See Source: it is in the page cache now."""
        return Files(self._checkpoint, 1)

    def fill(self, copies: Sequence[Copy], progress: Callable[[int], None]) -> int:
        """See Source."""
        ordered = sorted(copies, key=lambda each: (self._order[each.name], each.offset))
        cut = [part for each in ordered for part in parts(each)]
        pieces = [self._piece(each, byte_view(each.target)) for each in cut if direct(each)]
        done = read_all(pieces, threads=self._threads, progress=lambda read, _: progress(read))
        staged = [each for each in cut if not direct(each)]
        starts = accumulate((each.span[1] - each.span[0] for each in staged), initial=0)
        numbered = list(zip(starts, staged, strict=False))
        ahead = ReadAhead(self._span(start, each) for start, each in numbered)

        def work(start_and_copy: tuple[int, Copy], stage: "Stage") -> int:
            start, copy = start_and_copy
            return self._stage(copy, stage, ahead, start)

        return done + in_threads(numbered, work, self._threads, lambda read: progress(done + read))

    def check(self) -> None:
        """See Source."""
        if not self._checkpoint.unchanged():
            raise InvalidArgument(f"{self._checkpoint.path}: the files were changed while they were read")

    def _piece(self, copy: Copy, target: memoryview) -> Piece:
        return Piece.of(self._checkpoint, self._checkpoint.tensors[copy.name], target, copy.span[0])

    def _span(self, at: int, copy: Copy) -> Span:
        tensor, (start, stop) = self._checkpoint.tensors[copy.name], copy.span
        return Span(at, self._checkpoint.descriptor(tensor.file), tensor.offset + start, stop - start)

    def _stage(self, copy: Copy, stage: "Stage", ahead: ReadAhead, at: int) -> int:
        """Reads a part into a buffer and copies it from there."""
        start, stop = copy.span
        buffer = stage.buffer(stop - start, copy.target.device)
        part = self._piece(copy, byte_view(buffer[: stop - start]))
        read_next(ahead, at, part.descriptor, part.offset, [part])
        flat = buffer[: stop - start].view(copy.dtype)
        stage.copy(copy.target, flat.as_strided(copy.shape, copy.stride, copy.offset - start // copy.dtype.itemsize))
        return stop - start


class Pooled:
    """Tensors of the pool, mapped on this host."""

    def __init__(self, reference: str, tensors: Mapping[str, torch.Tensor], threads: int) -> None:
        self._reference = reference
        self._tensors = tensors
        self._threads = threads

    @property
    def what(self) -> str:
        """See Source."""
        return f"artifact {self._reference}"

    @property
    def given(self) -> Sequence[Given]:
        """See Source."""
        return [(name, each.dtype, tuple(each.shape)) for name, each in self._tensors.items()]

    def read(self, name: str) -> torch.Tensor:
        """See Source."""
        return self._tensors[name].clone()

    def streamed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Source."""
        for name in self._tensors:
            yield name, self.read(name)

    def again(self) -> "Source | None":
        """See Source: it is here."""
        return Pooled(self._reference, self._tensors, 1)

    def fill(self, copies: Sequence[Copy], progress: Callable[[int], None]) -> int:
        """See Source."""
        return in_threads([part for each in copies for part in rows(each)], self._copy, self._threads, progress)

    def check(self) -> None:
        """See Source: nothing can change an artifact."""

    def _copy(self, copy: Copy, stage: "Stage") -> int:
        whole = self._tensors[copy.name].reshape(-1).view(copy.dtype)
        view = whole.as_strided(copy.shape, copy.stride, copy.offset)
        if copy.target.device.type == "cpu":
            copy.target.copy_(view)
        else:
            buffer = stage.buffer(copy.target.numel() * copy.dtype.itemsize, copy.target.device)
            packed = buffer[: copy.target.numel() * copy.dtype.itemsize].view(copy.dtype).view(copy.shape)
            packed.copy_(view)
            stage.copy(copy.target, packed)
        return copy.bytes


def torch_dtype(name: str, dtype: str) -> torch.dtype:
    """The dtype of a checkpoint's tensor.

    Raises:
        InvalidArgument: this torch has no such dtype.
    """
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise InvalidArgument(f"tensor {name!r} is {dtype}, which this torch does not have")
    return found


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in this process's memory, to be written to."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


# --- parts of copies --------------------------------------------------------------------------------------------------


def direct(copy: Copy) -> bool:
    """Whether its bytes can be read to where they belong."""
    return copy.target.device.type == "cpu" and copy.plain


def parts(copy: Copy) -> Iterator[Copy]:
    """A copy in parts that can be read to where they belong, or that fit a buffer."""
    if direct(copy) or not copy.shape:
        yield copy
        return
    count = copy.shape[0]
    each = copy.bytes // count
    start, stop = copy.span
    if count > 1 and each >= STAGE_RUN_BYTES and copy.target.device.type == "cpu" and copy.dtype == copy.target.dtype:
        for index in range(count):
            yield from parts(_rows(copy, index, index + 1, single=True))
    elif stop - start > STAGE_BYTES and count == 1:
        yield from parts(_rows(copy, 0, 1, single=True))
    else:
        rows = max(1, count * STAGE_BYTES // (stop - start))
        for index in range(0, count, rows):
            part = _rows(copy, index, min(index + rows, count))
            yield from [part] if rows > 1 or part.span == copy.span else parts(part)


def _rows(copy: Copy, start: int, stop: int, single: bool = False) -> Copy:
    """Some of a copy along its first dimension, or one without that dimension."""
    offset = copy.offset + start * copy.stride[0]
    if single:
        return replace(copy, offset=offset, shape=copy.shape[1:], stride=copy.stride[1:], target=copy.target[start])
    return replace(copy, offset=offset, shape=(stop - start, *copy.shape[1:]), target=copy.target[start:stop])


def rows(copy: Copy) -> Iterator[Copy]:
    """A copy in parts of about STAGE_BYTES."""
    if not copy.shape or copy.bytes <= STAGE_BYTES:
        yield copy
    elif copy.shape[0] == 1:
        yield from rows(_rows(copy, 0, 1, single=True))
    else:
        each = max(1, copy.shape[0] * STAGE_BYTES // copy.bytes)
        for index in range(0, copy.shape[0], each):
            part = _rows(copy, index, min(index + each, copy.shape[0]))
            yield from [part] if each > 1 else rows(part)


def in_threads(
    copies: Sequence[T], work: Callable[[T, "Stage"], int], threads: int, progress: Callable[[int], None]
) -> int:
    """Makes copies by several threads, each with buffers of its own; the sum of what `work` returns. All are there then."""
    done = 0
    lock = threading.Lock()

    def some(mine: Iterator[T]) -> None:
        nonlocal done
        stage = Stage()
        try:
            for copy in mine:
                size = work(copy, stage)
                with lock:
                    done += size
                    progress(done)
        finally:  # nothing is under way any more when this fails and others load instead
            stage.finish()

    left, count = iter(copies), min(threads, len(copies))
    if count == 1:
        some(left)
    elif count:
        with ThreadPoolExecutor(count, "loading") as pool:
            for each in [pool.submit(some, left) for _ in range(count)]:
                each.result()
    return done


# --- devices ----------------------------------------------------------------------------------------------------------


class Stage:
    """Buffers of one thread, out of which is copied to any device. `finish` it, whatever happens.

    To a CUDA device from pinned memory, on a stream of its own: while one buffer is on its way the other one is filled. A
    buffer is filled again only after the event behind the last copy from it.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._packed: list[torch.Tensor] = []  # beside each: what is copied from it in another form
        self._events: list[Any] = []
        self._turn = 0
        self._stream: Any = None

    def buffer(self, size: int, device: torch.device) -> torch.Tensor:
        """At least `size` bytes, which nothing is copied from any more."""
        if device.type == "cuda" and self._stream is None:
            # What the model has filled in itself may be under way on any stream: that of this thread is another one's.
            torch.cuda.synchronize(device)
            self._stream = torch.cuda.Stream(device)
        if not self._buffers:
            count = 2 if self._stream is not None else 1
            self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(count)]
            self._packed, self._events = list(self._buffers), [None] * count
        self._turn = (self._turn + 1) % len(self._buffers)
        if self._events[self._turn] is not None:
            self._events[self._turn].synchronize()
        return self._of(self._buffers, size)

    def _of(self, buffers: list[torch.Tensor], size: int) -> torch.Tensor:
        """The buffer whose turn it is, made larger if it has to be."""
        if buffers[self._turn].numel() < size:
            pinned = self._stream is not None
            buffers[self._turn] = torch.empty(
                max(size, STAGE_BYTES), dtype=torch.uint8, device="cpu", pin_memory=pinned
            )  # fmt: skip
        return buffers[self._turn]

    def copy(self, target: torch.Tensor, given: torch.Tensor) -> None:
        """Copies out of the buffer that was last asked for, once; it may be under way when this returns."""
        if self._stream is None or target.device.type != "cuda":
            target.copy_(given)
            return
        if not given.is_contiguous() or given.dtype != target.dtype:
            # Else torch does that in memory that is not pinned, and the copy waits for it.
            size = target.numel() * target.itemsize
            packed = self._of(self._packed, size)[:size].view(target.dtype).view(given.shape)
            packed.copy_(given)
            given = packed
        with torch.cuda.stream(self._stream):
            target.copy_(given, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
            self._events[self._turn] = event

    def send(self, target: torch.Tensor, given: torch.Tensor) -> None:
        """Copies a tensor of this process's memory, of the target's shape, through buffers."""
        if target.is_contiguous():
            target, given = target.view(-1), given.reshape(-1)
        elif target.numel() * target.itemsize > STAGE_BYTES * target.shape[0]:  # one row is too large
            for one, other in zip(target, given, strict=True):
                self.send(one, other)
            return
        # Parts along the first dimension: a flat view of what is not contiguous would be a copy.
        row = max(1, given.numel() * given.itemsize // max(1, given.shape[0]))
        rows = max(1, STAGE_BYTES // row)
        for one, other in zip(target.split(rows), given.split(rows), strict=True):
            size = other.numel() * other.itemsize
            part = self.buffer(size, target.device)[:size].view(other.dtype).view(other.shape)
            part.copy_(other)
            self.copy(one, part)

    def finish(self) -> None:
        """Waits until all is there."""
        if self._stream is not None:
            self._stream.synchronize()


# --- how far it is ----------------------------------------------------------------------------------------------------


class Progress:
    """Says in the log how far a long load is, at which rate, and how long it still takes.

    Args:
        what: is loaded, for people.
        total: bytes.
    """

    def __init__(self, what: str, total: int, now: Callable[[], float]) -> None:
        self._what = what
        self._total = total
        self._now = now
        self._begun = self._said = now()

    def __call__(self, done: int) -> None:
        """So many bytes are there."""
        now = self._now()
        if now - self._said < LOAD_REPORT_INTERVAL_S or not done:
            return
        self._said = now
        rate = done / (now - self._begun)
        left = max(self._total - done, 0) / rate
        logger.info(
            "%s: %.1f of %.1f GB, %.2f GB/s, %.0f s left", self._what, done / 1e9, self._total / 1e9, rate / 1e9, left
        )  # fmt: skip
