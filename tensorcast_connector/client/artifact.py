"""A handle to an artifact, or to a view of one: nothing is asked or moved before a tensor is wanted."""

import asyncio
import functools
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorcast_connector.client.at_worker import run_at
from tensorcast_connector.client.link import GatewayLink
from tensorcast_connector.client.tensors import Framework, Maker
from tensorcast_connector.config import (
    ARTIFACT_TIMEOUT_S,
    HEADER_KEPT_BYTES_MAX,
    HEADERS_KEPT,
    KEYS_PER_MESSAGE_MAX,
    PLAN_DEADLINE_S,
    READ_PART_BYTES,
)
from tensorcast_connector.core.artifact import Header, Part, TensorSpec, decode_header, part_spec, runs
from tensorcast_connector.errors import Exhausted, InvalidArgument, NotFound
from tensorcast_connector.net.mapping import HUGE_PAGE_BYTES, map_memory
from tensorcast_connector.wire.caller_messages import (
    ArtifactOpened,
    CloseReplica,
    DeleteArtifact,
    ListReplicas,
    MapArtifact,
    OpenArtifact,
    OpenReplica,
    ReplicaList,
    ReplicaListed,
    ReplicaOpened,
)
from tensorcast_connector.wire.messages import Ok

READ_ATTEMPTS_MAX = 3
Slices = Mapping[str, slice | Sequence[slice]]


@dataclass(frozen=True, slots=True)
class Description:
    """What an artifact is, and where it is."""

    artifact_id: str
    names: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    bytes: int
    leased: bool
    created_unix_s: float
    workers: tuple[str, ...]  # that have a copy
    metadata: Mapping[str, str] = field(
        default_factory=dict
    )  # of the file that it was put from; no part of its identity


@dataclass(slots=True, weakref_slot=True)
class _Known:
    """What was read from the gateway, for an artifact and all views of it."""

    opened: ArtifactOpened | None = None
    header: Header | None = None
    descriptor: int = -1  # of its memory

    def shared(self, descriptor: int) -> None:
        """Keeps it as long as somebody may read; another one may have come first."""
        if self.descriptor >= 0:
            os.close(descriptor)
            return
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)


