"""Deliberate faults of plans; mutants.py lists them with the others."""

from typing import Any

import msgspec
import pytest

from tensorcast_connector.core import gateway_plans
from tensorcast_connector.core.execution import Finish, PlanExecution, WriteRecord
from tensorcast_connector.core.gateway_plans import GatewayPlans
from tensorcast_connector.core.ledger import Ledger, UnderWay
from tensorcast_connector.core.plan import PlanRecord, ready
from tensorcast_connector.core.plan_asks import Outbox
from tensorcast_connector.core.plan_runs import PlanRuns, executor_of, tenant_of
from tensorcast_connector.wire.plan_messages import RunStep
from tensorcast_connector.wire.store_messages import WriteRecords

Patch = pytest.MonkeyPatch


# --- gateways ---


def record_after_dispatch(patch: Patch) -> None:
    """Steps are sent off while the record is being written."""
    start = PlanExecution.start

    def eager(self: PlanExecution, now: float) -> Any:
        return [*start(self, now), *self._dispatch(now)]

    patch.setattr(PlanExecution, "start", eager)


def records_written_without_compare(patch: Patch) -> None:
    """Whoever writes last owns the plan."""
    ask = Outbox.ask

    def careless(self: Outbox, to: Any, message: Any, *rest: Any) -> Any:
        if isinstance(message, WriteRecords):
            message = WriteRecords([], message.puts, message.deletes)
        return ask(self, to, message, *rest)

    patch.setattr(Outbox, "ask", careless)


def taken_over_under_the_same_epoch(patch: Patch) -> None:
    """The next owner of a plan cannot be told from the one before."""
    patch.setattr(gateway_plans, "next_epoch", lambda former, incarnation: former or 1)


def follower_dispatches(patch: Patch) -> None:
    """A gateway that waits for another one's plan helps."""
    found = GatewayPlans._found

    def helpful(self: GatewayPlans, waiter: Any, record: PlanRecord | None, *rest: Any) -> None:
        found(self, waiter, record, *rest)
        if record is not None and not record.finished and waiter.key not in self._runs:
            number = min(ready(record.plan, record.outcomes), default=-1)
            step = record.plan.steps[number]
            message = RunStep(
                waiter.key, record.digest, record.epoch, number, step.operation, step.target, step.arguments, "", 1.0
            )
            if number >= 0 and step.target in self._view.instances:
                self.outbox.ask(executor_of(self._view, step, tenant_of(waiter.key)), message, 1.0, lambda *_: None)

    patch.setattr(GatewayPlans, "_found", helpful)


def conflict_taken_as_written(patch: Patch) -> None:
    """A gateway that lost a compare-and-swap goes on, as if it had won."""
    patch.setattr(PlanExecution, "_own", lambda self, found: found)


def finished_plan_run_again_by_its_owner(patch: Patch) -> None:
    """What the same gateway wrote in an earlier execution is taken for this one's."""

    def own(self: PlanExecution, found: PlanRecord | None) -> PlanRecord | None:
        mine = found is not None and (found.owner, found.epoch) == (self._record.owner, self._record.epoch)
        return found if mine else None

    def never_over(self: PlanExecution, now: float) -> Any:
        if self._written is not None and self._written.finished and not self._outcomes:
            self._written = msgspec.structs.replace(self._written, state="running")
        return following(self, now)

    following = PlanExecution._next
    patch.setattr(PlanExecution, "_own", own)
    patch.setattr(PlanExecution, "_next", never_over)


def result_visible_before_the_record(patch: Patch) -> None:
    """Callers are told as soon as the last step has ended."""
    write = PlanExecution._write

    def hasty(self: PlanExecution, now: float) -> Any:
        written = write(self, now)
        return [*written, *(Finish(each.record) for each in written if _ends(each))]

    def _ends(instruction: Any) -> bool:
        return isinstance(instruction, WriteRecord) and instruction.record.finished

    over = PlanRuns._over

    def once(self: PlanRuns, running: Any, *rest: Any) -> None:
        if running.key in self._running:
            over(self, running, *rest)

    patch.setattr(PlanExecution, "_write", hasty)
    patch.setattr(PlanRuns, "_over", once)


def orphans_are_nobodys(patch: Patch) -> None:
    """Nobody looks for the plans of a gateway that has gone."""
    patch.setattr(GatewayPlans, "_list_orphans", lambda self, at: None)
    patch.setattr(GatewayPlans, "_is_orphan", lambda self, owner: False)


def needs_ignored(patch: Patch) -> None:
    """A step that does not use the result of another one does not wait for it."""
    begin = PlanExecution.__init__

    def at_once(self: PlanExecution, *args: Any) -> None:
        begin(self, *args)
        steps = self._record.plan.steps
        self._fresh = [step for step in self._left if step not in self._outcomes and not steps[step].inputs]
        for need, followers in self._followers.items():
            self._followers[need] = [step for step in followers if steps[step].inputs]

    patch.setattr(PlanExecution, "__init__", at_once)


def gateway_woken_for_nothing(patch: Patch) -> None:
    """A plan whose deadline has passed wants to be told so at once, again and again, until its record is written."""
    wake_at = PlanExecution.wake_at
    patch.setattr(
        PlanExecution, "wake_at", lambda self: min(wake_at(self), float("inf") if self._over else self._deadline)
    )


# --- executors ---


def retry_without_idempotency(patch: Patch) -> None:
    """A step that was done is done again when it is asked for again."""
    begin = Ledger.begin

    def forgetful(self: Ledger, key: str, *rest: Any) -> Any:
        if key in self._plans:
            self._plans[key].results.clear()
        return begin(self, key, *rest)

    patch.setattr(Ledger, "begin", forgetful)


def step_under_way_begun_again(patch: Patch) -> None:
    """A step that is asked for again while it is being done is done twice."""
    begin = Ledger.begin

    def impatient(self: Ledger, key: str, digest: str, epoch: int, step: int, *rest: Any) -> Any:
        standing = begin(self, key, digest, epoch, step, *rest)
        if isinstance(standing, UnderWay) and not standing.fresh:
            del self._plans[key].under_way[step]
            return begin(self, key, digest, epoch, step, *rest)
        return standing

    patch.setattr(Ledger, "begin", impatient)


def ledger_without_epochs(patch: Patch) -> None:
    """A gateway that has lost a plan still has its steps done."""
    plan_of = Ledger._plan

    def credulous(self: Ledger, key: str, digest: str, epoch: int, now: float) -> Any:
        if key in self._plans:
            self._plans[key].epoch = min(epoch, self._plans[key].epoch)
        return plan_of(self, key, digest, epoch, now)

    patch.setattr(Ledger, "_plan", credulous)


def cancelled_step_begun_later(patch: Patch) -> None:
    """A dispatch that comes after its cancellation is carried out."""
    begin = Ledger.begin

    def forgetful(self: Ledger, key: str, *rest: Any) -> Any:
        if key in self._plans:
            self._plans[key].cancelled.clear()
        return begin(self, key, *rest)

    patch.setattr(Ledger, "begin", forgetful)


def step_outlives_its_plan(patch: Patch) -> None:
    """What nobody waits for goes on."""

    def stops(self: Ledger, now: float) -> list[int]:
        unwanted, self._unwanted = self._unwanted, []
        return unwanted

    patch.setattr(Ledger, "stops", stops)
