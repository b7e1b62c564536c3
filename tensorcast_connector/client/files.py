"""Tensors in safetensors files, read where they lie and written from artifacts, without a library for them.

A file is 8 bytes with the length of a JSON header, the header (name -> dtype, shape, place), and the bytes of the tensors. What
a file says of itself is believed only as far as it adds up. A file must not shrink while its tensors are used: they lie in it.
"""

import asyncio
import contextlib
import errno
import itertools
import json
import math
import mmap
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorcast_connector.client.artifact import Artifact
from tensorcast_connector.client.tensors import RawTensor
from tensorcast_connector.config import FILE_HEADER_BYTES_MAX, SAVE_PART_BYTES
from tensorcast_connector.core.artifact import DIMENSIONS_MAX, DTYPE_BYTES, TensorSpec, layout
from tensorcast_connector.errors import Exhausted, InvalidArgument

Tensors = Mapping[str, Any] | str | os.PathLike[str]
"""What can be put: tensors by name, or the path of a file or folder."""

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
METADATA = "__metadata__"
_LENGTH_BYTES = 8
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_partials = itertools.count()
_NAMES = {ours: theirs for theirs, ours in _DTYPES.items()}


# --- reading ----------------------------------------------------------------------------------------------------------


def read_tensors(path: str | os.PathLike[str]) -> dict[str, RawTensor]:
    """The tensors of a file, or of a folder: those that its model.safetensors.index.json names, else of all its files.

    Raises:
        InvalidArgument: it cannot be read, or is not what it says; names the file and the tensor.
    """
    found = Path(path)
    try:
        if not found.is_dir():
            return _read_file(found)
        return _read_index(found) if (found / INDEX).exists() else _read_folder(found)
    except OSError as error:
        raise InvalidArgument(f"{error.filename or found}: {error.strerror or error}") from error
    except ValueError as error:  # a path with a zero
        raise InvalidArgument(f"{str(found)!r}: {error}") from error


def _read_folder(folder: Path) -> dict[str, RawTensor]:
    files = sorted(each for each in folder.iterdir() if each.name.endswith(SUFFIX) and each.name[0] != ".")
    if not files:
        raise InvalidArgument(f"{folder}: a folder without any *{SUFFIX} file")
    tensors: dict[str, RawTensor] = {}
    homes: dict[str, Path] = {}
    for file in files:
        for name, tensor in _read_file(file).items():
            if name in homes:
                raise InvalidArgument(
                    f"{file}: tensor {name!r} is in {homes[name].name} too; write an index ({INDEX}) that says which counts"
                )
            homes[name], tensors[name] = file, tensor
    return tensors


def _read_index(folder: Path) -> dict[str, RawTensor]:
    """Exactly the tensors that the index names, each from the file it says."""
    path = folder / INDEX
    places = _parse(path, path.read_bytes()).get("weight_map")
    if not isinstance(places, dict):
        raise InvalidArgument(f"{path}: it has no object weight_map")
    files: dict[str, dict[str, RawTensor]] = {}
    tensors: dict[str, RawTensor] = {}
    for name, file in places.items():
        if not isinstance(file, str) or not file.endswith(SUFFIX) or "/" in file:
            raise InvalidArgument(f"{path}: tensor {name!r} is said to be in {file!r}, which is no file of this folder")
        if file not in files:
            files[file] = _read_file(folder / file)
        if name not in files[file]:
            raise InvalidArgument(f"{path}: tensor {name!r} is said to be in {file}, which does not have it")
        tensors[name] = files[file][name]
    return tensors


