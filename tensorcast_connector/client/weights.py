"""Published versions of a model's weights, as consumers see them: read, cut, compared, followed (core/weights.py).

async for version in session.subscribe("policy"):
    weights = await session.weights("policy", version=version.version)
    shares = weights.view(slices={"layer.0.weight": slice(0, 512)}).tensor_dict(framework="torch")
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensorcast_connector.client.artifact import Artifact, Slices
from tensorcast_connector.client.at_worker import run_at
from tensorcast_connector.client.link import GatewayLink
from tensorcast_connector.client.plan import OnWorker
from tensorcast_connector.client.tensors import Framework
from tensorcast_connector.config import (
    PLAN_DEADLINE_S,
    STORE_TIMEOUT_S,
    WATCH_WAIT_S,
    WEIGHT_RETRY_MAX_S,
    WEIGHT_RETRY_MIN_S,
)
from tensorcast_connector.core.weights import (
    MANIFEST_TENSOR,
    Manifest,
    TensorEntry,
    check_model,
    check_version,
    decode_manifest,
    is_manifest,
    version_name,
)
from tensorcast_connector.errors import InvalidArgument, NotFound, ProtocolError, Unavailable
from tensorcast_connector.wire.caller_messages import NameState, WaitName


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """A published version.

    Attributes:
        order: what makes it newer than others: the version itself, if it is a number.
        artifact_id: its manifest.
        id: the identity of the weights: equal for equal tensors under equal names, whoever published them.
        bytes: of all its tensors.
        changed_bytes: of those that the version before did not have.
        moved_bytes: that were put for it.
    """

    model: str
    version: int | str
    order: int
    artifact_id: str
    id: str
    tensors: int
    parts: int
    bytes: int
    changed_bytes: int
    moved_bytes: int


def describe(manifest: Manifest, artifact_id: str) -> WeightVersion:
    """The version that a manifest is."""
    return WeightVersion(
        manifest.model, manifest.version, manifest.order, artifact_id, manifest.content_id, len(manifest.tensors),
        len(manifest.parts), sum(each.bytes for each in manifest.tensors), manifest.changed_bytes, manifest.moved_bytes,
    )  # fmt: skip


async def read_manifest(artifact: Artifact) -> Manifest:
    """The manifest that an artifact is.

    Raises:
        NotFound: it does not exist, or its bytes are gone.
        InvalidArgument: it is an ordinary artifact.
    """
    try:
        raw = await artifact.tensor(MANIFEST_TENSOR, framework="raw")
        return decode_manifest(bytes(raw.data))
    except ProtocolError as error:
        raise InvalidArgument(
            f"artifact {artifact.reference!r} cannot be read as published weights: {error}"
        ) from error
    except InvalidArgument:
        raise InvalidArgument(
            f"artifact {artifact.reference!r} is no published weights; read it by session.artifact"
        ) from None


async def open_weights(link: GatewayLink, model: str, version: int | str | None) -> "Weights":
    """See Session.weights."""
    reference = model if version is None else version_name(check_model(model), check_version(version))
    artifact = Artifact(link, reference)
    manifest = await read_manifest(artifact)
    return Weights(link, manifest, await artifact.id())


async def open_stored(link: GatewayLink, reference: str) -> "Artifact | Weights":
    """See Session.stored."""
    artifact = Artifact(link, reference)
    described = await artifact.describe()
    if is_manifest(described.tensors):
        return await open_weights(link, described.artifact_id, None)
    return artifact


class Weights:
    """The weights of one version, or a view of them. Immutable, also when the names move on. Made by `Session.weights`.

    Attributes:
        published: the version.
        specs: of all tensors, by name: dtype, shape, bytes and the digest of their bytes (xxh3-128).
    """

    def __init__(self, link: GatewayLink, manifest: Manifest, artifact_id: str) -> None:
        self._link = link
        self._manifest = manifest
        self._parts = [Artifact(link, each.artifact_id) for each in manifest.parts]
        self._names: tuple[str, ...] | None = None  # of a view
        self._slices: dict[str, slice | Sequence[slice]] = {}
        self.published = describe(manifest, artifact_id)
        self.specs: Mapping[str, TensorEntry] = {each.name: each for each in manifest.tensors}

    def __repr__(self) -> str:
        return f"<Weights {version_name(self.model, self.version)} of {len(self.names)} tensors>"

    @property
    def model(self) -> str:
        """Under which name they were published."""
        return self.published.model

    @property
    def version(self) -> int | str:
        """Which version they are."""
        return self.published.version

    @property
    def id(self) -> str:
        """The identity of the whole version's content, see WeightVersion.id."""
        return self.published.id

    @property
    def reference(self) -> str:
        """The artifact that is its manifest, for steps of plans; `Session.weights` takes it for a model."""
        return self.published.artifact_id

    @property
    def part_ids(self) -> tuple[str, ...]:
        """The artifacts in which the tensors lie."""
        return tuple(each.artifact_id for each in self._manifest.parts)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors; of a view, those that it has."""
        return tuple(self.specs) if self._names is None else self._names

    def changed_since(self, other: "Weights | None") -> tuple[str, ...]:
        """The names of the tensors here that the other version has not, or has with other content; all if it is None."""
        before = other.specs if other is not None else {}
        return tuple(
            name for name in self.names if name not in before or before[name].content != self.specs[name].content
        )

    def view(self, *, slices: Slices | None = None, names: Sequence[str] | None = None) -> "Weights":
        """Some tensors, or boxes of them, as `Artifact.view`: what an engine's rank needs of a trainer's tensors.

        Raises:
            InvalidArgument: there is no such tensor, or it is sliced already.
        """
        made = Weights(self._link, self._manifest, self.reference)
        made._parts = self._parts
        made._names = self._names if names is None else tuple(names)
        made._slices = dict(self._slices)
        for name in [*(names or ()), *(slices or {})]:
            if name not in self.specs or (self._names is not None and name not in self._names):
                raise InvalidArgument(f"{version_name(self.model, self.version)} has no tensor {name!r} here")
        for name, each in (slices or {}).items():
            if name in made._slices:
                raise InvalidArgument(f"tensor {name!r} is sliced already")
            made._slices[name] = each
        return made

    async def tensor(self, name: str, *, framework: Framework = "numpy") -> Any:
        """One tensor; raises as `tensor_dict`."""
        return (await self.view(names=[name]).tensor_dict(framework=framework))[name]

    async def tensor_dict(self, *, framework: Framework = "numpy") -> dict[str, Any]:
        """All tensors, by name, as `Artifact.tensor_dict`: on the gateway's host shared memory, and from elsewhere their bytes.

        Raises:
            NotFound: the version was deleted, or the bytes of a part are gone.
            InvalidArgument: a slice is not within its tensor.
        """
        found: dict[str, Any] = {}

        async def read(part: int, names: Sequence[str]) -> None:
            inner = {self.specs[name].inner: name for name in names}
            slices = {at: self._slices[name] for at, name in inner.items() if name in self._slices}
            got = await self._parts[part].view(names=list(inner), slices=slices).tensor_dict(framework=framework)
            found.update({inner[at]: tensor for at, tensor in got.items()})

        await asyncio.gather(*(read(*each) for each in self._batches()))
        return {name: found[name] for name in self.names}

    def _batches(self) -> list[tuple[int, list[str]]]:
        """Names that are read together: of one part, and no two that are the same tensor there."""
        batches: dict[tuple[int, int], list[str]] = {}
        before: dict[tuple[int, str], int] = {}
        for name in self.names:
            spec = self.specs[name]
            turn = before[spec.part, spec.inner] = before.get((spec.part, spec.inner), -1) + 1
            batches.setdefault((spec.part, turn), []).append(name)
        return [(part, names) for (part, _), names in batches.items()]

    async def arrival(self, at: str = "") -> tuple[int, int]:
        """How many bytes of its parts are at a worker, as `Artifact.arrival`, and how many they have."""
        return await self._link.arrival({each.artifact_id: each.bytes for each in self._manifest.parts}, at)

    async def prefetch(self, to: str = "", timeout_s: float = PLAN_DEADLINE_S) -> None:
        """Makes all parts resident at a worker, by name or id (the session's own unless told); those that are stay.

        Raises:
            NotFound: there is no such worker, or the bytes of a part are gone.
            Unavailable: the worker is dead, though still listed; names those that are alive.
            DeadlineExceeded: not within `timeout_s`.
        """
        await self._at(to, lambda worker, each: worker.prefetch(each), timeout_s)

    async def pin(self, ttl_s: float, on: str = "", timeout_s: float = PLAN_DEADLINE_S) -> None:
        """Keeps all parts resident at a worker for so long, or until `unpin`; fetches the others. Raises: as `prefetch`."""
        await self._at(on, lambda worker, each: worker.pin(each, ttl_s), timeout_s)

    async def unpin(self, on: str = "", timeout_s: float = PLAN_DEADLINE_S) -> None:
        """Ends that; fine if they are not pinned. Raises: as `prefetch`."""
        await self._at(on, lambda worker, each: worker.unpin(each), timeout_s)

    async def _at(self, worker: str, add: Callable[[OnWorker, str], object], timeout_s: float) -> None:
        parts = [self.reference, *self.part_ids]
        await run_at(self._link, worker, lambda target: [add(target, each) for each in parts], timeout_s)


async def follow(link: GatewayLink, model: str, rollback: bool) -> AsyncIterator[WeightVersion]:
    """See Session.subscribe."""
    check_model(model)
    seen = NameState("", 0, 0)
    order, content = -1, ""
    wait_s, pause_s = 0.0, WEIGHT_RETRY_MIN_S
    while True:
        message = WaitName(model, seen.artifact_id, seen.incarnation, seen.revision, int(wait_s * 1000))
        try:
            state = await link.call_lately(message, NameState, wait_s + STORE_TIMEOUT_S)
            moved = _is_later(state, seen)
            if moved and state.artifact_id:
                version = describe(await read_manifest(Artifact(link, state.artifact_id)), state.artifact_id)
        except (Unavailable, NotFound):
            # Away, or deleted since, or its bytes are gone: what counts is what the name points to then.
            await asyncio.sleep(pause_s)
            wait_s, pause_s = 0.0, min(2 * pause_s, WEIGHT_RETRY_MAX_S)
            continue
        wait_s, pause_s = WATCH_WAIT_S, WEIGHT_RETRY_MIN_S
        if not moved:
            continue
        seen = state
        if state.artifact_id and (rollback or version.order > order) and version.id != content:
            order, content = version.order, version.id
            yield version


def _is_later(state: NameState, seen: NameState) -> bool:
    """Whether it is of a later moment: another gateway may be behind the one that was asked before."""
    return (state.incarnation, state.revision) > (seen.incarnation, seen.revision) and (
        bool(state.artifact_id) or bool(seen.artifact_id)
    )
