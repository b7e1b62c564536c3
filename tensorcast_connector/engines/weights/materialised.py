"""The parameters of one rank as `load_weights` leaves them, as an artifact that an identical rank maps instead of loading.

The artifact is named `weights/KEY`, and KEY is a digest of everything that determines the bytes: which weights, the model's
effective configuration, dtypes, quantisation, the parallel layout and the rank, the engine's version, the device, and every
parameter's name, shape, stride and dtype. All of that is stored in the artifact as well (tensor KEY_TENSOR, JSON), and compared
when it is used. What another process maps is never changed: everybody maps it copy-on-write.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tensorcast_connector.config import STAGE_BYTES
from tensorcast_connector.core.artifact import DTYPE_BYTES, TensorSpec
from tensorcast_connector.core.identity import canonical, digest
from tensorcast_connector.engines.weights.attributes import holders
from tensorcast_connector.engines.weights.load_plan import LoadPlan, storage_id, views_of
from tensorcast_connector.engines.weights.load_sources import Stage, in_threads, torch_dtype

FORMAT = 1  # raised whenever the meaning of a field, or of the bytes, changes
KEY_TENSOR = "tensorcast.key"
PREFIX = "weights/"
_ENGINES = ("vllm.", "sglang.")
# They name where the model was or who wrote it, not what it computes.
_IRRELEVANT = ("_name_or_path", "transformers_version", "architectures_source")


class NotShared(Exception):
    """Why the parameters of this model are kept to itself."""


@dataclass(slots=True, eq=False)
class Slot:
    """A tensor of the model, and all parameters and buffers that are this tensor."""

    name: str
    owners: list[torch.Tensor] = field(default_factory=list)

    @property
    def tensor(self) -> torch.Tensor:
        """One of them."""
        return self.owners[0]

    @property
    def dtype(self) -> str:
        """As artifacts spell it."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def spec(self) -> tuple[str, str, tuple[int, ...]]:
        """Name, dtype, shape."""
        return self.name, self.dtype, tuple(self.tensor.shape)

    @property
    def bytes(self) -> int:
        """Its size."""
        return int(self.tensor.numel() * self.tensor.itemsize)


