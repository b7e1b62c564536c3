"""The plans that a gateway runs: their records are written, their steps sent to the workers that do them.

core/execution decides for each; here its instructions become requests (core/plan_asks), and their answers events.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tensorcast_connector.config import (
    LEASE_TTL_MAX_S,
    PLAN_BYTES_MAX,
    PLAN_LEASE_SHARED_S,
    PLAN_RECORD_TTL_S,
    STORE_TIMEOUT_S,
)
from tensorcast_connector.core import execution as ex
from tensorcast_connector.core.cluster import ClusterView, fence_key
from tensorcast_connector.core.plan import (
    Marker,
    PlanRecord,
    StepSpec,
    encode_marker,
    encode_record,
    marker_key,
    plan_key,
    same_record,
)
from tensorcast_connector.core.plan_asks import STORE, Alarm, Ask, Began, Drop, Moment, Outbox, Over, Result
from tensorcast_connector.errors import NotFound, TensorcastError, Unavailable
from tensorcast_connector.types import InstanceId, WorkerId
from tensorcast_connector.wire.plan_messages import CancelSteps, RunStep
from tensorcast_connector.wire.store_messages import GrantLease, WriteRecords


@dataclass(eq=False, slots=True)
class _Running:
    """A plan that this gateway owns, or tries to."""

    key: str
    execution: ex.PlanExecution
    former: PlanRecord | None  # what it takes the place of
    lease_ttl_s: int
    lease_id: int = 0  # under which the record is to be; 0: there is none yet
    marked: int = 0  # under which the marker is
    alarm: Alarm | None = None  # the next
    asks: dict[tuple[int, int], Ask] = field(default_factory=dict)  # of each step and attempt


def tenant_of(key: str) -> str:
    """Of a plan's key, TENANT/KEY."""
    return key.partition("/")[0]


def executor_of(view: ClusterView, step: StepSpec, tenant: str) -> WorkerId:
    """The worker that does a step of a plan of that tenant. An instance of another tenant does not exist for it.

    Raises:
        Unavailable: it, or the instance, is not there.
    """
    if step.on_instance:
        instance = view.instances.get(InstanceId(step.target))
        if instance is None or instance.tenant not in ("", tenant):
            raise Unavailable(f"there is no instance {step.target!r}")
        return WorkerId(instance.worker_id)
    return worker_named(view, step.target)


def worker_named(view: ClusterView, name: str) -> WorkerId:
    """The worker with that name or id.

    Raises:
        Unavailable: there is none.
    """
    named = [each for each, record in view.workers.items() if name in (each, record.name)]
    if not named:
        raise Unavailable(f"there is no worker {name!r}")
    return max(named)


