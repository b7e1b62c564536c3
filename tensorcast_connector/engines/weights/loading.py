"""How the weights of a model that an engine has just made are had, as fast as they can be; for every engine alike.

In this order: what an identical rank has loaded before is copied from a replica on the rank's device (replica_load.py), or mapped
from the pool (materialised.py); the model's plan (load_plan.py) is carried out from an artifact or from files, straight into the
parameters, and published while the engine goes on (publication.py), so that the next one like it maps it; the tensors are given
to the model one by one; the engine's own loader.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from tensorcast_connector.client.blocking import BlockingSession, connect_blocking
from tensorcast_connector.client.checkpoint import Checkpoint
from tensorcast_connector.engines.options import LoaderConfig
from tensorcast_connector.engines.weights.attributes import Attributes
from tensorcast_connector.engines.weights.lineage import Lineage
from tensorcast_connector.engines.weights.load_plan import LoadPlan, Untraceable, trace
from tensorcast_connector.engines.weights.load_sources import Files, Pooled, Progress, Source
from tensorcast_connector.engines.weights.materialised import KeyDocument, Materialised, NotShared
from tensorcast_connector.engines.weights.peer_source import Peers
from tensorcast_connector.engines.weights.shared_load import Shared
from tensorcast_connector.engines.weights_epoch import snapshot_commit
from tensorcast_connector.errors import InvalidArgument, TensorcastError

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What has to be known of an engine to load one model of it."""

    name: str
    """Of the engine, as artifacts and logs have it."""
    model: str
    """Where the model is: a folder, or its name."""
    whole: bool
    """Whether each plain weight of the model is all in the checkpoint."""
    processed: threading.Event | None
    """Set when the engine has processed (packed, quantised) what was loaded, or has failed to; None: it does not say."""

    def folder(self) -> Path | None:
        """The model's folder, if it is on this host."""

    def files(self) -> tuple[str, Sequence[str], bool]:
        """The files that the engine's own loader would read: their folder, paths, and whether they are safetensors.

        Raises:
            RuntimeError, OSError, ValueError: there are none.
        """

    def document(self, materialised: Materialised, epoch: str) -> KeyDocument:
        """Everything that determines the bytes of this rank's parameters. Raises NotShared if they are its own."""

    def missing(self, plan: LoadPlan) -> list[str]:
        """Weights that the plan leaves without values, in whole or in part."""

    def loaded(self, names: Any) -> None:
        """What `load_weights` has returned. Raises what the engine's own loader raises if that is not all of the model."""


class Incomplete(ValueError):
    """A weight that the checkpoint should have is not there."""


