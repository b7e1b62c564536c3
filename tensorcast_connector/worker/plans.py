"""A gateway's plans: carries out what core/gateway_plans says, and tells it the time."""

import asyncio
import contextlib
import itertools
import logging
import math
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from tensorcast_connector.core.gateway_plans import GatewayPlans
from tensorcast_connector.core.plan import CANCELLED, DONE, FAILED, PlanRecord, check_key, decode_plan
from tensorcast_connector.core.plan_asks import STORE, Answer, Ask, Began, Drop, Moment
from tensorcast_connector.errors import DeadlineExceeded, InvalidArgument, TensorcastError
from tensorcast_connector.types import WorkerId
from tensorcast_connector.wire.messages import Message, Ok
from tensorcast_connector.wire.plan_messages import (
    CancelOwnedPlan,
    CancelSteps,
    PlanState,
    RunStep,
    StepDone,
    SubmitPlan,
)
from tensorcast_connector.wire.store_messages import (
    GrantLease,
    LeaseGranted,
    ReadRecords,
    Records,
    RecordsWritten,
    WriteRecords,
)
from tensorcast_connector.worker.executor import Executor, step_label
from tensorcast_connector.worker.links import whose
from tensorcast_connector.worker.peers import Peers
from tensorcast_connector.worker.tracing import Tracing

logger = logging.getLogger(__name__)
ANSWERS: dict[type[Message], type[Message]] = {
    GrantLease: LeaseGranted,
    ReadRecords: Records,
    WriteRecords: RecordsWritten,
    RunStep: StepDone,
    CancelSteps: Ok,
    CancelOwnedPlan: PlanState,
}


