"""The bytes of an artifact that is being put: where they come from, chunk by chunk, and their digests."""

import bisect
import os
import threading
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash

from tensorcast_connector.client.checkpoint import Checkpoint, FileTensor
from tensorcast_connector.client.read_ahead import ReadAhead, Span
from tensorcast_connector.client.reading import Piece, Progress, read_next
from tensorcast_connector.client.tensors import FileTensors, Source, sources
from tensorcast_connector.config import ARTIFACT_SPARE_BYTES
from tensorcast_connector.core.artifact import ALIGN_BYTES, CHUNK_BYTES, TensorSpec, check_fits, chunk_count, layout
from tensorcast_connector.errors import InvalidArgument

CACHED_BYTES = 512 << 10  # a part that stays in a core's own cache, with its source, between copying and digesting it
READ_BYTES = 1 << 20  # of a file in one read, which costs more than a copy to begin
_ZEROS = bytes(ALIGN_BYTES)


class Image:
    """See the module. Chunks may be read by several threads.

    Args:
        progress: told the bytes that are read and those that are to be, by one thread at a time.

    Attributes:
        metadata: of the files that it is made from; kept beside the artifact.

    Raises:
        InvalidArgument: something cannot be put; names it.
    """

    metadata: Mapping[str, str] = MappingProxyType({})

    def __init__(self, tensors: Mapping[str, Any], progress: Progress | None = None) -> None:
        if isinstance(tensors, FileTensors):
            self.metadata = tensors.metadata
        found = {each.name: each for each in sources(tensors)}
        self._lay_out(found.values(), progress)
        self._sources = [found[spec.name] for spec in self.specs]

    def _lay_out(self, tensors: Iterable[Source | FileTensor], progress: Progress | None) -> None:
        try:
            self.specs, self.size = layout((each.name, each.dtype, each.shape) for each in tensors)
            check_fits(self.specs, self.size)
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()
        self._contiguous: dict[int, memoryview] = {}  # those that are being read,
        self._left: dict[int, int] = {}  # and how many bytes of each are still to be taken
        self._firsts = self._first_of_chunks()
        self._buffers = threading.local()

    @property
    def chunks(self) -> int:
        """How many there are."""
        return chunk_count(self.size)

    def _first_of_chunks(self) -> list[int]:
        """The first tensor of each chunk."""
        ends = [spec.offset + spec.bytes for spec in self.specs]
        return [bisect.bisect_right(ends, chunk * CHUNK_BYTES) for chunk in range(self.chunks)]

    def write(self, number: int, target: "np.ndarray[Any, np.dtype[np.uint8]]") -> bytes:
        """Writes a chunk into memory of its size, and returns its digest; copied and digested while it is in the cache."""
        digest = xxhash.xxh3_128()
        at = 0
        for piece in self._pieces(number):
            step = _step(piece)
            for start in range(0, len(piece), step):
                part = target[at : at + min(step, len(piece) - start)]
                self._take(piece, start, part)
                digest.update(part.data)  # what was written: its owner may go on changing it
                at += part.size
        self._told(at)
        return digest.digest()

    def store(self, number: int, descriptor: int) -> bytes:
        """The same into a file of memory, at the chunk's place. Memory that was never touched is filled twice as fast like this.

        Raises:
            OSError: it cannot be written.
        """
        buffer = getattr(self._buffers, "mine", None)
        if buffer is None:
            buffer = self._buffers.mine = np.empty(READ_BYTES, np.uint8)
        digest = xxhash.xxh3_128()
        at = number * CHUNK_BYTES
        for piece in self._pieces(number):
            step = _step(piece)
            for start in range(0, len(piece), step):
                part = buffer[: min(step, len(piece) - start)]
                self._take(piece, start, part)
                digest.update(part.data)
                _write_all(descriptor, part.data, at)
                at += part.size
        self._told(at - number * CHUNK_BYTES)
        return digest.digest()

    def read(self, number: int) -> tuple[bytes, bytes]:
        """A chunk and its digest."""
        target = np.empty(self.chunk_bytes(number), np.uint8)
        digest = self.write(number, target)
        return target.tobytes(), digest

    def check(self) -> None:
        """After the last chunk: whether all of them are of the same state of what is put.

        Raises:
            InvalidArgument: it was changed meanwhile, as far as that can be told.
        """

    def close(self) -> None:
        """Lets go of what it is read from."""

    @staticmethod
    def _take(piece: "memoryview | bytes | _Stored", start: int, part: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
        if isinstance(piece, _Stored):
            piece.read(start, part.data)
        else:
            part[:] = np.frombuffer(piece[start : start + part.size], np.uint8)

    def _told(self, size: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += size
                self._progress(self._done, self.size)

    @property
    def fresh(self) -> bool:
        """Whether it goes into memory that no gateway has touched before: it is written then, by `store`, instead of mapped."""
        return self.size > ARTIFACT_SPARE_BYTES

    def chunk_bytes(self, number: int) -> int:
        """The size of a chunk."""
        return min(CHUNK_BYTES, self.size - number * CHUNK_BYTES)

    def _pieces(self, number: int) -> Iterator["memoryview | bytes | _Stored"]:
        at, end = number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, self.size)
        index = self._firsts[number]
        while at < end:
            spec = self.specs[index]
            if at < spec.offset:
                yield _ZEROS[: min(spec.offset, end) - at]
                at = min(spec.offset, end)
            stop = min(spec.offset + spec.bytes, end)
            if at < stop:
                yield self._bytes(index, spec, at - spec.offset, stop - spec.offset)
                at = stop
            index += 1

    def _bytes(self, index: int, spec: TensorSpec, start: int, stop: int) -> "memoryview | _Stored":
        """Part of a tensor. What had to be copied is let go of with its last part, so that copies of all are never there."""
        with self._lock:
            found = self._contiguous.get(index)
            if found is None:
                found = self._contiguous[index] = self._read(self._sources[index], spec)
                self._left[index] = spec.bytes
            self._left[index] -= stop - start
            if self._left[index] <= 0:
                del self._contiguous[index]
        return found[start:stop]

    def _read(self, source: Source, spec: TensorSpec) -> memoryview:
        data = source.contiguous()
        if data.nbytes != spec.bytes:
            raise InvalidArgument(f"tensor {spec.name!r} has changed its size while it was put")
        return data


def _step(piece: "memoryview | bytes | _Stored") -> int:
    return READ_BYTES if isinstance(piece, _Stored) else CACHED_BYTES


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(descriptor, data, offset)
        data, offset = data[done:], offset + done


@dataclass(frozen=True, slots=True)
class _Stored:
    """Part of a tensor in a file, which is read to where it is to be."""

    checkpoint: Checkpoint
    tensor: FileTensor
    start: int
    stop: int
    ahead: ReadAhead
    at: int  # of its first byte, in what `ahead` knows

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, start: int, target: memoryview) -> None:
        """Its bytes from `start` on."""
        piece = Piece.of(self.checkpoint, self.tensor, target, self.start + start)
        read_next(self.ahead, self.at + start, piece.descriptor, piece.offset, [piece])


