"""The state of the cluster: in-flight requests, health, models and the hit index, behind one method.

Nobody else changes any of it. `apply(event, now)` is the only way in, `view` the frozen way out.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, assert_never

from smetric_router.errors import NoInstance, UnknownModel
from smetric_router.state.prefix_index import PrefixIndex, Use
from smetric_router.types import (
    CacheCleared,
    ClusterView,
    Dispatched,
    DrainingChanged,
    Event,
    Finished,
    InstanceDown,
    InstanceUp,
    InstanceView,
    ModelsSeen,
    RequestInfo,
    Ticket,
    Usage,
)

# An engine counts cached tokens in whole blocks, and the router counts bytes: a report is short of the prediction only
# beyond one large block, two chunks, and this share (bytes per token differ between parts of a prompt).
BLOCK_TOKENS_MAX = 128
PREDICTION_DRIFT = 0.25

# Ties go by placements of this many per instance; older ones count half, a quarter, and so on.
PLACEMENTS_REMEMBERED = 64


class Health(StrEnum):
    """What is known of an instance. Only `UP` gets requests."""

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"


@dataclass(slots=True)
class _Instance:
    id: str
    ordinal: int
    view: InstanceView
    health: Health = Health.UNKNOWN
    cause: str = ""
    since: float = 0.0
    draining: bool = False
    models: Mapping[str, bytes] | None = None
    """None until the instance has listed them: it may then serve any."""
    numbers: set[int] = field(default_factory=set)
    """Tickets in flight."""


@dataclass(frozen=True, slots=True)
class InstanceStatistics:
    """One instance in `ClusterStatistics`."""

    health: str
    cause: str
    since_s: float
    draining: bool
    inflight: int
    models: list[str] | None
    chunks: int


@dataclass(frozen=True, slots=True)
class ClusterStatistics:
    """The whole state in figures."""

    instances: dict[str, InstanceStatistics]
    digests: int
    chunks_dropped: int
    evictions: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class ClusterState:
    """Owner of everything the router knows of its instances."""

    def __init__(self, instances: Iterable[str], *, chunk_bytes: int, index_chunks_max: int) -> None:
        names = list(instances)
        assert names and len(set(names)) == len(names), names
        self._instances = {name: _Instance(name, at, InstanceView(name, at, 0)) for at, name in enumerate(names)}
        self._index = PrefixIndex(names, max(1, index_chunks_max // len(names)))
        self._chunk_bytes = chunk_bytes
        self._flights: dict[int, tuple[Ticket, Use]] = {}
        self._listed: frozenset[str] = frozenset()
        self._placed: dict[str, dict[str, float]] = {}
        self._evictions = 0

    def __repr__(self) -> str:
        up = sum(instance.health is Health.UP for instance in self._instances.values())
        return f"<ClusterState {up}/{len(self._instances)} up, {len(self._flights)} in flight, {self._index!r}>"

    def apply(self, event: Event, now: float) -> None:
        """The only way to change the state."""
        match event:
            case Dispatched():
                self._dispatched(event.ticket)
            case Finished():
                self._finished(event)
            case InstanceUp():
                self._set_health(self._instances[event.instance], Health.UP, "", now)
            case InstanceDown():
                self._set_health(self._instances[event.instance], Health.DOWN, event.cause, now)
            case ModelsSeen():
                self._models_seen(self._instances[event.instance], event.models)
            case DrainingChanged():
                self._set_draining(self._instances[event.instance], event.draining)
            case CacheCleared():
                self._index.forget(event.instance)
            case _:
                assert_never(event)

    def view(self, request: RequestInfo, exclude: Collection[str] = ()) -> ClusterView:
        """What a decision on this request sees. Raises UnknownModel, or NoInstance when none can take it now."""
        serving = self._serving(request.model)
        if not serving:
            known = ", ".join(sorted(self.models())) or "none"
            raise UnknownModel(f"no instance serves the model {request.model!r}; known models: {known}", param="model")
        usable = [
            instance.view
            for instance in serving
            if instance.health is Health.UP and not instance.draining and instance.id not in exclude
        ]
        if not usable:
            what = f" of {len(serving)} for the model {request.model!r}" if request.model else f" of {len(serving)}"
            raise NoInstance(f"no instance{what} can take the request now", retry_after_s=1)
        hits = self._index.match(request.chain)
        if len(usable) < len(self._instances) and hits:
            among = {view.id for view in usable}
            hits = {name: hit for name, hit in hits.items() if name in among}
        return ClusterView(tuple(usable), hits, dict(self._placements(request.model)))

    def has_candidate(self, model: str, exclude: Collection[str]) -> bool:
        """Whether an instance outside `exclude` could take a request for the model."""
        return any(
            instance.health is Health.UP and not instance.draining and instance.id not in exclude
            for instance in self._serving(model)
        )

    def models(self) -> dict[str, bytes]:
        """The models of all instances in use: id -> the first entry seen, in the order of the instances."""
        merged: dict[str, bytes] = {}
        for instance in self._instances.values():
            if instance.health is Health.UP:
                for name, entry in (instance.models or {}).items():
                    merged.setdefault(name, entry)
        return merged

    def health(self, instance: str) -> Health:
        """The health of one instance."""
        return self._instances[instance].health

    def statistics(self, now: float) -> ClusterStatistics:
        """The whole state in figures."""
        index = self._index.statistics()
        instances = {
            name: InstanceStatistics(
                health=instance.health,
                cause=instance.cause,
                since_s=round(now - instance.since, 3),
                draining=instance.draining,
                inflight=len(instance.numbers),
                models=None if instance.models is None else list(instance.models),
                chunks=index.entries[name],
            )
            for name, instance in self._instances.items()
        }
        return ClusterStatistics(instances, index.digests, index.dropped, self._evictions)

    def check(self) -> None:
        """Every ticket is counted once, where it was sent; the index is sound."""
        self._index.check()
        counted: dict[int, str] = {}
        for instance in self._instances.values():
            assert instance.view.load == len(instance.numbers), instance.id
            for number in instance.numbers:
                assert number not in counted, f"ticket {number} counted twice"
                counted[number] = instance.id
        assert counted == {number: ticket.decision.instance for number, (ticket, _) in self._flights.items()}

    def _dispatched(self, ticket: Ticket) -> None:
        assert ticket.number not in self._flights, ticket.number
        decision = ticket.decision
        instance = self._instances[decision.instance]
        self._flights[ticket.number] = (ticket, self._index.record(instance.id, ticket.request.chain))
        if decision.placement:
            self._count_placement(ticket.request.model, instance.id)
        instance.numbers.add(ticket.number)
        self._refresh(instance)

    def _finished(self, event: Finished) -> None:
        ticket, use = self._flights.pop(event.number, (None, None))
        if ticket is None or use is None:
            return
        instance = self._instances[ticket.decision.instance]
        instance.numbers.discard(event.number)
        self._refresh(instance)
        resident = self._shortfall(ticket, event.usage)
        if self._index.settle(use, computed=event.computed, resident=resident) and event.computed:
            self._evictions += 1

    def _shortfall(self, ticket: Ticket, usage: Usage) -> int | None:
        """The length the instance did hold, when that is clearly less than predicted; else None."""
        if usage.cached_tokens is None or not usage.prompt_tokens:
            return None
        bytes_per_token = ticket.request.chain.length / usage.prompt_tokens
        slack = 2 * self._chunk_bytes + BLOCK_TOKENS_MAX * bytes_per_token
        resident = usage.cached_tokens * bytes_per_token + slack
        return int(resident) if resident < (1 - PREDICTION_DRIFT) * ticket.decision.hit else None

    def _set_health(self, instance: _Instance, health: Health, cause: str, now: float) -> None:
        if instance.health is Health.DOWN and health is Health.UP:
            # It may be another process with an empty cache.
            self._index.forget(instance.id)
        if instance.health is not health:
            instance.since = now
            if health is Health.UP:
                self._rejoin(instance)
        instance.health, instance.cause = health, cause

    def _set_draining(self, instance: _Instance, draining: bool) -> None:
        if instance.draining and not draining:
            self._rejoin(instance)
        instance.draining = draining

    def _rejoin(self, instance: _Instance) -> None:
        """A place in the round like the others', so that it need not make up for the time it was away."""
        for placed in self._placed.values():
            placed[instance.id] = max(placed.values())

    def _serving(self, model: str) -> list[_Instance]:
        """The instances that serve the model, or may. Any will do for a request that names none."""
        if not model:
            return list(self._instances.values())
        return [each for each in self._instances.values() if each.models is None or model in each.models]

    def _models_seen(self, instance: _Instance, models: Mapping[str, bytes]) -> None:
        instance.models = dict(models)
        self._listed = frozenset(name for each in self._instances.values() for name in each.models or ())
        for name in self._placed.keys() - self._listed - {""}:
            del self._placed[name]

    def _placements(self, model: str) -> dict[str, float]:
        """The model's counter of placements. Names that no instance has listed share one, so their number is bounded."""
        return self._placed.setdefault(model if model in self._listed else "", dict.fromkeys(self._instances, 0.0))

    def _count_placement(self, model: str, instance: str) -> None:
        placed = self._placements(model)
        placed[instance] += 1
        if sum(placed.values()) >= PLACEMENTS_REMEMBERED * len(placed):
            for name in placed:
                placed[name] /= 2

    def _refresh(self, instance: _Instance) -> None:
        instance.view = InstanceView(instance.id, instance.ordinal, len(instance.numbers))
