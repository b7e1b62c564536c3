"""One plan's execution: the record first, retries, the deadline, cancellation, and what is found instead of what was written."""

import math
from typing import Any

import msgspec
import pytest

from tensorcast_connector.config import PLAN_BYTES_MAX, PLAN_RETRY_DELAY_MAX_S
from tensorcast_connector.core.execution import (
    Cancel,
    CancelStep,
    Conflicted,
    Dispatch,
    Failed,
    Finish,
    Follow,
    PlanExecution,
    Succeeded,
    Tick,
    TooLarge,
    WriteFailed,
    WriteRecord,
    Written,
)
from tensorcast_connector.core.plan import (
    CANCELLED,
    DONE,
    FAILED,
    RUNNING,
    SKIPPED,
    PlanRecord,
    PlanSpec,
    StepOutcome,
    StepSpec,
    decode_record,
    encode_record,
)
from tensorcast_connector.errors import DeadlineExceeded, Exhausted, InvalidArgument, NotFound, Unavailable

DEADLINE = 100.0
A = StepSpec("publish", "e", {"request": "r", "sizes": (1, 2), "scale": float("nan")})
B = StepSpec("hydrate", "e", {}, {"artifact": (0, "artifact")})
C = StepSpec("prefetch", "w", {"artifact": "c"})


def record(*steps: StepSpec, concurrency: int = 16, **fields: Any) -> PlanRecord:
    plan = PlanSpec(steps or (A, B))
    return PlanRecord(plan, plan.digest(), "w/1", 7, "", 1000.0, concurrency, **fields)


class Run:
    """An execution, and what it has wanted so far."""

    def __init__(self, first: PlanRecord | None = None, revision: int = 0) -> None:
        self.execution = PlanExecution(first or record(), revision, DEADLINE, lambda: 1.0)
        self.now = 0.0
        self.revision = revision
        self.wanted: list[Any] = self.execution.start(0.0)

    def tell(self, event: Any, now: float = 0.0) -> list[Any]:
        self.now = max(self.now, now)
        self.wanted = self.execution.handle(event, self.now)
        return self.wanted

    def write(self) -> PlanRecord:
        """What it wants written."""
        [write] = [each for each in self.wanted if isinstance(each, WriteRecord)]
        assert write.revision == self.revision
        return write.record

    def written(self) -> list[Any]:
        """What it last wanted written is."""
        self.revision += 1
        return self.tell(Written(self.revision))

    def dispatched(self) -> list[int]:
        return [each.step for each in self.wanted if isinstance(each, Dispatch)]


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def begun(run: Run) -> Run:
    """Its first step is under way."""
    run.written()
    assert run.dispatched() == [0]
    return run


def test_the_record_comes_first(run: Run) -> None:
    assert [type(each) for each in run.wanted] == [WriteRecord] and run.write().state == RUNNING
    assert run.tell(Tick()) == [] and run.execution.written is None
    assert [type(each) for each in run.written()] == [Dispatch]
    assert run.execution.written is not None


def test_results_are_the_arguments_of_what_needs_them(begun: Run) -> None:
    begun.tell(Succeeded(0, 1, {"artifact": "x"}))
    [dispatch] = [each for each in begun.wanted if isinstance(each, Dispatch)]
    assert dispatch.arguments == {"artifact": "x"} and dispatch.timeout_s == DEADLINE
    assert begun.write().outcomes[0].result == {"artifact": "x"}
    begun.written()
    begun.tell(Succeeded(1, 1, {}))
    assert begun.write().state == DONE
    [finish] = begun.written()
    assert isinstance(finish, Finish) and finish.record.state == DONE


def test_a_result_without_what_is_wanted_of_it_ends_the_plan(begun: Run) -> None:
    begun.tell(Succeeded(0, 1, {"other": "x"}))
    ended = begun.write()
    assert (ended.state, ended.error) == (FAILED, InvalidArgument.code) and "step 1" in ended.message
    assert not begun.dispatched()


def test_no_more_at_once_than_told() -> None:
    run = Run(record(C, C, C, concurrency=2))
    run.written()
    assert run.dispatched() == [0, 1]
    run.tell(Succeeded(1, 1, {}))
    assert run.dispatched() == [2]


# --- retries ---


