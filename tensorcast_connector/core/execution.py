"""One plan's execution at the gateway that owns it: what to write, what to dispatch, when to try again, when it has ended.

    for instruction in execution.start(record or None, now): do it
    ... = execution.handle(event, now)        events: Written, Conflicted, Succeeded, Failed, Cancel, Tick, ...

The rules (architecture: consistency of plans): the record is in the store before anything is dispatched; only its owner
changes it, by compare-and-swap; what others see is what is in the record. An owner that loses a compare-and-swap stops and
follows, unless the record that it finds is what it tried to write itself and was not told of. No I/O and no chance: backoff is
drawn by who calls.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tensorcast_connector.config import PLAN_BYTES_MAX, PLAN_RETRY_DELAY_MAX_S, PLAN_RETRY_DELAY_MIN_S
from tensorcast_connector.core.plan import (
    CANCELLED,
    DONE,
    FAILED,
    SKIPPED,
    PlanRecord,
    StepOutcome,
    ready,
    resolve,
    same_record,
)
from tensorcast_connector.errors import (
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    TensorcastError,
    Unavailable,
)

RETRIED = (Unavailable, Exhausted)
MESSAGE_CHARS_MAX = 2000  # of an error, in the record


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Writes the record if its revision is still `revision` (0: there is none)."""

    record: PlanRecord
    revision: int


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Has a step done; answered by Succeeded or Failed with the same attempt."""

    step: int
    attempt: int
    arguments: dict[str, object]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CancelStep:
    """The answer to that attempt is not wanted any more."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The record is what it will stay."""

    record: PlanRecord


@dataclass(frozen=True, slots=True)
class Follow:
    """Somebody else owns the plan, as this record says, or its record has gone (None)."""

    found: PlanRecord | None
    revision: int


Instruction = WriteRecord | Dispatch | CancelStep | Finish | Follow


@dataclass(frozen=True, slots=True)
class Written:
    """The record was written, at this revision."""

    revision: int


@dataclass(frozen=True, slots=True)
class Conflicted:
    """It was not, since this record is there (None: it has gone): somebody else's, or one of ours that was answered late."""

    found: PlanRecord | None
    revision: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Whether it was written is not known."""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """It was not written, since a record of that size cannot be."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Succeeded:
    """A step is done."""

    step: int
    attempt: int
    result: object


@dataclass(frozen=True, slots=True)
class Failed:
    """An attempt of a step failed."""

    step: int
    attempt: int
    error: TensorcastError


