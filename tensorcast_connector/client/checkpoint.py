"""A checkpoint: the tensors of a safetensors file, or of a folder of them, and the files they lie in, which stay open.

    with Checkpoint.open("/models/qwen3") as checkpoint:
        read_all(Piece.of(checkpoint, each, memory_for(each)) for each in checkpoint.tensors.values())
        assert checkpoint.unchanged()

Only headers are read here; client/reading.py reads the tensors.
"""

import hashlib
import logging
import os
import stat
import time
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tensorcast_connector.config import (
    FILE_CLOCK_TICK_S,
    FILE_CLOCK_WAIT_S,
    FILE_INDEX_BYTES_MAX,
    METADATA_BYTES_MAX,
)
from tensorcast_connector.core.safetensors import (
    INDEX,
    LENGTH_BYTES,
    SUFFIX,
    Place,
    agreed,
    header_bytes,
    parse_header,
    parse_index,
)
from tensorcast_connector.errors import InvalidArgument

logger = logging.getLogger(__name__)
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_FILE_CLOCK = 5  # CLOCK_REALTIME_COARSE, which the kernel writes on files; the module time has no name for it


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor and where it lies: `bytes` of it from `offset` on in file number `file` of the checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Stat:
    """What changes when a file is written to or replaced. Times in nanoseconds."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, found: os.stat_result) -> Self:
        """Of what stat says."""
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file. `header_digest` is of its length and header, and so of everything but the tensors' bytes."""

    path: Path
    stat: Stat
    header_digest: str

    @property
    def size(self) -> int:
        """In bytes."""
        return self.stat.size


