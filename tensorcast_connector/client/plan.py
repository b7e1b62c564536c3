"""Plans as callers write them (TensorCast, section 3.3).

    plan = session.plan()
    pages = plan.on_instance(a).publish(request="r-17")
    there = plan.on_worker(w).prefetch(pages["artifact"])
    plan.on_instance(b).hydrate(pages["artifact"]).after(there)
    outcome = await plan.run().result()

Nothing happens before `run`, which returns at once; the handle tells how it goes.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from tensorcast_connector.client.link import GatewayLink
from tensorcast_connector.config import PLAN_CONCURRENCY, PLAN_DEADLINE_S, STORE_TIMEOUT_S, WATCH_WAIT_S
from tensorcast_connector.core.plan import (
    DONE,
    PlanRecord,
    PlanSpec,
    StepOutcome,
    StepSpec,
    check_deadline,
    decode_record,
    digest_of,
    validate,
)
from tensorcast_connector.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Unavailable,
    error_from_code,
)
from tensorcast_connector.wire.messages import Message
from tensorcast_connector.wire.plan_messages import CancelPlan, PlanState, SubmitPlan, WaitPlan

NOT_WRITTEN = (TypeError, ValueError, OverflowError, RecursionError)
RETRY_S = 0.1  # between attempts to reach the gateway


@dataclass(frozen=True, slots=True)
class CallContext:
    """What all steps of a plan share (TensorCast, section 3.2).

    Attributes:
        timeout_s: from `run`; what has not ended then has failed.
        idempotency_key: running the same plan again under the same key joins it, or gets its outcome.
        trace_id: for logs and spans.
    """

    timeout_s: float = PLAN_DEADLINE_S
    idempotency_key: str = field(default_factory=lambda: secrets.token_hex(16))
    trace_id: str = field(default_factory=lambda: secrets.token_hex(16))


class ResultOf(NamedTuple):
    """What a step is going to result in, as an argument of another one."""

    step: "Step"
    key: str


class Step:
    """One step of a plan."""

    def __init__(self, plan: "Plan", operation: str, target: str, arguments: Mapping[str, Any]) -> None:
        self._plan = plan
        self._operation = operation
        self._target = target
        self._arguments = arguments
        self._after: list[Step] = []

    def __repr__(self) -> str:
        return f"<Step {self._operation} on {self._target}>"

    def __getitem__(self, key: str) -> ResultOf:
        """An item of its result, for another step's argument; the step itself stands for all of its result."""
        return ResultOf(self, key)

    def after(self, *steps: "Step") -> "Step":
        """Waits for these, besides those whose results it uses."""
        self._after += steps
        return self

    def spec(self, numbers: Mapping["Step", int]) -> StepSpec:
        """As it travels; raises InvalidArgument if it depends on a step of another plan."""
        label = f"{self._operation} on {self._target}"

        def number(step: "Step") -> int:
            if step not in numbers:
                raise InvalidArgument(f"{label} depends on a step of another plan ({step!r})")
            return numbers[step]

        arguments: dict[str, Any] = {}
        inputs: dict[str, tuple[int, str]] = {}
        for name, value in self._arguments.items():
            if isinstance(value, Step):
                inputs[name] = number(value), ""
            elif isinstance(value, ResultOf):
                inputs[name] = number(value.step), value.key
            else:
                arguments[name] = value
        return StepSpec(self._operation, self._target, arguments, inputs, tuple(number(each) for each in self._after))


class Referring(Protocol):
    """A handle to an artifact, of either kind."""

    @property
    def reference(self) -> str:
        """Its id or name."""


Reference = str | Referring | Step | ResultOf
"""An artifact by name or id, as a handle, or as a step results in it."""


def _artifact(reference: Reference) -> str | ResultOf:
    if isinstance(reference, Step):
        return reference["artifact"]
    if isinstance(reference, str | ResultOf):
        return reference
    if not hasattr(reference, "reference"):
        raise InvalidArgument(
            f"{reference!r:.64} is no artifact: neither a name, an id, a handle, nor what a step results in"
        )
    return reference.reference


class OnWorker:
    """The operations of a worker."""

    def __init__(self, plan: "Plan", worker: str) -> None:
        self._plan = plan
        self._worker = worker

    def prefetch(self, artifact: Reference) -> Step:
        """Makes an artifact resident there; results in {"artifact", "bytes"}."""
        return self._plan.add("prefetch", self._worker, {"artifact": _artifact(artifact)})

    def replicate(self, artifact: Reference, device: str) -> Step:
        """Brings it into the memory of a device there, for engines that load it; results in {"artifact", "device", "bytes"}."""
        return self._plan.add("replicate", self._worker, {"artifact": _artifact(artifact), "device": device})

    def pin(self, artifact: Reference, ttl_s: float, pin: str = "") -> Step:
        """Keeps it resident there for so long, or until `unpin`; results in {"artifact"}."""
        return self._plan.add("pin", self._worker, {"artifact": _artifact(artifact), "pin": pin, "ttl_s": ttl_s})

    def unpin(self, artifact: Reference, pin: str = "") -> Step:
        """Ends that; results in {"artifact"}."""
        return self._plan.add("unpin", self._worker, {"artifact": _artifact(artifact), "pin": pin})


