"""Tensors in safetensors files, read where they lie and written from artifacts, without a library for them.

A file must not shrink while the tensors of `read_tensors` are used: they lie in it.
"""

import contextlib
import errno
import functools
import itertools
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorcast_connector.client.artifact import Artifact
from tensorcast_connector.client.checkpoint import Checkpoint
from tensorcast_connector.client.tensors import FileTensors, RawTensor
from tensorcast_connector.client.threads import in_thread
from tensorcast_connector.config import SAVE_PART_BYTES
from tensorcast_connector.core.artifact import TensorSpec
from tensorcast_connector.core.safetensors import encode_file_header
from tensorcast_connector.errors import Exhausted, InvalidArgument

Tensors = Mapping[str, Any] | str | os.PathLike[str]
"""What can be put: tensors by name, or the path of a file or folder."""

_partials = itertools.count()


def read_tensors(path: str | os.PathLike[str]) -> FileTensors:
    """The tensors of a file, or of a folder: those that its model.safetensors.index.json names, else of all its files.

    Of the metadata of several files that counts in which they agree. More than METADATA_BYTES_MAX is left out, with a warning.

    Raises:
        InvalidArgument: it cannot be read, or is not what it says; names the file and the tensor.
    """
    with Checkpoint.open(path) as checkpoint:
        maps = [_map(checkpoint, number) for number in range(len(checkpoint.files))]
        tensors = {
            each.name: RawTensor(each.dtype, each.shape, maps[each.file][each.offset : each.offset + each.bytes])
            for each in checkpoint.tensors.values()
        }
        return FileTensors(tensors, checkpoint.metadata_to_keep())


def _map(checkpoint: Checkpoint, number: int) -> memoryview:
    file = checkpoint.files[number]
    try:
        return memoryview(mmap.mmap(checkpoint.descriptor(number), file.size, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: it has become shorter
        raise InvalidArgument(f"{file.path} cannot be mapped: {error}") from error


async def write_file(
    artifact: Artifact, path: str | os.PathLike[str], names: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> int:  # fmt: skip
    """Writes an artifact's tensors to a safetensors file, which is there once it is complete. Returns its size.

    The metadata is that of the file that the artifact was put from, if it was.

    Args:
        names: of the tensors; all unless told.
        progress: told the bytes that are written and those that are to be.

    Raises:
        InvalidArgument: no such tensor, or a path that cannot be written.
        Exhausted: the disk is full.
        NotFound: the artifact or its bytes are gone.
    """
    described = await artifact.describe()
    wanted = {each.name: each for each in described.tensors}
    if names:
        if absent := [name for name in names if name not in wanted]:
            raise InvalidArgument(f"artifact {described.artifact_id} has no tensor {absent[0]!r}")
        wanted = {name: wanted[name] for name in names}
    header, order = encode_file_header(wanted.values(), described.metadata)
    size = len(header) + sum(each.bytes for each in order)
    target = Path(path)
    _check_target(target)
    partial = target.with_name(f".{target.name}.{os.getpid()}.{next(_partials)}.partial")
    try:
        nameless = _nameless(target.parent)
        with nameless or partial.open("xb") as file:
            file.write(header)
            done = len(header)
            for batch in _batches(order):
                tensors = await artifact.view(names=[each.name for each in batch]).tensor_dict(framework="raw")
                for each in batch:
                    await _write(file, tensors.pop(each.name).data)
                    done += each.bytes
                    if progress is not None:
                        progress(done, size)
            await in_thread(functools.partial(_flush, file))
            if nameless is not None:
                _give_name(file, partial)
        partial.rename(target)
    except OSError as error:
        kind = Exhausted if error.errno in (errno.ENOSPC, errno.EDQUOT) else InvalidArgument
        raise kind(f"{target}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return size


def _nameless(folder: Path) -> Any:
    """A file there without a name, of which nothing is left whatever ends this process; None if its file system has no such."""
    try:
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666), "wb")
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return None
        raise


def _give_name(file: Any, path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:  # with a folder, the link is followed to what it stands for
        os.link(f"/proc/self/fd/{file.fileno()}", path.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _check_target(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidArgument(f"{str(path)!r}: {error}") from error
    if not stat.S_ISREG(mode):
        raise InvalidArgument(f"{path}: something that is no file is in the way")


def _batches(specs: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    """Tensors that are read together: never much more of the artifact is in this process's memory."""
    batches: list[list[TensorSpec]] = []
    size = 0
    for each in specs:
        if not batches or size + each.bytes > SAVE_PART_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(each)
        size += each.bytes
    return batches


async def _write(file: Any, data: memoryview) -> None:
    """On a thread, so that the connection lives meanwhile; it ends before this does."""
    for at in range(0, data.nbytes, SAVE_PART_BYTES):
        await in_thread(functools.partial(file.write, data[at : at + SAVE_PART_BYTES]))


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
