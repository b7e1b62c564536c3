"""A running SGLang server takes a published version of its weights from the pool, all or nothing.

    POST /update_weights_from_disk  {"model_path": "NAME", "load_format": "tensorcast:policy:7"}        policy: the newest

SGLang makes one loader for each update and calls, in every rank: `prepare`, `apply`, `end`. Where `apply` raises it begins again,
to load the former weights once more; as nothing was changed, that does nothing. Every rank has all tensors of the version in its
address space and knows what the model does with them (engines/weights/load_plan.py) before any rank writes to a parameter.
SGLang empties its caches afterwards, and what is shared of them moves to the namespace of the new weights (live_weights.py).
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.runtime_context import get_parallel, get_spec

from tensorcast_connector.client.blocking import connect_blocking
from tensorcast_connector.client.checkpoint import Checkpoint
from tensorcast_connector.engines.options import LoaderConfig
from tensorcast_connector.engines.sglang.live_weights import live
from tensorcast_connector.engines.sglang.plain_weights import plain_weights
from tensorcast_connector.engines.weights.attributes import Attributes
from tensorcast_connector.engines.weights.load_plan import LoadPlan, Untraceable, trace
from tensorcast_connector.engines.weights.load_sources import Pooled
from tensorcast_connector.errors import ConfigError, InvalidArgument, TensorcastError

logger = logging.getLogger(__name__)
T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...]]
# Models skip these in any checkpoint; a tied output layer may be there or not.
_UNUSED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class _Version:
    """A version whose tensors are in this process's address space."""

    name: str
    identity: str
    tensors: Mapping[str, torch.Tensor]

    @property
    def bytes(self) -> int:
        """Of all its tensors."""
        return sum(each.nbytes for each in self.tensors.values())


class Update:
    """One update of one rank.

    Args:
        reference: NAME, of which the newest version is taken, or NAME:VERSION.
    """

    def __init__(self, reference: str, options: LoaderConfig) -> None:
        self._reference = reference
        self._options = options
        self._begun = time.perf_counter()
        self._version: _Version | None = None
        self._expected: Shapes = {}
        self._refused = False

    def prepare(self, model_config: Any) -> None:
        """The version is made resident, the same in every rank.

        Raises:
            InvalidArgument, NotFound, Unavailable, ConfigError: it cannot be, in this rank or in another one.
        """
        if self._refused:  # SGLang wants the former weights back, and they are there
            return
        version, error = None, ""
        # SGLang has written there what the request says, and serves the model under that name afterwards.
        model_config.model_path = getattr(model_config, "tensorcast_path", model_config.model_path)
        try:
            version = self._fetch(model_config)
        except TensorcastError as caught:
            error = str(caught)
        except Exception as caught:  # whatever it is, all ranks have to hear of it
            error = f"{type(caught).__name__}: {caught}"
        answers = _share((error, version.identity if version else ""))
        errors = [each for each, _ in answers if each]
        if not errors and len({identity for _, identity in answers}) > 1:
            errors = ["the ranks do not find the same version: try again"]
        if errors:
            self._keep()
            raise InvalidArgument(f"{self._reference} cannot be taken: {errors[0]}")
        self._version = version

    def _fetch(self, model_config: Any) -> _Version:
        if not self._options.worker:
            raise ConfigError(
                "no worker is known: start the server with --load-format tensorcast "
                '--model-loader-extra-config \'{"worker": "unix:/path"}\''
            )
        if get_parallel().pp_size > 1:
            raise ConfigError("pipeline stages are updated one after the other, so no version can be taken as a whole")
        if get_spec().speculative_draft_model_path:
            raise ConfigError("SGLang would give the same tensors to the draft model")
        self._expected = _shapes(Path(model_config.model_path))
        with connect_blocking(self._options.worker, tenant=self._options.tenant, name="sglang-update") as pool:
            weights = pool.weights(self._reference)
            _compare({each: tuple(spec.shape) for each, spec in weights.specs.items()}, self._expected)
            tensors = weights.tensor_dict(framework="torch")
            return _Version(f"{weights.published.model} version {weights.version}", f"version:{weights.id}", tensors)

    def apply(self, model: torch.nn.Module) -> None:
        """The version is taken by every rank, or by none.

        Raises:
            InvalidArgument: it is not this model's, in this rank or in another one. Nothing has changed.
        """
        if self._refused:
            return
        version = self._version
        assert version is not None, "prepare comes first"
        attributes = Attributes(model)
        plan, error, used = None, "", None
        try:
            plan = _plan(model, version)
            used = {copy.name for copy in plan.copies}
            error = "" if self._expected else _left(model, plan)
        except Untraceable as caught:
            attributes.restore()
            if not self._expected:
                error = f"the model cannot load it: {caught}"
        except Exception as caught:  # whatever it is, all ranks have to hear of it
            attributes.restore()
            error = f"{type(caught).__name__}: {caught}"
        answers = _share((error, used, bool(self._expected)))
        errors = [each for each, _, _ in answers if each]
        # All ranks decide alike, also where only some of them have the files that versions are compared with.
        if not errors and not any(compared for _, _, compared in answers):
            errors = self._unknown(version, set().union(*(names or () for _, names, _ in answers)))
        if errors:
            self._keep()
            raise InvalidArgument(f"{version.name} cannot be taken: {errors[0]}")
        self._load(model, version, plan, attributes)

    def _unknown(self, version: _Version, used: set[str]) -> list[str]:
        return [
            f"tensor {name!r} is unknown to the model"
            for name in version.tensors
            if name not in used and not name.endswith(_UNUSED)
        ]

    def _load(self, model: torch.nn.Module, version: _Version, plan: LoadPlan | None, attributes: Attributes) -> None:
        error, undo = "", _nothing
        try:
            if plan is not None:
                Pooled(version.name, version.tensors, self._options.threads).fill(plan.copies, lambda _: None)
            else:
                undo = _kept(model, attributes)
                load: Any = model.load_weights
                load(iter([(name, each) for name, each in version.tensors.items()]))
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        errors = [each for each in _share(error) if each]
        if errors:
            undo()
            if plan is None:
                self._keep()
            else:
                self._refused = True
            how = "nothing has changed" if plan is None else "HALF WAY, the weights are of no version: update again"
            raise InvalidArgument(f"{version.name} cannot be taken ({how}): {errors[0]}")

    def end(self) -> None:
        """All is written. Says so, and whose the KV is that is computed after the next flush."""
        if self._refused or self._version is None:
            return
        live.declared(self._version.identity)
        logger.info(
            "weights are %s now: %d tensors, %.1f MB, in %.3f s", self._version.name, len(self._version.tensors),
            self._version.bytes / 1e6, time.perf_counter() - self._begun,
        )  # fmt: skip
        self._version = None  # the memory of a version that is deleted is not kept

    def failed(self) -> None:
        """What follows on `apply` has failed in this rank. That SGLang begins again does nothing: the others do not."""
        self._refused = True
        self._version = None

    def _keep(self) -> None:
        """The update does not take place."""
        self._refused = True
        self._version = None
        live.kept()


