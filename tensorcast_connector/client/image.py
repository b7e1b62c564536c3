"""The bytes of an artifact that is being put: where they come from, chunk by chunk, and their digests."""

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from tensorcast_connector.client.tensors import Source, sources
from tensorcast_connector.core.artifact import ALIGN_BYTES, CHUNK_BYTES, TensorSpec, chunk_count, layout
from tensorcast_connector.errors import InvalidArgument

CACHED_BYTES = 256 << 10  # a part that stays in a core's cache between copying and digesting it
_ZEROS = bytes(ALIGN_BYTES)


class Image:
    """See the module. Chunks may be read by several threads.

    Raises:
        InvalidArgument: something cannot be put; names it.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        found = {each.name: each for each in sources(tensors)}
        try:
            self.specs, self.size = layout((each.name, each.dtype, each.shape) for each in found.values())
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
        self._sources = [found[spec.name] for spec in self.specs]
        self._lock = threading.Lock()
        self._contiguous: dict[int, memoryview] = {}  # those that are being read,
        self._left: dict[int, int] = {}  # and how many bytes of each are still to be taken
        self._firsts = self._first_of_chunks()

    @property
    def chunks(self) -> int:
        """How many there are."""
        return chunk_count(self.size)

    def _first_of_chunks(self) -> list[int]:
        """The first tensor of each chunk."""
        firsts: list[int] = []
        at = 0
        for chunk in range(self.chunks):
            while at < len(self.specs) and self.specs[at].range.end <= chunk * CHUNK_BYTES:
                at += 1
            firsts.append(at)
        return firsts

    def write(self, number: int, target: "np.ndarray[Any, np.dtype[np.uint8]]") -> bytes:
        """Writes a chunk into memory of its size, and returns its digest; copied and digested while it is in the cache."""
        digest = xxhash.xxh3_128()
        at = 0
        for piece in self._pieces(number):
            for start in range(0, len(piece), CACHED_BYTES):
                part = np.frombuffer(piece[start : start + CACHED_BYTES], np.uint8)
                target[at : at + part.size] = part
                digest.update(target[at : at + part.size].data)  # what was written: its owner may go on changing it
                at += part.size
        return digest.digest()

    def chunk_bytes(self, number: int) -> int:
        """The size of a chunk."""
        return min(CHUNK_BYTES, self.size - number * CHUNK_BYTES)

    def _pieces(self, number: int) -> Iterator[memoryview | bytes]:
        at, end = number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, self.size)
        index = self._firsts[number]
        while at < end:
            spec = self.specs[index]
            if at < spec.offset:
                yield _ZEROS[: min(spec.offset, end) - at]
                at = min(spec.offset, end)
            stop = min(spec.range.end, end)
            if at < stop:
                yield self._bytes(index, spec, at - spec.offset, stop - spec.offset)
                at = stop
            index += 1

    def _bytes(self, index: int, spec: TensorSpec, start: int, stop: int) -> memoryview:
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
