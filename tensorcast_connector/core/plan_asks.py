"""What the plans of a gateway ask of its worker: requests to others, answers to callers, and to be told the time.

No I/O and no clock: `Outbox` collects what is to be done, whoever owns it carries that out.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensorcast_connector.config import STORE_TIMEOUT_S
from tensorcast_connector.core.plan import PlanRecord, decode_record, plan_key
from tensorcast_connector.errors import TensorcastError
from tensorcast_connector.types import WorkerId
from tensorcast_connector.wire.messages import Message
from tensorcast_connector.wire.plan_messages import PlanState
from tensorcast_connector.wire.store_messages import ReadRecords

STORE = WorkerId("")


class Moment(NamedTuple):
    """When something happens."""

    now: float  # by this worker's clock
    unix_s: float  # seconds since 1970, which deadlines are kept by in the store


Result = Any
"""The reply to a message, or a TensorcastError."""


@dataclass(eq=False, slots=True)
class Ask:
    """A request to send. What came of it goes to `Outbox.answered`."""

    to: WorkerId  # STORE, or the worker, which may be this one
    message: Message
    timeout_s: float
    then: Callable[[Result, Moment], None]


@dataclass(frozen=True, slots=True)
class Drop:
    """The answer to that request is not wanted any more."""

    ask: Ask


@dataclass(frozen=True, slots=True)
class Answer:
    """What the caller with that ticket is told."""

    ticket: int
    result: PlanState | TensorcastError


@dataclass(frozen=True, slots=True)
class Began:
    """A plan runs here from now on."""

    key: str
    record: PlanRecord


@dataclass(frozen=True, slots=True)
class Over:
    """It does not any more: this is its end, or (None) another gateway has it."""

    key: str
    record: PlanRecord | None


Out = Ask | Drop | Answer | Began | Over


@dataclass(eq=False, slots=True)
class Alarm:
    """What is to happen at some time. Once it has happened, or was cancelled, it holds nothing."""

    when: float
    action: Callable[[Moment], None] | None


class Outbox:
    """See the module."""

    def __init__(self) -> None:
        self._out: list[Out] = []
        self._alarms: list[tuple[float, int, Alarm]] = []  # a heap; some were cancelled
        self._cancelled = 0
        self._count = 0

    def ask(
        self, to: WorkerId, message: Message, timeout_s: float, then: Callable[[Result, Moment], None]
    ) -> Ask:  # fmt: skip
        """Sends a request; `then` gets what came of it."""
        ask = Ask(to, message, timeout_s, then)
        self._out.append(ask)
        return ask

    def read(self, key: str, then: Callable[[PlanRecord | None, int, Any, Moment], None]) -> None:
        """Reads a plan's record; `then` gets it, its revision, and why it could not be read."""

        def came(result: Result, at: Moment) -> None:
            if isinstance(result, TensorcastError):
                then(None, 0, result, at)
            else:
                entry = next((each for each in result.entries if each.key == plan_key(key)), None)
                then(decode_record(entry.value) if entry else None, entry.revision if entry else 0, None, at)

        self.ask(STORE, ReadRecords(plan_key(key)), STORE_TIMEOUT_S, came)

    def tell(self, what: Drop | Answer | Began | Over) -> None:
        """To be done as well."""
        self._out.append(what)

    def poll(self) -> list[Out]:
        """What is to be done now."""
        out, self._out = self._out, []
        return out

    def answered(self, ask: Ask, result: Result, at: Moment) -> None:
        """What came of a request, once."""
        ask.then(result, at)

    def tick(self, at: Moment) -> None:
        """Time has passed."""
        due = []
        while self._alarms and self._alarms[0][0] <= at.now:
            due.append(heapq.heappop(self._alarms)[2])
        for alarm in due:
            action, alarm.action = alarm.action, None
            if action is not None:
                action(at)
            else:
                self._cancelled -= 1

    def wake_at(self) -> float:
        """When to tick, if nothing else happens."""
        while self._alarms and self._alarms[0][2].action is None:
            heapq.heappop(self._alarms)
            self._cancelled -= 1
        return self._alarms[0][0] if self._alarms else float("inf")

    def alarm(self, when: float, action: Callable[[Moment], None]) -> Alarm:
        """`action` happens then."""
        self._count += 1
        alarm = Alarm(when, action)
        heapq.heappush(self._alarms, (when, self._count, alarm))
        return alarm

    def cancel(self, alarm: Alarm | None) -> None:
        """It does not happen, and what it would have done is let go; fine if it has happened, or there is none."""
        if alarm is None or alarm.action is None:
            return
        alarm.action = None
        self._cancelled += 1
        if self._cancelled > len(self._alarms) // 2 + 16:
            self._alarms = [each for each in self._alarms if each[2].action is not None]
            heapq.heapify(self._alarms)
            self._cancelled = 0