def test_a_step_is_tried_again_later_and_later(begun: Run) -> None:
    now, waits = 0.0, []
    for attempt in range(1, 9):
        begun.tell(Failed(0, attempt, Unavailable("not now")), now)
        assert not begun.dispatched()
        waits.append(begun.execution.wake_at() - now)
        now = begun.execution.wake_at()
        begun.tell(Tick(), now)
        assert begun.dispatched() == [0]
    assert waits == sorted(waits) and waits[0] < waits[-1] == PLAN_RETRY_DELAY_MAX_S


def test_a_failure_that_is_no_matter_of_time_ends_the_plan() -> None:
    run = Run(record(A, B, C))
    run.written()
    run.tell(Failed(0, 1, NotFound("gone")))
    assert [each for each in run.wanted if isinstance(each, CancelStep)] == [CancelStep(2, 1)]
    ended = run.write()
    assert [ended.outcomes[step].state for step in range(3)] == [FAILED, SKIPPED, CANCELLED]
    assert ended.error == NotFound.code and "step 0 (publish on e): gone" in ended.message


def test_the_answer_to_an_attempt_that_was_given_up_does_not_count(begun: Run) -> None:
    begun.tell(Failed(0, 1, Unavailable("lost")))
    begun.tell(Succeeded(0, 1, {"artifact": "late"}))
    begun.tell(Tick(), begun.execution.wake_at())
    begun.tell(Succeeded(0, 1, {"artifact": "late"}))
    begun.tell(Succeeded(0, 2, {"artifact": "x"}))
    assert begun.write().outcomes[0] == StepOutcome(DONE, {"artifact": "x"}, attempts=2, seconds=begun.now)


def test_it_is_not_woken_for_a_step_that_waits_for_room() -> None:
    """It was, again and again, as long as another step was under way."""
    run = Run(record(C, C, concurrency=1))
    run.written()
    run.tell(Failed(0, 1, Unavailable("not now")))
    assert run.dispatched() == [1], "the other one goes first"
    assert run.execution.wake_at() == DEADLINE
    run.tell(Succeeded(1, 1, {}), 5.0)
    assert run.dispatched() == [0]


# --- the end ---


def test_the_deadline_names_what_had_not_ended(begun: Run) -> None:
    begun.tell(Tick(), DEADLINE)
    assert CancelStep(0, 1) in begun.wanted
    ended = begun.write()
    assert (ended.state, ended.error) == (FAILED, DeadlineExceeded.code) and "step 0 (publish on e)" in ended.message


def test_the_deadline_says_why_a_step_was_tried_again(begun: Run) -> None:
    begun.tell(Failed(0, 1, Unavailable("e is away")))
    begun.tell(Tick(), begun.execution.wake_at())
    assert any(isinstance(each, Dispatch) and each.attempt == 2 for each in begun.wanted)
    begun.tell(Tick(), DEADLINE)
    assert begun.write().message.endswith("had ended; tried again because: e is away")


def test_it_is_not_woken_for_a_deadline_that_has_passed(begun: Run) -> None:
    """It was, again and again, while the store was away."""
    begun.tell(Tick(), DEADLINE)
    assert begun.execution.wake_at() == math.inf, "the record is being written"
    begun.tell(WriteFailed())
    assert begun.execution.wake_at() > DEADLINE
    begun.tell(Tick(), begun.execution.wake_at())
    assert begun.write().state == FAILED


def test_writes_that_fail_are_tried_less_and_less_often(run: Run) -> None:
    waits = []
    for _ in range(9):
        assert run.tell(WriteFailed()) == []
        waits.append(run.execution.wake_at() - run.now)
        run.tell(Tick(), run.execution.wake_at())
        run.write()
    assert waits == sorted(waits) and waits[0] < waits[-1] == PLAN_RETRY_DELAY_MAX_S
    run.written()
    run.tell(Succeeded(0, 1, {"artifact": "x"}))
    run.tell(WriteFailed())
    assert run.execution.wake_at() - run.now == pytest.approx(waits[0])


def test_cancelled_by_its_caller(begun: Run) -> None:
    begun.tell(Cancel())
    assert CancelStep(0, 1) in begun.wanted and begun.write().state == CANCELLED
    assert begun.tell(Succeeded(0, 1, {"artifact": "x"})) == []
    [finish] = begun.written()
    assert finish.record.state == CANCELLED
    assert begun.tell(Cancel()) == [] and begun.execution.wake_at() == math.inf


