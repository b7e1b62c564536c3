"""A worker's conversation with the store: it registers, renews its lease, lists what it has, competes for shards, watches.

Two requests at most are under way at a time, one for the lease and what hangs on it, and the watch. While the store is away
the last known members stay valid and everything else goes on.
"""

from dataclasses import dataclass
from typing import Any

from tensorcast_connector.config import HEARTBEAT_INTERVAL_S, MEMBER_TTL_S, STORE_TIMEOUT_S, WATCH_WAIT_S
from tensorcast_connector.core.cluster import ClusterView, instance_key, replica_key
from tensorcast_connector.core.leases import ShardLeases
from tensorcast_connector.errors import NotFound, ProtocolError, TensorcastError, Unavailable
from tensorcast_connector.types import WorkerId
from tensorcast_connector.wire.messages import Message
from tensorcast_connector.wire.store_messages import (
    Changes,
    ClaimShards,
    InstanceRecord,
    KeepAlive,
    LeaseGranted,
    PutReplica,
    RegisterInstance,
    RegisterWorker,
    ReleaseShards,
    RemoveInstance,
    RemoveReplica,
    ReplicaRecord,
    WorkerRecord,
)

Listed = InstanceRecord | ReplicaRecord


@dataclass(eq=False, slots=True)
class StoreCall:
    """A request to send to the store; the answer goes to `Member.answered`, a failure to `Member.failed`."""

    message: Message
    timeout_s: float
    sent_at: float  # by this worker's clock, before it is sent
    about: tuple[Listed, bool] | None = None  # what it lists, and whether that is there


def refused(call: StoreCall, error: TensorcastError) -> bool:
    """Whether the store will never take what `call` lists."""
    return call.about is not None and isinstance(error, ProtocolError)