class PlanRuns:
    """See the module.

    Args:
        view: of the cluster, kept current by somebody else.
        jitter: a number from 0 to 1.
        me: this gateway.
        lease: of this gateway at the store; 0 while it has none.
        over: told when a plan does not run here any more, and why.
        changed: told after something has happened to one, and the error if its record could not be written.
    """

    def __init__(
        self, view: ClusterView, outbox: Outbox, jitter: Callable[[], float], me: WorkerId, lease: Callable[[], int],
        over: Callable[[str, ex.Finish | ex.Follow, Moment], None],
        changed: Callable[[str, TensorcastError | None, Moment], None],
    ) -> None:  # fmt: skip
        self._view = view
        self._outbox = outbox
        self._jitter = jitter
        self._me = me
        self._lease = lease
        self._tell_over = over
        self._tell_changed = changed
        self._running: dict[str, _Running] = {}
        self._leases: dict[int, tuple[float, int]] = {}  # by their time: when the last was granted, and its id

    def __repr__(self) -> str:
        return f"<PlanRuns: {len(self._running)}>"

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, key: str) -> bool:
        return key in self._running

    def digest(self, key: str) -> str:
        """Which plan runs under that key."""
        return self._running[key].execution.record.digest

    def written(self, key: str) -> PlanRecord | None:
        """As others see it; None before they do."""
        return self._running[key].execution.written

    def cancel(self, key: str, at: Moment) -> None:
        """Its caller does not want it any more."""
        self._handle(self._running[key], ex.Cancel(), at)

    def begin(self, key: str, record: PlanRecord, former: PlanRecord | None, revision: int, at: Moment) -> None:
        """Runs a plan, with this gateway as the owner in `record`; `former` is what it replaces, at `revision`."""
        left_s = min(record.deadline_unix_s - at.unix_s, record.timeout_s)
        execution = ex.PlanExecution(record, revision, at.now + left_s, self._jitter)
        # A record lives at least as long as it has to; plans of the same minute share a lease.
        ttl_s = (-(-int(max(left_s, 0.0) + 1) // PLAN_LEASE_SHARED_S) + 1) * PLAN_LEASE_SHARED_S + PLAN_RECORD_TTL_S
        self._outbox.tell(Began(key, record))
        running = self._running[key] = _Running(key, execution, former, min(ttl_s, LEASE_TTL_MAX_S))
        self._do(running, execution.start(at.now), at)

    def _handle(self, running: _Running, event: ex.Event, at: Moment) -> None:
        self._do(running, running.execution.handle(event, at.now), at)

    def _do(self, running: _Running, instructions: Iterable[ex.Instruction], at: Moment) -> None:
        events: deque[ex.Event] = deque()
        while True:
            for each in instructions:
                if isinstance(each, ex.WriteRecord):
                    if (event := self._write(running, each, at)) is not None:
                        events.append(event)
                elif isinstance(each, ex.Dispatch):
                    if (event := self._dispatch(running, each)) is not None:
                        events.append(event)
                elif isinstance(each, ex.CancelStep):
                    self._cancel_step(running, each)
                else:
                    self._over(running, each, at)
            if not events:
                break
            instructions = running.execution.handle(events.popleft(), at.now)
        when, alarm = running.execution.wake_at(), running.alarm
        if when < (alarm.when if alarm is not None else float("inf")):
            self._outbox.cancel(alarm)
            running.alarm = self._outbox.alarm(when, lambda then: self._ring(running, then))
        self._tell_changed(running.key, None, at)

    def _ring(self, running: _Running, at: Moment) -> None:
        running.alarm = None
        self._handle(running, ex.Tick(), at)

    def _over(self, running: _Running, how: ex.Finish | ex.Follow, at: Moment) -> None:
        del self._running[running.key]
        self._outbox.cancel(running.alarm)
        self._outbox.tell(Over(running.key, how.record if isinstance(how, ex.Finish) else None))
        self._tell_over(running.key, how, at)

    def _write(self, running: _Running, write: ex.WriteRecord, at: Moment) -> ex.Event | None:
        """What has happened already, if anything."""
        value = encode_record(write.record)
        if len(value) > PLAN_BYTES_MAX:
            return ex.TooLarge(len(value))
        granted_at, lease_id = self._leases.get(running.lease_ttl_s, (0.0, 0))
        if not write.revision and not self._lease():
            return ex.WriteFailed()  # a plan of a gateway that is not there is everybody's
        if running.lease_id:
            self._put(running, write, value)
        elif lease_id and at.now < granted_at + PLAN_LEASE_SHARED_S:
            self._leased(running, write, value, lease_id)
        else:
            ask = GrantLease(running.lease_ttl_s)
            self._outbox.ask(
                STORE, ask, STORE_TIMEOUT_S, lambda got, then: self._granted(running, write, value, got, then)
            )
        return None

    def _granted(
        self, running: _Running, write: ex.WriteRecord, value: bytes, result: Result, at: Moment
    ) -> None:  # fmt: skip
        if isinstance(result, TensorcastError):
            self._write_failed(running, result, at)
        else:
            self._leases[running.lease_ttl_s] = at.now, result.lease_id
            self._leased(running, write, value, result.lease_id)

    def _leased(self, running: _Running, write: ex.WriteRecord, value: bytes, lease_id: int) -> None:
        running.lease_id = lease_id
        if write.revision:
            self._outbox.read(running.key, lambda *what: self._looked(running, write, value, *what))
        else:
            self._put(running, write, value)

    def _looked(
        self, running: _Running, write: ex.WriteRecord, value: bytes, found: PlanRecord | None, revision: int, error: Any,
        at: Moment,
    ) -> None:  # fmt: skip
        """Whether the record is still the one of that revision: in another life of the database it would be any other.

        What is written after that needs the lease, which no other life has.
        """
        known = running.execution.written or running.former
        if error is not None:
            self._write_failed(running, error, at)
        elif revision == write.revision and found is not None and known is not None and same_record(found, known):
            self._put(running, write, value)
        else:
            self._handle(running, ex.Conflicted(found, revision), at)

    def _put(self, running: _Running, write: ex.WriteRecord, value: bytes) -> None:
        where, mark, lease_id = plan_key(running.key), marker_key(running.key), running.lease_id
        message = WriteRecords([(where, write.revision)], [(where, value, lease_id)], [])
        if not write.revision and (mine := self._lease()):
            # A record that nobody has seen is not made after this gateway has gone: others have said that there is none.
            message.puts.append((fence_key(self._me), b"", mine))
        if write.record.finished:
            message.deletes.append(mark)
        elif running.marked != lease_id:
            message.puts.append((mark, encode_marker(Marker(write.record.owner, running.key)), lease_id))
        self._outbox.ask(
            STORE, message, STORE_TIMEOUT_S, lambda result, at: self._put_done(running, lease_id, result, at)
        )

    def _put_done(self, running: _Running, lease_id: int, result: Result, at: Moment) -> None:
        if isinstance(result, TensorcastError):
            self._write_failed(running, result, at)
        elif result.succeeded:
            running.marked = lease_id
            self._handle(running, ex.Written(result.revision), at)
        else:
            self._outbox.read(running.key, lambda *what: self._conflicted(running, *what))

    def _conflicted(self, running: _Running, found: PlanRecord | None, revision: int, error: Any, at: Moment) -> None:
        if error is not None:
            self._write_failed(running, error, at)
        else:
            self._handle(running, ex.Conflicted(found, revision), at)

    def _write_failed(self, running: _Running, error: TensorcastError, at: Moment) -> None:
        if isinstance(error, NotFound) and running.lease_id:  # its lease has ended: it gets another one
            if self._leases.get(running.lease_ttl_s, (0.0, 0))[1] == running.lease_id:
                del self._leases[running.lease_ttl_s]
            running.lease_id = 0
        self._tell_changed(running.key, error, at)
        self._handle(running, ex.WriteFailed(), at)

    def _dispatch(self, running: _Running, dispatch: ex.Dispatch) -> ex.Event | None:
        """What has happened already, if anything."""
        record, number, attempt = running.execution.record, dispatch.step, dispatch.attempt
        step = record.plan.steps[number]
        try:
            worker = executor_of(self._view, step, tenant_of(running.key))
        except Unavailable as error:
            return ex.Failed(number, attempt, error)
        message = RunStep(
            running.key, record.digest, record.epoch, number, step.operation, step.target, dispatch.arguments,
            record.trace_id, dispatch.timeout_s,
        )  # fmt: skip

        def ended(result: Result, at: Moment) -> None:
            running.asks.pop((number, attempt), None)
            failed = isinstance(result, TensorcastError)
            event = ex.Failed(number, attempt, result) if failed else ex.Succeeded(number, attempt, result.result)
            self._handle(running, event, at)

        running.asks[number, attempt] = self._outbox.ask(worker, message, dispatch.timeout_s, ended)
        return None

    def _cancel_step(self, running: _Running, cancel: ex.CancelStep) -> None:
        ask = running.asks.pop((cancel.step, cancel.attempt), None)
        if ask is None:
            return
        self._outbox.tell(Drop(ask))
        record = running.execution.record
        message = CancelSteps(running.key, record.digest, record.epoch, [cancel.step])
        self._outbox.ask(
            ask.to, message, STORE_TIMEOUT_S, lambda *_: None
        )  # who does not hear it stops by the deadline
