"""What a model's own `load_weights` does with a checkpoint, found by letting it run once on tensors that have no bytes.

    plan = trace(model, [(name, dtype, shape), ...], read)
    plan.copies     # which part of which tensor of the checkpoint goes to which part of which parameter

vLLM's models slice, fuse and pad while they load, each in its own way. Nearly all of them do it by views and copies alone, which
can be recorded instead of done, and then be done in any order, by several threads, reading no byte that this rank does not need.
Whatever else a model does with a tensor (computes on it, asks for a value, keeps it) makes the trace fail as Untraceable, and the
tensors are then given to it in the ordinary way.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tensorcast_connector.config import TRACE_REAL_BYTES
from tensorcast_connector.errors import TensorcastError

_aten = torch.ops.aten
Given = tuple[str, torch.dtype, Sequence[int]]
"""A tensor of the checkpoint: name, dtype, shape."""


class Untraceable(Exception):
    """The model does with a tensor what cannot be recorded; says what."""


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A view of a checkpoint's tensor, and the view of a parameter that it goes to.

    Attributes:
        name: of the tensor in the checkpoint.
        dtype: as which the model looks at it, mostly its own.
        offset, shape, stride: of the view of it, in elements; the shape is that of the target, strides of 0 repeat.
        target: a view of memory of the model, of any dtype.
    """

    name: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    target: torch.Tensor

    @property
    def span(self) -> tuple[int, int]:
        """First and last byte (exclusive) of the tensor that are needed."""
        size = self.dtype.itemsize
        last = self.offset + sum((count - 1) * step for count, step in zip(self.shape, self.stride, strict=True))
        return self.offset * size, (last + 1) * size

    @property
    def plain(self) -> bool:
        """Whether the same bytes follow each other on both sides, so that they can be read to where they belong."""
        return (
            self.dtype == self.target.dtype
            and self.target.is_contiguous()
            and not self.target.is_conj()
            and not self.target.is_neg()
            and _contiguous(self.shape, self.stride)
        )

    @property
    def bytes(self) -> int:
        """Of the target."""
        return int(self.target.numel() * self.target.itemsize)


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """All that `load_weights` did.

    Attributes:
        copies: still to be made; none of them overlaps another.
        loaded: what `load_weights` returned: the names of the parameters that it has seen, or None.
        written: the storages (see `storage_id`) of all tensors that were written, or are to be.
        done: those of them that were written during the trace.
    """

    copies: tuple[Copy, ...]
    loaded: Any
    written: frozenset[int]
    done: frozenset[int]

    @property
    def bytes(self) -> int:
        """What is to be copied."""
        return sum(each.bytes for each in self.copies)

    def left(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """The names of those of some tensors that it leaves as they were made, in whole or in part."""
        left: dict[int, int] = {}
        names: dict[int, str] = {}
        for name, weight in weights.items():
            names.setdefault(storage_id(weight), name)
            left[storage_id(weight)] = weight.numel() * weight.itemsize
        for copy in self.copies:
            if storage_id(copy.target) in left:
                left[storage_id(copy.target)] -= copy.bytes
        return [names[storage] for storage, size in left.items() if size and storage not in self.done]


def trace(
    model: Any, tensors: Iterable[Given], read: Callable[[str], torch.Tensor], real_bytes: int = TRACE_REAL_BYTES
) -> LoadPlan:
    """Runs `model.load_weights` on placeholders for `tensors`. Copies of small tensors, and what the model fills in, are done.

    Args:
        read: gives a tensor of the checkpoint; called for those of at most `real_bytes`.

    Raises:
        Untraceable: see the module, or `load_weights` has failed. The model may be given its tensors themselves.
        TensorcastError: what `read` raises.
    """
    recorder = _Recorder()
    model_tensors = {storage_id(each) for each in _tensors(model)}

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in tensors:
            if math.prod(shape) * dtype.itemsize <= real_bytes:
                with recorder.paused():
                    tensor = read(name)
                yield name, tensor
            else:
                yield name, recorder.placeholder(name, dtype, shape)

    try:
        with recorder:
            loaded = model.load_weights(given())
    except (Untraceable, TensorcastError):
        raise
    except Exception as error:  # if a placeholder is not the reason, it comes again with the tensors themselves
        raise Untraceable(recorder.failed or f"{type(error).__name__}: {error}") from error
    if recorder.failed:
        raise Untraceable(recorder.failed)
    if kept := recorder.kept():
        raise Untraceable(f"it keeps {kept} instead of copying it")
    for each in recorder.copies():
        if storage_id(each.target) not in model_tensors:
            raise Untraceable(f"it copies {each.name} to memory that is not the model's")
    copies = tuple(recorder.copies())
    written = recorder.written | {storage_id(each.target) for each in copies}
    return LoadPlan(copies, loaded, frozenset(written), frozenset(recorder.written))


def storage_id(tensor: torch.Tensor) -> int:
    """The same for all views of one storage, as long as it lives."""
    number: int = tensor.untyped_storage()._cdata
    return number


def _tensors(model: Any) -> Iterator[torch.Tensor]:
    """Every tensor that a model's modules hold as a parameter, buffer or attribute."""
    for module in model.modules():
        for value in [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]:
            if isinstance(value, torch.Tensor):
                yield value


class _Recorder(TorchDispatchMode):
    """Sees every operation before it is done. Views are done, copies out of placeholders recorded, others refused."""

    def __init__(self) -> None:
        super().__init__()
        self.placeholders: dict[str, tuple[int, torch.Tensor]] = {}  # by name: the storage, and what keeps it
        self._names: dict[int, str] = {}  # by storage
        self._held = 0  # how many hold the storage of a placeholder that nobody else holds
        self.written: set[int] = set()
        self.failed = ""
        self._pending: dict[int, list[Copy]] = {}  # by the target's storage
        self._paused = False

    def placeholder(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Stands for a tensor of the checkpoint."""
        with self.paused():
            tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self.placeholders[name] = storage_id(tensor), tensor
        self._names[storage_id(tensor)] = name
        self._held = views_of(tensor)
        return tensor

    def kept(self) -> str:
        """The first of them that somebody still has."""
        for attempt in range(2):
            found = [name for name, (_, tensor) in self.placeholders.items() if views_of(tensor) > self._held]
            if not found or attempt:
                break
            gc.collect()  # what only a cycle of garbage holds is had by nobody
        return found[0] if found else ""

    def paused(self) -> "_Paused":
        """Nothing is recorded meanwhile."""
        return _Paused(self)

    def copies(self) -> Iterator[Copy]:
        """Those that were recorded and count."""
        for each in self._pending.values():
            yield from each

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if self.failed:  # and somebody has caught it
            raise Untraceable(self.failed)
        if func is _aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            self._copy(args[0], args[1])
            return args[0]
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if any(each.is_meta for each in tensors):
            if _is_view(func):
                return func(*args, **kwargs)
            if func is _aten._to_copy.default and _moves_only(args[0], kwargs):
                return _aten.alias.default(args[0])  # to where the parameter is, which the copy will do
            raise self._failed(f"{func} needs values of {self._name(tensors)}")
        if not _is_view(func):
            changed = set(_written(func, args, kwargs))
            for each in tensors:
                self._check(func, each)
                if id(each) in changed:
                    self.written.add(storage_id(each))
        return func(*args, **kwargs)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name = self._names.get(storage_id(source))
        if name is None:
            raise self._failed("it copies what was made without values")
        view = source.expand(target.shape)
        copy = Copy(name, source.dtype, view.storage_offset(), tuple(view.shape), view.stride(), target.detach())
        if not target.numel():
            return
        storage = storage_id(target)
        pending = self._pending.setdefault(storage, [])
        for number, other in enumerate(pending):
            if _same_place(other.target, target):
                pending[number] = copy  # the last one counts
                return
        self._check(_aten.copy_.default, target)
        pending.append(copy)

    def _check(self, func: Any, tensor: torch.Tensor) -> None:
        """No operation may see or change what is still to be copied to."""
        if tensor.is_meta or not tensor.numel() or tensor.layout is not torch.strided:
            return
        for other in self._pending.get(storage_id(tensor), ()):
            if overlap(other.target, tensor):
                raise self._failed(f"{func} uses a parameter that {other.name} was to be copied to")

    def _name(self, tensors: Iterable[torch.Tensor]) -> str:
        known = [self._names.get(storage_id(each)) for each in tensors if each.is_meta]
        return next((each for each in known if each), "a tensor without values")

    def _failed(self, reason: str) -> Untraceable:
        self.failed = reason
        return Untraceable(reason)


class _Paused:
    """See _Recorder.paused."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._before, self._recorder._paused = self._recorder._paused, True

    def __exit__(self, *_: object) -> None:
        self._recorder._paused = self._before


def views_of(tensor: torch.Tensor) -> int:
    """How many tensors have its storage, itself included."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count - 1  # one is what was made to ask


_views: dict[Any, bool] = {}


def _is_view(func: Any) -> bool:
    """Whether all it returns are views of what it is given."""
    known = _views.get(func)
    if known is None:
        schema = func._schema
        aliases = [each.alias_info for each in schema.arguments if each.alias_info is not None]
        known = _views[func] = (
            bool(aliases)
            and bool(schema.returns)
            and not any(each.is_write for each in aliases)
            and all(each.alias_info is not None for each in schema.returns)
        )
    return known


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[int]:
    """The ids (of Python) of the tensors that an operation changes."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            yield from (id(each) for each in tree_leaves(value))


def _moves_only(tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether `.to(...)` of this is about the device alone."""
    dtype = kwargs.get("dtype")
    return dtype in (None, tensor.dtype) and kwargs.get("memory_format") in (None, torch.preserve_format)


# --- where views lie --------------------------------------------------------------------------------------------------


def _contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    step = 1
    for count, each in zip(reversed(shape), reversed(stride), strict=True):
        if count != 1 and each != step:
            return False
        step *= count
    return True


def _same_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two views of one storage are of the same elements in the same order."""
    return (one.dtype, one.storage_offset(), one.shape, one.stride()) == (
        other.dtype, other.storage_offset(), other.shape, other.stride(),
    )  # fmt: skip


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two views of one storage may have a byte in common; exact for boxes of one tensor."""
    first, second = _extent(one), _extent(other)
    if first[1] <= second[0] or second[1] <= first[0]:
        return False
    if one.itemsize != other.itemsize:
        return True
    boxes = _box(one), _box(other)
    if boxes[0] is None or boxes[1] is None or boxes[0][0] != boxes[1][0]:
        return True
    pairs = zip(boxes[0][1], boxes[1][1], strict=True)
    return all(a[0] < b[1] and b[0] < a[1] for a, b in pairs)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte (exclusive) in the storage."""
    last = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset()
    return start * tensor.itemsize, (start + last + 1) * tensor.itemsize


def _box(tensor: torch.Tensor) -> tuple[tuple[int, ...], list[tuple[int, int]]] | None:
    """Its strides, largest first, and its bounds along each; None if it is no box of a tensor with these strides."""
    dims = [(step, count) for count, step in zip(tensor.shape, tensor.stride(), strict=True) if count > 1]
    dims.sort(reverse=True)
    left = tensor.storage_offset()
    bounds: list[tuple[int, int]] = []
    for at, (step, count) in enumerate(dims):
        if step <= 0 or (at and dims[at - 1][0] % step):
            return None
        start, left = divmod(left, step)
        if at and start + count > dims[at - 1][0] // step:
            return None
        bounds.append((start, start + count))
    # What is left is a place along a dimension of size 1; alike in both, or they are compared by it.
    bounds.append((left, left + 1))
    return tuple(step for step, _ in dims), bounds
