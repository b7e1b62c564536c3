"""One worker's whole metadata plane without its I/O: what it asks of the store and of other workers, and what it answers.

    for call in metadata.poll(now): send it; later metadata.answered(call, reply, now) or metadata.failed(call, error, now)
    reply = metadata.serve(message, now)
    lookup = metadata.lookup(keys)

The process around it (worker/peers.py, and the simulation in tests/sim) only carries messages and tells the time.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tensorcast_connector.config import ASK_INVENTORY_INTERVAL_S, STORE_TIMEOUT_S
from tensorcast_connector.core import fingerprints
from tensorcast_connector.core.catalog import Catalog
from tensorcast_connector.core.cluster import ClusterView
from tensorcast_connector.core.homes import Homes
from tensorcast_connector.core.leases import ShardLeases
from tensorcast_connector.core.lookup import Lookup
from tensorcast_connector.core.member import Member, StoreCall
from tensorcast_connector.core.reports import PageIndex, Reporter
from tensorcast_connector.errors import ProtocolError, TensorcastError, Unavailable
from tensorcast_connector.types import Token, WorkerId
from tensorcast_connector.wire.messages import (
    AskInventory,
    Fenced,
    Find,
    Message,
    PagesFound,
    Report,
    Reported,
    ReportKeys,
)
from tensorcast_connector.wire.store_messages import (
    Alive,
    Changes,
    KeepAlive,
    LeaseGranted,
    RegisterWorker,
    Watch,
    WorkerRecord,
)


@dataclass(eq=False, slots=True)
class PeerCall:
    """A request to another worker, or to this one: then it is answered by `Metadata.serve` without a network."""

    to: WorkerId
    message: ReportKeys | AskInventory
    timeout_s: float


Call = StoreCall | PeerCall
ANSWERS: dict[type[Message], type[Message]] = {
    RegisterWorker: LeaseGranted, KeepAlive: Alive, Watch: Changes, ReportKeys: Reported, AskInventory: Fenced,
}  # fmt: skip
"""What calls are answered with; those that are not here with Ok. Anything else is no answer, and the call has failed."""


class Metadata:
    """See the module.

    Args:
        record: this worker as the store lists it.
        pages: what can be read here.
    """

    def __init__(self, record: WorkerRecord, pages: PageIndex) -> None:
        self.worker_id = WorkerId(record.worker_id)
        self._pages = pages
        self._asked: dict[WorkerId, PeerCall] = {}
        self._ask_at: dict[WorkerId, float] = {}
        self._reports = itertools.count(1)  # goes on for ever: a report with a lower number is a late one
        self.view = ClusterView()
        self.leases = ShardLeases(self.worker_id)
        self.member = Member(record, self.view, self.leases)
        self._cut_into(0)

    def __repr__(self) -> str:
        return f"<Metadata of {self.worker_id}: {self.view}, {self.leases}>"

    def _cut_into(self, shards: int) -> None:
        """The number of shards is known, or another one: what was known of shards means nothing any more."""
        self.homes = Homes(shards)
        self.catalog = Catalog(shards)
        self.reporter = Reporter(self.worker_id, self._pages, self.homes, self._reports)

    # --- what to send ---

    def poll(self, now: float) -> list[Call]:
        """The requests to send now. Call again at `wake_at`, and after anything that was told to this object."""
        calls: list[Call] = [*self.member.poll(now)]
        self._hold()  # a handover may just have begun
        calls += [PeerCall(home, report, STORE_TIMEOUT_S) for home, report in self.reporter.poll(now)]
        ours = self._ours()
        for worker, at in self._ask_times().items():
            if at <= now:
                self._ask_at[worker] = now + ASK_INVENTORY_INTERVAL_S
                missing = self.catalog.missing(worker)
                if grants := [(shard, *ours[shard]) for shard in sorted(missing.intersection(ours))]:
                    self._asked[worker] = PeerCall(worker, AskInventory(self.worker_id, grants), STORE_TIMEOUT_S)
                    calls.append(self._asked[worker])
        return calls

    def wake_at(self) -> float:
        """When to poll again, if nothing else happens."""
        asks = self._ask_times().values()
        return min(self.member.wake_at(), self.reporter.wake_at(), min(asks, default=float("inf")))

    def _ask_times(self) -> dict[WorkerId, float]:
        """Which workers have not reported what they hold of our shards, and when to ask them (again)."""
        return {
            worker: self._ask_at.get(worker, 0.0)
            for worker in self.catalog.incomplete(self.view.workers)
            if worker != self.worker_id and worker not in self._asked
        }

    # --- what came back ---

    def answered(self, call: Call, reply: Any, now: float) -> None:
        """The answer to `call`.

        Raises:
            ProtocolError: it makes no sense, and `member.store_error` says so; it is asked again later.
        """
        if isinstance(call, StoreCall):
            try:
                self.member.answered(call, reply, now)
            finally:
                self._view_changed()
        elif isinstance(call.message, ReportKeys):
            assert isinstance(reply, Reported)
            self.homes.observe_all(reply.moved)
            self._hold()
            self.reporter.answered(call.to, call.message, reply, now)
        elif isinstance(reply, Fenced):
            self._answered_ask(call)
            self.homes.observe_all(reply.shards)
            self._hold()

    def failed(self, call: Call, error: TensorcastError, now: float) -> None:
        """`call` failed or was not answered in time; it may have been done all the same."""
        if isinstance(call, StoreCall):
            self.member.failed(call, error, now)
            self._view_changed()
        elif isinstance(call.message, ReportKeys):
            self.reporter.failed(call.to, call.message, now)
        else:
            self._answered_ask(call)

    def _answered_ask(self, call: PeerCall) -> None:
        if self._asked.get(call.to) is call:
            del self._asked[call.to]

    def _view_changed(self) -> None:
        view = self.view
        if view.shard_count != self.homes.shards:
            self._cut_into(view.shard_count)
        for shard, holder in view.shards.items():
            self.homes.observe(shard, holder.token, holder.worker_id)
        self.catalog.keep_only([*view.workers, self.worker_id])
        self._hold()
        self._ask_at = {worker: at for worker, at in self._ask_at.items() if worker in view.workers}

    def _hold(self) -> None:
        """A home keeps its index of a shard until somebody shows a higher token, also when its lease has ended or is given
        back: nobody else can be asked until then. Registrations need the lease, see `_report`."""
        self.catalog.hold(self.homes.of(self.worker_id))

    def _ours(self) -> dict[int, Token]:
        """The shards that this worker is the home of, by lease and undisputed."""
        token = self.homes.token
        return {shard: mine for shard, mine in self.leases.held.items() if token(shard) == mine}

    def changed(self, keys: Iterable[bytes]) -> None:
        """Pages were saved, fetched or evicted here."""
        self.reporter.changed(keys)

    # --- what others ask ---

    def serve(self, message: Message, now: float) -> Message:
        """The answer to a request of another worker.

        Raises:
            Unavailable: the caller is not known here yet.
            ProtocolError: not a request about metadata, or of a shard that does not exist.
        """
        if isinstance(message, Find):
            elsewhere = set(message.shards).difference(self.catalog.held)
            moved = [self.homes.at(shard) for shard in sorted(elsewhere)]
            return PagesFound(*self.catalog.locate(fingerprints.of(message.listed)), moved)
        if isinstance(message, Report):
            return self._report(message, now)
        if isinstance(message, AskInventory):
            return self._ask(message)
        raise ProtocolError(f"a worker does not take {type(message).__name__} here")

    def _report(self, message: Report, now: float) -> Reported:
        worker = WorkerId(message.worker_id)
        if worker not in self.view.workers and worker != self.worker_id:
            raise Unavailable(f"{worker} is not known here yet")
        self._hold()  # a redirect of a lookup may just have shown a higher token
        held = self._ours() if self.leases.may_write(now) else {}
        mine = [shard for shard, *token in message.shards if held.get(shard) == tuple(token)]
        refused = {shard for shard, *_ in message.shards}.difference(mine)
        added, removed = map(fingerprints.of, (message.listed_added, message.listed_removed))
        unknown = self.catalog.report(worker, message.number, mine, message.reset, added, removed)
        return Reported([self.homes.at(shard) for shard in sorted(refused)], unknown)

    def _ask(self, message: AskInventory) -> Fenced:
        home = WorkerId(message.home)
        if home not in self.view.workers:
            raise Unavailable(f"{home} is not known here yet")
        current: list[int] = []
        outdated: list[int] = []
        for shard, incarnation, revision in message.shards:
            accepted = self.homes.observe(shard, Token(incarnation, revision), home)
            (current if accepted else outdated).append(shard)
        self._hold()
        self.reporter.asked(current)
        return Fenced([self.homes.at(shard) for shard in outdated])

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        """Begins a batch lookup of page locations (every question to a home has FIND_TIMEOUT_S)."""
        return Lookup(keys, self.homes)

    def statistics(self) -> dict[str, int | str]:
        """Counts for people and metrics."""
        return {
            **self.catalog.statistics(),
            "shards_held": len(self._ours()),
            "workers": len(self.view.workers),
            "shards": self.view.shard_count,
            "shards_without_home": self.view.shard_count - len(self.view.shards),
            "store_revision": self.view.revision,
        }

    def check(self) -> None:
        """Raises AssertionError unless every part keeps its invariants."""
        self.view.check()
        self.leases.check()
        self.homes.check()
        self.catalog.check()
        self.reporter.check()