class FileImage(Image):
    """The same of a file or folder; opens it.

    Raises:
        InvalidArgument: it cannot be put; names the file and the tensor. So do `write` and `check`.
    """

    def __init__(self, path: str | os.PathLike[str], progress: Progress | None = None) -> None:
        self._checkpoint = Checkpoint.open(path)
        try:
            self.metadata = self._checkpoint.metadata_to_keep()
            self._lay_out(self._checkpoint.tensors.values(), progress)
            self._ahead = self._reads_ahead()
        except BaseException:
            self.close()
            raise

    def _reads_ahead(self, others: Container[str] = ()) -> ReadAhead:
        """By the places in the image, of which those tensors are not in files."""
        checkpoint = self._checkpoint
        stored = [(spec, checkpoint.tensors[spec.name]) for spec in self.specs if spec.name not in others]
        return ReadAhead(
            Span(spec.offset, checkpoint.descriptor(tensor.file), tensor.offset, tensor.bytes)
            for spec, tensor in stored
        )

    def _bytes(self, index: int, spec: TensorSpec, start: int, stop: int) -> "memoryview | _Stored":  # noqa: ARG002
        tensor = self._checkpoint.tensors[spec.name]
        return _Stored(self._checkpoint, tensor, start, stop, self._ahead, spec.offset + start)

    def check(self) -> None:
        """See Image."""
        if not self._checkpoint.unchanged():
            raise InvalidArgument(f"{self._checkpoint.path}: it was changed while it was put; put it again")

    def close(self) -> None:
        """See Image."""
        self._checkpoint.close()


class FilePart(FileImage):
    """Some tensors of a checkpoint, which whoever has opened it closes, and `others` beside them, by name."""

    def __init__(self, checkpoint: Checkpoint, names: Iterable[str], others: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self._others = {each.name: each for each in sources(others)}
        self._lay_out([*(checkpoint.tensors[name] for name in names), *self._others.values()], None)
        self._ahead = self._reads_ahead(self._others)

    def _bytes(self, index: int, spec: TensorSpec, start: int, stop: int) -> "memoryview | _Stored":
        if spec.name in self._others:
            return self._others[spec.name].contiguous()[start:stop]
        return super()._bytes(index, spec, start, stop)

    def close(self) -> None:
        """See Image."""
