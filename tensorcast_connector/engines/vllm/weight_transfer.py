"""vLLM's weight transfer engine "tensorcast": a running engine takes a published version of its weights from the pool.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "tensorcast"}' ...

    POST /init_weight_transfer_engine  {"init_info": {"worker": "unix:/path/worker.sock", "model": "policy"}}
    POST /pause                        (waits for nothing and empties the caches; see docs/weights.md)
    POST /start_weight_update
    POST /update_weights               {"update_info": {"version": 7}}       null or nothing: the newest
    POST /finish_weight_update
    POST /resume

All or nothing: every rank makes the whole version resident in its host's memory and checks all of it before any rank writes
to the first parameter. What goes wrong until then changes nothing, and the error says what it was.
"""

import asyncio
import logging
import sys
import time
import traceback
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from tensorcast_connector.client.checkpoint import Checkpoint
from tensorcast_connector.client.session import connect
from tensorcast_connector.client.weights import Weights
from tensorcast_connector.config import TENANT, parse_address
from tensorcast_connector.core.weights import Content
from tensorcast_connector.engines.vllm.logs import log_with_vllm
from tensorcast_connector.engines.vllm.ranks import Ranks
from tensorcast_connector.engines.vllm.weight_check import Spec, Uses, check, check_taken
from tensorcast_connector.engines.vllm.weight_reload import reload_layers
from tensorcast_connector.engines.vllm.weights_state import UNKNOWN, weights_state
from tensorcast_connector.errors import ConfigError, InvalidArgument, TensorcastError

logger = logging.getLogger(__name__)
log_with_vllm()
T = TypeVar("T")
Specs = Mapping[str, Spec]
Contents = Mapping[str, Content]


