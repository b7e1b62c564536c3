"""An artifact's header is canonical and never believed; parts of tensors are the bytes that numpy says they are."""

import itertools
import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcast_connector.config import ARTIFACT_HEADER_BYTES_MAX, ARTIFACT_TENSORS_MAX
from tensorcast_connector.core.artifact import (
    ALIGN_BYTES,
    ARTIFACT_BYTES_MAX,
    CHUNK_BYTES,
    CHUNK_DIGEST_BYTES,
    DIMENSIONS_MAX,
    DTYPE_BYTES,
    TENSOR_NAME_CHARS_MAX,
    Header,
    Part,
    TensorSpec,
    artifact_id,
    check_fits,
    chunk_count,
    decode_header,
    encode_header,
    is_artifact_id,
    layout,
    part_spec,
    runs,
)
from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.types import ByteRange

Tensor = tuple[str, str, tuple[int, ...]]
shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
tensors = st.lists(
    st.tuples(st.text("abcü0/.", min_size=1, max_size=4), st.sampled_from(sorted(DTYPE_BYTES)), shapes),
    unique_by=lambda each: each[0], max_size=8,
)  # fmt: skip


def header(*given: Tensor) -> Header:
    specs, size = layout(given)
    return Header(specs, size, bytes(CHUNK_DIGEST_BYTES * chunk_count(size)))


# --- where tensors lie ---


@pytest.mark.slow
@settings(derandomize=True, max_examples=60)
@given(tensors, st.randoms(use_true_random=False))
def test_tensors_lie_by_name_aligned_and_apart_in_whatever_order_they_come(
    given_: list[Tensor], chance: object
) -> None:
    specs, size = layout(given_)
    shuffled = list(given_)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert layout(shuffled) == (specs, size)
    assert [(each.name, each.dtype, each.shape) for each in specs] == sorted(given_)
    for before, after in itertools.pairwise(specs):
        assert before.range.end <= after.offset < before.range.end + ALIGN_BYTES
    assert all(each.offset % ALIGN_BYTES == 0 for each in specs)
    assert all(each.bytes == DTYPE_BYTES[each.dtype] * math.prod(each.shape) for each in specs)
    assert size == (specs[-1].range.end if specs else 0)
    made = header(*given_)
    assert decode_header(encode_header(made)) == made
    assert made.tensor_bytes == sum(each.bytes for each in specs) <= size


def test_nothing_is_an_artifact_too() -> None:
    empty = header()
    assert (empty.tensors, empty.size, empty.chunks) == ((), 0, b"") and decode_header(encode_header(empty)) == empty