def test_results_that_do_not_fit_fail_the_plan(begun: Run) -> None:
    """It was written again and again, beyond every deadline."""
    begun.tell(Succeeded(0, 1, {"artifact": "x" * PLAN_BYTES_MAX}))
    begun.tell(TooLarge(len(encode_record(begun.write()))))
    ended = begun.write()
    assert (ended.state, ended.error) == (FAILED, Exhausted.code) and str(PLAN_BYTES_MAX) in ended.message
    assert len(encode_record(ended)) < 1000 and CancelStep(1, 1) in begun.wanted


def test_what_does_not_fit_without_results_either_is_not_written_again(begun: Run) -> None:
    begun.tell(Succeeded(0, 1, {"artifact": "x" * PLAN_BYTES_MAX}))
    begun.tell(TooLarge(PLAN_BYTES_MAX + 1))
    [finish] = begun.tell(TooLarge(PLAN_BYTES_MAX + 1))
    assert isinstance(finish, Finish) and (finish.record.state, finish.record.error) == (FAILED, Exhausted.code)
    assert begun.tell(Cancel()) == [] and begun.execution.wake_at() == math.inf


def test_a_long_error_is_cut(begun: Run) -> None:
    begun.tell(Failed(0, 1, NotFound("x" * PLAN_BYTES_MAX)))
    assert len(encode_record(begun.write())) < 10_000


# --- what is found instead ---


def test_what_was_written_and_not_told_is_its_own(run: Run) -> None:
    first = run.write()
    run.tell(WriteFailed())
    run.tell(Tick(), run.execution.wake_at())
    run.tell(Conflicted(decode_record(encode_record(first)), 5))
    assert run.dispatched() == [0] and run.execution.written is not None
    run.tell(Succeeded(0, 1, {"artifact": "x"}))
    run.revision = 5
    run.write()


def test_what_was_written_last_and_not_told_is_the_end(begun: Run) -> None:
    begun.tell(Cancel())
    last = begun.write()
    begun.tell(WriteFailed())
    begun.tell(Tick(), begun.execution.wake_at())
    assert begun.tell(Conflicted(last, 9)) == [Finish(last)]


@pytest.mark.parametrize(
    "other",
    [
        record(state=DONE, outcomes={0: StepOutcome(DONE, {"artifact": "x"}), 1: StepOutcome(DONE, {})}),
        msgspec.structs.replace(record(), deadline_unix_s=2000.0),
        record(C),
        msgspec.structs.replace(record(), owner="w/2"),
        msgspec.structs.replace(record(), epoch=8),
        None,
    ],
    ids=["that has ended", "of an earlier call", "of another plan", "of another gateway", "of a later epoch", "none"],
)  # fmt: skip
def test_another_record_ends_it(other: PlanRecord | None, run: Run) -> None:
    """Also one of this gateway under the same epoch: its plan was run again, and its finished record written over."""
    assert run.tell(Conflicted(other, 9)) == [Follow(other, 9)]
    assert run.execution.wake_at() == math.inf and run.tell(Tick()) == []


def test_losing_the_plan_cancels_what_is_under_way(begun: Run) -> None:
    begun.tell(Failed(0, 1, Unavailable("not now")))
    begun.tell(Tick(), begun.execution.wake_at())
    begun.tell(Cancel())
    assert begun.tell(Conflicted(msgspec.structs.replace(record(), epoch=8), 9))[-1] == Follow(
        msgspec.structs.replace(record(), epoch=8), 9
    )


def test_taken_over_in_the_middle() -> None:
    done = {0: StepOutcome(DONE, {"artifact": "x"}), 1: StepOutcome(CANCELLED)}
    run = Run(record(outcomes=done), 4)
    assert 1 not in run.write().outcomes
    run.written()
    assert run.dispatched() == [1]


def test_taken_over_after_its_deadline() -> None:
    execution = PlanExecution(record(), 4, -1.0, lambda: 1.0)
    [write] = execution.start(0.0)
    assert isinstance(write, WriteRecord) and write.record.error == DeadlineExceeded.code
