"""What a running model would do with the tensors of a version, found without writing to any parameter.

The model's own `load_weights` runs once on the tensors while all of its parameters are replaced by ones without bytes. So names,
shapes and dtypes are judged by the code that would load them, before the first parameter changes.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import (
    get_layer_params_buffers,
    get_layer_tensors,
    get_tensor_load_numel,
)

from tensorcast_connector.errors import InvalidArgument

logger = logging.getLogger(__name__)
Spec = tuple[str, tuple[int, ...]]
"""Of a tensor in a checkpoint: dtype by torch's name, and shape."""
_aten = torch.ops.aten
# vLLM's models skip these in any checkpoint.
_UNUSED = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


@dataclass(frozen=True, slots=True)
class Uses:
    """What the model of this rank does with each tensor of a version.

    Attributes:
        taken: how many elements of it it takes, 0 if none.
        layers: the numbers of the layers (in the order of `model.modules()`) that take some.
    """

    taken: Mapping[str, int]
    layers: Mapping[str, frozenset[int]]

    def closure(self, changed: Sequence[str]) -> tuple[list[str], list[int]]:
        """The tensors to load and the layers to make anew when these tensors have changed.

        A layer is made as a whole, since what the engine computes with may be packed from all of its tensors.
        """
        of_layer: dict[int, set[str]] = defaultdict(set)
        for name, those in self.layers.items():
            for layer in those:
                of_layer[layer].add(name)
        names, layers, left = set(changed), set[int](), set(changed)
        while left:
            reached = {layer for name in left for layer in self.layers.get(name, ())} - layers
            layers |= reached
            left = {name for layer in reached for name in of_layer[layer]} - names
            names |= left
        return sorted(names, key=lambda name: (min(self.layers.get(name) or {-1}), name)), sorted(layers)


def check(model: Any, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, Spec]) -> Uses:
    """Whether these tensors are a whole checkpoint of `model`, and what it does with them.

    Args:
        expected: the tensors of the checkpoint that the model was loaded from, as far as it is known.

    Raises:
        InvalidArgument: a tensor is unknown or missing or of the wrong shape or dtype; names it. The model is as it was.
    """
    for name, tensor in tensors.items():
        if name in expected and tuple(tensor.shape) != expected[name][1]:
            raise InvalidArgument(
                f"tensor {name!r} has shape {list(tensor.shape)}, and the model needs {list(expected[name][1])}"
            )
    with _without_bytes(model):
        recorder = _Recorder(model, tensors, expected)
        try:
            with recorder, torch.no_grad():
                model.load_weights(recorder.giving(tensors))
        except InvalidArgument:
            raise
        except Exception as error:
            if expected and recorder.given not in expected:
                raise InvalidArgument(f"tensor {recorder.given!r} is unknown to the model") from error
            reason = str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
            shape = list(tensors[recorder.given].shape) if recorder.given else []
            raise InvalidArgument(
                f"the model cannot load tensor {recorder.given!r} of shape {shape}: {reason}"
            ) from error
        uncovered = recorder.uncovered()
    if uncovered:
        absent = sorted(expected.keys() - tensors.keys())
        what = f"tensor {absent[0]!r} is missing" if absent else "a tensor is missing"
        raise InvalidArgument(f"{what}: parameter {uncovered[0]!r} would not be filled")
    return Uses(
        {name: recorder.taken[name] for name in tensors},
        {name: frozenset(recorder.layers[name]) for name in tensors},
    )


def check_taken(tensors: Mapping[str, Sequence[int]], taken: Sequence[Mapping[str, int]], tied: bool) -> None:
    """Whether all ranks together take the whole of each tensor.

    Args:
        tensors: their shapes.
        taken: by rank, how many elements it takes.
        tied: the output layer is that of the embeddings, so a tensor for it may be left out.

    Raises:
        InvalidArgument: a tensor that nobody knows, or that is larger than what the model takes of it.
    """
    for name, shape in tensors.items():
        count = sum(each.get(name, 0) for each in taken)
        size = torch.Size(shape).numel()
        if count >= size or name.endswith(_UNUSED) or (tied and name.split(".")[-2:-1] == ["lm_head"]):
            continue
        if not count:
            raise InvalidArgument(f"tensor {name!r} is unknown to the model")
        raise InvalidArgument(
            f"tensor {name!r} has shape {list(shape)}, of which the model takes {count} elements only"
        )


@dataclass(slots=True)
class _Place:
    """A parameter or buffer of the model while it has no bytes."""

    layer: int
    name: str  # within the model
    tensor: torch.Tensor
    required: bool
    kept: bool  # it still is the engine's own
    group: int  # the same for parameters that share memory in the engine
    covered: int = 0


