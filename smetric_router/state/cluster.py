"""The state of the cluster: in-flight requests, health, models and the hit index, behind one method.

Nobody else changes any of it. `apply(event, now)` is the only way in, `view` the frozen way out.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn, assert_never

from smetric_router.errors import NoInstance, Overloaded, UnknownModel
from smetric_router.state.exact_index import ExactIndex
from smetric_router.state.hits import hit_column
from smetric_router.state.load import LoadBoard, TokenRatio
from smetric_router.state.placements import Placements
from smetric_router.state.prefix_index import PrefixIndex, Use
from smetric_router.state.shared_counts import SharedCounts
from smetric_router.state.slow_start import SlowStart
from smetric_router.state.statistics import ClusterStatistics, InstanceStatistics
from smetric_router.state.telling import Telling
from smetric_router.types import (
    PREFILL_COST,
    BlocksChanged,
    BreakerChanged,
    CacheCleared,
    Dispatched,
    DrainingChanged,
    DrainingTold,
    EngineReported,
    Event,
    FeedChanged,
    Finished,
    FirstByte,
    Heard,
    InstanceDown,
    InstanceUp,
    ModelsSeen,
    PrefillCost,
    RequestInfo,
    Ticket,
    Told,
    Usage,
)
from smetric_router.view import ClusterView, Members

# An engine counts cached tokens in whole blocks, and the router counts bytes: a report is short of the prediction only
# beyond one large block, two chunks, and this share (bytes per token differ between parts of a prompt).
BLOCK_TOKENS_MAX = 128
PREDICTION_DRIFT = 0.25

# In an error.
MODELS_NAMED_MAX = 20
# By then an engine has told what it computed for an answer.
EVENTS_LATE_S = 2.0


class Health(StrEnum):
    """What is known of an instance. Only `UP` gets requests."""

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"


@dataclass(slots=True)
class _Instance:
    id: str
    ordinal: int
    health: Health = Health.UNKNOWN
    cause: str = ""
    since: float = 0.0
    draining: bool = False
    open: bool = False
    """Its breaker is."""
    models: Mapping[str, bytes] | None = None
    """None until the instance has listed them: it may then serve any."""


class ClusterState:
    """Owner of everything the router knows of its instances."""

    def __init__(
        self,
        instances: Iterable[str],
        *,
        chunk_bytes: int,
        index_chunks_max: int,
        prefill_cost: PrefillCost = PREFILL_COST,
        report_stale_s: float = 10.0,
        inflight_max: int = 0,
        slow_start_s: float = 0.0,
        exact: ExactIndex | None = None,
        shared: SharedCounts | None = None,
        process: int = 0,
    ) -> None:
        names = list(instances)
        assert names and len(set(names)) == len(names), names
        self._instances = {name: _Instance(name, at) for at, name in enumerate(names)}
        self._load = LoadBoard(len(names), cost=prefill_cost, report_stale_s=report_stale_s, shared=shared)
        self._ordinals = {name: at for at, name in enumerate(names)}
        self._index = PrefixIndex(names, max(1, index_chunks_max // len(names)))
        self._exact = exact
        self._live: set[str] = set()  # whose feed is
        self.telling = Telling(self._index, names, process)
        self._chunk_bytes = chunk_bytes
        self._inflight_max = inflight_max  # of one instance; 0: no limit
        self._slow_start = SlowStart(slow_start_s)
        self._flights: dict[int, tuple[Ticket, Use]] = {}
        self._listed: frozenset[str] = frozenset()
        self._placed = Placements(len(names), shared)
        self._ratios: dict[str, TokenRatio] = {}
        self._evictions = 0
        self._usable: dict[str | None, Members] = {}  # by model; read from the rest where it is missing

    def __repr__(self) -> str:
        up = sum(instance.health is Health.UP for instance in self._instances.values())
        return f"<ClusterState {up}/{len(self._instances)} up, {len(self._flights)} in flight, {self._index!r}>"

    def apply(self, event: Event, now: float) -> None:
        """The only way to change the state."""
        match event:
            case Dispatched():
                self._dispatched(event.ticket, now)
            case FirstByte():
                self._load.first_byte(event.number, now, computed=event.computed)
            case Finished():
                self._finished(event, now)
            case InstanceUp():
                self._set_health(self._instances[event.instance], Health.UP, "", now)
            case InstanceDown():
                self._set_health(self._instances[event.instance], Health.DOWN, event.cause, now)
            case ModelsSeen():
                self._models_seen(self._instances[event.instance], event.models)
            case DrainingChanged():
                instance = self._instances[event.instance]
                self._set_draining(instance, event.draining)
                if self.telling.tell is not None:
                    self.telling.tell(DrainingTold(instance.ordinal, event.draining))
            case BreakerChanged():
                self._set_open(self._instances[event.instance], event.open)
            case CacheCleared():
                self._forget(self._instances[event.instance])
                if self._exact is not None:
                    self._exact.forget(event.instance)
            case BlocksChanged():
                if self._exact is not None:
                    self._exact.apply(event.instance, event.rank, event.event)
            case FeedChanged():
                (self._live.add if event.live else self._live.discard)(event.instance)
            case EngineReported():
                self._load.reported(self._instances[event.instance].ordinal, event.report, event.own, now)
            case Heard():
                self._hear(event.told)
            case _:
                assert_never(event)

    def view(self, request: RequestInfo, exclude: Collection[str] = (), now: float = 0.0, draw: int = 0) -> ClusterView:
        """What a decision on this request sees. `now` lets go of reports that are too old by then; `draw` is passed on.

        Raises UnknownModel, NoInstance when none can take it now, or Overloaded when all have as much as they may have.
        """
        self._load.expire(now)
        usable = self._usable_for(request.model)
        if exclude:
            usable = usable.without(exclude)
        if not usable.names:
            self._raise_none(request.model)
        if full := self._full(usable):
            usable = usable.without(full)
            if not usable.names:
                raise Overloaded("every instance has as many requests as it may have", retry_after_s=1)
        if self._exact is not None:
            self._exact.expire(now)
        hit = hit_column(request, self._ordinals, self._index, self._exact, self._live)
        if self._slow_start and (waiting := self._slow_start.waiting(usable.ordinals.tolist(), hit, now)):
            usable = usable.without({usable.names[at] for at, each in enumerate(usable.ordinals) if each in waiting})
        placed = self._placed.of(self._known(request.model))
        if len(usable.names) < len(self._instances):
            table, hit, placed = self._load.look(usable.ordinals), hit[usable.ordinals], placed[usable.ordinals]
        else:
            table = self._load.look(None)
        return ClusterView(usable, table, hit, placed, self._unit(request), self._load.cost, draw)

    def _unit(self, request: RequestInfo) -> float:
        """What a token is, in the unit of the request's length and hits."""
        return self._ratio(request.model).bytes_per_token if request.tokens is None else 1.0

    def _full(self, usable: Members) -> set[str]:
        """Those that have as many of this router's requests as they may have."""
        if not self._inflight_max:
            return set()
        full = self._load.inflight_column()[usable.ordinals] >= self._inflight_max
        return {usable.names[at] for at in full.nonzero()[0].tolist()}

    def _usable_for(self, model: str) -> Members:
        # All names that no instance has listed are the same: those that have listed nothing may serve them.
        known = model if model in self._listed or not model else None
        found = self._usable.get(known)
        if found is None:
            up = [each for each in self._serving(model) if each.health is Health.UP and not each.draining]
            # A breaker never takes the last one: then the cause is hardly the instances.
            usable = [each for each in up if not each.open] or up
            found = Members.of((each.id for each in usable), (each.ordinal for each in usable))
            self._usable[known] = found
        return found

    def _raise_none(self, model: str) -> NoReturn:
        serving = self._serving(model)
        if not serving:
            models = sorted(self.models())
            more = f" and {len(models) - MODELS_NAMED_MAX} more" if len(models) > MODELS_NAMED_MAX else ""
            known = (", ".join(models[:MODELS_NAMED_MAX]) or "none") + more
            raise UnknownModel(f"no instance serves the model {model!r}; known models: {known}", param="model")
        what = f" of {len(serving)} for the model {model!r}" if model else f" of {len(serving)}"
        raise NoInstance(f"no instance{what} can take the request now", retry_after_s=1)

    def has_candidate(self, model: str, exclude: Collection[str]) -> bool:
        """Whether an instance outside `exclude` could take a request for the model."""
        usable = self._usable_for(model)
        out = {*exclude, *full} if (full := self._full(usable)) else exclude
        return any(name not in out for name in usable.names)

    def has_room(self, model: str) -> bool:
        """Whether a request for the model need not wait: an instance has room, or none can take it at all."""
        return self.has_candidate(model, ()) or not self._usable_for(model).names

    @property
    def inflight(self) -> int:
        """Requests at all instances, whichever process sent them."""
        return int(self._load.inflight_column().sum())

    def models(self) -> dict[str, bytes]:
        """The models of all instances in use: id -> the first entry seen, in the order of the instances."""
        merged: dict[str, bytes] = {}
        for instance in self._instances.values():
            if instance.health is Health.UP:
                for name, entry in (instance.models or {}).items():
                    merged.setdefault(name, entry)
        return merged

    def inflight_at(self, instance: str) -> int:
        """This router's requests in flight at one instance."""
        return self._load.inflight(self._instances[instance].ordinal)

    def health(self, instance: str) -> Health:
        """The health of one instance."""
        return self._instances[instance].health

    def statistics(self, now: float) -> ClusterStatistics:
        """The whole state in figures."""
        self._load.expire(now)
        index = self._index.statistics()
        instances: dict[str, InstanceStatistics] = {}
        for name, instance in self._instances.items():
            load = self._load.figures(instance.ordinal, now)
            instances[name] = InstanceStatistics(
                health=instance.health,
                cause=instance.cause,
                since_s=round(now - instance.since, 3),
                draining=instance.draining,
                breaker_open=instance.open,
                inflight=load.inflight,
                load=load.load,
                pending_tokens=load.pending_tokens,
                prefill_rate=load.prefill_rate,
                report_age_s=None if load.report_age_s is None else round(load.report_age_s, 3),
                kv_usage=load.report.kv_usage if load.report is not None else None,
                models=None if instance.models is None else list(instance.models),
                chunks=index.entries[name],
            )
        used = [each.inflight for each in instances.values() if each.health == Health.UP and not each.draining]
        imbalance = max(used) * len(used) / sum(used) if any(used) else 1.0
        exact = None if self._exact is None else self._exact.statistics()
        return ClusterStatistics(
            instances, index.digests, index.dropped, self._evictions, imbalance, exact, tuple(sorted(self._live))
        )

    def check(self) -> None:
        """Every ticket is counted once, where it was sent; the index is sound."""
        self._index.check()
        if self._exact is not None:
            self._exact.check()
        self._load.check()
        sent = {number: ticket.decision.instance for number, (ticket, _) in self._flights.items()}
        assert self._load.where() == {number: self._instances[name].ordinal for number, name in sent.items()}

    def _dispatched(self, ticket: Ticket, now: float) -> None:
        assert ticket.number not in self._flights, ticket.number
        decision, request = ticket.decision, ticket.request
        instance = self._instances[decision.instance]
        unit = self._unit(request)
        length, hit = round(request.length / unit), round(decision.hit / unit)
        use = self._index.record(instance.id, request.chain)
        self._load.dispatched(ticket.number, instance.ordinal, length, hit, now)
        self._flights[ticket.number] = (ticket, use)
        self.telling.recorded(ticket.number, instance.ordinal, use)
        if decision.placement:
            self._placed.count(self._known(request.model), instance.ordinal)
            self._slow_start.placed(instance.ordinal)

    def _finished(self, event: Finished, now: float) -> None:
        ticket, use = self._flights.pop(event.number, (None, None))
        if ticket is None or use is None:
            return
        instance, tokens = ticket.decision.instance, ticket.request.tokens
        self._load.finished(event.number)
        if self._exact is not None and tokens is not None and event.computed and instance in self._live:
            self._exact.expect(instance, tokens, ticket.decision.hit, now + EVENTS_LATE_S)
        if event.usage.prompt_tokens:
            self._ratio(ticket.request.model).learn(ticket.request.chain.length, event.usage.prompt_tokens)
        resident = self._shortfall(ticket, event.usage)
        if self._index.settle(use, computed=event.computed, resident=resident) and event.computed:
            self._evictions += 1
        self.telling.settled(event.number, use, computed=event.computed, resident=resident)

    def _hear(self, told: Told) -> None:
        if not isinstance(told, DrainingTold):
            self.telling.hear(told)
        elif 0 <= told.instance < len(self._instances):
            self._set_draining(list(self._instances.values())[told.instance], told.draining)

    def known(self, chunks_max: int) -> Iterator[Told]:
        """What a process that begins should hear: who is draining, and about so many chunks of the index."""
        yield from [DrainingTold(each.ordinal, True) for each in self._instances.values() if each.draining]
        yield from self.telling.known(chunks_max)

    def _forget(self, instance: _Instance) -> None:
        self._index.forget(instance.id)
        self.telling.forgotten(instance.ordinal)

    def _shortfall(self, ticket: Ticket, usage: Usage) -> int | None:
        """The length the instance did hold, when that is clearly less than predicted; else None."""
        if usage.cached_tokens is None or not usage.prompt_tokens:
            return None
        length = ticket.request.chain.length
        bytes_per_token = length / usage.prompt_tokens
        slack = 2 * self._chunk_bytes + BLOCK_TOKENS_MAX * bytes_per_token
        resident = usage.cached_tokens * bytes_per_token + slack
        predicted = ticket.decision.hit * length / (ticket.request.length or 1)
        return int(resident) if resident < (1 - PREDICTION_DRIFT) * predicted else None

    def _set_health(self, instance: _Instance, health: Health, cause: str, now: float) -> None:
        if instance.health is Health.DOWN and health is Health.UP:
            # It may be another process with an empty cache.
            self._forget(instance)
        if health is Health.DOWN:
            self._load.forget(instance.ordinal)
        if instance.health is not health:
            instance.since = now
            if health is Health.UP:
                self._placed.rejoin(instance.ordinal)
                self._slow_start.welcome(instance.ordinal, now)
        instance.health, instance.cause = health, cause
        self._usable.clear()

    def _set_draining(self, instance: _Instance, draining: bool) -> None:
        if instance.draining and not draining:
            self._placed.rejoin(instance.ordinal)
        instance.draining = draining
        self._usable.clear()

    def _set_open(self, instance: _Instance, is_open: bool) -> None:
        if instance.open and not is_open:
            self._placed.rejoin(instance.ordinal)
        if instance.open is not is_open:
            instance.open = is_open
            self._usable.clear()

    def _serving(self, model: str) -> list[_Instance]:
        """The instances that serve the model, or may. Any will do for a request that names none."""
        if not model:
            return list(self._instances.values())
        return [each for each in self._instances.values() if each.models is None or model in each.models]

    def _models_seen(self, instance: _Instance, models: Mapping[str, bytes]) -> None:
        instance.models = dict(models)
        self._usable.clear()
        self._listed = frozenset(name for each in self._instances.values() for name in each.models or ())
        self._placed.keep(self._listed | {""})
        for name in self._ratios.keys() - self._listed - {""}:
            del self._ratios[name]

    def _known(self, model: str) -> str:
        """Under which name figures of the model are kept. Those that no instance has listed share one, so they are bounded."""
        return model if model in self._listed else ""

    def _ratio(self, model: str) -> TokenRatio:
        known = self._known(model)
        found = self._ratios.get(known)
        if found is None:
            found = self._ratios[known] = TokenRatio()
        return found