class Plans:
    """See the module.

    Args:
        me: this gateway.
        adopts: whether it looks for the plans of gateways that have gone.
        now: its clock; `wall` is seconds since 1970, which deadlines are kept by in the store.
    """

    def __init__(
        self, me: WorkerId, peers: Peers, executor: Executor, chance: random.Random, adopts: bool,
        now: Callable[[], float], wall: Callable[[], float],
    ) -> None:  # fmt: skip
        self._me = me
        self._peers = peers
        self._executor = executor
        self._now = now
        self._wall = wall
        member = peers.metadata.member
        self._core = GatewayPlans(me, peers.metadata.view, chance.random, lambda: member.lease_id, adopts)
        self._tickets = itertools.count(1)
        self._callers: dict[int, asyncio.Future[PlanState]] = {}
        self._asks: dict[Ask, asyncio.Task[None]] = {}
        self._sent: dict[Ask, Callable[[], bool]] = {}  # without a task; what takes it back
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = math.inf  # when it rings
        self._closed = False
        self._tracing = Tracing()
        self.counters = {DONE: 0, FAILED: 0, CANCELLED: 0}  # plans that have ended here
        peers.on_view.append(self._view_changed)

    def __repr__(self) -> str:
        return f"<Plans {self._core!r}>"

    # --- what callers ask ---

    async def submit(self, tenant: str, message: SubmitPlan) -> PlanState:
        """Begins a plan, or joins the one with that key.

        Raises:
            InvalidArgument, NotFound: it cannot run; names the step.
            Conflict: another plan has that key.
        """
        plan, key = decode_plan(message.plan), f"{tenant}/{check_key(message.key)}"
        return await self._answer(
            lambda ticket, at: self._core.submit(
                ticket, key, plan, message.trace_id, message.timeout_s, message.concurrency, message.wait_ms / 1000, at
            )
        )

    async def wait(self, tenant: str, key: str, wait_s: float) -> PlanState:
        """How a plan is doing, once it has ended or after `wait_s`.

        Raises:
            NotFound: there is none with that key, or it was forgotten.
        """
        full = f"{tenant}/{check_key(key)}"
        return await self._answer(lambda ticket, at: self._core.wait(ticket, full, wait_s, at))

    async def cancel(self, key: str, forward: bool = True) -> PlanState:
        """Ends a plan, here or at the gateway that has it.

        Args:
            key: tenant/key.
            forward: whether to ask that gateway.

        Raises:
            NotFound: there is none with that key.
            Unavailable: that gateway cannot be reached.
        """
        return await self._answer(lambda ticket, at: self._core.cancel(ticket, key, forward, at))

    async def _answer(self, ask: Callable[[int, Moment], None]) -> PlanState:
        ticket = next(self._tickets)
        future: asyncio.Future[PlanState] = asyncio.get_running_loop().create_future()
        self._callers[ticket] = future
        try:
            ask(ticket, self._moment())
            self._pump()
            return await future
        finally:
            del self._callers[ticket]
            self._core.forget(ticket)

    # --- carrying out ---

    def _moment(self) -> Moment:
        return Moment(self._now(), self._wall())

    def _view_changed(self) -> None:
        self._core.view_changed(self._moment())
        self._pump()

    def _tick(self) -> None:
        self._timer, self._wake_at = None, math.inf
        self._core.outbox.tick(self._moment())
        self._pump()

    def _pump(self, after: Ask | None = None) -> Ask | None:
        """Does what the core wants done. One request is left to the task that has ended `after`, and so spared a task.

        Not one step after another: steps that take no time would keep the loop for as long as a plan is.
        """
        if self._closed:
            return None
        following: Ask | None = None
        outbox, ended = self._core.outbox, list[tuple[str, PlanRecord]]()
        for each in outbox.poll():
            if isinstance(each, Ask):
                if each.to == STORE and self._send_to_store(each):
                    continue
                if after is None or following is not None or type(each.message) is type(after.message):
                    self._spawn(each)
                else:
                    following = each
            elif isinstance(each, Drop):
                if each.ask is following:
                    following = None
                elif each.ask in self._asks:
                    self._asks[each.ask].cancel()
                elif (take_back := self._sent.pop(each.ask, None)) is not None:
                    take_back()
            elif isinstance(each, Answer):
                self._tell(each)
            elif isinstance(each, Began):
                self._tracing.began(each.key, each.record)
                steps = f"{len(each.record.plan.steps)} steps, epoch {each.record.epoch}"
                self._note("plan run", each.key, f"by this gateway: {steps}, trace {each.record.trace_id}")
            else:
                self._tracing.over(each.key, each.record)
                if each.record is not None:
                    ended.append((each.key, each.record))
                else:
                    self._note("plan left", each.key, "another gateway runs it, or its record has gone")
        if ended:  # callers are answered before it is written down for people
            asyncio.get_running_loop().call_soon(self._ended, ended)
        if (when := outbox.wake_at()) < self._wake_at:
            if self._timer is not None:
                self._timer.cancel()
            self._wake_at = when
            self._timer = asyncio.get_running_loop().call_later(max(0.0, when - self._now()), self._tick)
        return following

    def _ended(self, plans: Sequence[tuple[str, PlanRecord]]) -> None:
        for key, record in plans:
            self.counters[record.state] += 1
            fields = {"event": "plan-ended", "plan": key, "state": record.state, "trace_id": record.trace_id}
            what = f"{record.state}{': ' if record.message else ''}{record.message}"
            logger.info("plan %r of %d steps: %s", key, len(record.plan.steps), what, extra=fields)
            self._note("plan ended", key, what)

    def _note(self, what: str, key: str, cause: str) -> None:
        """To the stories, once what follows from it is on its way. A plan is found by its key, with and without its tenant."""
        names = (key.partition("/")[2],)
        asyncio.get_running_loop().call_soon(lambda: self._peers.record(what, key, names=names, cause=cause))

    def _spawn(self, ask: Ask) -> None:
        task = self._asks[ask] = asyncio.get_running_loop().create_task(self._carry_on(ask))
        task.add_done_callback(lambda _: self._asks.pop(ask, None))  # also of one that was cancelled before it began

    async def _carry_on(self, ask: Ask) -> None:
        """One request after another, as long as each follows from the one before."""
        task = self._asks[ask]
        following: Ask | None = ask
        while following is not None:
            ask = following
            self._asks[ask] = task
            try:
                await self._carry(ask)
            finally:
                self._asks.pop(ask, None)
            following = self._pump(ask)

    # --- without a task, whose turns of the loop would be most of what a short plan takes ---

    def _send_to_store(self, ask: Ask) -> bool:
        """False: it has to wait, or cannot be sent, which a task is told."""
        try:
            take_back = self._peers.store.send(
                ask.message, ANSWERS[type(ask.message)], ask.timeout_s, lambda result: self._came(ask, result)
            )
        except Exception:
            return False
        if take_back is not None:
            self._sent[ask] = take_back
        return take_back is not None

    def _came(self, ask: Ask, result: Any) -> None:
        del self._sent[ask]
        if isinstance(result, TensorcastError):
            result = _failure(ask, result)
        self._answered(ask, result)
        following = self._pump(ask)
        while following is not None:
            ask = following
            if not self._did(ask):
                self._spawn(ask)
                return
            following = self._pump(ask)

    def _did(self, ask: Ask) -> bool:
        """Whether a step waits for nobody; then it is done."""
        if ask.to != self._me or not isinstance(ask.message, RunStep):
            return False
        try:
            if not self._executor.waits_for_nobody(ask.message):
                return False
            with self._traced(ask):
                result: Any = StepDone(self._executor.at_once(ask.message))
        except Exception as error:
            result = _failure(ask, error)
        self._answered(ask, result)
        return True

    def _tell(self, answer: Answer) -> None:
        future = self._callers.get(answer.ticket)
        if future is None or future.done():
            return
        if isinstance(answer.result, TensorcastError):
            future.set_exception(answer.result)
        else:
            future.set_result(answer.result)

    async def _carry(self, ask: Ask) -> None:
        try:
            with self._traced(ask):
                result: Any = await self._send(ask)
        except Exception as error:
            result = _failure(ask, error)
        self._answered(ask, result)

    def _traced(self, ask: Ask) -> AbstractContextManager[None]:
        traced = self._tracing.step(ask.message) if isinstance(ask.message, RunStep) else None
        return traced or contextlib.nullcontext()

    def _answered(self, ask: Ask, result: Any) -> None:
        if isinstance(ask.message, RunStep):
            how = f"failed: {result}" if isinstance(result, TensorcastError) else "done"
            self._note("step answered", ask.message.key, f"{step_label(ask.message)} at {ask.to}: {how}")
        self._core.outbox.answered(ask, result, self._moment())

    async def _send(self, ask: Ask) -> Message:
        expected = ANSWERS[type(ask.message)]
        if ask.to == STORE:
            return await self._peers.store.call(ask.message, expected, ask.timeout_s)
        if ask.to != self._me:
            return await self._send_to(ask, expected)
        if isinstance(ask.message, RunStep):
            return StepDone(await self._executor.run(ask.message, ask.timeout_s))
        assert isinstance(ask.message, CancelSteps)
        self._executor.cancel(ask.message)
        return Ok()

    async def _send_to(self, ask: Ask, expected: type[Message]) -> Message:
        lanes = self._peers.lanes(ask.to)
        if (why := self._peers.without_service(ask.to)) is not None:
            raise InvalidArgument(why)  # at once: it will not learn it by the deadline
        if isinstance(ask.message, CancelSteps):
            return await lanes.cancels.call(ask.message, expected, ask.timeout_s)
        if not isinstance(ask.message, RunStep):
            return await lanes.plans.call(ask.message, expected, ask.timeout_s)
        async with lanes.steps.turn(ask.timeout_s, whose(ask.message)) as left_s:
            message = msgspec.structs.replace(
                ask.message, timeout_s=left_s
            )  # it ends by the plan's deadline all the same
            return await lanes.steps.call_now(message, expected, left_s)

    async def close(self) -> None:
        """Stops; another gateway goes on with what was under way."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for take_back in self._sent.values():
            take_back()
        self._sent.clear()
        tasks = list(self._asks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _failure(ask: Ask, error: Exception) -> TensorcastError:
    """What became of a request that ended like that."""
    if isinstance(error, TensorcastError):
        logger.debug("%s failed: %s", type(ask.message).__name__, error)
        return error
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("not done by the deadline")
    # A fault of our own ends the step, and not the gateway.
    logger.error("%s failed", type(ask.message).__name__, exc_info=error)
    return TensorcastError(f"{type(error).__name__}: {error}")