@dataclass
class InitInfo(WeightTransferInitInfo):
    """`init_info`: the Unix socket of this host's worker, the name under which versions are published, and whose they are."""

    worker: str
    model: str
    tenant: str = TENANT


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`update_info`: the version, None for the newest."""

    version: int | str | None = None


@dataclass(frozen=True, slots=True)
class _Resident:
    """A version whose tensors, as far as they are to be loaded, are in this process's address space; and what to do with them."""

    weights: Weights
    specs: Specs
    uses: Uses
    tensors: Mapping[str, torch.Tensor]
    names: list[str]
    layers: list[int]

    @property
    def bytes(self) -> int:
        """Of the tensors that are to be loaded."""
        return sum(self.tensors[name].nbytes for name in self.names)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a rank tells the others of a version: why it cannot take it, what it is, how much of each tensor it takes."""

    version: int | str | None
    identity: str = ""
    error: str | None = None
    taken: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Found:
    """The version, if this rank can take it, and the answer."""

    ready: _Resident | None
    answer: _Answer


class TensorcastWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """See the module."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._state = weights_state(vllm_config.instance_id)
        self._ranks = Ranks()
        self._from: InitInfo | None = None
        self._now: Contents | None = None  # what the parameters hold, if it came through here
        self._checked: tuple[Specs, Uses] | None = None  # the last version that was found to be whole
        self._loading = False
        self._expected: Specs | None = None
        self._watch_other_loads()

    def _watch_other_loads(self) -> None:
        """Weights that come another way (vLLM's reload_weights) have no identity that could be shared under."""
        load = self.model.load_weights

        def load_weights(*args: Any, **kwargs: Any) -> Any:
            if self._loading:
                return load(*args, **kwargs)
            self._now = None
            self._state.begin()
            try:
                return load(*args, **kwargs)
            finally:
                self._state.end(UNKNOWN)

        self.model.load_weights = load_weights

    @contextmanager
    def _own_load(self) -> Iterator[None]:
        self._loading = True
        try:
            yield
        finally:
            self._loading = False

    # --- vLLM's calls ---

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """vLLM: the body of /init_weight_transfer_engine. What is wrong with it is said by `init_transfer_engine`."""
        return _Wrong(init_dict) if _problem(InitInfo, init_dict) else InitInfo(**init_dict)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """vLLM: where versions come from. Asks the worker, so that a wrong address is told now."""
        error = self._why_not()
        if error is None:
            try:
                if isinstance(init_info, _Wrong):
                    raise ConfigError(f"init_info: {_problem(InitInfo, init_info.given)}")
                _check_init(init_info)
                _wait(_reach(init_info))
            except TensorcastError as caught:
                error = str(caught)
        errors = self._ranks.share(error)
        if any(errors):
            self._refuse("cannot take weights from the pool", errors)
            return
        self._from = init_info

    def start_weight_update(self) -> None:
        """vLLM: an update begins. The engine keeps its weights until the version is known to be whole."""

    def finish_weight_update(self) -> None:
        """vLLM: an update has ended. All was done by `update_weights`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """vLLM: the body of /update_weights."""
        wrong = _problem(UpdateInfo, update_info)
        if wrong:
            self._refuse("no update", [f"update_info: {wrong}"])
            return
        self.receive_weights(UpdateInfo(**update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """vLLM: the version is taken, as the module says."""
        started = time.monotonic()
        ready = self._prepare(update_info.version)
        if ready is None:
            return  # another rank says why
        prepared_s = time.monotonic() - started
        self._apply(ready)
        logger.info(
            "tensorcast: weights are %s version %s now: %d of %d tensors, %.1f MB, made ready in %.3f s, loaded in %.3f s",
            ready.weights.model, ready.weights.version, len(ready.names), len(ready.specs), ready.bytes / 1e6, prepared_s,
            time.monotonic() - started - prepared_s,
        )  # fmt: skip

    def shutdown(self) -> None:
        """vLLM: no more updates. Nothing is held between two."""
        self._from = None

    # --- before anything is written ---

    def _why_not(self) -> str | None:
        compilation = self.vllm_config.compilation_config
        if self.device.type == "cpu" and int(compilation.mode or 0) and not self.model_config.enforce_eager:
            return (
                "on CPU a compiled model keeps the weights it was compiled with: start the engine with --enforce-eager"
            )
        return None

    def _prepare(self, version: int | str | None) -> _Resident | None:
        """A version in memory and checked, the same in every rank; None if not here is to be said why not."""
        for _ in range(2):
            found = self._found(version)
            answers = self._ranks.share(found.answer)
            errors = [each.error for each in answers]
            if not any(errors) and len({each.identity for each in answers}) > 1:
                version = answers[0].version  # "the newest" has changed between two ranks' questions
                continue
            if found.ready is not None and not any(errors):
                try:
                    tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))
                    shapes = {name: spec[1] for name, spec in found.ready.specs.items()}
                    check_taken(shapes, [each.taken for each in answers], tied)
                    return found.ready
                except InvalidArgument as caught:
                    errors = [str(caught)]
            self._refuse(_which(next((each.version for each in answers if each.version is not None), version)), errors)
            return None
        self._refuse(_which(version), ["the ranks do not find the same: try again"])
        return None

    def _found(self, version: int | str | None) -> "_Found":
        answer = _Answer(version=version)
        try:
            if self._from is None:
                raise ConfigError("POST /init_weight_transfer_engine first")
            weights, names, tensors = _wait(_fetch(self._from, version, self._wanted))
            answer = _Answer(version=weights.version, identity=weights.id)
            ready = self._resident(weights, names, tensors)
            return _Found(ready, replace(answer, taken=dict(ready.uses.taken)))
        except TensorcastError as caught:
            return _Found(None, replace(answer, error=str(caught)))
        except Exception as caught:  # whatever it is, nothing has changed yet
            logger.error("tensorcast: an update failed before it began\n%s", traceback.format_exc())
            return _Found(None, replace(answer, error=f"{type(caught).__name__}: {caught}"))

    def _resident(self, weights: Weights, names: list[str], tensors: Mapping[str, torch.Tensor]) -> _Resident:
        specs = _specs(weights)
        if self._checked is not None and self._checked[0] == specs:
            uses = self._checked[1]
        else:
            with self._own_load():
                uses = check(self.model, tensors, self._checkpoint())
        names, layers = uses.closure(names)
        return _Resident(weights, specs, uses, tensors, names, layers)

    def _wanted(self, weights: Weights) -> list[str]:
        """The tensors that have to be loaded: those that have changed and those of the same layers; or all."""
        specs = _specs(weights)
        if self._now is None or self._checked is None or self._checked[0] != specs:
            return list(specs)
        changed = [name for name, each in weights.specs.items() if self._now.get(name) != each.content]
        return self._checked[1].closure(changed)[0]

    def _checkpoint(self) -> Specs:
        """The tensors of the files that the engine was started from, if they are there."""
        if self._expected is None:
            try:
                with Checkpoint.open(Path(self.model_config.model)) as checkpoint:
                    self._expected = {
                        each.name: (each.dtype, tuple(each.shape)) for each in checkpoint.tensors.values()
                    }
            except (TensorcastError, OSError) as error:
                logger.debug("tensorcast: versions are compared with the model alone: %s", error)
                self._expected = {}
        return self._expected

    # --- and then ---

    def _apply(self, ready: _Resident) -> None:
        self._state.begin()
        self._now, error = None, None
        try:
            tensors = ((name, ready.tensors[name]) for name in ready.names)
            if ready.layers:
                with self._own_load():
                    reload_layers(self.model, self.model_config, ready.layers, tensors)
        except Exception as caught:
            logger.error("tensorcast: an update failed half way\n%s", traceback.format_exc())
            error = f"{type(caught).__name__}: {caught}"
        errors = self._ranks.share(error)
        if any(errors):
            self._state.end(UNKNOWN)
            self._refuse("the update failed HALF WAY; the weights are of no version, update again or restart", errors)
            return
        self._state.end(ready.weights.id)
        # Not the weights themselves, which would keep the memory of a version that is deleted.
        self._now = {name: each.content for name, each in ready.weights.specs.items()}
        self._checked = ready.specs, ready.uses

    def _refuse(self, what: str, errors: list[str | None]) -> None:
        """The error of one rank for all: raised by the last one, since vLLM's answers go out of step otherwise.

        vLLM reads the ranks' answers in their order until the first failure; what is behind it would be taken for the answer to
        the next call, and the engine would die of it. The others end the update as vLLM does after an error.
        """
        message = f"{what}: {next(each for each in errors if each)}"
        if self._ranks.is_last:
            _fail(message)
        logger.warning("tensorcast: %s", message)
        self.reset_weight_update_target()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            caller: Any = frame.f_locals.get("self")
            if getattr(caller, "weight_transfer_engine", None) is self:
                caller._weight_update_active = False
                return
            frame = frame.f_back


@dataclass
class _Wrong(InitInfo):
    """What was given instead of an InitInfo."""

    given: Mapping[str, Any] = None  # type: ignore[assignment]

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given


def _fail(message: str) -> NoReturn:
    raise RuntimeError(f"tensorcast: {message}")


def _which(version: int | str | None) -> str:
    return "the newest version cannot be taken" if version is None else f"version {version} cannot be taken"


def _problem(kind: type[InitInfo] | type[UpdateInfo], given: Any) -> str:
    """What is wrong with the fields of a request's body; "" if nothing."""
    known = {"version"} if kind is UpdateInfo else {"worker", "model", "tenant"}
    if not isinstance(given, dict):
        return "it should be an object"
    for key, value in given.items():
        if key not in known:
            return f"unknown key {key!r}; known keys: {', '.join(sorted(known))}"
        if kind is UpdateInfo and value is not None and (isinstance(value, bool) or not isinstance(value, int | str)):
            return f"version={value!r} should be a number, a text or null"
        if kind is InitInfo and not isinstance(value, str):
            return f"{key}={value!r} should be a text"
    absent = {"worker", "model"} - given.keys() if kind is InitInfo else set()
    return f"{min(absent)!r} is missing" if absent else ""