class Artifact:
    """See the module. Immutable; what it reads from the gateway once it keeps, so a name that moves on does not change it."""

    def __init__(self, link: GatewayLink, reference: str, opened: ArtifactOpened | None = None) -> None:
        self._link = link
        self._reference = reference
        self._known = _Known(opened)
        self._names: tuple[str, ...] | None = None  # of a view
        self._slices: dict[str, tuple[slice, ...]] = {}

    def __repr__(self) -> str:
        return f"<Artifact {self._reference or self.reference}>"

    @property
    def reference(self) -> str:
        """What it is asked for by: its id as soon as that is known, else its name."""
        return self._known.opened.artifact_id if self._known.opened else self._reference

    def view(self, *, slices: Slices | None = None, names: Sequence[str] | None = None) -> "Artifact":
        """Some tensors of it, or boxes of them. What does not exist is found when a tensor is wanted.

        Args:
            slices: by tensor; a slice of the first dimension, or one of each dimension, in steps of 1.
            names: of the tensors that remain; all unless told.

        Raises:
            InvalidArgument: this is no such thing, or a tensor is sliced twice, or was left out by the view that this is.
        """
        if isinstance(names, str):
            raise InvalidArgument(f"names={names!r}: a list of names; for one tensor [{names!r}]")
        if slices is not None and not isinstance(slices, Mapping):
            raise InvalidArgument(f"slices are a mapping from tensors to slices, not a {type(slices).__name__}")
        made = Artifact(self._link, self._reference)
        made._known = self._known
        made._names = self._names if names is None else tuple(names)
        made._slices = dict(self._slices)
        if self._names is not None and (absent := [each for each in made._names or () if each not in self._names]):
            raise InvalidArgument(f"this view of artifact {self._reference!r} has no tensor {absent[0]!r}")
        for name, each in (slices or {}).items():
            if name in made._slices:
                raise InvalidArgument(f"tensor {name!r} is sliced already")
            made._slices[name] = _each_slice(name, each)
        return made

    # --- what it is ---

    async def _open(self) -> tuple[ArtifactOpened, Header]:
        known = self._known
        if known.opened is None:
            opened = await self._ask(self._reference)
            known.opened = known.opened or opened  # the first answer counts, if it was asked for twice at once
        if known.header is None:
            known.header = _decoded(known.opened.header)
        return known.opened, known.header

    async def _ask(self, reference: str) -> ArtifactOpened:
        message = OpenArtifact(reference, self._link.revision)
        return await self._link.call(message, ArtifactOpened, ARTIFACT_TIMEOUT_S)

    async def id(self) -> str:
        """Its identity, which follows from its tensors alone."""
        return (await self._open())[0].artifact_id

    async def describe(self) -> Description:
        """What it is and who has it, now.

        Raises:
            NotFound: it does not exist (any more).
        """
        identity = await self.id()
        opened = await self._ask(identity)
        header = decode_header(opened.header)
        return Description(
            identity, tuple(opened.names), header.tensors, header.size, bool(opened.lease_id), opened.created_unix_s,
            tuple(opened.workers), opened.metadata,
        )  # fmt: skip

    # --- where it is ---

    async def arrival(self, at: str = "") -> tuple[int, int]:
        """How many of its bytes are at a worker, by name or id (the session's own unless told), and how many it has.

        Raises:
            Unavailable: there is no such worker.
        """
        opened, header = await self._open()
        return await self._link.arrival({opened.artifact_id: header.size}, at)

    async def prefetch(self, to: str = "", timeout_s: float = PLAN_DEADLINE_S) -> None:
        """Makes it resident at a worker, by name or id; at the session's own unless told. Retried while there is no room.

        Raises:
            NotFound: there is no such worker, or the artifact's bytes are gone.
            Unavailable: the worker is dead, though still listed; names those that are alive.
            DeadlineExceeded: not within `timeout_s`.
        """
        await run_at(self._link, to, lambda worker: worker.prefetch(self), timeout_s)

    async def replicate(self, device: str, to: str = "", timeout_s: float = PLAN_DEADLINE_S) -> None:
        """Brings it into the memory of a device of a worker (`--devices`), from where engines there copy it.

        Raises: as `prefetch`, and
            InvalidArgument: that worker has no such device, or never room for it on one.
        """
        await run_at(self._link, to, lambda worker: worker.replicate(self, device), timeout_s)

    async def open_replica(self, device: str) -> ReplicaOpened:
        """Holds the copy in the memory of a device of this host until `close_replica`, or the end of the session.

        Args:
            device: its name at the worker, or its identity (engines/devices/memory.py).

        Raises:
            NotFound: there is none.
            Unavailable: what owns the device's memory is away just now.
            InvalidArgument: the session is with a worker of another host.
            ConfigError: the worker is too old to have any.
        """
        if not self._link.local:
            raise InvalidArgument("memory of devices is for engines on the worker's host: connect to its Unix socket")
        return await self._link.call_lately(OpenReplica(self.reference, device), ReplicaOpened)

    async def close_replica(self, opened: ReplicaOpened) -> None:
        """Ends that; what was read of it counts only if this does not fail.

        Raises:
            NotFound: it has gone meanwhile.
        """
        await self._link.call(CloseReplica(opened.number), Ok)

    async def replicas(self) -> list[ReplicaListed]:
        """Its copies in the memory of devices at the gateway. Raises as `open_replica`."""
        return (await self._link.call_lately(ListReplicas(self.reference), ReplicaList)).replicas

    async def pin(self, ttl_s: float, on: str = "", timeout_s: float = PLAN_DEADLINE_S) -> None:
        """Keeps it resident at a worker for so long, or until `unpin`; fetches it if it is not. Raises: as `prefetch`."""
        await run_at(self._link, on, lambda worker: worker.pin(self, ttl_s), timeout_s)

    async def unpin(self, on: str = "", timeout_s: float = PLAN_DEADLINE_S) -> None:
        """Ends that; fine if it is not pinned. Raises: as `prefetch`."""
        await run_at(self._link, on, lambda worker: worker.unpin(self), timeout_s)

    async def delete(self) -> None:
        """See Session.delete."""
        await self._link.call(DeleteArtifact(self.reference), Ok)

    # --- its tensors ---

    async def tensor(self, name: str, *, framework: Framework = "numpy") -> Any:
        """One tensor.

        Raises:
            NotFound: the artifact's bytes are gone.
            InvalidArgument: there is no such tensor, or a slice is not within it.
        """
        return (await self.view(names=[name]).tensor_dict(framework=framework))[name]

    async def tensor_dict(self, *, framework: Framework = "numpy") -> dict[str, Any]:
        """All tensors, by name. On the gateway's host they are shared memory, which writing to does not change for others.

        Raises: as `tensor`.
        """
        opened, header = await self._open()
        parts = self._parts(header)
        maker = Maker(framework)
        if self._link.local:
            memory, start = await self._map(opened.artifact_id, [spec for spec, _ in parts])
            memory = maker.memory(memory)
            return {spec.name: _made(maker, spec, part, memory, start) for spec, part in parts}
        return await self._read(opened.artifact_id, parts, maker)

    def _parts(self, header: Header) -> list[tuple[TensorSpec, Part]]:
        specs = {each.name: each for each in header.tensors}
        names = specs if self._names is None else self._names
        for name in [*names, *self._slices]:
            if name not in specs:
                raise InvalidArgument(f"artifact {self._reference!r} has no tensor {name!r}")
        return [(specs[name], _part(specs[name], self._slices.get(name))) for name in names]

    async def _map(self, identity: str, specs: Sequence[TensorSpec]) -> tuple[Any, int]:
        """Memory with these tensors, and where in the artifact it begins. Mapped anew each time, since it may be written to."""
        if self._known.descriptor < 0:
            descriptor, _ = await self._link.descriptor(MapArtifact(identity), Ok)
            self._known.shared(descriptor)
        ends = [(spec.offset, spec.offset + size) for spec in specs if (size := spec.bytes)]
        if not ends:
            return b"", 0
        start = min(ends)[0] // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        size = max(ends)[1] - start  # they do not overlap
        try:
            # Private: a tensor that is written to is copied, page by page, for the one who writes.
            return map_memory(self._known.descriptor, size, start, private=True).buffer, start
        except OSError as error:
            raise Exhausted(f"cannot map {size} bytes of an artifact: {error.strerror}") from error

    async def _read(self, identity: str, parts: Sequence[tuple[TensorSpec, Part]], maker: Maker) -> dict[str, Any]:
        """Only the bytes that are wanted."""
        tensors: dict[str, Any] = {}
        wanted: list[tuple[int, memoryview]] = []
        for spec, part in parts:
            shape, ranges = part_spec(spec, part), runs(spec, part)
            memory = bytearray(sum(each.length for each in ranges))
            tensors[spec.name] = maker.make(spec.name, spec.dtype, shape, memory, 0)
            view, at = memoryview(memory), 0
            for each in ranges:
                wanted.append((each.offset, view[at : at + each.length]))
                at += each.length
        requests = _requests(wanted)
        for attempt in range(READ_ATTEMPTS_MAX):
            await self._link.prepare(identity)
            try:
                await asyncio.gather(*(self._link.fetch(identity, request) for request in requests))
                break
            except NotFound:  # it had to go before all was read, since the gateway needed the memory for others
                if attempt == READ_ATTEMPTS_MAX - 1:
                    raise
        return tensors


