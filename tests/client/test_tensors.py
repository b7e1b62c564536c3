"""Tensors of numpy and torch to the bytes of an artifact and back, bit for bit, and what is no tensor."""

import math
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash

from tensorcast_connector.client.image import Image
from tensorcast_connector.client.tensors import Maker, sources
from tensorcast_connector.core.artifact import ALIGN_BYTES, CHUNK_BYTES, DTYPE_BYTES
from tensorcast_connector.errors import InvalidArgument

torch = pytest.importorskip("torch")
NUMPY_DTYPES = [
    each for each in DTYPE_BYTES if each.startswith(("bool", "int", "uint", "complex", "float16", "float32"))
]
NUMPY_DTYPES.append("float64")
OTHERS = sorted(set(DTYPE_BYTES) - set(NUMPY_DTYPES))


def noise(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Any bits, NaNs with payloads and negative zeros among them."""
    raw = np.random.default_rng(len(dtype)).integers(0, 256, math.prod(shape) * DTYPE_BYTES[dtype], np.uint8)
    return (raw & 1 if dtype == "bool" else raw).view(dtype if dtype in NUMPY_DTYPES else np.uint8).copy()


def of_numpy(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype if dtype in NUMPY_DTYPES else getattr(ml_dtypes, dtype))
    return noise(shape, dtype).view(kind).reshape(shape)


def of_torch(shape: tuple[int, ...], dtype: str) -> "torch.Tensor":
    raw = noise(shape, dtype).view(np.uint8)
    kind = getattr(torch, dtype)
    return torch.from_numpy(raw).view(kind).reshape(shape) if raw.size else torch.empty(shape, dtype=kind)


def bits(tensor: Any) -> bytes:
    """In canonical order, by another way than the one that is tested."""
    if isinstance(tensor, torch.Tensor):
        flat = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return np.asarray(tensor).astype(tensor.dtype.newbyteorder("="), order="C").tobytes()


def written(image: Image) -> bytes:
    """All chunks; asserts that the digests are theirs."""
    data = np.full(image.size, 0xEE, np.uint8)
    for number in range(image.chunks):
        chunk = data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        assert image.write(number, chunk) == xxhash.xxh3_128_digest(chunk)
        assert image.chunk_bytes(number) == chunk.size
    return data.tobytes()


def round_trip(tensors: Mapping[str, Any], framework: str) -> dict[str, Any]:
    image = Image(tensors)
    memory = bytearray(written(image) or 1)
    maker = Maker(framework)  # type: ignore[arg-type]
    return {each.name: maker.make(each.name, each.dtype, each.shape, memory, each.offset) for each in image.specs}


SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (3, 0, 2), (5,), (4, 3), (2, 3, 4)]


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_dtype_of_numpy(dtype: str) -> None:
    given = {f"{shape}": of_numpy(shape, dtype) for shape in SHAPES}
    for name, got in round_trip(given, "numpy").items():
        assert isinstance(got, np.ndarray) and (got.dtype, got.shape) == (given[name].dtype, given[name].shape)
        assert got.tobytes() == given[name].tobytes(), name
    for name, got in round_trip(given, "torch").items():
        assert (str(got.dtype), tuple(got.shape)) == (f"torch.{dtype}", given[name].shape)
        assert bits(got) == given[name].tobytes(), name


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_dtype_of_torch(dtype: str) -> None:
    given = {f"{shape}": of_torch(shape, dtype) for shape in SHAPES}
    for name, got in round_trip(given, "torch").items():
        assert got.dtype == given[name].dtype and got.shape == given[name].shape
        assert bits(got) == bits(given[name]), name
    if dtype in NUMPY_DTYPES:
        for name, back in round_trip(given, "numpy").items():
            assert (back.dtype.name, back.shape, back.tobytes()) == (dtype, given[name].shape, bits(given[name]))


@pytest.mark.parametrize("dtype", OTHERS)
def test_without_ml_dtypes_numpy_has_no_such_dtype_and_torch_has(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(InvalidArgument, match=f"tensor 'w' is {dtype}, .* install ml_dtypes, or .*'torch'"):
        round_trip({"w": of_torch((3,), dtype)}, "numpy")


base = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
read_only = base.copy()
read_only.setflags(write=False)
ODD_NUMPY: dict[str, Any] = {
    "transposed": base.T, "reversed": base[::-1], "reversed inside": base[:, :, ::-1], "strided": base[:, ::2, 1::2],
    "broadcast": np.broadcast_to(base[0], (5, 3, 4)), "Fortran": np.asfortranarray(base), "read-only": read_only,
    "big-endian": base.astype(">f4"), "big-endian complex": (base + 1j).astype(">c16"), "a scalar": np.float64(-0.0),
    "big-endian strided": base.astype(">f8")[::-1, 1], "0-d big-endian": np.array(7, ">i8"),
    "unaligned": np.frombuffer(b"\0" + base.tobytes(), np.float32, 24, 1), "of a matrix": np.ones((2, 2)).view(np.matrix),
    "one of many": base[1, 2, 3], "an empty slice": base[:, 3:],
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_NUMPY)
def test_arrays_that_do_not_lie_in_canonical_order(name: str) -> None:
    given = ODD_NUMPY[name]
    before = bits(given)
    got = round_trip({"w": given}, "numpy")["w"]
    assert got.shape == given.shape and got.dtype == given.dtype.newbyteorder("=") and got.tobytes() == before
    assert bits(given) == before


def odd_torch() -> dict[str, "torch.Tensor"]:
    whole = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    complex_ = torch.complex(whole, -whole)
    return {
        "transposed": whole.permute(2, 0, 1), "strided": whole[:, ::2, 1::2], "expanded": whole[:1].expand(5, 3, 4),
        "a view": whole[1, 1:], "a parameter": torch.nn.Parameter(whole), "with a gradient": (whole * 1).requires_grad_(),
        "in a graph": torch.nn.Parameter(whole) * 2, "conjugated": complex_.conj(), "conjugated and strided": complex_.mH,
        "negated": complex_.conj().imag, "channels last": whole.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "made in inference": torch.inference_mode()(whole.clone)(),
        "0-d": whole[0, 0, 0], "an empty slice": whole[:, 3:], "bfloat16 strided": whole.bfloat16()[:, ::2],
        "float8 strided": whole.to(torch.float8_e4m3fn)[:, ::2], "bool strided": (whole > 3)[:, ::2],
    }  # fmt: skip


@pytest.mark.parametrize("name", odd_torch())
def test_torch_tensors_that_do_not_lie_in_canonical_order(name: str) -> None:
    given = odd_torch()[name]
    got = round_trip({"w": given}, "torch")["w"]
    assert got.shape == given.shape and got.dtype == given.dtype and not got.requires_grad
    assert bits(got) == bits(given)


class Foreign:
    """A tensor of another library."""

    def __init__(self, array: np.ndarray[Any, Any], error: Exception | None = None) -> None:
        self._array, self._error = array, error

    def __dlpack__(self, **options: Any) -> Any:
        if self._error is not None:
            raise self._error
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_tensors_of_other_libraries_come_by_dlpack() -> None:
    assert round_trip({"w": Foreign(base)}, "numpy")["w"].tobytes() == base.tobytes()


WRONG: dict[str, tuple[Any, str]] = {
    "a list": ([1, 2], "tensor 'w' is a list; numpy and torch tensors can be put"),
    "a number": (1.5, "tensor 'w' is a float"),
    "text": ("weights", "tensor 'w' is a str"),
    "bytes": (b"weights", "tensor 'w' is a bytes"),
    "nothing": (None, "tensor 'w' is a NoneType"),
    "a tensor's type": (np.float32, "tensor 'w' is a type"),
    "objects": (np.array([{}, None]), "tensor 'w' has dtype object; known are bool"),
    "strings": (np.array(["a", "bc"]), "tensor 'w' has dtype str"),
    "byte strings": (np.array([b"a"]), "tensor 'w' has dtype bytes"),
    "records": (np.zeros(2, [("x", "f4"), ("y", "i4")]), "tensor 'w' has dtype void"),
    "times": (np.array(["2026-01-01"], "M8[s]"), "tensor 'w' has dtype datetime64"),
    "long doubles": (np.zeros(2, np.longdouble), "tensor 'w' has dtype"),
    "from elsewhere": (Foreign(base, BufferError("on a device")), "tensor 'w' cannot be read .*: on a device"),
    "from elsewhere, broken": (Foreign(base, KeyError("what")), "tensor 'w' cannot be read as a numpy array"),
    "sparse": (torch.eye(3).to_sparse(), "tensor 'w' is sparse, quantised or without data"),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), "tensor 'w' is sparse"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "tensor 'w' is .*quantised"),
    "without data": (torch.empty(3, device="meta"), "tensor 'w' is .*without data"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_tensor_is_named(name: str) -> None:
    given, message = WRONG[name]
    if callable(given) and not isinstance(given, type):
        given = given()
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        Image({"fine": base, "w": given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([base], "as a mapping from names to tensors, not as list"),
        (base, "not as ndarray"),
        ({5: base}, "the name of a tensor is text, not 5"),
        ({"a\nb": base}, r"'a\\nb' is no name of a tensor"),
        ({"": base}, "'' is no name of a tensor"),
    ],
)
def test_what_is_no_mapping_of_names(given: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Image(given)


def test_a_framework_that_is_none() -> None:
    with pytest.raises(InvalidArgument, match="framework='jax': numpy"):
        Maker("jax")  # type: ignore[arg-type]


def test_torch_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InvalidArgument, match="framework='torch': "):
        Maker("torch")
    assert round_trip({"w": base}, "numpy")["w"].tobytes() == base.tobytes(), "numpy needs no torch"


def test_a_dtype_this_torch_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e5m2fnuz")
    with pytest.raises(InvalidArgument, match="tensor 'w' is float8_e5m2fnuz, which this torch does not have"):
        Maker("torch").make("w", "float8_e5m2fnuz", (1,), bytearray(1), 0)


# --- chunks ---


@pytest.mark.slow
def test_tensors_that_cross_the_bounds_of_chunks() -> None:
    chance = np.random.default_rng(3)
    given = {
        f"t{number:02}": chance.integers(0, 256, size, np.uint8)
        for number, size in enumerate(
            [CHUNK_BYTES - 70, 1, 5, 0, 200, 2 * CHUNK_BYTES + 3, CHUNK_BYTES, 1, CHUNK_BYTES - ALIGN_BYTES, 0, 64]
        )
    }
    image = Image(given)
    data = written(image)
    taken = bytearray(data)
    for spec in image.specs:
        assert data[spec.offset : spec.range.end] == given[spec.name].tobytes()
        taken[spec.offset : spec.range.end] = bytes(spec.bytes)
    assert not any(taken), "what is between them is zero"


@pytest.mark.slow
def test_copies_of_what_is_not_contiguous_are_not_all_there_at_once() -> None:
    """A model on a device would otherwise be twice in the host's memory."""
    given = {f"t{number}": np.ones((1500, 1000), np.float32).T for number in range(6)}
    image = Image(given)
    alive: list[weakref.ref[Any]] = []
    contiguous = np.ascontiguousarray

    def watched(array: Any) -> Any:
        made = contiguous(array)
        alive.append(weakref.ref(made))
        return made

    most = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "ascontiguousarray", watched)
        for number in range(image.chunks):
            image.write(number, np.empty(image.chunk_bytes(number), np.uint8))
            most = max(most, sum(each() is not None for each in alive))
    assert len(alive) == 6 and most <= 2
    assert not any(each() is not None for each in alive)
    assert written(image) == written(Image(given)), "it can be read again"