class Ordinary(Exception):
    """Why the engine's own loader is to do it."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """Which weights are wanted, and how to get at them.

    Attributes:
        epoch: says which they are, whoever asks.
        lineage: of files whose next state takes the place of this one.
    """

    epoch: str
    open: Callable[[], Source]
    lineage: Lineage | None = None


class Load:
    """One model is loaded.

    Args:
        stack: closes what is opened, unless it is needed longer.
    """

    def __init__(
        self, engine: Engine, options: LoaderConfig, model: torch.nn.Module, stack: ExitStack
    ) -> None:  # fmt: skip
        self._engine = engine
        self._options = options
        self._model = model
        self._stack = stack
        self._say = partial(_say, engine.model)  # for those who may outlive this: it does not keep the model
        self._begun = time.perf_counter()
        self._attributes: Attributes | None = None  # as they were before anything of the model was run

    def run(self) -> str:
        """Does it; returns which weights they are, the same for whoever loads them (see weights_epoch.py, or an artifact's id).

        Raises:
            Ordinary: the engine's own loader is to do it; nothing of the model but values of its tensors has changed.
            Incomplete: the checkpoint has not all of the model.
        """
        try:
            return self._run()
        except (Ordinary, Incomplete):
            raise
        except Exception as error:  # if it is the model's or the files' fault, the engine's own loader says so again
            if self._attributes is not None:
                self._attributes.restore()
            what = str(error) if isinstance(error, TensorcastError) else f"{type(error).__name__}: {error}"
            raise Ordinary(what) from error

    def _run(self) -> str:
        pool = self._connect()
        origin = self._origin(pool)
        shared = self._shared(pool, origin) if pool is not None else None
        if shared is not None and (copied := shared.replica(self._options.device)) is not None:
            self._log(f"a replica on {copied[0]}", copied[1])
        elif shared is not None and (size := shared.map()) is not None:
            self._log("the pool, mapped", size)
        else:
            self._attributes = Attributes(self._model)
            self._load(origin.open(), shared, self._attributes)
        return origin.epoch

    def _connect(self) -> BlockingSession | None:
        if not self._options.worker:
            return None
        try:
            pool = connect_blocking(
                self._options.worker, tenant=self._options.tenant, name=f"{self._engine.name}-loader"
            )
        except TensorcastError as error:
            self._say(f"no pool: {error}")
            return None
        return self._stack.enter_context(pool)

    # --- which weights ---

    def _origin(self, pool: BlockingSession | None) -> _Origin:
        """A given source, files on this host, an artifact with the model's name, files that are downloaded."""
        if self._options.source and pool is not None:
            try:
                return self._pooled(pool, self._options.source)
            except TensorcastError as error:
                self._say(f"source {self._options.source!r}: {error}; its files are read")
        folder = self._engine.folder()
        if folder is None and pool is not None:
            with suppress(TensorcastError):
                return self._pooled(pool, self._engine.model)
        if self._options.weight_version:
            # Of whatever is in a folder of this name: versions are counted for each model.
            epoch = f"declared:{self._options.weight_version}:{Path(self._engine.model).name}"
            return _Origin(epoch, lambda: Files(self._checkpoint(), self._options.threads))
        if folder is not None and (commit := snapshot_commit(folder)):
            return _Origin(f"commit:{commit}", lambda: Files(self._checkpoint(), self._options.threads))
        checkpoint = self._checkpoint()
        return _Origin(
            f"files:{checkpoint.fingerprint}", lambda: Files(checkpoint, self._options.threads), Lineage.of(checkpoint)
        )

    def _pooled(self, pool: BlockingSession, reference: str) -> _Origin:
        def mapped() -> Source:
            return Pooled(reference, found.tensor_dict(framework="torch"), self._options.threads)

        found: Any
        peers = Peers(pool, self._options.tenant, f"{self._engine.name}-loader", self._stack, self._say)
        try:
            found = weights = pool.weights(reference)
            return _Origin(
                f"version:{found.id}",
                lambda: peers.source_of_version(reference, weights, self._options.threads) or mapped(),
            )
        except InvalidArgument:  # an ordinary artifact
            found = pool.artifact(reference)
            identity = found.id()
            return _Origin(f"artifact:{identity}", lambda: peers.source_of(identity) or mapped())

    def _checkpoint(self) -> Checkpoint:
        """The files that the engine's own loader would read."""
        try:
            folder, files, safetensors = self._engine.files()
        except (RuntimeError, OSError, ValueError) as error:
            raise Ordinary(f"no files: {error}") from error
        if not safetensors:
            raise Ordinary(f"{folder} has no safetensors files")
        try:
            checkpoint = self._stack.enter_context(Checkpoint.open(folder))
        except TensorcastError as error:
            raise Ordinary(str(error)) from error
        if {each.path.resolve() for each in checkpoint.files} != {Path(each).resolve() for each in files}:
            raise Ordinary(f"the engine reads other files of {folder} than those that its index names")
        return checkpoint

    # --- loading them ---

    def _shared(self, pool: BlockingSession, origin: _Origin) -> Shared | None:
        try:
            materialised = Materialised(self._model)
            document = self._engine.document(materialised, origin.epoch)
        except NotShared as error:
            self._say(f"not shared: {error}")
            return None
        return Shared(
            pool, self._options.tenant, materialised, document, self._say, self._options.threads, origin.lineage
        )

    def _load(self, source: Source, shared: Shared | None, attributes: Attributes) -> None:
        try:
            plan = trace(self._model, source.given, source.read)
        except Untraceable as error:
            attributes.restore()
            self._say(f"its tensors are given to the model one by one: {error}")
            loaded = self._model.load_weights(source.streamed())
            self._engine.loaded(loaded)
            source.check()
            self._log(source.what, sum(_bytes(each) for each in source.given))
            return
        self._engine.loaded(plan.loaded)
        if self._engine.whole:
            for name in self._engine.missing(plan):
                raise Incomplete(f"{self._engine.model}: the checkpoint has not all of {name}")
        progress = Progress(self._engine.model, plan.bytes, time.monotonic)
        publication = None
        if shared is not None and self._options.publish:
            if changed := attributes.changed(self._model):
                self._say(f"not shared: loading changes {changed[0]}")
            else:
                publication = shared.publication(plan, source, self._stack)
        beside = publication.beside if publication is not None else ()
        size = source.fill([*plan.copies, *beside], progress)
        del beside
        source.check()
        begun = publication is not None and publication.begin(self._engine.processed)
        self._log(source.what + (", being shared" if begun else ""), size)

    def _log(self, source: str, size: int) -> None:
        seconds = max(time.perf_counter() - self._begun, 1e-9)
        logger.info(
            "weights of %s from %s: %.3f GB in %.3f s, %.2f GB/s", self._engine.model, source, size / 1e9, seconds,
            size / 1e9 / seconds,
        )  # fmt: skip


def _say(model: str, line: str) -> None:
    logger.info("weights of %s: %s", model, line)


def _bytes(given: Any) -> int:
    _, dtype, shape = given
    return int(torch.Size(shape).numel()) * int(dtype.itemsize)