class Materialised:
    """Which tensors of a model are shared.

    Raises:
        NotShared: those of this model cannot be.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if not type(model).__module__.startswith(_ENGINES):
            raise NotShared(
                f"{type(model).__name__} is no model of the engine's own, so its version does not say how it loads"
            )
        self._model = model
        self._slots: dict[str, Slot] = {}
        self._by_storage: dict[int, Slot] = {}
        self._odd: dict[int, str] = {}  # storages of buffers that cannot be shared, and why
        for name, tensor in model.named_parameters(remove_duplicate=False):
            if why := self._add(name, tensor):
                raise NotShared(why)
        self._parameters = set(self._by_storage)
        for name, tensor in model.named_buffers(remove_duplicate=False):
            if why := self._add(name, tensor):
                self._refuse(tensor, why)
        self._check_views()

    def _add(self, name: str, tensor: torch.Tensor) -> str:
        """Why it cannot be a slot, or part of one."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return "" if tensor.layout is torch.strided else f"{name} has no plain bytes"
        slot = self._by_storage.get(storage_id(tensor))
        if slot is not None:
            if tensor.storage_offset() != slot.tensor.storage_offset() or _form(tensor) != _form(slot.tensor):
                return f"{name} and {slot.name} are parts of one tensor"
            if all(tensor is not each for each in slot.owners):
                slot.owners.append(tensor)
            return ""
        slot = Slot(name, [tensor])
        if not tensor.is_contiguous() or slot.dtype not in DTYPE_BYTES:
            return f"{name} ({tensor.dtype}, strides {tuple(tensor.stride())}) has no plain bytes"
        self._slots[name] = self._by_storage[storage_id(tensor)] = slot
        return ""

    def _refuse(self, tensor: torch.Tensor, why: str) -> None:
        storage = storage_id(tensor)
        if storage in self._parameters:
            raise NotShared(why)
        self._odd[storage] = why
        if slot := self._by_storage.pop(storage, None):
            del self._slots[slot.name]

    def _check_views(self) -> None:
        """Nothing else may look at the memory of a slot: it would go on looking at it."""
        for slot in list(self._slots.values()):
            if views_of(slot.tensor) > len(slot.owners):
                if storage_id(slot.tensor) in self._parameters:
                    self._look_around()  # who it is
                self._refuse(slot.tensor, f"something looks at the memory of {slot.name}")

    def _look_around(self) -> None:
        """Finds tensors that modules have besides parameters and buffers."""
        owners = {id(each) for slot in self._slots.values() for each in slot.owners}
        for name, holder in holders(self._model):
            for key, value in holder.items():
                if key in ("_modules", "_parameters", "_buffers"):
                    continue
                for each in _leaves(value):
                    if isinstance(each, torch.Tensor) and id(each) not in owners and each.layout is torch.strided:
                        if (slot := self._by_storage.get(storage_id(each))) is not None:
                            self._refuse(slot.tensor, f"{name}.{key} looks at the memory of {slot.name}")
                        elif not each.is_meta:
                            self._odd.setdefault(storage_id(each), f"{name}.{key} is neither a parameter nor a buffer")

    @property
    def model_class(self) -> list[str]:
        """Module and name of the model's class."""
        return [type(self._model).__module__, type(self._model).__qualname__]

    def describe(self) -> list[Any]:
        """Names, shapes, strides and dtypes of all parameters and buffers, those that are one tensor together."""
        return [
            [name, list(slot.tensor.shape), list(slot.tensor.stride()), slot.dtype, len(slot.owners)]
            for name, slot in sorted(self._slots.items())
        ]

    def loaded(self, plan: LoadPlan) -> dict[str, Slot]:
        """What `load_weights` has an effect on: all parameters, and the buffers that it writes.

        Raises:
            NotShared: it writes other tensors too.
        """
        self._look_around()
        for storage in plan.written & self._odd.keys():
            raise NotShared(f"loading changes what is not to be shared: {self._odd[storage]}")
        wanted = self._parameters | plan.written
        return {name: slot for name, slot in self._slots.items() if storage_id(slot.tensor) in wanted}

    def slot_of(self, tensor: torch.Tensor) -> Slot | None:
        """The one whose memory a view is of."""
        return self._by_storage.get(storage_id(tensor))

    def matching(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of an artifact by slot, checked.

        Raises:
            NotShared: they are not those of this model.
        """
        needed = {name for name, slot in self._slots.items() if storage_id(slot.tensor) in self._parameters}
        if odd := (needed - tensors.keys()) | (tensors.keys() - self._slots.keys()):
            raise NotShared(f"{min(odd)} is not in both of them")
        for name, tensor in tensors.items():
            if _form(tensor) != _form(self._slots[name].tensor):
                raise NotShared(f"{name} is {_form(tensor)} there and {_form(self._slots[name].tensor)} here")
        return dict(tensors)

    def adopt(self, tensors: Mapping[str, torch.Tensor], threads: int = 1) -> None:
        """Makes the model's tensors these: on the CPU they are this memory from now on, on another device copies of it.

        Args:
            threads: that copy.
        """
        sent: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, tensor in tensors.items():
            for owner in self._slots[name].owners:
                if owner.device.type == "cpu":
                    owner.data = tensor
            first = self._slots[name].tensor
            if first.device.type != "cpu":
                rows = max(1, STAGE_BYTES // max(1, tensor.itemsize))
                sent += zip(first.data.view(-1).split(rows), tensor.view(-1).split(rows), strict=True)

        def send(part: tuple[torch.Tensor, torch.Tensor], stage: Stage) -> int:
            stage.send(*part)
            return int(part[1].numel() * part[1].itemsize)

        in_threads(sent, send, threads, lambda _: None)

    def placed(self, specs: Mapping[str, TensorSpec]) -> list[tuple[torch.Tensor, TensorSpec]]:
        """Where in the model's own memory each tensor of an artifact belongs, checked.

        Raises:
            NotShared: they are not those of this model, or its tensors are not all on one device.
        """
        forms = {
            name: torch.empty(each.shape, dtype=torch_dtype(name, each.dtype), device="meta")
            for name, each in specs.items()
        }
        found = [(self._slots[name].tensor.data, specs[name]) for name in self.matching(forms)]
        if len({tensor.device for tensor, _ in found}) > 1:
            raise NotShared("its tensors are on several devices")
        return found

    @property
    def device(self) -> torch.device:
        """That of the first of its tensors; the CPU if it has none."""
        return next((slot.tensor.device for slot in self._slots.values()), torch.device("cpu"))


def _leaves(value: Any) -> list[Any]:
    """What a container holds, or the value itself; nothing where no tensor can be."""
    if isinstance(value, torch.Tensor):
        return [value]
    return tree_leaves(value) if isinstance(value, list | tuple | dict) and value else []


def _form(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride())


# --- the key ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyDocument:
    """Everything that determines the bytes, and what people want to know besides."""

    facts: Mapping[str, Any]
    people: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Of the artifact."""
        return PREFIX + digest(self.facts)[:40]

    def encode(self) -> bytes:
        """What is stored in the artifact."""
        return canonical({**self.people, "facts": self.facts})

    def check(self, stored: bytes) -> None:
        """Whether an artifact is what its name says.

        Raises:
            NotShared: it is not.
        """
        try:
            found = json.loads(stored)["facts"]
        except (ValueError, TypeError, KeyError):
            raise NotShared("its key document cannot be read") from None
        if canonical(found) != canonical(self.facts):
            raise NotShared("its key document says something else than its name")


def key_document(
    materialised: Materialised, hf_config: Any, epoch: str, engine: Mapping[str, Any], people: Mapping[str, str]
) -> KeyDocument:  # fmt: skip
    """For the rank that this process is.

    Args:
        hf_config: the model's effective configuration (a PretrainedConfig).
        epoch: says which weights these are, whoever asks.
        engine: what else determines the bytes: the engine and its version, dtype, quantisation, device, and `layout`: the
            sizes, and under `ranks` the place of this rank by kind as (rank, size).
        people: what they want to know besides.

    Raises:
        NotShared: something about this engine has no canonical form.
    """
    model = json.loads(hf_config.to_json_string(use_diff=False))
    for name in _IRRELEVANT:
        model.pop(name, None)
    facts = {
        "format": FORMAT,
        "weights": epoch,
        "model": model,
        "class": materialised.model_class,
        "parameters": digest(materialised.describe()),
        **engine,
    }
    try:
        canonical(facts)
    except (TypeError, ValueError) as error:
        raise NotShared(f"its configuration has no canonical form: {error}") from error
    ranks = engine["layout"]["ranks"].items()
    return KeyDocument(facts, {**people, "rank": " ".join(f"{kind} {rank} of {size}" for kind, (rank, size) in ranks)})
