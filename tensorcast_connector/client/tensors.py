"""Tensors of numpy and torch to bytes and back, without copying where that can be.

torch is never imported before somebody asks for torch tensors; who gives them has imported it. bfloat16 and the float8 types
come from ml_dtypes in numpy, which has none of its own.
"""

import functools
import importlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tensorcast_connector.core.artifact import DTYPE_BYTES
from tensorcast_connector.errors import InvalidArgument

Framework = Literal["numpy", "torch", "raw"]
"""What tensors are made for: "raw" are RawTensors."""
_NUMPY_DTYPES = frozenset({
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
    "complex64", "complex128",
})  # fmt: skip


_NUMPY = (np.ndarray, np.generic)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as its plain bytes, for which no library has to know its dtype.

    Attributes:
        dtype: one of DTYPE_BYTES.
        data: contiguous, little-endian, the last dimension fastest.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __repr__(self) -> str:
        return f"<RawTensor {self.dtype} {self.shape}>"


class FileTensors(dict[str, RawTensor]):
    """The tensors of files by name, and the metadata of these (safetensors: `__metadata__`)."""

    def __init__(self, tensors: Mapping[str, RawTensor], metadata: Mapping[str, str]) -> None:
        super().__init__(tensors)
        self.metadata = dict(metadata)


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that is put."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tensor: Any

    def contiguous(self) -> memoryview:
        """Its bytes in canonical order; a copy only if they do not lie like that, or not in this process's memory."""
        if isinstance(self.tensor, RawTensor):
            return self.tensor.data.cast("B") if self.tensor.data.nbytes else memoryview(b"")
        if _is_torch(self.tensor):
            torch = sys.modules["torch"]
            # Conjugated and negated tensors are flags on the memory of others until they are resolved.
            flat = self.tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
        array = np.ascontiguousarray(self.tensor).reshape(-1)
        return memoryview(array.view(np.uint8)) if array.size else memoryview(b"")  # type: ignore[arg-type]


def sources(tensors: Mapping[str, Any]) -> list[Source]:
    """What is to be put.

    Raises:
        InvalidArgument: something is no tensor, or of a kind that cannot be stored; names it.
    """
    if not isinstance(tensors, Mapping):
        raise InvalidArgument(f"tensors are put as a mapping from names to tensors, not as {type(tensors).__name__}")
    return [_source(name, tensor) for name, tensor in tensors.items()]


def _source(name: str, tensor: Any) -> Source:
    if not isinstance(name, str):
        raise InvalidArgument(f"the name of a tensor is text, not {name!r}")
    if isinstance(tensor, RawTensor):
        return _raw(name, tensor)
    if _is_torch(tensor):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_meta:
            raise InvalidArgument(f"tensor {name!r} is sparse, quantised or without data, and has no plain bytes")
    else:
        if not isinstance(tensor, _NUMPY) and hasattr(tensor, "__dlpack__"):
            tensor = _from_dlpack(name, tensor)
        if not isinstance(tensor, _NUMPY):
            raise InvalidArgument(f"tensor {name!r} is a {type(tensor).__name__}; numpy and torch tensors can be put")
        if isinstance(tensor, np.ma.MaskedArray):
            raise InvalidArgument(f"tensor {name!r} has a mask, which is not kept; put what `filled` makes of it")
        tensor = np.asarray(tensor)
        dtype = _name_of(tensor.dtype)
        if tensor.dtype.byteorder == (">" if sys.byteorder == "little" else "<"):
            tensor = tensor.astype(tensor.dtype.newbyteorder("="))
    if dtype not in DTYPE_BYTES:
        raise InvalidArgument(f"tensor {name!r} has dtype {dtype}; known are {', '.join(DTYPE_BYTES)}")
    return Source(name, dtype, tuple(tensor.shape), tensor)


@functools.lru_cache(256)
def _name_of(dtype: "np.dtype[Any]") -> str:
    """numpy makes it anew each time, which takes as long as everything else about a tensor."""
    return dtype.name


def _raw(name: str, tensor: RawTensor) -> Source:
    size = DTYPE_BYTES.get(tensor.dtype)
    if size is None:
        raise InvalidArgument(f"tensor {name!r} has dtype {tensor.dtype}; known are {', '.join(DTYPE_BYTES)}")
    if tensor.data.nbytes != size * math.prod(tensor.shape) or not tensor.data.c_contiguous:
        raise InvalidArgument(f"tensor {name!r}: {tensor.data.nbytes} bytes are no {tensor.dtype} {tensor.shape}")
    return Source(name, tensor.dtype, tensor.shape, tensor)


def _from_dlpack(name: str, tensor: Any) -> Any:
    try:
        return np.from_dlpack(tensor)
    except Exception as error:  # whatever its library raises for a dtype or a device that numpy does not have
        raise InvalidArgument(f"tensor {name!r} cannot be read as a numpy array: {error}") from error


def _is_torch(tensor: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


class Maker:
    """Makes tensors on memory.

    Raises:
        InvalidArgument: there is no such framework, or it is not installed.
    """

    def __init__(self, framework: Framework) -> None:
        if framework not in ("numpy", "torch", "raw"):
            raise InvalidArgument(f"framework={framework!r}: numpy or torch, or raw for plain bytes")
        self.raw = framework == "raw"
        self._torch: Any = None
        if framework == "torch":
            try:
                self._torch = importlib.import_module("torch")
            except ImportError as error:
                raise InvalidArgument(f"framework='torch': {error}") from None
        self._dtypes: dict[str, Any] = {}

    def memory(self, shared: Any) -> Any:
        """The same memory, in the form that tensors are made on fastest."""
        if self._torch is None or not len(shared):
            return shared
        return np.frombuffer(shared, np.uint8).data  # ctypes describes what it has anew each time it is asked

    def make(self, name: str, dtype: str, shape: Sequence[int], memory: Any, offset: int) -> Any:
        """A tensor on `memory` at `offset`; it keeps the memory."""
        if self.raw:
            size = DTYPE_BYTES[dtype] * math.prod(shape)
            data = np.frombuffer(memory, np.uint8, size, offset).data if size else memoryview(b"")
            return RawTensor(dtype, tuple(shape), data)
        kind = self._dtypes.get(dtype) or self._dtypes.setdefault(dtype, self._dtype(name, dtype))
        if self._torch is None:
            return np.empty(shape, kind) if 0 in shape else np.ndarray(shape, kind, memory, offset)
        if 0 in shape:
            return self._torch.empty(shape, dtype=kind)
        flat = self._torch.frombuffer(memory, dtype=kind, count=math.prod(shape), offset=offset)
        return flat if len(shape) == 1 else flat.view(shape)

    def _dtype(self, name: str, dtype: str) -> Any:
        if self._torch is not None:
            found = getattr(self._torch, dtype, None)
            if found is None:
                raise InvalidArgument(f"tensor {name!r} is {dtype}, which this torch does not have")
            return found
        if dtype in _NUMPY_DTYPES:
            return np.dtype(dtype)
        try:
            return np.dtype(getattr(importlib.import_module("ml_dtypes"), dtype))
        except (ImportError, AttributeError):
            raise InvalidArgument(
                f"tensor {name!r} is {dtype}, which numpy does not have: install ml_dtypes, or ask for framework='torch'"
            ) from None