@contextmanager
def _without_bytes(model: Any) -> Iterator[None]:
    saved: list[tuple[Any, Any, Any, set[str]]] = []
    try:
        for layer in model.modules():
            saved.append((layer, *get_layer_params_buffers(layer), set(layer._non_persistent_buffers_set)))
            layer.__dict__["_tensorcast_kept"] = get_layer_tensors(layer)
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for tensor in get_layer_tensors(layer).values():
                # A former reload has left its own loader there, which waits for the next one to begin.
                if getattr(getattr(tensor, "weight_loader", None), "__wrapped__", None) is not None:
                    tensor.weight_loader = _get_original_loader(tensor)
        yield
    finally:
        for layer, parameters, buffers, non_persistent in saved:
            layer.__dict__.pop("_tensorcast_kept", None)
            for name in get_layer_tensors(layer):
                delattr(layer, name)
            for name, parameter in parameters.items():
                layer.register_parameter(name, parameter)
            for name, buffer in buffers.items():
                layer.register_buffer(name, buffer, persistent=name not in non_persistent)


class _Recorder(TorchDispatchMode):
    """Sees every operation of `load_weights`; lets none write to what is the engine's own."""

    def __init__(self, model: Any, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, Spec]) -> None:
        super().__init__()
        self.taken = Counter[str]()
        self.layers: dict[str, set[int]] = defaultdict(set)
        self._expected = expected
        self._given: dict[int, list[tuple[int, int, str]]] = defaultdict(list)  # where they lie, by storage
        for name, tensor in tensors.items():
            start = tensor.storage_offset() * tensor.itemsize
            self._given[_storage(tensor)].append((start, start + tensor.nbytes, name))
        self._derived: dict[int, frozenset[str]] = {}  # what was made of them, by storage
        self.given = ""
        self._made: list[torch.Tensor] = []  # keeps storages from being used again
        self._places: dict[int, _Place] = {}
        groups: dict[int, int] = {}
        for number, (layer_name, layer) in enumerate(model.named_modules()):
            kept = layer.__dict__["_tensorcast_kept"]
            for name, tensor in get_layer_tensors(layer).items():
                own = kept.get(name)
                memory = own.data_ptr() if own is not None and own.numel() else 0
                group = groups.setdefault(memory, len(groups)) if memory else -1 - len(self._places)
                self._places[_storage(tensor)] = _Place(
                    number, f"{layer_name}.{name}".lstrip("."), tensor, name in layer._parameters, tensor is own, group
                )

    def giving(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors in their order; `given` is the name of the last one."""
        for name, tensor in tensors.items():
            self.given = name
            yield name, tensor

    def uncovered(self) -> list[str]:
        """Parameters that were not filled, apart from those that share the memory of one that was."""
        filled = {each.group for each in self._places.values() if each.covered}
        return [
            each.name
            for each in self._places.values()
            if each.required
            and each.covered < get_tensor_load_numel(each.tensor)
            and not (each.group in filled and not each.covered)
        ]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        names = frozenset[str]().union(*(self._names(each) for each in inputs))
        if func is _aten.copy_.default:
            self._copy(args[0], args[1], names)
        written = [each for each in _written(func, args) if isinstance(each, torch.Tensor)]
        for target in written:
            place = self._places.get(_storage(target))
            if place is not None:
                place.covered += target.numel()
                for name in names:
                    self.layers[name].add(place.layer)
                if place.kept:
                    return target  # nothing is written to it now
        result = func(*args, **kwargs)
        if names:
            self._derive(names, inputs, result)
        return result

    def _copy(self, target: torch.Tensor, source: torch.Tensor, names: frozenset[str]) -> None:
        place = self._places.get(_storage(target))
        if place is None or not names:
            return
        name = self._one(names)
        try:
            fits = torch.broadcast_shapes(source.shape, target.shape) == target.shape
        except RuntimeError:
            fits = False
        if not fits:
            raise InvalidArgument(
                f"tensor {name!r}: a part of shape {list(source.shape)} does not fit into {place.name!r}, "
                f"which takes {list(target.shape)} there"
            )
        if _storage(source) not in self._given:
            return
        self.taken[name] += source.numel()
        known = self._expected.get(name, ("",))[0]
        if (
            source.dtype != target.dtype
            and _name(source.dtype) != known
            and place.name.rpartition(".")[2] not in SKIP_TENSORS
        ):
            raise InvalidArgument(
                f"tensor {name!r} is {_name(source.dtype)}, and the model needs {_name(target.dtype)}"
            )

    def _derive(self, names: frozenset[str], inputs: Sequence[torch.Tensor], result: Any) -> None:
        """What is made of a tensor counts as it, and as taken as a whole."""
        before = {_storage(each) for each in inputs}
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and _storage(each) not in before:
                self._made.append(each)
                self._derived[_storage(each)] = names
                for tensor in inputs:
                    if _storage(tensor) in self._given:
                        self.taken[self._one(self._names(tensor))] += tensor.numel()

    def _names(self, tensor: torch.Tensor) -> frozenset[str]:
        """The tensors that it is a view of or was made of; several if they share memory, as equal ones may."""
        storage, at = _storage(tensor), tensor.storage_offset() * tensor.itemsize
        given = self._given.get(storage, ())
        return self._derived.get(storage, frozenset()).union(name for start, end, name in given if start <= at < end)

    def _one(self, names: frozenset[str]) -> str:
        return self.given if self.given in names else min(names)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _written(func: Any, args: Sequence[Any]) -> Iterator[Any]:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tree_leaves(value)
