"""The header of a safetensors file and the index of a folder, read and written as text: what lies where.

A file is 8 bytes with the length of a JSON header, the header (name -> dtype, shape, place), and the bytes of the tensors, one
after the other. What a file says of itself is believed only as far as it adds up. `where` is what messages call it.
"""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tensorcast_connector.config import FILE_HEADER_BYTES_MAX
from tensorcast_connector.core.artifact import DIMENSIONS_MAX, DTYPE_BYTES, TensorSpec, layout
from tensorcast_connector.errors import InvalidArgument

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
METADATA = "__metadata__"
LENGTH_BYTES = 8
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_NAMES = {ours: theirs for theirs, ours in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of a file: `start` and `end` (one past the last) count bytes of the file's data, which follows the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header_bytes(first: bytes, size: int, where: str) -> int:
    """How long the header is that follows the first LENGTH_BYTES of a file of `size` bytes.

    Raises:
        InvalidArgument: it cannot be so long.
    """
    if len(first) < LENGTH_BYTES:
        raise InvalidArgument(f"{where}: {len(first)} bytes are no safetensors file")
    length = int.from_bytes(first, "little")
    if LENGTH_BYTES + length > size:
        raise InvalidArgument(
            f"{where}: it says that its header has {length} bytes, and has {size} in all: cut off, or no safetensors file"
        )
    if length > FILE_HEADER_BYTES_MAX:
        raise InvalidArgument(
            f"{where}: it says that its header has {length} bytes; no safetensors file has more than {FILE_HEADER_BYTES_MAX}"
        )
    return length


def parse_header(text: bytes, data_bytes: int, where: str) -> tuple[dict[str, Place], dict[str, str]]:
    """What a header says: the tensors, in the order of their places, and the file's metadata.

    Args:
        data_bytes: what follows the header in the file.

    Raises:
        InvalidArgument: it cannot be so; names the tensor.
    """
    header = _parse(text, where)
    metadata = _metadata(header.pop(METADATA, {}), where)
    found = {name: _place(entry, data_bytes, f"{where}: tensor {name!r}") for name, entry in header.items()}
    places = dict(sorted(found.items(), key=lambda each: (each[1].start, each[1].end)))
    _check_places(places, data_bytes, where)
    try:
        layout((name, each.dtype, each.shape) for name, each in places.items())
    except ValueError as error:
        raise InvalidArgument(f"{where}: {error}") from None
    return places, metadata


def agreed(files: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The metadata of several files: what no two of them say differently."""
    said: dict[str, set[str]] = {}
    for metadata in files:
        for name, value in metadata.items():
            said.setdefault(name, set()).add(value)
    return {name: values.pop() for name, values in said.items() if len(values) == 1}


def parse_index(text: bytes, where: str) -> dict[str, str]:
    """Which tensor is in which file of the folder.

    Raises:
        InvalidArgument: it says so of something that is no file of a folder; names the tensor.
    """
    places = _parse(text, where).get("weight_map")
    if not isinstance(places, dict):
        raise InvalidArgument(f"{where}: it has no object weight_map")
    for name, file in places.items():
        if not isinstance(file, str) or not file.endswith(SUFFIX) or "/" in file or not file.isprintable():
            raise InvalidArgument(
                f"{where}: tensor {name!r} is said to be in {str(file)[:200]!r}, which is no file of this folder"
            )
    return places


def encode_file_header(
    specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[TensorSpec]]:
    """The beginning of a file with these tensors, and the order in which their bytes follow.

    Args:
        metadata: without any it is `{"format": "pt"}`, for the sake of loaders that refuse a file that has none.

    Raises:
        InvalidArgument: one cannot be in such a file; names it.
    """
    # The widest first, as others write them: so every tensor is aligned to its elements.
    order = sorted(specs, key=lambda each: (-DTYPE_BYTES[each.dtype], each.name))
    entries: dict[str, Any] = {METADATA: dict(metadata or {"format": "pt"})}
    at = 0
    for each in order:
        if each.name == METADATA or each.dtype not in _NAMES:
            raise InvalidArgument(f"tensor {each.name!r} of dtype {each.dtype} cannot be in a safetensors file")
        place = [at, at + each.bytes]
        entries[each.name] = {"dtype": _NAMES[each.dtype], "shape": each.shape, "data_offsets": place}
        at = place[1]
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, order


def _parse(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object that says nothing twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise InvalidArgument(f"{where}: {twice!r} is there twice")
        return found

    try:
        parsed = json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where}: its header is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidArgument(f"{where}: its header is not an object")
    return parsed


def _metadata(given: Any, where: str) -> dict[str, str]:
    """For people and loaders; text by text."""
    with contextlib.suppress(msgspec.ValidationError, UnicodeEncodeError):
        metadata = msgspec.convert(given, dict[str, str])
        msgspec.json.encode(metadata)
        return metadata
    raise InvalidArgument(f"{where}: its {METADATA} is not text by text")


def _place(entry: Any, size: int, where: str) -> Place:
    """What the header says of one tensor, if it can be so."""
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
    return Place(dtype, tuple(shape), offsets[0], offsets[1])


def _whole(numbers: Any) -> bool:
    """Whether it is a list of whole numbers that a size can be."""
    return isinstance(numbers, list) and all(type(each) is int and 0 <= each < 1 << 63 for each in numbers)


def _check_places(places: Mapping[str, Place], size: int, where: str) -> None:
    """The data is tensors one after the other, and nothing else; `places` are in order."""
    at, before = 0, ""
    for name, each in places.items():
        if each.start < at:
            raise InvalidArgument(f"{where}: tensor {name!r} overlaps with {before!r}")
        if each.start > at:
            raise InvalidArgument(f"{where}: before tensor {name!r} are {each.start - at} bytes that are of no tensor")
        at, before = each.end, name
    if at < size:
        raise InvalidArgument(f"{where}: {size - at} bytes at its end are of no tensor")
