"""Does steps of plans: its own worker's operations, and those of the engines attached to it (TensorCast, section 4.1)."""

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensorcast_connector.config import NAME_CHARS_MAX
from tensorcast_connector.core.ledger import Known, Ledger, UnderWay
from tensorcast_connector.core.plan import INSTANCE_OPERATIONS
from tensorcast_connector.core.weights import decode_manifest, is_manifest
from tensorcast_connector.errors import InvalidArgument, NotFound, ProtocolError, Unavailable, error_from_code
from tensorcast_connector.types import InstanceId
from tensorcast_connector.wire.plan_messages import CANCEL, CancelSteps, RunStep, StepEnded, StepTaken
from tensorcast_connector.worker.artifacts import Artifacts, Copy
from tensorcast_connector.worker.devices import Devices
from tensorcast_connector.worker.names import Names
from tensorcast_connector.worker.recorder import Record, unrecorded

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
        names: what they stand for.
        now: this worker's clock in seconds.
        record: for the stories.
    """

    def __init__(
        self, artifacts: Artifacts, devices: Devices, names: Names, now: Callable[[], float], record: Record = unrecorded,
    ) -> None:  # fmt: skip
        self._artifacts = artifacts
        self._devices = devices
        self._names = names
        self._resolve = names.resolve
        self._now = now
        self._record = record
        self._ledger = Ledger()
        self._tasks: dict[int, asyncio.Task[Any]] = {}  # by the ledger's numbers
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = math.inf  # when it rings
        self._instances: dict[InstanceId, _Instance] = {}
        self._tickets = itertools.count(1)
        self._operations: Mapping[str, Callable[[str, dict[str, Any]], Awaitable[Any]]] = {
            "prefetch": self._prefetch,
            "replicate": self._replicate,
            "pin": self._pin,
            "unpin": self._unpin,
        }

    async def run(self, message: RunStep, wait_s: float | None = None) -> Any:
        """The result of a step. One that is under way is joined, one that was done is not done again.

        Args:
            message: the step.
            wait_s: how long it is waited for; None: as long as it takes.

        Raises:
            TimeoutError: that was not long enough.
            Conflict: it comes from a gateway that does not own the plan any more, or was cancelled.
            TensorcastError: what went wrong.
        """
        standing = self._begin(message)
        if isinstance(standing, Known):
            return standing.result
        if standing.fresh:
            if self._is_here(message):
                return self._done_at_once(standing.number, message)
            task = asyncio.get_running_loop().create_task(self._do(standing.number, message))
            self._tasks[standing.number] = task
            task.add_done_callback(lambda done: self._ended(standing.number, message, done))
        self._stop_unwanted()
        task = self._tasks[standing.number]
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise  # who asked has gone; the step goes on for others, or until nobody waits for it
            raise Unavailable(f"step {message.step} of plan {message.key!r} was cancelled") from None

    def waits_for_nobody(self, message: RunStep) -> bool:
        """Whether `at_once` can be asked."""
        return self._is_here(message) and not self._ledger.is_under_way(message.key, message.step)

    def at_once(self, message: RunStep) -> Any:
        """The result of a step that `waits_for_nobody`. Raises as `run`."""
        standing = self._begin(message)
        if isinstance(standing, Known):
            return standing.result
        return self._done_at_once(standing.number, message)

    def _begin(self, message: RunStep) -> Known | UnderWay:
        standing = self._ledger.begin(
            message.key, message.digest, message.epoch, message.step, message.timeout_s, self._now()
        )
        if isinstance(standing, Known):
            self._tell("step known", message, standing.result)
        elif standing.fresh:
            self._tell("step begun", message)
        return standing

    def _tell(self, what: str, message: RunStep, result: Any = None, why: str = "") -> None:
        """To the stories, in order, once what follows from it is on its way."""
        asyncio.get_running_loop().call_soon(self._write_down, what, message, result, why)

    def _write_down(self, what: str, message: RunStep, result: Any, why: str) -> None:
        """A step is found by its plan's key and by its artifact."""
        named = [each.get("artifact") for each in (message.arguments, result) if isinstance(each, Mapping)]
        names = [
            message.key.partition("/")[2],
            *(each for each in named if isinstance(each, str) and len(each) <= 2 * NAME_CHARS_MAX),
        ]
        self._record(what, message.key, names=names, cause=f"{step_label(message)}{why}")

    def _ended(self, number: int, message: RunStep, task: "asyncio.Task[Any]") -> None:
        del self._tasks[number]
        if task.cancelled() or task.exception() is not None:  # who waits for it gets it
            self._failed(number, message, "cancelled" if task.cancelled() else task.exception())

    def _failed(self, number: int, message: RunStep, why: object) -> None:
        self._tell("step failed", message, why=f": {why}")
        self._ledger.ended(number, done=False)

    def _done_at_once(self, number: int, message: RunStep) -> Any:
        """The result of a step that waits for nobody."""
        work = self._do(number, message)
        try:
            work.send(None)
            raise AssertionError("it waits, and all that it needs is here")
        except StopIteration as done:
            return done.value
        except Exception as error:
            self._failed(number, message, error)
            raise
        finally:
            work.close()
            self._stop_unwanted()

    async def _do(self, number: int, message: RunStep) -> Any:
        if message.operation in INSTANCE_OPERATIONS:
            result = await self._on_instance(message)
        elif message.operation in self._operations:
            tenant = message.key.partition("/")[0]
            result = await self._operations[message.operation](tenant, message.arguments)
        else:
            raise InvalidArgument(f"this worker does not know the operation {message.operation!r}")
        self._tell("step done", message, result)
        self._ledger.ended(number, done=True, result=result)
        return result

    def _is_here(self, message: RunStep) -> bool:
        """Whether a step waits for nobody: then a task, and the turns of the loop that it takes, would be all that it costs."""
        reference, tenant = message.arguments.get("artifact"), message.key.partition("/")[0]
        if message.operation not in ("prefetch", "pin", "unpin") or not isinstance(reference, str):
            return False
        identity = self._names.known(tenant, reference)
        if not identity or identity not in self._artifacts.residence:
            return False
        return message.operation == "unpin" or not is_manifest(self._artifacts.copy(identity).header.tensors)

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
        copies = await self._resident(tenant, arguments)
        return {"artifact": next(iter(copies)), "bytes": sum(each.header.size for each in copies.values())}

    async def _replicate(self, tenant: str, arguments: dict[str, Any]) -> Any:
        device = _text(arguments, "device")
        self._devices.table.check_device(device)  # before anything is fetched
        identity = await self._resolve(tenant, _text(arguments, "artifact"))
        copy = await self._artifacts.resident(identity)
        if is_manifest(copy.header.tensors):
            raise InvalidArgument(
                "a published version is in parts; on a device can be what engines have loaded (`weights/...`), or an artifact"
            )
        made = await self._devices.make(identity, device, copy)
        return {"artifact": identity, "device": device, "bytes": made.size}

    async def _pin(self, tenant: str, arguments: dict[str, Any]) -> Any:
        ttl_s = arguments.get("ttl_s")
        if not isinstance(ttl_s, int | float) or not 0 < ttl_s < 1e18:
            raise InvalidArgument(f"a pin of {ttl_s!r} seconds")
        pin = f"{tenant}/{arguments.get('pin', '')}"
        copies = await self._resident(tenant, arguments, lambda each: self._pin_one(each, pin, ttl_s))
        return {"artifact": next(iter(copies))}

    def _pin_one(self, identity: str, pin: str, ttl_s: float) -> None:
        self._artifacts.residence.pin(identity, pin, self._now() + ttl_s)

    async def _unpin(self, tenant: str, arguments: dict[str, Any]) -> Any:
        identity = await self._resolve(tenant, _text(arguments, "artifact"))
        for each in [
            identity,
            *(self._parts(self._artifacts.copy(identity)) if identity in self._artifacts.residence else ()),
        ]:
            self._artifacts.residence.unpin(each, f"{tenant}/{arguments.get('pin', '')}")
        return {"artifact": identity}

    async def _resident(
        self, tenant: str, arguments: Mapping[str, Any], arrived: Callable[[str], None] = lambda _: None
    ) -> dict[str, Copy]:
        """An artifact, and if it is a published version its parts; each is told to `arrived` when it is here."""
        identity = await self._resolve(tenant, _text(arguments, "artifact"))
        found = {identity: await self._artifacts.resident(identity)}
        arrived(identity)
        for each in self._parts(found[identity]):
            part = await self._resolve(tenant, each)
            found[part] = await self._artifacts.resident(part)
            arrived(part)
        return found

    @staticmethod
    def _parts(copy: Copy) -> list[str]:
        """Of a published version; an artifact has none."""
        if not is_manifest(copy.header.tensors):
            return []
        try:
            return sorted(decode_manifest(bytes(copy.blob.view)).part_ids)
        except ProtocolError as error:
            raise InvalidArgument(f"it cannot be read as a published version: {error}") from error

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


def step_label(message: RunStep) -> str:
    """For people."""
    return f"step {message.step} ({message.operation} on {message.target})"


def _text(arguments: Mapping[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise InvalidArgument(f"{name}={value!r} should be text")
    return value