@functools.lru_cache(HEADERS_KEPT)
def _kept(encoded: bytes) -> Header:
    return decode_header(encoded)


def _decoded(encoded: bytes) -> Header:
    """A header; the last ones are kept, since many handles of one artifact may be made, and decoding takes longer than asking."""
    return _kept(encoded) if len(encoded) <= HEADER_KEPT_BYTES_MAX else decode_header(encoded)


def _requests(wanted: Sequence[tuple[int, memoryview]]) -> list[list[tuple[int, memoryview]]]:
    """Cuts what is wanted into requests of about READ_PART_BYTES, of no more parts than one message may name."""
    requests: list[list[tuple[int, memoryview]]] = [[]]
    size = 0
    for offset, memory in wanted:
        for at in range(0, memory.nbytes, READ_PART_BYTES):
            part = memory[at : at + READ_PART_BYTES]
            full = size + part.nbytes > READ_PART_BYTES or len(requests[-1]) >= KEYS_PER_MESSAGE_MAX
            if full and requests[-1]:
                requests.append([])
                size = 0
            requests[-1].append((offset + at, part))
            size += part.nbytes
    return [each for each in requests if each]


def _each_slice(name: str, given: Any) -> tuple[slice, ...]:
    if isinstance(given, slice):
        return (given,)
    if not isinstance(given, Sequence) or not all(isinstance(each, slice) for each in given):
        raise InvalidArgument(f"tensor {name!r} is sliced by {given!r}, which is no slice and no list of slices")
    return tuple(given)


def _part(spec: TensorSpec, slices: tuple[slice, ...] | None) -> Part:
    """Slices as bounds."""
    if slices is None:
        return Part(spec.name)
    if len(slices) > len(spec.shape):
        raise InvalidArgument(f"tensor {spec.name!r} has {len(spec.shape)} dimensions and {len(slices)} are sliced")
    bounds: list[tuple[int, int]] = []
    for at, size in enumerate(spec.shape):
        each = slices[at] if at < len(slices) else slice(None)
        if each.step not in (None, 1):
            raise InvalidArgument(
                f"tensor {spec.name!r}: dimension {at} is sliced by {each!r}; slices in steps of 1 can be"
            )
        if not all(end is None or hasattr(end, "__index__") for end in (each.start, each.stop)):
            raise InvalidArgument(
                f"tensor {spec.name!r}: dimension {at} is sliced by {each!r}, which has no whole numbers"
            )
        start, stop = int(each.start or 0), size if each.stop is None else int(each.stop)
        start, stop = start + size if start < 0 else start, stop + size if stop < 0 else stop
        if not 0 <= start <= stop <= size:
            raise InvalidArgument(
                f"tensor {spec.name!r}: {each.start}:{each.stop} is not within dimension {at} of {size}"
            )
        bounds.append((start, stop))
    return Part(spec.name, tuple(bounds))


def _made(maker: Maker, spec: TensorSpec, part: Part, memory: Any, start: int) -> Any:
    """On the memory itself, which begins at `start`; raw bytes of a box that does not lie in one run are copied."""
    if part.bounds is not None and maker.raw:
        data = b"".join(memoryview(memory)[each.offset - start : each.end - start] for each in runs(spec, part))
        return maker.make(spec.name, spec.dtype, part_spec(spec, part), data, 0)
    tensor = maker.make(spec.name, spec.dtype, spec.shape, memory, spec.offset - start)
    return tensor if not part.bounds else tensor[tuple(slice(*each) for each in part.bounds)]
