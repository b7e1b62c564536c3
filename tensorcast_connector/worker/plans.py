"""A gateway's plans: carries out what core/gateway_plans says, and tells it the time."""

import asyncio
import contextlib
import itertools
import logging
import math
import random
from collections.abc import Callable
from typing import Any

import msgspec

from tensorcast_connector.core.gateway_plans import GatewayPlans
from tensorcast_connector.core.plan import CANCELLED, DONE, FAILED, check_key, decode_plan
from tensorcast_connector.core.plan_asks import STORE, Answer, Ask, Began, Drop, Moment, Over
from tensorcast_connector.errors import DeadlineExceeded, TensorcastError
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
from tensorcast_connector.worker.executor import Executor
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
        self._core = GatewayPlans(me, peers.metadata.view, chance.random, adopts)
        self._tickets = itertools.count(1)
        self._callers: dict[int, asyncio.Future[PlanState]] = {}
        self._asks: dict[Ask, asyncio.Task[None]] = {}
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

    def _pump(self) -> None:
        if self._closed:
            return
        outbox = self._core.outbox
        for each in outbox.poll():
            if isinstance(each, Ask):
                self._spawn(each)
            elif isinstance(each, Drop):
                if each.ask in self._asks:
                    self._asks[each.ask].cancel()
            elif isinstance(each, Answer):
                self._tell(each)
            elif isinstance(each, Began):
                self._tracing.began(each.key, each.record)
            else:
                self._ended(each)
        if (when := outbox.wake_at()) < self._wake_at:
            if self._timer is not None:
                self._timer.cancel()
            self._wake_at = when
            self._timer = asyncio.get_running_loop().call_later(max(0.0, when - self._now()), self._tick)

    def _ended(self, over: Over) -> None:
        self._tracing.over(over.key, over.record)
        if over.record is not None:
            self.counters[over.record.state] += 1
            fields = {
                "event": "plan-ended",
                "plan": over.key,
                "state": over.record.state,
                "trace_id": over.record.trace_id,
            }
            what = f"{over.record.state}{': ' if over.record.message else ''}{over.record.message}"
            logger.info("plan %r of %d steps: %s", over.key, len(over.record.plan.steps), what, extra=fields)

    def _spawn(self, ask: Ask) -> None:
        task = self._asks[ask] = asyncio.get_running_loop().create_task(self._carry(ask))
        task.add_done_callback(lambda _: self._asks.pop(ask))

    def _tell(self, answer: Answer) -> None:
        future = self._callers.get(answer.ticket)
        if future is None or future.done():
            return
        if isinstance(answer.result, TensorcastError):
            future.set_exception(answer.result)
        else:
            future.set_result(answer.result)

    async def _carry(self, ask: Ask) -> None:
        traced = self._tracing.step(ask.message) if isinstance(ask.message, RunStep) else contextlib.nullcontext()
        try:
            with traced:
                result: Any = await self._send(ask)
        except TensorcastError as error:
            logger.debug("%s failed: %s", type(ask.message).__name__, error)
            result = error
        except TimeoutError:
            result = DeadlineExceeded("not done by the deadline")
        except Exception as error:  # a fault of our own ends the step, and not the gateway
            logger.exception("%s failed", type(ask.message).__name__)
            result = TensorcastError(f"{type(error).__name__}: {error}")
        self._core.outbox.answered(ask, result, self._moment())
        self._pump()

    async def _send(self, ask: Ask) -> Message:
        expected = ANSWERS[type(ask.message)]
        if ask.to == STORE:
            return await self._peers.store.call(ask.message, expected, ask.timeout_s)
        if ask.to != self._me:
            return await self._send_to(ask, expected)
        if isinstance(ask.message, RunStep):
            async with asyncio.timeout(ask.timeout_s):
                return StepDone(await self._executor.run(ask.message))
        assert isinstance(ask.message, CancelSteps)
        self._executor.cancel(ask.message)
        return Ok()

    async def _send_to(self, ask: Ask, expected: type[Message]) -> Message:
        lanes = self._peers.lanes(ask.to)
        if isinstance(ask.message, CancelSteps):
            return await lanes.cancels.call(ask.message, expected, ask.timeout_s)
        if not isinstance(ask.message, RunStep):
            return await lanes.plans.call(ask.message, expected, ask.timeout_s)
        async with lanes.steps.turn(ask.timeout_s) as left_s:
            message = msgspec.structs.replace(
                ask.message, timeout_s=left_s
            )  # it ends by the plan's deadline all the same
            return await lanes.steps.call_now(message, expected, left_s)

    async def close(self) -> None:
        """Stops; another gateway goes on with what was under way."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._asks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