def _check_init(info: InitInfo) -> None:
    if parse_address(info.worker, "init_info: worker").scheme != "unix":
        raise ConfigError(f"init_info: worker={info.worker!r} must be a Unix socket (unix:/path) of this host")


def _specs(weights: Weights) -> Specs:
    return {name: (each.dtype, tuple(each.shape)) for name, each in weights.specs.items()}


# --- with the worker --------------------------------------------------------------------------------------------------


def _wait(asking: Coroutine[Any, Any, T]) -> T:
    """On a thread of its own, since an event loop takes over signals where it runs in the main one."""
    with ThreadPoolExecutor(1, thread_name_prefix="tensorcast-weights") as thread:
        return thread.submit(asyncio.run, asking).result()


async def _reach(info: InitInfo) -> None:
    async with await connect(info.worker, tenant=info.tenant):
        pass


async def _fetch(
    info: InitInfo, version: int | str | None, wanted: Any
) -> tuple[Weights, list[str], Mapping[str, torch.Tensor]]:
    """A version, and those of its tensors that are wanted: mapped, so that no worker can take them away any more."""
    async with await connect(info.worker, tenant=info.tenant) as session:
        weights = await session.weights(info.model, version=version)
        names = wanted(weights)
        tensors = await weights.view(names=names).tensor_dict(framework="torch") if names else {}
        return weights, names, tensors