def test_three_thousand_tensors() -> None:
    given = {f"layers.{number}.weight": np.full((number % 7, 3), number, np.float32) for number in range(3000)}
    got = round_trip(given, "numpy")
    assert list(got) == sorted(given)
    assert all(np.array_equal(got[name], given[name]) and got[name].shape == given[name].shape for name in given)


def test_a_tensor_that_changes_its_size_while_it_is_put() -> None:
    tensor = torch.ones(10)
    image = Image({"w": tensor})
    tensor.resize_(5)
    with pytest.raises(InvalidArgument, match="tensor 'w' has changed its size while it was put"):
        image.write(0, np.empty(40, np.uint8))


def test_a_tensor_that_changes_while_it_is_put_makes_what_fits_its_digest() -> None:
    tensor = np.zeros(1000, np.uint8)

    class Changing(np.ndarray[Any, Any]):
        """Memory to write to, during which the tensor changes."""

        def __setitem__(self, at: Any, part: Any) -> None:
            super().__setitem__(at, part)
            tensor[:] += 1

    image = Image({"w": tensor})
    target = np.zeros(image.chunk_bytes(0), np.uint8).view(Changing)
    assert image.write(0, target) == xxhash.xxh3_128_digest(target.tobytes())


def test_what_lies_in_order_is_not_copied() -> None:
    for tensor in (base, torch.from_numpy(base)):
        [source] = sources({"w": tensor})
        assert np.shares_memory(np.asarray(source.contiguous()), base)