class OnInstance:
    """The operations of an engine. What they take and result in is up to its adaptor (client/instance.py)."""

    def __init__(self, plan: "Plan", instance: str) -> None:
        self._plan = plan
        self._instance = instance

    def publish(self, **arguments: Any) -> Step:
        """Puts tensors of the engine into the pool; results in {"artifact", ...}."""
        return self._plan.add("publish", self._instance, arguments)

    def hydrate(self, artifact: Reference, **arguments: Any) -> Step:
        """Loads what was published into the engine."""
        return self._plan.add("hydrate", self._instance, {"artifact": _artifact(artifact), **arguments})

    def evict_local(self, **arguments: Any) -> Step:
        """Has the engine forget tensors of its own."""
        return self._plan.add("evict_local", self._instance, arguments)

    def transform_into(self, artifact: Reference, **arguments: Any) -> Step:
        """Fills the engine's parameters from an artifact, in the engine's own layout."""
        return self._plan.add("transform_into", self._instance, {"artifact": _artifact(artifact), **arguments})


class Plan:
    """See the module. Made by `Session.plan`."""

    def __init__(self, link: GatewayLink, context: CallContext) -> None:
        self._link = link
        self._steps: list[Step] = []
        self.context = context

    def __repr__(self) -> str:
        return f"<Plan of {len(self._steps)} steps, {self.context.idempotency_key}>"

    def on_worker(self, worker: str) -> OnWorker:
        """Steps that a worker does, by its name or id."""
        return OnWorker(self, worker)

    def on_instance(self, instance: str) -> OnInstance:
        """Steps that an engine does, by its id."""
        return OnInstance(self, instance)

    def add(self, operation: str, target: str, arguments: Mapping[str, Any]) -> Step:
        """A step; `on_worker` and `on_instance` are the usual way."""
        if not isinstance(target, str):
            raise InvalidArgument(f"a step is done by a worker or an engine, named by text, not by {target!r:.64}")
        self._steps.append(Step(self, operation, target, arguments))
        return self._steps[-1]

    def spec(self) -> PlanSpec:
        """As it travels.

        Raises:
            InvalidArgument: it cannot run; names the step.
        """
        numbers = {step: number for number, step in enumerate(self._steps)}
        spec = PlanSpec(tuple(step.spec(numbers) for step in self._steps))
        validate(spec)
        return spec

    def run(self, concurrency: int = PLAN_CONCURRENCY) -> "PlanHandle":
        """Begins it, `concurrency` steps at once at most; the handle tells how it goes.

        Raises:
            InvalidArgument: it cannot run; names the step.
            Conflict: this session runs another plan under that key just now; nothing was sent.
        """
        spec = self.spec()
        if not isinstance(concurrency, int) or concurrency < 1:
            raise InvalidArgument(f"concurrency={concurrency!r}: how many steps run at once, 1 or more")
        if not isinstance(self.context.timeout_s, int | float):
            raise InvalidArgument(f"timeout_s={self.context.timeout_s!r} is no number of seconds")
        if not self.context.timeout_s > 0:
            raise DeadlineExceeded(f"the plan's deadline has passed ({self.context.timeout_s:g} s from now)")
        check_deadline(self.context.timeout_s)
        plan, key = _encoded(spec), self.context.idempotency_key
        if any(each != plan for each in self._link.plans.get(key, ())):
            raise Conflict(
                f"the idempotency key {key!r} belongs to another plan, which this session runs just now; give each plan a "
                "CallContext of its own"
            )
        return PlanHandle(self._link, self._steps, self.context, plan, concurrency)


def _encoded(spec: PlanSpec) -> bytes:
    """Equal plans are equal bytes."""
    try:
        return msgspec.msgpack.encode(spec, order="deterministic")
    except NOT_WRITTEN:  # which step it is
        for number, step in enumerate(spec.steps):
            try:
                msgspec.msgpack.encode(step, order="deterministic")
            except NOT_WRITTEN as error:
                what = "an argument is neither text, bytes, number, list nor mapping by text"
                raise InvalidArgument(f"{step.label(number)}: {what}: {error}") from error
        raise


class PlanOutcome:
    """How a plan has ended: done. What has not is an error that `PlanHandle.result` raises."""

    def __init__(self, record: PlanRecord, steps: Sequence[Step]) -> None:
        self._record = record
        self._numbers = {step: number for number, step in enumerate(steps)}

    def __repr__(self) -> str:
        return f"<PlanOutcome of {len(self._numbers)} steps>"

    def __getitem__(self, step: Step) -> Any:
        """What a step resulted in."""
        return self.step(step).result

    def step(self, step: Step) -> StepOutcome:
        """How it went: its result, the attempts it took and the time. Raises InvalidArgument for a step of another plan."""
        if step not in self._numbers:
            raise InvalidArgument(f"{step!r} is no step of the plan that has ended here")
        return self._record.outcomes[self._numbers[step]]


