"""What a publisher is given: tensors in memory, or files. Each is digested where it is, and what is put is copied from there."""

import asyncio
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import xxhash

from tensorcast_connector.client.checkpoint import Checkpoint
from tensorcast_connector.client.image import FilePart, Image
from tensorcast_connector.client.reading import stream
from tensorcast_connector.client.tensors import RawTensor, sources
from tensorcast_connector.client.threads import in_thread
from tensorcast_connector.config import PUT_THREADS
from tensorcast_connector.core.weights import Content
from tensorcast_connector.errors import InvalidArgument


class Given(Protocol):
    """See the module."""

    async def digest(self) -> dict[str, Content]:
        """What the tensors are, by name. Raises InvalidArgument if one cannot be read; names it."""

    def image(self, names: Sequence[str], others: Mapping[str, RawTensor]) -> Image:
        """Some of them, and others, to be put."""

    def close(self) -> None:
        """Lets go of them."""


class MemoryGiven:
    """Tensors by name; digested by several threads at once.

    Raises:
        InvalidArgument: something is no tensor, or of a kind that cannot be stored; names it.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._sources = {each.name: each for each in sources(tensors)}

    async def digest(self) -> dict[str, Content]:
        """See Given."""
        left = iter(self._sources.values())
        content: dict[str, Content] = {}

        def some() -> None:
            for each in left:  # which gives each to one thread only
                content[each.name] = each.dtype, each.shape, xxhash.xxh3_128_digest(each.contiguous())

        await asyncio.gather(*(asyncio.to_thread(some) for _ in range(PUT_THREADS)))
        return {name: content[name] for name in self._sources}

    def image(self, names: Sequence[str], others: Mapping[str, RawTensor]) -> Image:
        """See Given."""
        return Image({**{name: self._sources[name].tensor for name in names}, **others})

    def close(self) -> None:
        """See Given."""


class FilesGiven:
    """A safetensors file, or a folder of them; read by several threads, and again as far as it is put.

    Raises:
        InvalidArgument: it cannot be read, or is not what it says; names the file and the tensor.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._checkpoint = Checkpoint.open(path)

    async def digest(self) -> dict[str, Content]:
        """See Given."""
        stop = threading.Event()
        content = await in_thread(lambda: dict(_digests(self._checkpoint, stop)), stop=stop.set)
        if not self._checkpoint.unchanged():
            raise InvalidArgument(f"{self._checkpoint.path}: it was changed while it was read; publish it again")
        return content

    def image(self, names: Sequence[str], others: Mapping[str, RawTensor]) -> Image:
        """See Given."""
        return FilePart(self._checkpoint, names, others)

    def close(self) -> None:
        """See Given."""
        self._checkpoint.close()


def _digests(checkpoint: Checkpoint, stop: threading.Event) -> Iterable[tuple[str, Content]]:
    for tensor, data in stream(checkpoint):
        if stop.is_set():
            return
        yield tensor.name, (tensor.dtype, tensor.shape, xxhash.xxh3_128_digest(data))
