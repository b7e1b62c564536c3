"""What an executor does once, for whom, and until when."""

import pytest

from tensorcast_connector.config import LEDGER_PLANS_MAX, PLAN_DEADLINE_MAX_S, PLAN_RECORD_TTL_S
from tensorcast_connector.core.ledger import Known, Ledger, UnderWay
from tensorcast_connector.errors import Conflict


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def begin(ledger: Ledger, epoch: int = 1, step: int = 0, digest: str = "d", timeout_s: float = 10.0, now: float = 0.0):  # type: ignore[no-untyped-def]
    return ledger.begin("t/k", digest, epoch, step, timeout_s, now)


def test_what_was_done_is_known(ledger: Ledger) -> None:
    assert begin(ledger) == UnderWay(1, True)
    ledger.ended(1, done=True, result={"a": 1})
    assert begin(ledger, epoch=2) == Known({"a": 1}) and begin(ledger, epoch=2, step=1) == UnderWay(2, True)


def test_what_is_under_way_is_joined_also_by_the_next_owner(ledger: Ledger) -> None:
    begin(ledger)
    assert begin(ledger) == begin(ledger, epoch=2) == UnderWay(1, False)


def test_what_failed_is_begun_again(ledger: Ledger) -> None:
    begin(ledger)
    ledger.ended(1, done=False)
    assert begin(ledger) == UnderWay(2, True)


def test_nothing_is_taken_under_a_lower_epoch(ledger: Ledger) -> None:
    begin(ledger, epoch=2)
    for attempt in (lambda: begin(ledger), lambda: ledger.cancel("t/k", "d", 1, [0], 0.0)):
        with pytest.raises(Conflict, match="another owner"):
            attempt()
    assert ledger.stops(0.0) == []


def test_another_plan_under_the_same_key_needs_a_higher_epoch_and_joins_nothing(ledger: Ledger) -> None:
    """It joined what was under way for the former plan."""
    begin(ledger)
    with pytest.raises(Conflict, match="another one"):
        begin(ledger, digest="other")
    assert begin(ledger, epoch=2, digest="other") == UnderWay(2, True)
    assert ledger.stops(0.0) == [1]
    ledger.ended(1, done=True, result="of the former plan")
    assert begin(ledger, epoch=2, digest="other") == UnderWay(2, False)


def test_a_cancelled_step_is_stopped_and_its_result_does_not_count(ledger: Ledger) -> None:
    begin(ledger)
    ledger.cancel("t/k", "d", 1, [0, 1], 0.0)
    assert ledger.stops(0.0) == [1] and ledger.stops(0.0) == []
    ledger.ended(1, done=True, result="late")
    assert begin(ledger, epoch=2) == UnderWay(2, True)


def test_a_dispatch_that_comes_after_its_cancellation_is_refused(ledger: Ledger) -> None:
    """It was carried out."""
    ledger.cancel("t/k", "d", 3, [0], 0.0)
    with pytest.raises(Conflict, match="cancelled"):
        begin(ledger, epoch=3)
    assert begin(ledger, epoch=3, step=1) == UnderWay(1, True)
    assert begin(ledger, epoch=4) == UnderWay(2, True)


def test_a_cancellation_does_not_undo_what_is_done(ledger: Ledger) -> None:
    begin(ledger)
    ledger.ended(1, done=True, result="x")
    ledger.cancel("t/k", "d", 1, [0], 0.0)
    assert begin(ledger) == Known("x") and ledger.stops(0.0) == []


def test_what_nobody_waits_for_is_stopped(ledger: Ledger) -> None:
    """It went on."""
    assert ledger.wake_at() == float("inf")
    begin(ledger, timeout_s=5.0)
    begin(ledger, timeout_s=3.0, now=1.0)
    assert ledger.wake_at() == 5.0 and ledger.stops(4.9) == []
    begin(ledger, timeout_s=5.0, now=4.0)
    assert ledger.stops(5.0) == [] and ledger.stops(9.0) == [1] and ledger.wake_at() == float("inf")
    begin(ledger, timeout_s=0.0, now=10.0)
    assert ledger.wake_at() == 10.0 + PLAN_DEADLINE_MAX_S


def test_plans_are_forgotten_when_they_are_old_but_not_while_they_go_on(ledger: Ledger) -> None:
    begin(ledger, timeout_s=PLAN_DEADLINE_MAX_S)
    ledger.begin("t/other", "d", 1, 0, 1.0, 1.0)
    ledger.ended(2, done=True, result="x")
    late = 2.0 + PLAN_RECORD_TTL_S
    assert ledger.begin("t/other", "d", 1, 0, 1.0, late) == UnderWay(3, True)
    assert begin(ledger, now=late) == UnderWay(1, False)


def test_there_is_a_limit_to_what_is_remembered(ledger: Ledger) -> None:
    for number in range(LEDGER_PLANS_MAX + 2):
        standing = ledger.begin(f"t/{number}", "d", 1, 0, 1.0, 0.0)
        assert isinstance(standing, UnderWay)
        ledger.ended(standing.number, done=True, result=number)
    assert ledger.begin(f"t/{LEDGER_PLANS_MAX}", "d", 1, 0, 1.0, 0.0) == Known(LEDGER_PLANS_MAX)
    again = ledger.begin("t/0", "d", 1, 0, 1.0, 0.0)
    assert isinstance(again, UnderWay) and again.fresh
