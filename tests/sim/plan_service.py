"""Plans in a worker process: the production gateway and ledger, as worker/plans.py and worker/executor.py drive them.

What a step does takes a while and has one effect when it ends: on a worker at once, on an engine once per key, however often the
step comes. Every effect has a result of its own, so that doing a step twice is seen.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tensorcast_connector.config import SILENCE_MAX_S
from tensorcast_connector.core.gateway_plans import GatewayPlans
from tensorcast_connector.core.ledger import Known, Ledger
from tensorcast_connector.core.plan import INSTANCE_OPERATIONS, decode_plan
from tensorcast_connector.core.plan_asks import STORE, Ask, Drop, Moment
from tensorcast_connector.core.plan_asks import Answer as Told
from tensorcast_connector.errors import NotFound, TensorcastError, Unavailable, error_from_code
from tensorcast_connector.wire.messages import Failure, Message, Ok
from tensorcast_connector.wire.plan_messages import (
    CancelOwnedPlan,
    CancelPlan,
    CancelSteps,
    RunStep,
    StepDone,
    SubmitPlan,
    WaitPlan,
)
from tests.sim import store_process
from tests.sim.network import Answer
from tests.sim.world import QUIET

if TYPE_CHECKING:
    from tests.sim.worker_process import WorkerProcess

TENANT = "t"
MESSAGES = (SubmitPlan, WaitPlan, CancelPlan, CancelOwnedPlan, RunStep, CancelSteps)
FLAKY, BROKEN, SLOW = "flaky", "broken", "slow"  # artifacts that a step has its way with
SLOW_STEP_MAX_S = 6.0
STEP_MAX_S = 0.06
RINGS_MAX = 20


class PlanService:
    """See the module.

    Args:
        wall_offset_s: by how much this host's wall clock is wrong.
    """

    def __init__(self, worker: "WorkerProcess", wall_offset_s: float) -> None:
        self.worker = worker
        self.world = worker.world
        self._wall_offset_s = wall_offset_s
        plane = worker.metadata
        self.core = GatewayPlans(
            worker.name, plane.view, self.world.random.random, lambda: plane.member.lease_id, "gateway" in worker.roles  # type: ignore[arg-type]
        )  # fmt: skip
        self.ledger = Ledger()
        self.doing: dict[int, RunStep] = {}  # by the ledger's numbers
        self._joined: dict[int, list[Answer]] = {}
        self._orders: dict[int, set[int]] = {}  # connection of an engine -> what it was told to do
        self._callers: dict[int, Answer] = {}
        self._asks: set[Ask] = set()
        self._tickets = 0
        self._effects = 0
        self._alarm = float("inf")
        self._rings = 0  # of the alarm, one right after the other
        self._rung_at = 0.0

    # --- messages ---

    def receive(self, message: Any, answer: Answer) -> object:
        """A request of a caller or of another gateway has arrived."""
        try:
            if isinstance(message, RunStep):
                self._run(message, answer)
            elif isinstance(message, CancelSteps):
                self._cancel(message)
                answer(Ok())
            else:
                self._caller(message, answer)
        except TensorcastError as error:
            self.world.counts["step refused"] += isinstance(message, RunStep)
            self.world.note(self.worker.name, "refuses", type(message).__name__, message.key, str(error))
            answer(Failure(error.code, str(error)))
        self._stop_unwanted()
        self.pump()
        return QUIET

    def _caller(self, message: Any, answer: Answer) -> None:
        self._tickets += 1
        ticket, at, core = self._tickets, self._moment(), self.core
        key = message.key if isinstance(message, CancelOwnedPlan) else f"{TENANT}/{message.key}"
        if isinstance(message, SubmitPlan):
            core.submit(
                ticket, key, decode_plan(message.plan), message.trace_id, message.timeout_s, message.concurrency,
                message.wait_ms / 1000, at,
            )  # fmt: skip
        elif isinstance(message, WaitPlan):
            core.wait(ticket, key, message.wait_ms / 1000, at)
        else:
            core.cancel(ticket, key, isinstance(message, CancelPlan), at)
        self._callers[ticket] = answer

    # --- the gateway ---

    def _moment(self) -> Moment:
        return Moment(self.worker.clock(), store_process.EPOCH_UNIX_S + self.world.now + self._wall_offset_s)

    def view_changed(self) -> None:
        """The store has told something."""
        self.core.view_changed(self._moment())
        self.pump()

    def pump(self) -> None:
        """Does what the gateway wants done, and sets its alarm."""
        outbox = self.core.outbox
        outbox.tick(self._moment())
        while out := outbox.poll():
            for each in out:
                if isinstance(each, Ask):
                    self._send(each)
                elif isinstance(each, Drop):
                    self._asks.discard(each.ask)
                elif isinstance(each, Told) and (answer := self._callers.pop(each.ticket, None)) is not None:
                    result = each.result
                    failed = isinstance(result, TensorcastError)
                    answer(Failure(result.code, str(result)) if failed else result)  # type: ignore[union-attr, arg-type]
        when = outbox.wake_at()
        if when < self._alarm:
            self._alarm = when
            self.world.schedule(
                max(self.worker.clock.when(when), self.world.now) + 1e-6, self.worker, self._ring, when
            )  # fmt: skip

    def _ring(self, when: float) -> object:
        if when != self._alarm:
            return False
        self._alarm = float("inf")
        self._rings = self._rings + 1 if self.world.now < self._rung_at + 1e-4 else 0
        self._rung_at = self.world.now
        self.world.require(self._rings < RINGS_MAX, f"{self.worker.name} is woken again and again for plans")
        self.pump()
        return QUIET

    def _send(self, ask: Ask) -> None:
        message, worker = ask.message, self.worker
        self._asks.add(ask)
        if isinstance(message, RunStep):
            self.world.counts["step dispatched"] += 1
            self.world.tell("dispatched", worker, message)
        if ask.to == worker.name:
            self._serve_myself(ask)
            return
        # A connection on which nothing comes back is given up; long steps are asked for again meanwhile, and joined.
        timeout_s = min(ask.timeout_s, SILENCE_MAX_S) if isinstance(message, RunStep) else ask.timeout_s
        to = store_process.STORE if ask.to == STORE else ask.to
        if to != store_process.STORE and to not in worker.metadata.view.workers:
            worker.after(0.001, self._came, ask, Unavailable("it has left"))
            return
        worker.network.call(worker, to, message, timeout_s, lambda result, _: self._came(ask, result))

    def _serve_myself(self, ask: Ask) -> None:
        def answer(reply: Message, payload: bytes = b"") -> None:
            failed = isinstance(reply, Failure)
            result = error_from_code(reply.code, reply.message) if failed else reply  # type: ignore[attr-defined]
            self.worker.after(0.0, self._came, ask, result)

        self.worker.after(0.0, self.receive, ask.message, answer)

    def _came(self, ask: Ask, result: Message | TensorcastError) -> object:
        if ask not in self._asks:
            return False
        self._asks.discard(ask)
        if isinstance(result, TensorcastError):
            self.world.note(self.worker.name, "fails", type(ask.message).__name__, str(result))
        self.core.outbox.answered(ask, result, self._moment())
        self.pump()
        return QUIET

    # --- the executor ---

    def _run(self, message: RunStep, answer: Answer) -> None:
        standing = self.ledger.begin(
            message.key, message.digest, message.epoch, message.step, message.timeout_s, self.worker.clock()
        )
        self.world.tell("step_taken", self.worker, message, standing)
        if isinstance(standing, Known):
            self.world.counts["step known"] += 1
            answer(StepDone(standing.result))
            return
        self._joined.setdefault(standing.number, []).append(answer)
        if not standing.fresh:
            self.world.counts["step joined"] += 1
            return
        self.doing[standing.number] = message
        self.world.note(self.worker.name, "begins", f"{message.key}/{message.step}", str(message.epoch))
        self.worker.after(message.timeout_s, self._stop_unwanted)
        if message.operation in INSTANCE_OPERATIONS:
            self._order(standing.number, message)
        else:
            self.worker.after(self._duration(message), self._done_here, standing.number)

    def _duration(self, message: RunStep) -> float:
        chance = self.world.random.random()
        return chance * (SLOW_STEP_MAX_S if message.arguments.get("artifact") == SLOW else STEP_MAX_S)

    def _done_here(self, number: int) -> object:
        message = self.doing.get(number)
        if message is None:
            return False
        artifact = message.arguments["artifact"]
        if artifact == BROKEN:
            self.ended(number, NotFound("there is no such artifact"))
        elif artifact == FLAKY and self.world.random.random() < 0.5:
            self.ended(number, Unavailable("no way to it just now"))
        else:
            self._effects += 1
            self.ended(number, {"artifact": f"{message.key}/{message.step} by {self.worker.name}, {self._effects}"})
        return QUIET

    def ended(self, number: int, result: Any) -> object:
        """What was under way has ended: a result, or an error."""
        self._stop_unwanted()
        message = self.doing.pop(number, None)
        if message is None:
            return False
        failed = isinstance(result, TensorcastError)
        self.ledger.ended(number, not failed, None if failed else result)
        if not failed:
            self.world.note(self.worker.name, "has done", f"{message.key}/{message.step}", result)
            self.world.tell("step_done", self.worker, message, result)
        for orders in self._orders.values():
            orders.discard(number)
        for answer in self._joined.pop(number):
            answer(Failure(result.code, str(result)) if failed else StepDone(result))
        return QUIET

    def _cancel(self, message: CancelSteps) -> None:
        self.ledger.cancel(message.key, message.digest, message.epoch, message.steps, self.worker.clock())
        self.world.tell("steps_cancelled", self.worker, message)

    def _stop_unwanted(self) -> object:
        unwanted = self.ledger.stops(self.worker.clock())
        for number in unwanted:
            self.world.counts["step stopped"] += 1
            del self.doing[number]
            for answer in self._joined.pop(number):
                answer(Failure(Unavailable.code, "cancelled"))
        return QUIET if unwanted else False

    # --- engines ---

    def _order(self, number: int, message: RunStep) -> None:
        sessions = self.worker.sessions.items()
        session = next((each for each, one in sessions if one.listed and one.listed.instance_id == message.target), 0)
        engine: Any = self.world.processes.get(message.target)
        connection = engine.connection if engine is not None else None
        if connection is None or connection.worker is not self.worker or connection.session != session:
            self.worker.after(0.0, self.ended, number, Unavailable("not attached here"))
            return
        self._orders.setdefault(session, set()).add(number)

        def done(result: Any) -> None:
            connection.tell(lambda _: self.ended(number, result))

        connection.reply(engine.do_step, f"{message.key}/{message.step}", self._duration(message), done)

    def connection_ended(self, session: int) -> None:
        """An engine has gone, or its connection."""
        for number in self._orders.pop(session, set()):
            self.worker.after(0.0, self.ended, number, Unavailable("the engine has gone"))


Done = Callable[[Any], None]
"""Gets what an engine's step resulted in."""