class PlanHandle:
    """A plan that runs. Lazy: whoever does not want its result need not wait."""

    def __init__(
        self, link: GatewayLink, steps: Sequence[Step], context: CallContext, plan: bytes, concurrency: int
    ) -> None:
        self._link = link
        self._steps = tuple(steps)
        self._context = context
        self._record: PlanRecord | None = None
        self._submit = SubmitPlan(context.idempotency_key, plan, context.trace_id, context.timeout_s, concurrency, 0)
        self._until = asyncio.get_running_loop().time() + context.timeout_s
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(_seen)
        link.plans.setdefault(context.idempotency_key, []).append(plan)
        self._task.add_done_callback(lambda _: self._over(plan))

    def __repr__(self) -> str:
        return f"<PlanHandle {self._context.idempotency_key} {self.status}>"

    def _over(self, plan: bytes) -> None:
        """Another plan may have the key, as far as this session is concerned."""
        key = self._context.idempotency_key
        self._link.plans[key].remove(plan)
        if not self._link.plans[key]:
            del self._link.plans[key]

    async def _run(self) -> PlanRecord:
        """Asks until it has ended. Repeating that is safe: the key names the plan."""
        loop = asyncio.get_running_loop()
        submitted = False
        while True:
            # Soon after its deadline it has ended, or nobody knows.
            wait_s = min(max(self._until - loop.time(), 0.0) + STORE_TIMEOUT_S, WATCH_WAIT_S)
            message: Message = WaitPlan(self._context.idempotency_key, int(wait_s * 1000))
            if not submitted:
                left_s = max(self._until - loop.time(), 0.001)  # it may be begun anew
                message = msgspec.structs.replace(self._submit, wait_ms=int(wait_s * 1000), timeout_s=left_s)
            try:
                state = await self._link.call(message, PlanState, wait_s + STORE_TIMEOUT_S)
            except Unavailable as error:
                if loop.time() > self._until + STORE_TIMEOUT_S:
                    raise DeadlineExceeded(
                        f"plan {self._context.idempotency_key}: not known how it ended: {error}"
                    ) from None
                await asyncio.sleep(RETRY_S)
                continue
            except NotFound:
                if not submitted or loop.time() > self._until:
                    raise
                submitted = False  # its gateway has died before the plan was written down
                continue
            submitted = True
            record = decode_record(state.record)
            # The store may have lost ours, and since then somebody may have begun another one.
            if record.digest != digest_of(self._submit.plan):
                raise Conflict(f"the idempotency key {self._context.idempotency_key!r} belongs to another plan by now")
            self._record = record
            if self._record.finished:
                return self._record

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or another."""
        return self._task.done()

    @property
    def status(self) -> str:
        """running, done, failed or cancelled, as far as is known here."""
        if self._task.done() and not self._task.cancelled() and self._task.exception() is not None:
            return "failed"
        return self._record.state if self._record is not None else "running"

    async def wait(self, timeout_s: float) -> bool:
        """Whether it has ended; it is waited for so long at most."""
        return bool((await asyncio.wait([self._task], timeout=timeout_s))[0])

    async def result(self, timeout_s: float | None = None) -> PlanOutcome:
        """Its outcome, once it is done.

        Raises:
            DeadlineExceeded: not within `timeout_s`, and it goes on; or the plan's own deadline has passed.
            Cancelled: it was cancelled.
            TensorcastError: as the step failed that made it fail; names the step.
        """
        try:
            async with asyncio.timeout(timeout_s):
                record = await asyncio.shield(self._task)
        except TimeoutError:
            raise DeadlineExceeded(
                f"plan {self._context.idempotency_key} has not ended within {timeout_s:g} s"
            ) from None
        if record.state != DONE:
            raise error_from_code(record.error or InvalidArgument.code, record.message)
        return PlanOutcome(record, self._steps)

    async def cancel(self) -> None:
        """Ends it; what is done stays done. Fine if it has ended.

        Raises:
            Unavailable: the gateway that has it cannot be reached, and it goes on.
        """
        while not self._task.done():
            message = CancelPlan(self._context.idempotency_key)
            try:
                state = await self._link.call(message, PlanState, 2 * STORE_TIMEOUT_S)
            except NotFound:  # it has not begun yet
                await asyncio.wait([self._task], timeout=RETRY_S)
                continue
            self._record = decode_record(state.record)
            if self._record.finished:
                await asyncio.wait([self._task])


def _seen(task: "asyncio.Task[PlanRecord]") -> None:
    """Nobody has to ask how a plan went."""
    if not task.cancelled():
        task.exception()