class Checkpoint:
    """See the module. Made by `open`; a context manager that closes the files.

    Attributes:
        path: as it was given.
        files: the index of a folder is not among them.
        tensors: by name, in the order in which they lie in the files.
        metadata: of the files; of several that in which they agree.
        fingerprint: text that is another one when any file was written to or replaced, or is of another host. It is made of
            what the file system says and of the headers; the tensors are not read for it.
        host: text that is another one on another host, or after a restart: inodes and devices mean nothing there.
    """

    def __init__(
        self, path: Path, files: tuple[CheckpointFile, ...], tensors: Mapping[str, FileTensor], metadata: Mapping[str, str],
        others: Mapping[Path, Stat], listed: frozenset[str] | None, descriptors: tuple[int, ...], closing: ExitStack,
    ) -> None:  # fmt: skip
        self.path = path
        self.files = files
        self.tensors = tensors
        self.metadata = metadata
        self.host = _BOOT.read_text().strip()
        self.fingerprint = _fingerprint(self.host, files, tensors)
        self._others = others
        self._listed = listed
        self._descriptors = descriptors
        self._close = weakref.finalize(self, closing.close)  # of one that nobody closes, too

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """A file, or a folder: what its model.safetensors.index.json names, else all its *.safetensors files.

        Raises:
            InvalidArgument: it cannot be read, or is not what it says; names the file and the tensor.
        """
        found = Path(path)
        with ExitStack() as stack:
            opened = _Opened(stack)
            others: dict[Path, Stat] = {}
            listed: frozenset[str] | None = None
            try:
                if not found.is_dir():
                    opened.add(found)
                    tensors = opened.all_tensors()
                elif (index := found / INDEX).exists():
                    places, others[index] = _read_index(index)
                    tensors = opened.named_tensors(found, places)
                else:
                    listed = _listed(found)
                    for name in sorted(listed):
                        opened.add(found / name)
                    tensors = opened.all_tensors()
            except OSError as error:
                raise InvalidArgument(f"{error.filename or found}: {error.strerror or error}") from error
            except ValueError as error:  # a path with a zero
                raise InvalidArgument(f"{str(found)!r}: {error}") from error
            return cls(
                found, tuple(opened.files), tensors, opened.metadata(), others, listed, tuple(opened.descriptors),
                stack.pop_all(),
            )  # fmt: skip

    def descriptor(self, file: int) -> int:
        """Of file number `file`, open for reading until the checkpoint is closed."""
        return self._descriptors[file]

    def label(self, tensor: FileTensor) -> str:
        """The file and the tensor, for messages."""
        return f"{self.files[tensor.file].path}: tensor {tensor.name!r}"

    def metadata_to_keep(self) -> dict[str, str]:
        """What an artifact that is put from it has as metadata: none, with a warning, if it is more than METADATA_BYTES_MAX."""
        size = len(msgspec.json.encode(self.metadata))
        if size <= METADATA_BYTES_MAX:
            return dict(self.metadata)
        logger.warning(
            "%s: its metadata has %d bytes, more than %d, and is not kept", self.path, size, METADATA_BYTES_MAX
        )
        return {}

    def unchanged(self) -> bool:
        """Whether the files are still those that were opened, and were not written to since."""
        try:
            for file, descriptor in zip(self.files, self._descriptors, strict=True):
                if not file.stat == Stat.of(os.fstat(descriptor)) == Stat.of(file.path.stat()):
                    return False
            if any(Stat.of(path.stat()) != found for path, found in self._others.items()):
                return False
            return self._listed is None or _listed(self.path) == self._listed
        except (OSError, InvalidArgument):
            return False

    def close(self) -> None:
        """Closes the files; again does nothing."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Opened:
    """The files of a checkpoint while it is opened."""

    def __init__(self, closing: ExitStack) -> None:
        self.files: list[CheckpointFile] = []
        self.descriptors: list[int] = []
        self._closing = closing
        self._metadata: list[dict[str, str]] = []
        # Of each file: where its data begins, and what is in it.
        self._contents: list[tuple[int, dict[str, Place]]] = []

    def add(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe is not waited for
        self._closing.callback(os.close, descriptor)
        found = _settled(descriptor, path)
        first = os.pread(descriptor, LENGTH_BYTES, 0)
        length = header_bytes(first, found.size, str(path))
        header = os.pread(descriptor, length, LENGTH_BYTES)
        if len(header) < length:
            raise InvalidArgument(f"{path}: it was cut off while its header was read")
        start = LENGTH_BYTES + length
        places, metadata = parse_header(header, found.size - start, str(path))
        self._contents.append((start, places))
        self._metadata.append(metadata)
        digest = hashlib.blake2b(first + header, digest_size=16).hexdigest()
        self.files.append(CheckpointFile(path, found, digest))
        self.descriptors.append(descriptor)

    def metadata(self) -> dict[str, str]:
        """See Checkpoint."""
        return agreed(self._metadata)

    def all_tensors(self) -> dict[str, FileTensor]:
        """Every tensor of every file."""
        homes: dict[str, Path] = {}
        for file, (_, places) in zip(self.files, self._contents, strict=True):
            for name in places:
                if name in homes:
                    raise InvalidArgument(
                        f"{file.path}: tensor {name!r} is in {homes[name].name} too; "
                        f"write an index ({INDEX}) that says which counts"
                    )
                homes[name] = file.path
        return self._tensors(None)

    def named_tensors(self, folder: Path, index: Mapping[str, str]) -> dict[str, FileTensor]:
        """Exactly the tensors that the index names, each from the file it says."""
        numbers: dict[str, int] = {}
        for name in sorted(set(index.values())):
            numbers[name] = len(self.files)
            self.add(folder / name)
        for name, file in index.items():
            if name not in self._contents[numbers[file]][1]:
                raise InvalidArgument(
                    f"{folder / INDEX}: tensor {name!r} is said to be in {file}, which does not have it"
                )
        return self._tensors({name: numbers[file] for name, file in index.items()})

    def _tensors(self, index: Mapping[str, int] | None) -> dict[str, FileTensor]:
        return {
            name: FileTensor(name, each.dtype, each.shape, file, start + each.start, each.end - each.start)
            for file, (start, places) in enumerate(self._contents)
            for name, each in places.items()
            if index is None or index.get(name) == file
        }


def _settled(descriptor: int, path: Path) -> Stat:
    """What a file is, from when on any change of it changes its times.

    The clock of a file system ticks every few milliseconds: who writes in the same tick as before leaves the times as they are.
    """
    waited = 0.0
    while True:
        now = time.clock_gettime_ns(_FILE_CLOCK)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidArgument(f"{path}: neither a file nor a folder")
        # On a network file system the times are of another clock, which may be ahead: it is not waited for.
        if found.st_ctime_ns < now or waited >= FILE_CLOCK_WAIT_S:
            return Stat.of(found)
        time.sleep(FILE_CLOCK_TICK_S)
        waited += FILE_CLOCK_TICK_S


def _read_index(path: Path) -> tuple[dict[str, str], Stat]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = _settled(descriptor, path)
        if found.size > FILE_INDEX_BYTES_MAX:
            raise InvalidArgument(f"{path}: {found.size} bytes; an index has at most {FILE_INDEX_BYTES_MAX}")
        return parse_index(os.pread(descriptor, found.size, 0), str(path)), found
    finally:
        os.close(descriptor)


def _listed(folder: Path) -> frozenset[str]:
    names = frozenset(each.name for each in folder.iterdir() if each.name.endswith(SUFFIX) and each.name[0] != ".")
    if not names:
        raise InvalidArgument(f"{folder}: a folder without any *{SUFFIX} file")
    return names


def _fingerprint(host: str, files: tuple[CheckpointFile, ...], tensors: Mapping[str, FileTensor]) -> str:
    parts: list[object] = [host]  # inodes and devices mean something on this host, while it runs
    for file in files:
        found = file.stat
        parts += [
            file.path.name, found.size, found.modified, found.changed, found.inode, found.device, file.header_digest,
        ]  # fmt: skip
    parts += [(each.name, each.file) for each in tensors.values()]  # which of them count, where an index says so
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
