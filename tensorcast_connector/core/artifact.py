"""What an artifact is: named tensors in one run of bytes, and a header that says which (TensorCast, section 3.1).

    header = Header(layout([("weight", "bfloat16", (4096, 4096)), ...]), digests of the chunks)
    artifact id = blake3(encoded header), so the same tensors have the same id wherever they are

The tensors lie in the order of their names, each at a multiple of ALIGN_BYTES; what is between them is zero. The bytes are
digested in chunks of CHUNK_BYTES, so that parts of an artifact can be fetched and checked alone. Chunks are digested with
xxh3-128: as fast as memory, safe against every accident, and not against somebody who is trusted with writing artifacts.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Annotated

import blake3
import msgspec

from tensorcast_connector.config import ARTIFACT_HEADER_BYTES_MAX, ARTIFACT_TENSORS_MAX, NAME_CHARS_MAX
from tensorcast_connector.errors import InvalidArgument, ProtocolError
from tensorcast_connector.types import ByteRange

FORMAT_VERSION = 1
ALIGN_BYTES = 64
CHUNK_BYTES = 4 << 20
CHUNK_DIGEST_BYTES = 16
ARTIFACT_ID_CHARS = 32
TENSOR_NAME_CHARS_MAX = 1024
DIMENSIONS_MAX = 64
ARTIFACT_BYTES_MAX = 1 << 46
_TENANT_BYTES_MAX = 4 * NAME_CHARS_MAX + 16

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Names as numpy, ml_dtypes and torch spell them, and the size of an element."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: contiguous, little-endian, the last dimension fastest; `offset` from the start of the artifact."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        """Its size."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def range(self) -> ByteRange:
        """Where it lies in the artifact."""
        return ByteRange(self.offset, self.bytes)


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The canonical description of an artifact's content. `chunks` are the digests of its chunks, one after the other."""

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=ARTIFACT_TENSORS_MAX)]
    size: int  # in bytes
    chunks: bytes
    format: int = FORMAT_VERSION
    tenant: str = ""  # whose: what one tenant puts never stands in for what another does

    @property
    def tensor_bytes(self) -> int:
        """Without what is between the tensors."""
        return sum(each.bytes for each in self.tensors)


encode_header = msgspec.msgpack.Encoder().encode
_header_decoder = msgspec.msgpack.Decoder(Header)


def artifact_id(encoded_header: bytes) -> str:
    """The identity of what the header describes."""
    return blake3.blake3(encoded_header).hexdigest()[:ARTIFACT_ID_CHARS]


def is_artifact_id(text: str) -> bool:
    """Whether this is the form of an id. Names must not have it."""
    return len(text) == ARTIFACT_ID_CHARS and not set(text) - set("0123456789abcdef")


def check_name(name: str) -> str:
    """The name of an artifact.

    Raises:
        InvalidArgument: it cannot be one.
    """
    most = 2 * NAME_CHARS_MAX
    if not isinstance(name, str):
        raise InvalidArgument(f"the name of an artifact is text, not {name!r:.64}")
    if not 0 < len(name) <= most or not name.isprintable() or name != name.strip() or is_artifact_id(name):
        raise InvalidArgument(
            f"{name[:64]!r} is no name of an artifact: 1 to {most} printable characters that are not an id"
        )
    return name


def check_tenant(tenant: str) -> str:
    """The tenant of a caller.

    Raises:
        InvalidArgument: it cannot be one.
    """
    if not isinstance(tenant, str):
        raise InvalidArgument(f"a tenant is text, not {tenant!r:.64}")
    if not 0 < len(tenant) <= NAME_CHARS_MAX or "/" in tenant or not tenant.isprintable():
        raise InvalidArgument(f"tenant {tenant[:40]!r}: 1 to {NAME_CHARS_MAX} printable characters without a slash")
    return tenant


def chunk_count(size: int) -> int:
    """How many chunks so many bytes have."""
    return -(-size // CHUNK_BYTES)


def decode_header(encoded: bytes) -> Header:
    """The header in `encoded`, which may come from anybody.

    Raises:
        ProtocolError: it is none, or contradicts itself.
    """
    if len(encoded) > ARTIFACT_HEADER_BYTES_MAX:
        raise ProtocolError(f"a header of {len(encoded)} bytes; one artifact has at most {ARTIFACT_HEADER_BYTES_MAX}")
    try:
        header = _header_decoder.decode(encoded)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"not the header of an artifact: {error}") from error
    if header.format != FORMAT_VERSION:
        raise ProtocolError(f"an artifact of format {header.format}; this version reads {FORMAT_VERSION}")
    try:
        canonical = _in_place(header)
    except ValueError as error:
        raise ProtocolError(f"not the header of an artifact: {error}") from error
    if not canonical or encode_header(header) != encoded:
        raise ProtocolError("the header of an artifact is not in its canonical form")
    if len(header.chunks) != CHUNK_DIGEST_BYTES * chunk_count(header.size):
        raise ProtocolError(f"{len(header.chunks)} bytes of digests for {chunk_count(header.size)} chunks")
    return header


