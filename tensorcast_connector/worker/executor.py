"""Does steps of plans: its own worker's operations, and those of the engines attached to it (TensorCast, section 4.1)."""

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensorcast_connector.core.ledger import Known, Ledger
from tensorcast_connector.core.plan import INSTANCE_OPERATIONS
from tensorcast_connector.errors import InvalidArgument, NotFound, Unavailable, error_from_code
from tensorcast_connector.types import InstanceId
from tensorcast_connector.wire.plan_messages import CANCEL, CancelSteps, RunStep, StepEnded, StepTaken
from tensorcast_connector.worker.artifacts import Artifacts

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Order:
    """A step that an engine is to do."""

    taken: StepTaken
    answer: "asyncio.Future[Any]"


@dataclass(slots=True)
class _Instance:
    """An attached engine that does steps."""

    waiting: deque[_Order] = field(default_factory=deque)
    under_way: dict[int, _Order] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class Executor:
    """See the module.

    Args:
        resolve: (tenant, name or id) -> the id of an artifact.
        now: this worker's clock in seconds.
    """

    def __init__(
        self, artifacts: Artifacts, resolve: Callable[[str, str], Awaitable[str]], now: Callable[[], float]
    ) -> None:  # fmt: skip
        self._artifacts = artifacts
        self._resolve = resolve
        self._now = now
        self._ledger = Ledger()
        self._tasks: dict[int, asyncio.Task[Any]] = {}  # by the ledger's numbers
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = math.inf  # when it rings
        self._instances: dict[InstanceId, _Instance] = {}
        self._tickets = itertools.count(1)
        self._operations: Mapping[str, Callable[[str, dict[str, Any]], Awaitable[Any]]] = {
            "prefetch": self._prefetch,
            "pin": self._pin,
            "unpin": self._unpin,
        }

    async def run(self, message: RunStep) -> Any:
        """The result of a step. One that is under way is joined, one that was done is not done again.

        Raises:
            Conflict: it comes from a gateway that does not own the plan any more, or was cancelled.
            TensorcastError: what went wrong.
        """
        standing = self._ledger.begin(
            message.key, message.digest, message.epoch, message.step, message.timeout_s, self._now()
        )
        if isinstance(standing, Known):
            return standing.result
        if standing.fresh:
            task = asyncio.get_running_loop().create_task(self._do(standing.number, message))
            self._tasks[standing.number] = task
            task.add_done_callback(lambda done: self._ended(standing.number, done))
        self._stop_unwanted()
        task = self._tasks[standing.number]
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise  # who asked has gone; the step goes on for others, or until nobody waits for it
            raise Unavailable(f"step {message.step} of plan {message.key!r} was cancelled") from None

    def _ended(self, number: int, task: "asyncio.Task[Any]") -> None:
        del self._tasks[number]
        if task.cancelled() or task.exception() is not None:  # who waits for it gets it
            self._ledger.ended(number, done=False)

    async def _do(self, number: int, message: RunStep) -> Any:
        if message.operation in INSTANCE_OPERATIONS:
            result = await self._on_instance(message)
        elif message.operation in self._operations:
            tenant = message.key.partition("/")[0]
            result = await self._operations[message.operation](tenant, message.arguments)
        else:
            raise InvalidArgument(f"this worker does not know the operation {message.operation!r}")
        self._ledger.ended(number, done=True, result=result)
        return result

    def cancel(self, message: CancelSteps) -> None:
        """The steps are not wanted any more.

        Raises:
            Conflict: by a gateway that does not own the plan any more.
        """
        self._ledger.cancel(message.key, message.digest, message.epoch, message.steps, self._now())
        self._stop_unwanted()

    def _stop_unwanted(self) -> None:
        now = self._now()
        for number in self._ledger.stops(now):
            self._tasks[number].cancel()
        if (when := self._ledger.wake_at()) < self._wake_at:
            if self._timer is not None:
                self._timer.cancel()
            self._wake_at = when
            self._timer = asyncio.get_running_loop().call_later(max(0.0, when - now), self._ring)

    def _ring(self) -> None:
        self._timer, self._wake_at = None, math.inf
        self._stop_unwanted()

    # --- this worker's operations ---

    async def _prefetch(self, tenant: str, arguments: dict[str, Any]) -> Any:
        identity = await self._resolve(tenant, _text(arguments, "artifact"))
        copy = await self._artifacts.resident(identity)
        return {"artifact": identity, "bytes": copy.header.size}

    async def _pin(self, tenant: str, arguments: dict[str, Any]) -> Any:
        identity = await self._resolve(tenant, _text(arguments, "artifact"))
        ttl_s = arguments.get("ttl_s")
        if not isinstance(ttl_s, int | float) or not 0 < ttl_s < 1e18:
            raise InvalidArgument(f"a pin of {ttl_s!r} seconds")
        await self._artifacts.resident(identity)
        self._artifacts.residence.pin(identity, f"{tenant}/{arguments.get('pin', '')}", self._now() + ttl_s)
        return {"artifact": identity}

    async def _unpin(self, tenant: str, arguments: dict[str, Any]) -> Any:
        identity = await self._resolve(tenant, _text(arguments, "artifact"))
        self._artifacts.residence.unpin(identity, f"{tenant}/{arguments.get('pin', '')}")
        return {"artifact": identity}

    # --- engines' operations ---

    async def _on_instance(self, message: RunStep) -> Any:
        instance = self._instances.get(InstanceId(message.target))
        if instance is None:
            raise Unavailable(f"instance {message.target} is not attached here, or takes no steps just now")
        key = f"{message.key}/{message.step}"
        taken = StepTaken(next(self._tickets), message.operation, message.arguments, key, message.trace_id)
        order = _Order(taken, asyncio.get_running_loop().create_future())
        instance.waiting.append(order)
        instance.arrived.set()
        try:
            return await order.answer
        finally:
            if order in instance.waiting:
                instance.waiting.remove(order)
            elif instance.under_way.pop(taken.ticket, None) is not None:  # it does not know yet that nobody waits
                instance.waiting.append(_Order(StepTaken(taken.ticket, CANCEL), order.answer))
                instance.arrived.set()

    def attach(self, instance_id: InstanceId) -> None:
        """An engine does steps from now on."""
        self._instances.setdefault(instance_id, _Instance())

    def detach(self, instance_id: InstanceId) -> None:
        """It has gone; what it was doing may or may not have been done."""
        instance = self._instances.pop(instance_id, None)
        if instance is not None:
            for order in [*instance.waiting, *instance.under_way.values()]:
                if not order.answer.done():
                    order.answer.set_exception(Unavailable(f"instance {instance_id} has gone"))

    async def take(self, instance_id: InstanceId, wait_s: float) -> StepTaken:
        """The next step of an engine; without a ticket if there is none within `wait_s`."""
        instance = self._instances.get(instance_id)
        if instance is None:
            raise NotFound(f"instance {instance_id} is not attached")
        if not instance.waiting:
            instance.arrived.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await instance.arrived.wait()
            except TimeoutError:
                return StepTaken(0)
        if not instance.waiting:
            return StepTaken(0)
        order = instance.waiting.popleft()
        if order.taken.operation == CANCEL:
            return order.taken
        instance.under_way[order.taken.ticket] = order
        return order.taken

    def ended(self, instance_id: InstanceId, message: StepEnded) -> None:
        """An engine's answer; one that nobody waits for any more is fine."""
        instance = self._instances.get(instance_id)
        order = instance.under_way.pop(message.ticket, None) if instance is not None else None
        if order is None or order.answer.done():
            return
        if message.error:
            order.answer.set_exception(error_from_code(message.error, message.message))
        else:
            order.answer.set_result(message.result)

    async def close(self) -> None:
        """Ends what is under way."""
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _text(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise InvalidArgument(f"{name}={value!r} should be text")
    return value