@dataclass(frozen=True, slots=True)
class Cancel:
    """The caller does not want it any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Written | Conflicted | WriteFailed | TooLarge | Succeeded | Failed | Cancel | Tick


@dataclass(slots=True)
class _Attempt:
    number: int
    started_at: float
    first_at: float


class PlanExecution:
    """See the module.

    Args:
        record: as it is to be written first, with this gateway as its owner.
        revision: of the record that this replaces; 0: there is none.
        deadline: by the clock of `now`.
        jitter: a number from 0 to 1, by which retries are spread.
    """

    def __init__(self, record: PlanRecord, revision: int, deadline: float, jitter: Callable[[], float]) -> None:
        self._record = record
        self._revision = revision
        self._deadline = deadline
        self._jitter = jitter
        self._outcomes = {step: each for step, each in record.outcomes.items() if each.state == DONE}
        steps = record.plan.steps
        # What each step waits for, and those that wait for nothing (a heap).
        self._left = {step: each.needs - set(self._outcomes) for step, each in enumerate(steps)}
        self._fresh = [step for step, left in self._left.items() if not left and step not in self._outcomes]
        self._followers: dict[int, list[int]] = {}
        for step, left in self._left.items():
            for need in left:
                self._followers.setdefault(need, []).append(step)
        self._running: dict[int, _Attempt] = {}
        self._waiting: dict[int, tuple[float, int, float]] = {}  # to be tried again: when, attempts so far, first start
        self._why: dict[int, str] = {}  # the last error of a step that is tried again
        self._writing: PlanRecord | None = None
        self._written: PlanRecord | None = None
        self._changed = True  # since what was last to be written
        self._tried: list[PlanRecord] = []  # may have been written since then: nobody has told
        self._write_at = 0.0
        self._write_failures = 0  # one after the other
        self._ended: tuple[str, str, str] | None = None  # state, error, message
        self._stripped = False  # of results, since they did not fit
        self._over = False

    def __repr__(self) -> str:
        return f"<PlanExecution {len(self._outcomes)} of {len(self._record.plan.steps)} steps, {len(self._running)} running>"

    @property
    def record(self) -> PlanRecord:
        """As it was to be written first."""
        return self._record

    @property
    def written(self) -> PlanRecord | None:
        """As it is in the store, as far as is known; None before it is there."""
        return self._written

    def start(self, now: float) -> list[Instruction]:
        """The record comes first."""
        return self._next(now)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """What to do after something has happened."""
        if self._over:
            return []
        if isinstance(event, Written):
            self._known(self._writing, event.revision)
        elif isinstance(event, Conflicted):
            if (own := self._own(event.found)) is None:
                return self._stop(event)
            self._known(own, event.revision)
        elif isinstance(event, WriteFailed):
            self._writing = None
            self._changed = True
            self._write_failures += 1
            self._write_at = now + self._delay(self._write_failures)
        elif isinstance(event, TooLarge):
            if self._stripped:
                return self._give_up(event)
            self._too_large(event)
        elif isinstance(event, Succeeded):
            self._succeeded(event, now)
        elif isinstance(event, Failed):
            self._failed(event, now)
        elif isinstance(event, Cancel):
            self._end(CANCELLED, Cancelled.code, "cancelled by its caller")
        return self._next(now)

    def wake_at(self) -> float:
        """When to tick, if nothing else happens."""
        if self._over:
            return float("inf")
        times = [self._deadline] if self._ended is None else []
        if len(self._running) < self._record.concurrency:  # else the next answer makes room for a step that is due
            times += [at for at, _, _ in self._waiting.values()]
        if self._writing is None and self._write_at:
            times.append(self._write_at)
        return min(times, default=float("inf"))

    # --- the record ---

    def _own(self, found: PlanRecord | None) -> PlanRecord | None:
        """What was found, if this execution wrote it, and not one with the same owner before it."""
        return next((each for each in self._tried if found is not None and same_record(found, each)), None)

    def _known(self, written: PlanRecord | None, revision: int) -> None:
        self._revision, self._written, self._writing = revision, written, None
        self._write_failures = 0
        self._changed |= written is not self._tried[-1]
        self._tried.clear()

    def _too_large(self, event: TooLarge) -> None:
        """Nobody has seen the results, so the plan has failed instead."""
        self._writing = None
        self._changed = True
        self._tried.pop()
        message = f"the results of its steps make a record of {event.bytes} bytes; the limit is {PLAN_BYTES_MAX}"
        self._outcomes = {
            step: msgspec.structs.replace(each, result=None, message=each.message[:MESSAGE_CHARS_MAX])
            for step, each in self._outcomes.items()
        }
        self._ended = FAILED, Exhausted.code, message
        self._stripped = True

    def _give_up(self, event: TooLarge) -> list[Instruction]:
        """Without results it does not fit either: it has failed for who waits, and nothing is written any more."""
        self._over = True
        message = f"its record has {event.bytes} bytes without any results; the limit is {PLAN_BYTES_MAX}"
        failed = msgspec.structs.replace(self._record, state=FAILED, error=Exhausted.code, message=message)
        return [*self._cancel_all(), Finish(failed)]

    # --- steps ---

    def _succeeded(self, event: Succeeded, now: float) -> None:
        attempt = self._running.get(event.step)
        if attempt is not None and attempt.number == event.attempt:
            del self._running[event.step]
            seconds = now - attempt.first_at
            self._outcomes[event.step] = StepOutcome(DONE, event.result, attempts=event.attempt, seconds=seconds)
            self._changed = True
            for step in self._followers.get(event.step, ()):
                self._left[step].discard(event.step)
                if not self._left[step]:
                    heapq.heappush(self._fresh, step)

    def _failed(self, event: Failed, now: float) -> None:
        attempt = self._running.get(event.step)
        if attempt is None or attempt.number != event.attempt:
            return
        del self._running[event.step]
        again_at = now + self._delay(event.attempt)
        if isinstance(event.error, RETRIED) and again_at < self._deadline:
            self._waiting[event.step] = again_at, event.attempt, attempt.first_at
            self._why[event.step] = str(event.error)
            return
        label = self._record.plan.steps[event.step].label(event.step)
        message = f"{label}: {event.error}"[:MESSAGE_CHARS_MAX]
        self._outcomes[event.step] = StepOutcome(
            FAILED, None, event.error.code, message, event.attempt, now - attempt.first_at
        )
        self._end(FAILED, event.error.code, message)

    def _delay(self, attempt: int) -> float:
        """Doubles with every attempt; from a half to all of it."""
        most = min(PLAN_RETRY_DELAY_MIN_S * 2 ** min(attempt - 1, 30), PLAN_RETRY_DELAY_MAX_S)
        return float(most * (0.5 + 0.5 * self._jitter()))

    def _end(self, state: str, error: str, message: str) -> None:
        """Nothing new is begun. The first reason counts."""
        self._changed = True
        if self._ended is None:
            self._ended = state, error, message[:MESSAGE_CHARS_MAX]

    # --- what comes next ---

    def _next(self, now: float) -> list[Instruction]:
        if now >= self._deadline and self._ended is None and len(self._outcomes) < len(self._record.plan.steps):
            self._end(FAILED, DeadlineExceeded.code, self._late())
        done: list[Instruction] = []
        if self._written is not None and self._written.finished:
            self._over = True
            return [*self._cancel_all(), Finish(self._written)]
        if self._ended is not None:
            done += self._cancel_all()
        elif len(self._outcomes) == len(self._record.plan.steps):
            self._end(DONE, "", "")
        elif self._written is not None:
            done += self._dispatch(now)
        return [*done, *self._write(now)]

    def _late(self) -> str:
        unfinished = sorted({*self._running, *self._waiting}) or list(ready(self._record.plan, self._outcomes))
        labels = [self._record.plan.steps[each].label(each) for each in unfinished[:3]]
        why = next((f"; tried again because: {self._why[each]}" for each in unfinished if each in self._why), "")
        return f"the deadline passed before {', '.join(labels)} had ended{why}"

    def _dispatch(self, now: float) -> list[Instruction]:
        done: list[Instruction] = []
        due = [step for step, (at, _, _) in self._waiting.items() if at <= now]
        while (due or self._fresh) and len(self._running) < self._record.concurrency:
            step = due.pop(0) if due else heapq.heappop(self._fresh)
            _, attempts, first_at = self._waiting.pop(step, (0.0, 0, now))
            try:
                arguments = resolve(self._record.plan.steps[step], self._outcomes, step)
            except TensorcastError as error:
                self._outcomes[step] = StepOutcome(FAILED, None, error.code, str(error)[:MESSAGE_CHARS_MAX])
                self._end(FAILED, error.code, str(error))
                return [*done, *self._cancel_all()]
            self._running[step] = _Attempt(attempts + 1, now, first_at)
            done.append(Dispatch(step, attempts + 1, arguments, self._deadline - now))
        return done

    def _cancel_all(self) -> list[Instruction]:
        cancelled: list[Instruction] = [CancelStep(step, each.number) for step, each in self._running.items()]
        for step in {*self._running, *self._waiting}:
            self._outcomes[step] = StepOutcome(CANCELLED)
        self._running.clear()
        self._waiting.clear()
        for step in range(len(self._record.plan.steps)):
            self._outcomes.setdefault(step, StepOutcome(SKIPPED, attempts=0))
        return cancelled

    def _write(self, now: float) -> list[Instruction]:
        """One write at a time; what has happened meanwhile goes into the next one."""
        if self._writing is not None or now < self._write_at or not self._changed:
            return []
        state, error, message = self._ended or (self._record.state, "", "")
        wanted = msgspec.structs.replace(
            self._record, outcomes=dict(self._outcomes), state=state, error=error, message=message
        )
        self._write_at = 0.0
        self._changed = False
        if wanted == self._written:
            return []
        self._writing = wanted
        self._tried.append(wanted)
        return [WriteRecord(wanted, self._revision)]

    def _stop(self, event: Conflicted) -> list[Instruction]:
        """Somebody else owns the plan: what runs here is not wanted any more."""
        cancelled: list[Instruction] = [CancelStep(step, each.number) for step, each in self._running.items()]
        self._over = True
        return [*cancelled, Follow(event.found, event.revision)]