def _read_file(path: Path) -> dict[str, RawTensor]:
    memory = _map(path)
    if len(memory) < _LENGTH_BYTES:
        raise InvalidArgument(f"{path}: {len(memory)} bytes are no safetensors file")
    length = int.from_bytes(memory[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if length > FILE_HEADER_BYTES_MAX or start > len(memory):
        raise InvalidArgument(
            f"{path}: it says that its header has {length} bytes, and has {len(memory)} in all: cut off, or no safetensors file"
        )
    header = _parse(path, bytes(memory[_LENGTH_BYTES:start]))
    header.pop(METADATA, None)  # for people
    data = memory[start:]
    places = {name: _place(path, name, entry, len(data)) for name, entry in header.items()}
    _check_places(path, places, len(data))
    try:
        layout((name, dtype, shape) for name, (dtype, shape, _, _) in places.items())
    except ValueError as error:
        raise InvalidArgument(f"{path}: {error}") from None
    return {name: RawTensor(dtype, shape, data[at:end]) for name, (dtype, shape, at, end) in places.items()}


def _map(path: Path) -> memoryview:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe is not waited for
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidArgument(f"{path}: neither a file nor a folder")
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if found.st_size else b"")
    finally:
        os.close(descriptor)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """A JSON object that says nothing twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise InvalidArgument(f"{path}: {twice!r} is there twice")
        return found

    try:
        parsed = json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path}: its header is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidArgument(f"{path}: its header is not an object")
    return parsed


_Place = tuple[str, tuple[int, ...], int, int]
"""dtype, shape, first byte of the data, and one past the last."""


def _place(path: Path, name: str, entry: Any, size: int) -> _Place:
    """What the header says of one tensor, if it can be so."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise InvalidArgument(f"{where} is not described by dtype, shape and data_offsets")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise InvalidArgument(f"{where} has dtype {str(entry['dtype'])[:40]!r}; known are {', '.join(_DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _whole(shape) or len(shape) > DIMENSIONS_MAX:
        raise InvalidArgument(f"{where} has the shape {str(shape)[:80]}")
    if not _whole(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1]:
        raise InvalidArgument(f"{where} has the data_offsets {str(offsets)[:80]}")
    if offsets[1] > size:
        raise InvalidArgument(f"{where} ends at byte {offsets[1]} of {size} bytes of data: the file is cut off")
    if math.prod(shape) * DTYPE_BYTES[dtype] != offsets[1] - offsets[0]:
        raise InvalidArgument(
            f"{where}: {offsets[1] - offsets[0]} bytes are no {entry['dtype']} of the shape {str(shape)[:80]}"
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def _whole(numbers: Any) -> bool:
    """Whether it is a list of whole numbers that a size can be."""
    return isinstance(numbers, list) and all(type(each) is int and 0 <= each < 1 << 63 for each in numbers)


def _check_places(path: Path, places: Mapping[str, _Place], size: int) -> None:
    """The data is tensors one after the other, and nothing else."""
    at, before = 0, ""
    for name, (_, _, start, end) in sorted(places.items(), key=lambda each: each[1][2:]):
        if start < at:
            raise InvalidArgument(f"{path}: tensor {name!r} overlaps with {before!r}")
        if start > at:
            raise InvalidArgument(f"{path}: before tensor {name!r} are {start - at} bytes that are of no tensor")
        at, before = end, name
    if at < size:
        raise InvalidArgument(f"{path}: {size - at} bytes at its end are of no tensor")


# --- writing ----------------------------------------------------------------------------------------------------------


def encode_file_header(specs: Iterable[TensorSpec]) -> tuple[bytes, list[TensorSpec]]:
    """The beginning of a file with these tensors, and the order in which their bytes follow.

    Raises:
        InvalidArgument: one cannot be in such a file; names it.
    """
    # The widest first, as others write them: so every tensor is aligned to its elements.
    order = sorted(specs, key=lambda each: (-DTYPE_BYTES[each.dtype], each.name))
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}  # without it some loaders refuse the file
    at = 0
    for each in order:
        if each.name == METADATA or each.dtype not in _NAMES:
            raise InvalidArgument(f"tensor {each.name!r} of dtype {each.dtype} cannot be in a safetensors file")
        place = [at, at + each.bytes]
        entries[each.name] = {"dtype": _NAMES[each.dtype], "shape": each.shape, "data_offsets": place}
        at = place[1]
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, order


async def write_file(
    artifact: Artifact, path: str | os.PathLike[str], names: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> int:  # fmt: skip
    """Writes an artifact's tensors to a safetensors file, which is there once it is complete. Returns its size.

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
    header, order = encode_file_header(wanted.values())
    size = len(header) + sum(each.bytes for each in order)
    target = Path(path)
    _check_target(target)
    partial = target.with_name(f".{target.name}.{os.getpid()}.{next(_partials)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(header)
            done = len(header)
            for batch in _batches(order):
                tensors = await artifact.view(names=[each.name for each in batch]).tensor_dict(framework="raw")
                for each in batch:
                    await _write(file, tensors.pop(each.name).data)
                    done += each.bytes
                    if progress is not None:
                        progress(done, size)
            await asyncio.to_thread(_flush, file)
        partial.rename(target)
    except OSError as error:
        kind = Exhausted if error.errno in (errno.ENOSPC, errno.EDQUOT) else InvalidArgument
        raise kind(f"{target}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return size


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
        work = asyncio.ensure_future(asyncio.to_thread(file.write, data[at : at + SAVE_PART_BYTES]))
        try:
            await asyncio.shield(work)
        finally:
            while not work.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([work])


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