def _in_place(header: Header) -> bool:
    """Whether the tensors lie where `layout` puts them; raises as it does."""
    last, end, canonical = "", 0, True
    for each in header.tensors:
        offset, end = _place(each.name, each.dtype, each.shape, end)
        if each.name == last:
            raise ValueError(f"two tensors with the name {last!r}")
        canonical &= each.name > last and each.offset == offset
        last = each.name
    return canonical and header.size == end


def layout(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[tuple[TensorSpec, ...], int]:
    """Where tensors (name, dtype, shape) lie in an artifact, and how many bytes it has.

    Raises:
        ValueError: a name, dtype or shape that cannot be, says which.
    """
    specs: list[TensorSpec] = []
    end = 0
    for name, dtype, shape in sorted(tensors, key=lambda each: each[0]):
        if specs and specs[-1].name == name:
            raise ValueError(f"two tensors with the name {name!r}")
        offset, end = _place(name, dtype, shape, end)
        specs.append(TensorSpec(name, dtype, tuple(shape), offset))
    return tuple(specs), end


def check_fits(specs: Sequence[TensorSpec], size: int) -> None:
    """Whether one artifact may have as much as that.

    Raises:
        ValueError: it has too many tensors, or too much to be told of them.
    """
    if len(specs) > ARTIFACT_TENSORS_MAX:
        raise ValueError(f"{len(specs)} tensors; one artifact has at most {ARTIFACT_TENSORS_MAX}: put them as several")
    described = len(encode_header(Header(tuple(specs), size, b""))) + CHUNK_DIGEST_BYTES * chunk_count(size)
    if described > ARTIFACT_HEADER_BYTES_MAX - _TENANT_BYTES_MAX:
        raise ValueError(
            f"{len(specs)} tensors of {size} bytes, whose names, shapes and digests take {described} bytes; "
            f"one artifact has at most {ARTIFACT_HEADER_BYTES_MAX}: put them as several"
        )


def _place(name: str, dtype: str, shape: Sequence[int], at: int) -> tuple[int, int]:
    """Where a tensor begins and ends if the one before it ends `at`; raises ValueError for one that cannot be."""
    if not 0 < len(name) <= TENSOR_NAME_CHARS_MAX or not name.isprintable():
        raise ValueError(f"{name[:64]!r} is no name of a tensor: 1 to {TENSOR_NAME_CHARS_MAX} printable characters")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"tensor {name!r} has dtype {dtype[:40]!r}; known are {', '.join(DTYPE_BYTES)}")
    # An empty tensor is measured by its other dimensions: numpy and torch have none that are larger than memory can be.
    least = min(shape, default=1)
    if (
        len(shape) > DIMENSIONS_MAX
        or least < 0
        or (not least and math.prod(size for size in shape if size) > ARTIFACT_BYTES_MAX)
    ):
        raise ValueError(f"tensor {name!r} has the shape {tuple(shape)[:8]}")
    start = -(-at // ALIGN_BYTES) * ALIGN_BYTES
    end = start + DTYPE_BYTES[dtype] * math.prod(shape)
    if end > ARTIFACT_BYTES_MAX:
        raise ValueError(f"tensor {name!r} brings the artifact over {ARTIFACT_BYTES_MAX} bytes")
    return start, end


# --- views ------------------------------------------------------------------------------------------------------------

Bounds = tuple[tuple[int, int], ...]
"""(start, stop) of each dimension, within the tensor."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A box of one tensor; the whole of it where `bounds` is None."""

    name: str
    bounds: Bounds | None = None


def part_spec(tensor: TensorSpec, part: Part) -> tuple[int, ...]:
    """The shape of a part.

    Raises:
        ValueError: the part is not within the tensor.
    """
    if part.bounds is None:
        return tensor.shape
    if len(part.bounds) != len(tensor.shape):
        raise ValueError(f"tensor {part.name!r} has {len(tensor.shape)} dimensions and {len(part.bounds)} are sliced")
    for at, ((start, stop), size) in enumerate(zip(part.bounds, tensor.shape, strict=True)):
        if not 0 <= start <= stop <= size:
            raise ValueError(f"tensor {part.name!r}: {start}:{stop} is not within dimension {at}, which is {size}")
    return tuple(stop - start for start, stop in part.bounds)


def runs(tensor: TensorSpec, part: Part) -> list[ByteRange]:
    """The bytes of a part in the artifact, in the order of the part's elements; neighbours are one run.

    Raises:
        ValueError: the part is not within the tensor.
    """
    shape = part_spec(tensor, part)
    if part.bounds is None or shape == tensor.shape:
        return [tensor.range] if tensor.bytes else []
    if not math.prod(shape):
        return []
    size = DTYPE_BYTES[tensor.dtype]
    strides = [size * math.prod(tensor.shape[at + 1 :]) for at in range(len(shape))]
    # Dimensions at the end that are whole belong to one run with the last one that is not.
    inner = max(at for at in range(len(shape)) if shape[at] != tensor.shape[at])
    length = shape[inner] * strides[inner]
    first = tensor.offset + part.bounds[inner][0] * strides[inner]
    outer = itertools.product(*(range(*part.bounds[at]) for at in range(inner)))
    return [ByteRange(first + sum(map(int.__mul__, at, strides)), length) for at in outer]