def _share(value: T) -> list[T]:
    """The values of all ranks of the tensor-parallel group, in their order; waits for all of them."""
    group = get_tp_group()
    values: list[T] = [value] * int(group.world_size)
    if group.world_size > 1:
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def _shapes(folder: Path) -> Shapes:
    """Of the tensors that the server was started with, if its files are here."""
    try:
        with Checkpoint.open(folder) as checkpoint:
            return {each.name: tuple(each.shape) for each in checkpoint.tensors.values()}
    except (TensorcastError, OSError) as error:
        logger.debug("versions are compared with the model alone: %s", error)
        return {}


def _compare(given: Shapes, expected: Shapes) -> None:
    if not expected:
        return
    for name in sorted(expected.keys() - given.keys()):
        if not name.endswith(_UNUSED):
            raise InvalidArgument(f"tensor {name!r} is missing")
    for name, shape in given.items():
        if name not in expected and not name.endswith(_UNUSED):
            raise InvalidArgument(f"tensor {name!r} is unknown to the model")
        if shape != expected.get(name, shape):
            raise InvalidArgument(
                f"tensor {name!r} has shape {list(shape)}, and the model needs {list(expected[name])}"
            )


def _plan(model: torch.nn.Module, version: _Version) -> LoadPlan:
    given = [(name, each.dtype, tuple(each.shape)) for name, each in version.tensors.items()]
    with torch.no_grad():
        return trace(model, given, lambda name: version.tensors[name], real_bytes=0)


def _left(model: torch.nn.Module, plan: LoadPlan) -> str:
    """A parameter that would keep a value of the former weights; "" if there is none."""
    left = plan.left(dict(plain_weights(model)))
    return f"a tensor is missing: {left[0]} would not be filled" if left else ""


def _nothing() -> None:
    """What is to be undone of a plan: see `_load`."""


def _kept(model: torch.nn.Module, attributes: Attributes) -> Callable[[], None]:
    """A copy of all the model's tensors in this host's memory, and how it gets them back."""
    copies = [(each, each.detach().to("cpu", copy=True)) for each in [*model.parameters(), *model.buffers()]]

    def undo() -> None:
        for tensor, copy in copies:
            tensor.data.copy_(copy)
        attributes.restore()

    return undo