WRONG: dict[str, tuple[list[Tensor], str]] = {
    "twice": ([("a", "int8", (1,)), ("b", "int8", ()), ("a", "int16", (2,))], "two tensors with the name 'a'"),
    "no name": ([("", "int8", ())], "is no name"),
    "a line break": ([("a\nb", "int8", ())], r"'a\\nb' is no name"),
    "a null": ([("a\0", "int8", ())], "is no name"),
    "an escape": ([("\x1b[31m", "int8", ())], "is no name"),
    "half a surrogate": ([("\ud800", "int8", ())], "is no name"),
    "a long name": ([("x" * (TENSOR_NAME_CHARS_MAX + 1), "int8", ())], "is no name"),
    "a dtype": ([("a", "float7", ())], "tensor 'a' has dtype 'float7'; known are bool"),
    "less than nothing": ([("a", "int8", (3, -1))], r"tensor 'a' has the shape \(3, -1\)"),
    "many dimensions": ([("a", "int8", (1,) * (DIMENSIONS_MAX + 1))], "tensor 'a' has the shape"),
    "huge": ([("a", "int8", (1 << 40, 1 << 40))], "tensor 'a' brings the artifact over"),
    "huge together": ([(name, "int8", (ARTIFACT_BYTES_MAX - 64,)) for name in "ab"], "tensor 'b' brings"),
    "huge but empty": ([("a", "int8", (0, 1 << 62))], "tensor 'a' has the shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_a_tensor_is_named(name: str) -> None:
    given_, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        layout(given_)


def test_names_and_shapes_at_their_limits() -> None:
    specs, size = layout([
        ("x" * TENSOR_NAME_CHARS_MAX, "int8", (1,) * DIMENSIONS_MAX), ("blank space", "complex128", ()),
        ("z", "int8", (ARTIFACT_BYTES_MAX - 128,)),
    ])  # fmt: skip
    assert size == ARTIFACT_BYTES_MAX and [each.bytes for each in specs] == [16, 1, ARTIFACT_BYTES_MAX - 128]


# --- identity ---


def test_the_identity_is_fixed_and_follows_from_all_that_matters() -> None:
    """Other versions and other machines have to come to the same."""
    base = header(("w", "float32", (2, 3)), ("b", "bfloat16", (3,)))
    assert artifact_id(encode_header(base)) == "b86886ef4408e8b01d4a1385ba357801"
    other_bytes = msgspec.structs.replace(base, chunks=b"\1" * 16)
    others = [
        other_bytes, header(("w", "float32", (3, 2)), ("b", "bfloat16", (3,))),
        header(("w", "int32", (2, 3)), ("b", "bfloat16", (3,))), header(("v", "float32", (2, 3)), ("b", "bfloat16", (3,))),
    ]  # fmt: skip
    ids = {artifact_id(encode_header(each)) for each in [base, *others]}
    assert len(ids) == 5 and all(is_artifact_id(each) for each in ids)


@pytest.mark.parametrize("text", ["", "a" * 31, "a" * 33, "g" * 32, "A" * 32, "policy:v1"])
def test_what_is_no_identity(text: str) -> None:
    assert not is_artifact_id(text)


# --- headers from strangers ---


def changed(**fields: object) -> bytes:
    base = header(("a", "int8", (65,)), ("b", "float32", (2,)))
    return encode_header(msgspec.structs.replace(base, **fields))


A, B = TensorSpec("a", "int8", (65,), 0), TensorSpec("b", "float32", (2,), 128)
LIES: dict[str, bytes] = {
    "another order": changed(tensors=(B, A)),
    "another offset": changed(tensors=(A, msgspec.structs.replace(B, offset=192))),
    "overlapping": changed(tensors=(A, msgspec.structs.replace(B, offset=64))),
    "before the start": changed(tensors=(msgspec.structs.replace(A, offset=-64), B)),
    "twice the same": changed(tensors=(A, A)),
    "smaller": changed(size=135),
    "larger": changed(size=137),
    "less than nothing": changed(size=-1),
    "too few digests": changed(chunks=b""),
    "half a digest": changed(chunks=bytes(8)),
    "too many digests": changed(chunks=bytes(32)),
    "a later format": changed(format=2),
    "an unknown dtype": changed(tensors=(msgspec.structs.replace(A, dtype="object"), B)),
    "huge": changed(tensors=(msgspec.structs.replace(A, shape=(1 << 62,) * 60), B)),
    "huge but empty": changed(tensors=(msgspec.structs.replace(A, shape=(0, 1 << 63)), B)),
    "a line break": changed(tensors=(msgspec.structs.replace(A, name="a\n"), B)),
    "nothing": b"",
    "no msgpack": b"\xc1" * 40,
    "lists in lists": b"\x91" * 50_000,
    "a list of 2^32": b"\x94\xdd\xff\xff\xff\xff",
    "a mapping": msgspec.msgpack.encode({"tensors": [], "size": 0, "chunks": b""}),
    "text for a size": msgspec.msgpack.encode([[], "0", b"", 1]),
    "more behind it": encode_header(header()) + b"\0",
    "one field more": msgspec.msgpack.encode([[], 0, b"", 1, "t", "and this"]),
    "one field less": msgspec.msgpack.encode([[], 0, b""]),
    "a number written long": encode_header(header()).replace(b"\x00\xc4\x00", b"\xcc\x00\xc4\x00"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ProtocolError) as error:
        decode_header(LIES[name])
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.slow
@settings(derandomize=True, max_examples=300)
@given(st.data())
def test_a_damaged_header_is_refused_or_is_another_artifact(data: st.DataObject) -> None:
    good = encode_header(header(("a", "int8", (65,)), ("bias/ü", "float32", (2, 3))))
    cut = data.draw(st.integers(0, len(good)))
    noise = data.draw(st.binary(max_size=6))
    damaged = good[:cut] + noise + good[cut + data.draw(st.integers(0, 6)) :]
    try:
        got = decode_header(damaged)
    except ProtocolError:
        return
    assert encode_header(got) == damaged, "one artifact has one header, and so one identity"


# --- parts ---


@st.composite
def boxes(draw: Callable[..., object]) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    shape = draw(shapes)
    bounds = []
    for size in shape:  # type: ignore[attr-defined]
        start = draw(st.integers(0, size))
        bounds.append((start, draw(st.integers(start, size))))
    return shape, tuple(bounds)  # type: ignore[return-value]


@pytest.mark.slow
@settings(derandomize=True, max_examples=200)
@given(boxes(), st.sampled_from(["int8", "float16", "float32", "complex128"]), st.integers(0, 3))
def test_the_runs_of_a_part_are_the_bytes_numpy_takes(
    box: tuple[tuple[int, ...], tuple[tuple[int, int], ...]], dtype: str, before: int
) -> None:
    shape, bounds = box
    specs, size = layout([("a", "int8", (before,)), ("b", dtype, shape)])
    spec, part = specs[1], Part("b", bounds)
    data = np.random.default_rng(0).integers(0, 256, size + ALIGN_BYTES, np.uint8)
    array = np.frombuffer(data, dtype, math.prod(shape), spec.offset).reshape(shape)
    wanted = array[tuple(slice(*each) for each in bounds)]
    got = runs(spec, part)
    assert part_spec(spec, part) == wanted.shape
    assert b"".join(data[each.offset : each.end].tobytes() for each in got) == wanted.tobytes()
    assert all(each.length for each in got)
    for one, other in itertools.pairwise(got):
        assert one.end < other.offset or math.prod(wanted.shape[1:]) == 0, "neighbours are one run, in order"
    assert runs(spec, Part("b")) == ([spec.range] if spec.bytes else [])


def test_a_part_of_the_first_dimension_is_one_run() -> None:
    [spec], _ = layout([("w", "float32", (10, 3, 5))])
    assert runs(spec, Part("w", ((2, 7), (0, 3), (0, 5)))) == [ByteRange(2 * 60, 5 * 60)]
    assert runs(spec, Part("w", ((2, 4), (1, 2), (0, 5)))) == [ByteRange(140, 20), ByteRange(200, 20)]
    assert runs(spec, Part("w", ((0, 10), (0, 3), (0, 5)))) == [spec.range]


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (((0, 2),), "has 2 dimensions and 1 are sliced"),
        (((0, 2), (0, 3), (0, 1)), "has 2 dimensions and 3 are sliced"),
        (((0, 3), (0, 3)), "tensor 'w': 0:3 is not within dimension 0, which is 2"),
        (((0, 2), (-1, 3)), "-1:3 is not within dimension 1"),
        (((2, 1), (0, 3)), "2:1 is not within dimension 0"),
    ],
)
def test_a_part_that_is_not_within_its_tensor(bounds: tuple[tuple[int, int], ...], message: str) -> None:
    [spec], _ = layout([("w", "float32", (2, 3))])
    for ask in (part_spec, runs):
        with pytest.raises(ValueError, match=message):
            ask(spec, Part("w", bounds))


@pytest.mark.parametrize(
    ("size", "chunks"),
    [(0, 0), (1, 1), (CHUNK_BYTES - 1, 1), (CHUNK_BYTES, 1), (CHUNK_BYTES + 1, 2), (ARTIFACT_BYTES_MAX, 1 << 24)],
)
def test_how_many_chunks_there_are(size: int, chunks: int) -> None:
    assert chunk_count(size) == chunks


def test_a_header_that_is_too_much_is_refused_before_it_is_decoded() -> None:
    specs, size = layout((f"{number}", "uint8", (0,)) for number in range(ARTIFACT_TENSORS_MAX + 1))
    encoded = encode_header(Header(specs, size, b""))
    assert len(encoded) < ARTIFACT_HEADER_BYTES_MAX
    with pytest.raises(ProtocolError, match=f"length <= {ARTIFACT_TENSORS_MAX}"):
        decode_header(encoded)
    with pytest.raises(ProtocolError, match="one artifact has at most"):
        decode_header(bytes(ARTIFACT_HEADER_BYTES_MAX + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ([(f"t{number}", "uint8", ()) for number in range(100_001)], "100001 tensors; one artifact has at most 100000"),
        ([(f"{number:04}" + "\u20ac" * 1020, "uint8", ()) for number in range(1400)], "1400 tensors of .* take 43"),
        ([("t", "uint8", (1 << 40,))], "1 tensors of 1099511627776 bytes, whose names, shapes and digests take 41943"),
    ],
    ids=["tensors", "names", "bytes"],
)
def test_what_is_more_than_one_artifact_has_is_told_before_anything_is_copied(
    tensors: list[tuple[str, str, tuple[int, ...]]], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        check_fits(*layout(tensors))
    check_fits(*layout(tensors[: len(tensors) // 2]))
