"""A gateway's plans: which it begins, joins, follows and takes over, and what callers are told of them (TensorCast, section 3.3).

    plans.submit(ticket, ...), wait, cancel        a caller asks; the Answer has the same ticket
    plans.view_changed(at)                         whenever the view of the cluster may have
    plans.outbox                                   what is to be done, and when: core/plan_asks.py

What one plan does is said by core/execution, core/plan_runs does it; here is whose it is. A plan that this gateway does not run
is followed: its record is read until it has ended, or until its owner has left the cluster; then it is taken over by
compare-and-swap, under a higher epoch. Plans that nobody waits for are found by their markers (core/plan.py). No I/O, no clock,
no chance.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from tensorcast_connector.config import (
    PLAN_FOLLOW_INTERVAL_S,
    PLAN_ORPHANS_DELAY_MAX_S,
    PLAN_ORPHANS_INTERVAL_S,
    PLAN_RECORD_TTL_S,
    STORE_TIMEOUT_S,
    WATCH_WAIT_S,
)
from tensorcast_connector.core.cluster import PLAN_MARKERS, ClusterView
from tensorcast_connector.core.execution import Finish, Follow
from tensorcast_connector.core.plan import (
    PlanRecord,
    PlanSpec,
    check_deadline,
    check_size,
    check_trace,
    decode_marker,
    encode_record,
    next_epoch,
)
from tensorcast_connector.core.plan_asks import STORE, Alarm, Answer, Moment, Outbox, Result
from tensorcast_connector.core.plan_runs import PlanRuns, executor_of, tenant_of
from tensorcast_connector.errors import Conflict, NotFound, TensorcastError, Unavailable
from tensorcast_connector.types import WorkerId
from tensorcast_connector.wire.plan_messages import CancelOwnedPlan, PlanState
from tensorcast_connector.wire.store_messages import ReadRecords


@dataclass(eq=False, slots=True)
class _Waiter:
    """A caller."""

    ticket: int
    key: str
    until: float
    wanted: PlanRecord | None = None  # to be run if there is none
    refusal: TensorcastError | None = None  # why it cannot be, if there is none
    cancel: bool = False
    forward: bool = False  # whether the owner may be asked
    asking: bool = False
    found: PlanRecord | None = None  # as it was when last read
    error: TensorcastError | None = None  # why it could not be read
    alarm: Alarm | None = None  # at `until`


class GatewayPlans:
    """See the module.

    Args:
        me: this gateway.
        view: of the cluster, kept current by somebody else.
        jitter: a number from 0 to 1.
        lease: of this gateway at the store; 0 while it has none.
        adopts: whether it looks for plans of gateways that have gone.
    """

    def __init__(
        self, me: WorkerId, view: ClusterView, jitter: Callable[[], float], lease: Callable[[], int], adopts: bool = True
    ) -> None:  # fmt: skip
        self._me = me
        self._view = view
        self._jitter = jitter
        self._adopts = adopts
        self.outbox = Outbox()
        self._runs = PlanRuns(view, self.outbox, jitter, me, lease, self._over, self._run_changed)
        self._waiters: dict[int, _Waiter] = {}
        self._waiting: dict[str, dict[int, _Waiter]] = {}  # by key
        self._seen: tuple[int, int, frozenset[WorkerId]] = 0, 0, frozenset()  # of the view: life, revision, workers
        self._look_for_orphans_at = float("inf")

    def __repr__(self) -> str:
        return f"<GatewayPlans of {self._me}: {len(self._runs)} running, {len(self._waiters)} waited for>"

    # --- what callers ask ---

    def submit(
        self, ticket: int, key: str, plan: PlanSpec, trace_id: str, timeout_s: float, concurrency: int, wait_s: float,
        at: Moment,
    ) -> None:  # fmt: skip
        """Begins a plan, or joins the one with that key; answered when it has ended, or after `wait_s` (WATCH_WAIT_S at most).

        The error can be a NotFound that names a step, or a Conflict since another plan has that key.

        Args:
            key: tenant/key.
            plan: valid.

        Raises:
            InvalidArgument: no such deadline or trace id, or a plan that is too large.
            Unavailable: this gateway has not heard of the store yet.
        """
        check_deadline(timeout_s)
        check_trace(trace_id)
        epoch = next_epoch(0, self._view.incarnation)
        concurrency = min(max(1, concurrency), len(plan.steps))
        record = PlanRecord(
            plan, plan.digest(), self._me, epoch, trace_id, at.unix_s + timeout_s, concurrency, timeout_s=timeout_s
        )
        check_size(record)
        waiter = _Waiter(ticket, key, _until(wait_s, at), record)
        if not self._view.incarnation:
            raise Unavailable("this gateway does not know the cluster yet")
        for number, step in enumerate(plan.steps):
            try:
                executor_of(self._view, step, tenant_of(key))
            except Unavailable as error:  # it may have been there when the plan was run
                waiter.refusal = waiter.refusal or NotFound(f"{step.label(number)}: {error}")
        self._admit(waiter, at)

    def wait(self, ticket: int, key: str, wait_s: float, at: Moment) -> None:
        """How a plan is doing; answered as `submit`. The error can be NotFound."""
        self._admit(_Waiter(ticket, key, _until(wait_s, at)), at)

    def cancel(self, ticket: int, key: str, forward: bool, at: Moment) -> None:
        """Ends a plan, here or, if `forward`, at the gateway that has it; answered as `wait`."""
        self._admit(_Waiter(ticket, key, at.now + STORE_TIMEOUT_S, cancel=True, forward=forward), at)

    def forget(self, ticket: int) -> None:
        """That caller does not wait any more; fine if it was answered."""
        waiter = self._waiters.pop(ticket, None)
        if waiter is not None:
            self.outbox.cancel(waiter.alarm)
            self._waiting[waiter.key].pop(ticket)
            if not self._waiting[waiter.key]:
                del self._waiting[waiter.key]

    def _admit(self, waiter: _Waiter, at: Moment) -> None:
        self._waiters[waiter.ticket] = waiter
        self._waiting.setdefault(waiter.key, {})[waiter.ticket] = waiter
        waiter.alarm = self.outbox.alarm(waiter.until, lambda then: self._time_is_up(waiter, then))
        self._attend(waiter, at)

    def _attend(self, waiter: _Waiter, at: Moment) -> None:
        """Begins, joins or follows the plan that a caller wants to know of."""
        if waiter.ticket not in self._waiters:
            return
        if waiter.key in self._runs:
            if waiter.wanted is not None and waiter.wanted.digest != self._runs.digest(waiter.key):
                # Before it is written it is not decided which of two plans, at two gateways, it will be.
                if self._runs.written(waiter.key) is not None:
                    self._answer(waiter, _other_plan(waiter.key))
            elif waiter.cancel:
                self._runs.cancel(waiter.key, at)
        elif waiter.wanted is not None and waiter.refusal is None and waiter.found is None:
            self._runs.begin(waiter.key, waiter.wanted, None, 0, at)
        elif not waiter.asking:
            waiter.asking = True
            self.outbox.read(waiter.key, lambda *what: self._followed(waiter, *what))

    def _followed(self, waiter: _Waiter, found: PlanRecord | None, revision: int, error: Any, at: Moment) -> None:
        waiter.asking = False
        if waiter.ticket not in self._waiters:
            return
        waiter.error = error
        if error is None:
            self._found(waiter, found, revision, at)
        elif at.now >= waiter.until:
            self._time_is_up(waiter, at)
        else:
            self._look_again(waiter, at)

    def _found(self, waiter: _Waiter, found: PlanRecord | None, revision: int, at: Moment) -> None:
        """The store has this record of the plan that a caller wants to know of."""
        waiter.found = found
        wanted = waiter.wanted is not None and waiter.refusal is None
        if waiter.key in self._runs or (found is None and wanted):
            self._attend(waiter, at)
        elif found is None:
            own = waiter.key.partition("/")[2]
            gone = NotFound(f"there is no plan {own!r}, or it ended more than {PLAN_RECORD_TTL_S} s ago")
            self._answer(waiter, waiter.refusal or gone)
        elif waiter.wanted is not None and waiter.wanted.digest != found.digest:
            self._answer(waiter, _other_plan(waiter.key))
        elif found.finished or at.now >= waiter.until:
            self._answer(waiter, PlanState(encode_record(found)))
        elif self._is_orphan(found.owner):
            self._take_over(waiter.key, found, revision, at)
            self._attend(waiter, at)
        elif waiter.cancel and waiter.forward:
            ask = CancelOwnedPlan(waiter.key)
            owner = WorkerId(found.owner)
            self.outbox.ask(owner, ask, STORE_TIMEOUT_S, lambda result, _: self._answer(waiter, result))
        else:
            self._look_again(waiter, at)

    def _look_again(self, waiter: _Waiter, at: Moment) -> None:
        self.outbox.alarm(min(at.now + PLAN_FOLLOW_INTERVAL_S, waiter.until), lambda then: self._attend(waiter, then))

    def _time_is_up(self, waiter: _Waiter, at: Moment) -> None:
        """A caller is told how the plan is doing now."""
        if waiter.ticket not in self._waiters or waiter.asking:
            return
        running = waiter.key in self._runs
        known = self._runs.written(waiter.key) if running else waiter.found
        if known is not None:
            self._answer(waiter, PlanState(encode_record(known)))
        elif running and at.now < waiter.until + STORE_TIMEOUT_S:  # it is being written for the first time
            self.outbox.cancel(waiter.alarm)
            waiter.alarm = self.outbox.alarm(
                waiter.until + STORE_TIMEOUT_S, lambda then: self._time_is_up(waiter, then)
            )
        else:
            self._answer(waiter, waiter.error or Unavailable("the plan's record could not be written yet"))

    def _answer(self, waiter: _Waiter, result: PlanState | TensorcastError) -> None:
        if waiter.ticket in self._waiters:
            self.forget(waiter.ticket)
            self.outbox.tell(Answer(waiter.ticket, result))

    def _over(self, key: str, how: Finish | Follow, at: Moment) -> None:
        """A plan does not run here any more."""
        for waiter in list(self._waiting.get(key, {}).values()):
            if isinstance(how, Finish):
                self._found(waiter, how.record, 0, at)
            else:
                self._found(waiter, how.found, how.revision, at)

    def _run_changed(self, key: str, error: TensorcastError | None, at: Moment) -> None:
        """Once it is written, those are told who want another plan, or wait no longer."""
        for waiter in list(self._waiting.get(key, {}).values()):
            waiter.error = error or waiter.error
            if key not in self._runs or self._runs.written(key) is None:
                continue
            if waiter.wanted is not None and waiter.wanted.digest != self._runs.digest(key):
                self._answer(waiter, _other_plan(key))
            elif waiter.until <= at.now:
                self._time_is_up(waiter, at)

    # --- the plans of gateways that have gone ---

    def view_changed(self, at: Moment) -> None:
        """Looks for plans to take over, if somebody has gone since the last time."""
        life, revision, workers = self._seen
        view = self._view
        if not self._adopts or (view.incarnation, view.revision) == (life, revision):
            return
        self._seen = view.incarnation, view.revision, frozenset(view.workers)
        if workers - self._seen[2] or view.incarnation != life:
            self._look_for_orphans(at.now + self._jitter() * PLAN_ORPHANS_DELAY_MAX_S)

    def _look_for_orphans(self, when: float) -> None:
        """Then, unless it is to happen earlier."""
        if when < self._look_for_orphans_at:
            self._look_for_orphans_at = when
            self.outbox.alarm(when, self._list_orphans)

    def _list_orphans(self, at: Moment) -> None:
        if at.now >= self._look_for_orphans_at:
            self._look_for_orphans_at = float("inf")
            self.outbox.ask(STORE, ReadRecords(PLAN_MARKERS), STORE_TIMEOUT_S, self._listed)

    def _listed(self, result: Result, at: Moment) -> None:
        failed = isinstance(result, TensorcastError)
        in_s = STORE_TIMEOUT_S if failed else PLAN_ORPHANS_INTERVAL_S
        self._look_for_orphans(at.now + in_s * (0.5 + self._jitter()))
        for entry in () if failed else result.entries:
            marker = decode_marker(entry.value)
            if marker.key not in self._runs and self._is_orphan(marker.owner):
                self.outbox.read(marker.key, lambda *what, key=marker.key: self._adopt(key, *what))

    def _adopt(self, key: str, found: PlanRecord | None, revision: int, _: Any, at: Moment) -> None:
        """Errors are for the next time."""
        if key not in self._runs and found is not None and not found.finished and self._is_orphan(found.owner):
            self._take_over(key, found, revision, at)

    def _is_orphan(self, owner: str) -> bool:
        """Whether a plan of that gateway, which does not run here, is nobody's."""
        return owner == self._me or bool(self._view.incarnation and owner not in self._view.workers)

    def _take_over(self, key: str, found: PlanRecord, revision: int, at: Moment) -> None:
        epoch = next_epoch(found.epoch, self._view.incarnation)
        self._runs.begin(key, msgspec.structs.replace(found, owner=self._me, epoch=epoch), found, revision, at)


def _until(wait_s: float, at: Moment) -> float:
    """How long a caller waits, whatever it said."""
    return at.now + min(max(wait_s, 0.0), WATCH_WAIT_S)


def _other_plan(key: str) -> Conflict:
    return Conflict(f"the idempotency key {key.partition('/')[2]!r} belongs to another plan")