class Member:
    """See the module.

    Args:
        record: how this worker is listed.
        view: kept current.
        leases: told of the lease.
    """

    def __init__(self, record: WorkerRecord, view: ClusterView, leases: ShardLeases) -> None:
        self._record = record
        self._view = view
        self._leases = leases
        self._listed: dict[str, Listed] = {}
        self._untold: dict[str, tuple[Listed, bool]] = {}  # what the store is still to be told, and whether it is here
        self._polled_at = 0.0
        self._lease_call: StoreCall | None = None
        self._watch_call: StoreCall | None = None
        self._lease_at = 0.0  # when the lease is renewed, or asked for again
        self._list_at = 0.0
        self._listed_at = 0.0  # when the store was last told of a listing, as far as is known
        self._watch_at = 0.0
        self._registered_revision = 0
        self._listed_life = 0  # the life of the store in which we were seen listed, since we registered
        self._lease_error: TensorcastError | None = None
        self._watch_error: TensorcastError | None = None

    def __repr__(self) -> str:
        return f"<Member {self._record.worker_id}, lease {self._leases.lease_id}, {len(self._untold)} to be listed>"

    @property
    def store_error(self) -> TensorcastError | None:
        """Why the store cannot be used, since its last good answer of that kind."""
        return self._lease_error or self._watch_error

    # --- what is listed under the worker's lease ---

    def add(self, record: Listed) -> None:
        """Lists an engine of this host or a copy of an artifact, now and whenever the worker registers anew."""
        key = _key(record)
        self._listed[key] = record
        self._untold[key] = record, True

    def told(self, record: Listed) -> None:
        """The store has it already, by a transaction of somebody else here; from now on it is listed like the others."""
        key = _key(record)
        self._listed[key] = record
        self._untold.pop(key, None)  # the watch may have shown it before we knew
        call = self._lease_call
        if call is not None and call.about is not None and _key(call.about[0]) == key:
            self._untold[key] = record, True  # that may be done before or after

    def remove(self, record: Listed) -> None:
        """Takes it off the list; one that is not on it is fine."""
        key = _key(record)
        if self._listed.pop(key, None) is not None:
            self._untold[key] = record, False

    def connected(self, now: float) -> None:
        """A store can be reached (again): nothing that waits for it waits any longer."""
        self._lease_at = min(self._lease_at, now)
        self._list_at = min(self._list_at, now)
        self._watch_at = min(self._watch_at, now)

    # --- what to send ---

    def poll(self, now: float) -> list[StoreCall]:
        """The requests to send now."""
        self._polled_at = now
        calls = []
        if self._lease_call is None and (call := self._next(now)) is not None:
            self._lease_call = call
            calls.append(call)
        if self._watch_call is None and self._watch_at <= now:
            trouble = not self._view.incarnation or self._watch_error is not None
            wait_ms = 0 if trouble else int(WATCH_WAIT_S * 1000)  # in trouble any answer is news
            self._watch_call = StoreCall(self._view.ask(wait_ms), WATCH_WAIT_S + STORE_TIMEOUT_S, now)
            calls.append(self._watch_call)
        return calls

    def wake_at(self) -> float:
        """When to poll again, if nothing else happens."""
        times = [self._watch_at] if self._watch_call is None else []
        if self._lease_call is None:
            times.append(self._lease_at)
            if self._leases.lease_id:
                if not self._view.restored:
                    times.append(self._leases.wake_at(self._polled_at))
                if self._untold:
                    times.append(self._list_at)
        return min(times, default=float("inf"))

    def _next(self, now: float) -> StoreCall | None:
        lease_id = self._leases.lease_id
        if self._lease_at <= now:
            message: Message = KeepAlive(lease_id) if lease_id else RegisterWorker(self._record, MEMBER_TTL_S)
            return StoreCall(message, STORE_TIMEOUT_S, now)
        if not lease_id:
            return None
        if self._untold and self._list_at <= now:
            record, here = next(iter(self._untold.values()))
            return StoreCall(_listing(record, here, lease_id), STORE_TIMEOUT_S, now, (record, here))
        if self._view.restored:
            return None  # no shards are granted; the watch tells when
        if shards := self._leases.handovers(now):
            revisions = self._leases.given_back(shards, now)
            return StoreCall(ReleaseShards(lease_id, shards, revisions), STORE_TIMEOUT_S, now)
        if shards := self._leases.claims(now):
            self._leases.claimed(shards, now)
            return StoreCall(ClaimShards(self._record.worker_id, lease_id, shards), STORE_TIMEOUT_S, now)
        return None

    # --- what came back ---

    def answered(self, call: StoreCall, reply: Any, now: float) -> None:
        """The store's answer to `call`.

        Raises:
            ProtocolError: the watch's answer makes no sense; see ClusterView.apply. It goes on a little later.
        """
        if call is self._watch_call:
            self._watch_call = None
            try:
                self._seen(reply, call.sent_at, now)
            except TensorcastError as error:
                self._watch_at, self._watch_error = now + HEARTBEAT_INTERVAL_S, error
                raise
            self._watch_at, self._watch_error = now, None
        elif call is self._lease_call:
            self._lease_call = self._lease_error = None
            if isinstance(call.message, RegisterWorker):
                assert isinstance(reply, LeaseGranted)
                self._registered(reply, call, now)
            elif isinstance(call.message, KeepAlive):
                if call.message.lease_id == self._leases.lease_id:  # else it was found lost meanwhile
                    self._leases.renewed(call.message.lease_id, call.sent_at, MEMBER_TTL_S)
                    self._lease_at = call.sent_at + HEARTBEAT_INTERVAL_S
            elif call.about is not None:
                self._told(call, now)

    def _registered(self, reply: LeaseGranted, call: StoreCall, now: float) -> None:
        self._leases.renewed(reply.lease_id, call.sent_at, MEMBER_TTL_S)
        self._leases.update(self._view, now)
        self._registered_revision = reply.revision
        self._listed_life = 0
        self._untold = {key: (record, True) for key, record in self._listed.items()}
        self._listed_at = now
        self._lease_at = call.sent_at + HEARTBEAT_INTERVAL_S

    def _told(self, call: StoreCall, now: float) -> None:
        assert call.about is not None
        self._listed_at = now
        key = _key(call.about[0])
        if self._untold.get(key) == call.about:  # else it has changed meanwhile, and is told again
            del self._untold[key]

    def _seen(self, reply: Changes, sent_at: float, now: float) -> None:
        try:
            self._view.apply(reply)
        finally:  # what made sense of it counts
            if not self._view.listing:  # else some are still to be listed
                self._look(sent_at, now)

    def _look(self, sent_at: float, now: float) -> None:
        """The view is another one."""
        me = WorkerId(self._record.worker_id)
        another_life = 0 < self._listed_life < self._view.incarnation
        recent = self._view.revision >= self._registered_revision or another_life
        if self._leases.lease_id and recent and me not in self._view.workers:
            self._lost(now)  # whatever the lease's number means to this store, it is not ours
        if me in self._view.workers:
            self._listed_life = self._view.incarnation
        self._leases.update(self._view, now)
        if self._leases.lease_id and sent_at > self._listed_at and not self._untold:
            self._compare()

    def _compare(self) -> None:
        """Lists what should be listed and is not, and the other way round: an old request may have been done late.

        Only for a view that was asked for after the store was last told something.
        """
        me, view = WorkerId(self._record.worker_id), self._view
        there: dict[str, Listed] = {instance_key(name): each for name, each in view.instances.items()}
        there |= {replica_key(name, me): copies[me] for name, copies in view.replicas.items() if me in copies}
        mine = {key: record for key, record in there.items() if record.worker_id == me}
        wrong = {key: (record, False) for key, record in mine.items() if key not in self._listed}
        # What is listed at another worker has moved there.
        absent = {key: each for key, each in self._listed.items() if key in mine or key not in there}
        wrong |= {key: (each, True) for key, each in absent.items() if mine.get(key) != each}
        self._untold = wrong

    def failed(self, call: StoreCall, error: TensorcastError, now: float) -> None:
        """`call` failed; nothing is known of what it did, unless the error says so."""
        if call is self._watch_call:
            self._watch_call = None
            self._watch_at, self._watch_error = now + HEARTBEAT_INTERVAL_S, error
        elif call is self._lease_call:
            self._lease_call = None
            renewal = isinstance(call.message, KeepAlive) and not isinstance(error, NotFound)
            if isinstance(error, Unavailable) or renewal or isinstance(call.message, RegisterWorker):
                self._lease_error = error
            if isinstance(error, NotFound) and not isinstance(call.message, RegisterWorker):
                self._lost(now)
            elif refused(call, error):
                assert call.about is not None
                self._told(call, now)
                if self._listed.get(_key(call.about[0])) is call.about[0]:
                    del self._listed[_key(call.about[0])]
            elif isinstance(call.message, RegisterWorker | KeepAlive):
                self._lease_at = now + HEARTBEAT_INTERVAL_S
            else:
                self._list_at = now + HEARTBEAT_INTERVAL_S
                if call.about is not None and (key := _key(call.about[0])) in self._untold:
                    self._untold[key] = self._untold.pop(key)  # it holds nothing else up

    def _lost(self, now: float) -> None:
        self._leases.lost()
        self._lease_at = now

    @property
    def engines(self) -> int:
        """How many engines of this host are listed, or are to be."""
        return sum(isinstance(record, InstanceRecord) for record in self._listed.values())

    @property
    def lease_id(self) -> int:
        """Of the lease everything hangs on; 0 while there is none."""
        return self._leases.lease_id


def _key(record: Listed) -> str:
    if isinstance(record, InstanceRecord):
        return instance_key(record.instance_id)
    return replica_key(record.artifact_id, record.worker_id)


def _listing(record: Listed, here: bool, lease_id: int) -> Message:
    if isinstance(record, InstanceRecord):
        return RegisterInstance(record, lease_id) if here else RemoveInstance(record.instance_id)
    return PutReplica(record, lease_id) if here else RemoveReplica(record.artifact_id, record.worker_id)
