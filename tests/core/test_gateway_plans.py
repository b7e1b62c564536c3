"""Whose a plan is: begun, joined, followed, taken over; and what callers are told meanwhile."""

from typing import Any

import msgspec
import pytest

from tensorcast_connector.config import (
    PLAN_BYTES_MAX,
    PLAN_FOLLOW_INTERVAL_S,
    PLAN_LEASE_SHARED_S,
    PLAN_ORPHANS_DELAY_MAX_S,
    PLAN_ORPHANS_INTERVAL_S,
    PLAN_RECORD_TTL_S,
    PLAN_TRACE_CHARS_MAX,
    STORE_TIMEOUT_S,
    WATCH_WAIT_S,
)
from tensorcast_connector.core.cluster import ClusterView, instance_key, worker_key
from tensorcast_connector.core.gateway_plans import GatewayPlans
from tensorcast_connector.core.plan import (
    CANCELLED,
    DONE,
    FAILED,
    RUNNING,
    PlanRecord,
    PlanSpec,
    StepSpec,
    check_key,
    decode_plan,
    decode_record,
    encode_record,
    marker_key,
    next_epoch,
    plan_key,
)
from tensorcast_connector.core.plan_asks import STORE, Answer, Ask, Drop, Moment
from tensorcast_connector.errors import (
    Conflict,
    DeadlineExceeded,
    Exhausted,
    InvalidArgument,
    NotFound,
    ProtocolError,
    TensorcastError,
    Unavailable,
)
from tensorcast_connector.types import WorkerId
from tensorcast_connector.wire.plan_messages import CancelOwnedPlan, CancelSteps, PlanState, RunStep, StepDone
from tensorcast_connector.wire.store_messages import (
    Changes,
    Entry,
    GrantLease,
    InstanceRecord,
    LeaseGranted,
    ReadRecords,
    Records,
    RecordsWritten,
    WorkerRecord,
    WriteRecords,
)

ME, OTHER = WorkerId("a/1"), WorkerId("b/1")
KEY = "t/k"
LIFE = 1000
WALL = 1e9
PLAN = PlanSpec((StepSpec("publish", "e"),))
ANOTHER = PlanSpec((StepSpec("prefetch", "b", {"artifact": "x"}),))


class Store:
    """The store's records, without a network."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[bytes, int, int]] = {}
        self.revision = 10
        self.leases: set[int] = set()
        self.granted = 0
        self.own = 99  # the lease of the gateway
        self.asked: list[Any] = []

    def answer(self, message: Any) -> Any:
        self.asked.append(message)
        if isinstance(message, GrantLease):
            self.granted += 1
            self.leases.add(self.granted)
            return LeaseGranted(self.granted, self.revision)
        if isinstance(message, ReadRecords):
            found = [(key, row) for key, row in self.rows.items() if key.startswith(message.prefix)]
            return Records(self.revision, [Entry(key, value, at) for key, (value, at, _) in found])
        assert isinstance(message, WriteRecords)
        if any(self.rows.get(key, (b"", 0, 0))[1] != at for key, at in message.compares):
            return RecordsWritten(False, self.revision)
        if any(lease_id not in self.leases for _, _, lease_id in message.puts):
            return NotFound("the lease does not exist")
        self.revision += 1
        self.rows |= {key: (value, self.revision, lease_id) for key, value, lease_id in message.puts}
        for key in message.deletes:
            self.rows.pop(key, None)
        return RecordsWritten(True, self.revision)

    def put(self, record: PlanRecord) -> None:
        """By another gateway."""
        self.revision += 1
        self.rows[plan_key(KEY)] = encode_record(record), self.revision, 0
        if not record.finished:
            self.rows[marker_key(KEY)] = msgspec.msgpack.encode((record.owner, KEY)), self.revision, 0
        else:
            self.rows.pop(marker_key(KEY), None)

    def record(self) -> PlanRecord:
        return decode_record(self.rows[plan_key(KEY)][0])

    def lose(self) -> None:
        """The database is another one."""
        self.rows.clear()
        self.leases.clear()
        self.own += 1
        self.leases.add(self.own)
        self.revision = 3


class Gateway:
    """The gateway, a store that answers unless told otherwise, and what has been asked of workers and told to callers."""

    def __init__(self, adopts: bool = True) -> None:
        self.view = ClusterView()
        self.now = 0.0
        self.wall = WALL
        self.jitter = 0.5
        self.store = Store()
        self.store.leases.add(self.store.own)
        self.core = GatewayPlans(ME, self.view, lambda: self.jitter, lambda: self.store.own, adopts)
        self.store_error: TensorcastError | None = None
        self.steps: list[Ask] = []
        self.others: list[Ask] = []
        self.dropped: list[Ask] = []
        self.told: dict[int, Any] = {}
        self.tickets = 0

    def meet(self, *workers: str, engine_at: str = "b/1", life: int = LIFE) -> None:
        """The view shows these workers, and an engine e."""
        entries = [
            Entry(worker_key(each), msgspec.json.encode(WorkerRecord(each, each[0], "h:1", 1, 3, ("gateway",))), 5)
            for each in workers
        ]
        if engine_at in workers:
            engine = InstanceRecord("e", engine_at, "fake", "m", "n")
            entries.append(Entry(instance_key("e"), msgspec.json.encode(engine), 5))
        self.view.apply(Changes(life, self.view.revision + 1, True, entries, []))
        self.core.view_changed(self.at)
        self.pump()

    @property
    def at(self) -> Moment:
        return Moment(self.now, self.wall + self.now)

    def pump(self) -> None:
        self.core.outbox.tick(self.at)
        while out := self.core.outbox.poll():
            for each in out:
                if isinstance(each, Ask):
                    self._ask(each)
                elif isinstance(each, Drop):
                    self.dropped.append(each.ask)
                elif isinstance(each, Answer):
                    self.told[each.ticket] = each.result

    def _ask(self, ask: Ask) -> None:
        if ask.to == STORE:
            answer = self.store_error or self.store.answer(ask.message)
            self.core.outbox.answered(ask, answer, self.at)
        elif isinstance(ask.message, RunStep):
            self.steps.append(ask)
        else:
            self.others.append(ask)

    def answer(self, ask: Ask, result: Any) -> None:
        self.core.outbox.answered(ask, result, self.at)
        self.pump()

    def pass_time(self, seconds: float) -> None:
        """Alarm by alarm."""
        end = self.now + seconds
        for _ in range(1000):
            self.now = min(max(self.core.outbox.wake_at(), self.now), end)
            self.pump()
            if self.now >= end:
                return
        raise AssertionError("it is woken again and again")

    def submit(self, plan: PlanSpec = PLAN, wait_s: float = 5.0, timeout_s: float = 30.0) -> int:
        self.tickets += 1
        self.core.submit(self.tickets, KEY, plan, "", timeout_s, 16, wait_s, self.at)
        self.pump()
        return self.tickets

    def wait(self, wait_s: float = 5.0) -> int:
        self.tickets += 1
        self.core.wait(self.tickets, KEY, wait_s, self.at)
        self.pump()
        return self.tickets

    def cancel(self, forward: bool = True) -> int:
        self.tickets += 1
        self.core.cancel(self.tickets, KEY, forward, self.at)
        self.pump()
        return self.tickets

    def state(self, ticket: int) -> PlanRecord:
        """What that caller was told."""
        assert isinstance(self.told[ticket], PlanState), self.told[ticket]
        return decode_record(self.told[ticket].record)


def record(owner: str = OTHER, **fields: Any) -> PlanRecord:
    return PlanRecord(PLAN, PLAN.digest(), owner, 7, "", WALL + 30.0, 1, timeout_s=30.0, **fields)


@pytest.fixture
def gateway() -> Gateway:
    gateway = Gateway()
    gateway.meet(ME, OTHER)
    return gateway


# --- running ---


def test_a_plan_is_recorded_run_and_told(gateway: Gateway) -> None:
    ticket = gateway.submit()
    assert gateway.store.record().state == RUNNING and marker_key(KEY) in gateway.store.rows
    [step] = gateway.steps
    assert step.to == OTHER and step.message.timeout_s == step.timeout_s == 30.0  # type: ignore[attr-defined]
    gateway.answer(step, StepDone({"artifact": "x"}))
    assert gateway.state(ticket) == gateway.store.record() and gateway.store.record().state == DONE
    assert marker_key(KEY) not in gateway.store.rows


def test_nothing_is_dispatched_while_the_store_is_away_and_nobody_is_told_that_it_runs(gateway: Gateway) -> None:
    gateway.store_error = Unavailable("the store is away")
    ticket = gateway.submit(wait_s=1.0)
    gateway.pass_time(1.0 + STORE_TIMEOUT_S)
    assert isinstance(gateway.told[ticket], Unavailable) and not gateway.steps
    gateway.store_error = None
    gateway.pass_time(5.0)
    assert len(gateway.steps) == 1


def test_who_does_not_wait_is_told_once_it_is_recorded(gateway: Gateway) -> None:
    assert gateway.state(gateway.submit(wait_s=0.0)).state == RUNNING
    assert gateway.state(gateway.wait(0.0)).state == RUNNING


def test_a_second_submission_joins(gateway: Gateway) -> None:
    first, second = gateway.submit(), gateway.submit()
    [step] = gateway.steps
    gateway.answer(step, StepDone({}))
    assert gateway.state(first) == gateway.state(second)


def test_a_finished_plan_is_not_run_again(gateway: Gateway) -> None:
    """It was, by the gateway that had run it, and its record written over."""
    first = gateway.submit()
    gateway.answer(gateway.steps[0], StepDone({}))
    gateway.pass_time(1.0)
    assert gateway.state(gateway.submit()) == gateway.state(first) and len(gateway.steps) == 1


def test_a_step_without_anybody_who_does_it_is_refused_by_name(gateway: Gateway) -> None:
    gateway.meet(ME)
    ticket = gateway.submit()
    assert isinstance(gateway.told[ticket], NotFound) and "step 0 (publish on e)" in str(gateway.told[ticket])
    assert not gateway.store.rows


def test_but_not_if_the_plan_has_been_run(gateway: Gateway) -> None:
    """A caller who asks again after a lost answer is told the outcome, also when the engine has left meanwhile."""
    first = gateway.submit()
    gateway.answer(gateway.steps[0], StepDone({}))
    gateway.meet(ME)
    assert gateway.state(gateway.submit()) == gateway.state(first)


def test_an_engine_that_has_gone_meanwhile_is_waited_for(gateway: Gateway) -> None:
    gateway.submit(wait_s=60.0)
    gateway.meet(ME, OTHER, engine_at="")
    gateway.answer(gateway.steps[0], Unavailable("lost"))
    gateway.pass_time(1.0)
    assert len(gateway.steps) == 1
    gateway.meet(ME, OTHER, engine_at="a/1")
    gateway.pass_time(3.0)
    assert gateway.steps[1].to == ME


def test_the_deadline(gateway: Gateway) -> None:
    gateway.submit()
    gateway.pass_time(30.0)
    assert gateway.state(gateway.wait()).error == DeadlineExceeded.code
    assert gateway.dropped == gateway.steps
    assert isinstance(gateway.others[0].message, CancelSteps) and gateway.others[0].to == OTHER


def test_an_answer_that_was_dropped_and_comes_nevertheless_is_nothing(gateway: Gateway) -> None:
    ticket = gateway.submit()
    gateway.cancel()
    assert gateway.state(ticket).state == CANCELLED
    gateway.answer(gateway.steps[0], StepDone({}))
    assert gateway.store.record().state == CANCELLED


def test_a_gateway_without_a_view_does_not_say_that_there_is_no_such_engine() -> None:
    with pytest.raises(Unavailable, match="does not know the cluster yet"):
        Gateway().submit()


def test_results_that_do_not_fit(gateway: Gateway) -> None:
    ticket = gateway.submit()
    gateway.answer(gateway.steps[0], StepDone({"artifact": "x" * PLAN_BYTES_MAX}))
    assert gateway.state(ticket).error == Exhausted.code and gateway.store.record().state == FAILED


@pytest.mark.parametrize("trace_id", ["t" * 600_000, "t" * (PLAN_TRACE_CHARS_MAX + 1), "t\n"])
def test_no_trace_id(trace_id: str, gateway: Gateway) -> None:
    """The first record was too large, and was made again for ever."""
    with pytest.raises(InvalidArgument, match="trace id"):
        gateway.core.submit(1, KEY, PLAN, trace_id, 30.0, 16, 5.0, gateway.at)


@pytest.mark.parametrize("value", [[0.5] * 35_000, {1: "a", "b": 2}])
def test_a_plan_that_cannot_be_written_down(value: Any, gateway: Gateway) -> None:
    """What came as float32 becomes nearly twice as large."""
    with pytest.raises(InvalidArgument, match="a plan that"):
        gateway.submit(PlanSpec((StepSpec("publish", "e", {"x": value}),)))


def test_a_record_that_never_fits_ends_the_plan_for_who_waits(gateway: Gateway) -> None:
    """One that is taken over can be: it was made elsewhere."""
    large = msgspec.structs.replace(record(), trace_id="t" * PLAN_BYTES_MAX)
    gateway.store.put(large)
    ticket = gateway.submit()
    gateway.meet(ME, engine_at=ME)
    gateway.pass_time(5.0)
    assert gateway.state(ticket).error == Exhausted.code and not gateway.steps
    assert gateway.store.record() == large


def test_no_alarm_keeps_what_has_ended(gateway: Gateway) -> None:
    gateway.submit()
    gateway.answer(gateway.steps[0], StepDone({}))
    for _ in range(200):
        gateway.state(gateway.wait(wait_s=1e12))
    assert gateway.core.outbox.wake_at() <= PLAN_ORPHANS_INTERVAL_S * 1.5
    gateway.core.outbox.cancel(None)
    kept = gateway.core.outbox._alarms
    assert len(kept) < 40 and sum(each.action is not None for _, _, each in kept) <= 1


def test_nobody_waits_longer_than_a_watch(gateway: Gateway) -> None:
    tickets = [gateway.submit(wait_s=1e12), gateway.wait(wait_s=1e12)]
    gateway.pass_time(WATCH_WAIT_S + 0.1)
    assert [gateway.state(each).state for each in tickets] == [RUNNING] * 2


def test_who_has_gone_is_forgotten(gateway: Gateway) -> None:
    ticket = gateway.submit()
    gateway.core.forget(ticket)
    gateway.core.forget(ticket)
    gateway.answer(gateway.steps[0], StepDone({}))
    assert not gateway.told and gateway.store.record().state == DONE
    assert "0 running, 0 waited for" in repr(gateway.core)


# --- another plan under the same key ---


def test_another_plan_is_a_conflict(gateway: Gateway) -> None:
    gateway.submit()
    assert isinstance(gateway.told[gateway.submit(ANOTHER)], Conflict)
    gateway.answer(gateway.steps[0], StepDone({}))
    assert isinstance(gateway.told[gateway.submit(ANOTHER)], Conflict)


def test_which_of_two_it_is_the_store_says(gateway: Gateway) -> None:
    """Who comes second to this gateway was told of a conflict, and then it was his plan that another gateway ran."""
    gateway.store_error = Unavailable("away")
    first, second = gateway.submit(PLAN), gateway.submit(ANOTHER)
    assert not gateway.told
    other = msgspec.structs.replace(record(), plan=ANOTHER, digest=ANOTHER.digest())
    gateway.store.put(msgspec.structs.replace(other, state=DONE))
    gateway.store_error = None
    gateway.pass_time(3.0)
    assert isinstance(gateway.told[first], Conflict) and gateway.state(second).state == DONE


# --- leases ---


def test_plans_share_a_lease_that_outlives_them(gateway: Gateway) -> None:
    gateway.submit()
    for number in range(3):
        gateway.core.submit(100 + number, f"t/{number}", PLAN, "", 30.0, 1, 1.0, gateway.at)
        gateway.pump()
    [grant] = [each for each in gateway.store.asked if isinstance(each, GrantLease)]
    assert grant.ttl_s >= 30 + PLAN_LEASE_SHARED_S + PLAN_RECORD_TTL_S


def test_a_lease_that_has_ended_is_replaced(gateway: Gateway) -> None:
    """The store's database was lost: the record was written again and again under a lease that is not there."""
    gateway.submit()
    gateway.store.lose()
    gateway.core.submit(100, "t/next", PLAN, "", 30.0, 1, 1.0, gateway.at)
    gateway.pump()
    gateway.pass_time(1.0)
    assert plan_key("t/next") in gateway.store.rows


def test_a_revision_of_another_life_of_the_database_counts_for_nothing(gateway: Gateway) -> None:
    """It happened to be that of another gateway's record, which was written over (the simulation's seed 2053)."""
    ticket = gateway.submit()
    revision = gateway.store.rows[plan_key(KEY)][1]
    gateway.store.lose()
    gateway.core.submit(100, "t/next", PLAN, "", 30.0, 1, 1.0, gateway.at)  # which brings the lease of this life
    gateway.pump()
    gateway.pass_time(1.0)
    gateway.store.revision = revision - 1
    gateway.store.put(theirs := record(state=DONE))
    assert gateway.store.rows[plan_key(KEY)][1] == revision
    gateway.answer(gateway.steps[0], StepDone({}))
    gateway.pass_time(1.0)
    assert gateway.store.record() == gateway.state(ticket) == theirs


def test_a_plan_that_was_lost_with_the_database_is_run_for_who_waits(gateway: Gateway) -> None:
    ticket = gateway.submit(wait_s=60.0)
    gateway.store.lose()
    gateway.answer(gateway.steps[0], StepDone({}))
    gateway.pass_time(1.0)
    assert gateway.store.record().state == RUNNING
    gateway.answer(gateway.steps[1], StepDone({}))
    assert gateway.state(ticket).state == DONE


# --- following ---


def test_a_plan_of_another_gateway_is_followed_to_its_end(gateway: Gateway) -> None:
    gateway.store.put(record())
    ticket = gateway.submit()
    gateway.pass_time(10 * PLAN_FOLLOW_INTERVAL_S)
    assert not gateway.told and not gateway.steps
    gateway.store.put(record(state=DONE))
    gateway.pass_time(PLAN_FOLLOW_INTERVAL_S)
    assert gateway.state(ticket).state == DONE


def test_a_follower_is_told_how_it_is_when_its_time_is_up(gateway: Gateway) -> None:
    gateway.store.put(record())
    ticket = gateway.wait(1.0)
    gateway.pass_time(1.0)
    assert gateway.state(ticket) == record()


def test_a_follower_bears_with_the_store(gateway: Gateway) -> None:
    gateway.store.put(record())
    ticket = gateway.wait(5.0)
    gateway.store_error = Unavailable("away")
    gateway.pass_time(2.0)
    gateway.store_error = None
    gateway.store.put(record(state=DONE))
    gateway.pass_time(1.0)
    assert gateway.state(ticket).state == DONE
    gateway.store_error = Unavailable("away")
    late = gateway.wait(0.0)
    assert isinstance(gateway.told[late], Unavailable)


def test_there_is_no_such_plan(gateway: Gateway) -> None:
    for ticket in (gateway.wait(), gateway.cancel()):
        assert isinstance(gateway.told[ticket], NotFound)


def test_the_other_gateway_is_asked_to_cancel(gateway: Gateway) -> None:
    gateway.store.put(record())
    ticket = gateway.cancel()
    [ask] = gateway.others
    assert ask.to == OTHER and ask.message == CancelOwnedPlan(KEY)
    gateway.answer(ask, PlanState(encode_record(record(state=CANCELLED))))
    assert gateway.state(ticket).state == CANCELLED
    assert gateway.cancel(forward=False) and len(gateway.others) == 1, "who was asked does not ask"


# --- taking over ---


def test_the_plan_of_a_gateway_that_has_gone_is_taken_over(gateway: Gateway) -> None:
    gateway.store.put(record())
    ticket = gateway.submit()
    gateway.meet(ME, engine_at=ME)
    gateway.pass_time(1.0)
    mine = gateway.store.record()
    assert mine.owner == ME and mine.epoch == next_epoch(7, LIFE) > 7 and mine.deadline_unix_s == WALL + 30.0
    gateway.answer(gateway.steps[0], StepDone({}))
    assert gateway.state(ticket).state == DONE and marker_key(KEY) not in gateway.store.rows


def test_also_if_nobody_waits(gateway: Gateway) -> None:
    gateway.store.put(record())
    gateway.meet(ME, engine_at=ME)
    gateway.pass_time(PLAN_ORPHANS_DELAY_MAX_S)
    assert gateway.store.record().owner == ME and len(gateway.steps) == 1


def test_also_if_it_had_gone_before_or_the_store_was_away(gateway: Gateway) -> None:
    gateway.meet(ME, engine_at=ME)
    gateway.store_error = Unavailable("away")
    gateway.pass_time(5.0)
    gateway.store_error = None
    gateway.store.put(record())
    gateway.pass_time(2 * PLAN_ORPHANS_INTERVAL_S)
    assert gateway.store.record().owner == ME


def test_but_not_by_who_is_no_gateway() -> None:
    gateway = Gateway(adopts=False)
    gateway.meet(ME, OTHER)
    gateway.store.put(record())
    gateway.meet(ME, engine_at=ME)
    gateway.pass_time(100.0)
    assert gateway.store.record().owner == OTHER


def test_a_plan_of_this_gateway_that_it_does_not_run_is_taken_over(gateway: Gateway) -> None:
    """Nobody ran it: its owner was there, so that everybody waited."""
    gateway.store.put(record(owner=ME))
    gateway.wait()
    assert gateway.store.record().epoch == next_epoch(7, LIFE) and len(gateway.steps) == 1


def test_of_two_that_take_over_one_follows(gateway: Gateway) -> None:
    gateway.store.put(record())
    ticket = gateway.submit(wait_s=60.0)
    gateway.store_error = Unavailable("away")
    gateway.meet(ME, WorkerId("c/1"), engine_at="c/1")
    gateway.store_error = None
    theirs = msgspec.structs.replace(record(owner="c/1"), epoch=next_epoch(7, LIFE))
    gateway.store.put(theirs)
    gateway.pass_time(3.0)
    assert gateway.store.record() == theirs and not gateway.steps
    gateway.store.put(msgspec.structs.replace(theirs, state=DONE))
    gateway.pass_time(1.0)
    assert gateway.state(ticket).state == DONE


def test_the_orphan_that_somebody_cancels_is_not_run_first(gateway: Gateway) -> None:
    """It was taken over and run."""
    gateway.store.put(record())
    gateway.meet(ME, engine_at=ME)
    ticket = gateway.cancel()
    assert gateway.state(ticket).state == CANCELLED and not gateway.steps


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_a_wall_clock_hours_away_gives_no_plan_hours(ahead_s: float, gateway: Gateway) -> None:
    gateway.store.put(record())
    gateway.wall += ahead_s
    gateway.submit()
    gateway.meet(ME, engine_at=ME)
    gateway.pass_time(31.0)
    assert gateway.state(gateway.wait()).error == DeadlineExceeded.code


def test_a_gateway_that_knows_nobody_takes_nothing_over() -> None:
    gateway = Gateway()
    gateway.store.put(record())
    gateway.wait(1.0)
    assert gateway.store.record().owner == OTHER


# --- values ---


def test_epochs_rise_over_lives_of_the_database() -> None:
    assert next_epoch(0, 5) < next_epoch(next_epoch(0, 5), 5) < next_epoch(0, 6)
    assert next_epoch(next_epoch(0, 6), 5) > next_epoch(0, 6)


def test_no_key_of_a_plan_is_the_beginning_of_another() -> None:
    keys = [plan_key(f"t/{key}") for key in ("a", "ab", "a/", "a/b", "a%2F", "a%", "%")]
    assert len(set(keys)) == len(keys) and not any(
        one != other and one.startswith(other) for one in keys for other in keys
    )
    assert max(len(plan_key("t" * 128 + "/" + "/" * 256)), len(marker_key("t/" + "/" * 256))) <= 1024


@pytest.mark.parametrize("key", ["", "a\nb", "x" * 257])
def test_no_key(key: str) -> None:
    with pytest.raises(InvalidArgument, match="idempotency key"):
        check_key(key)


def test_no_plan() -> None:
    assert decode_plan(msgspec.msgpack.encode(PLAN)) == PLAN
    with pytest.raises(ProtocolError):
        decode_plan(b"\x80")
    with pytest.raises(InvalidArgument, match="bytes"):
        decode_plan(b"x" * PLAN_BYTES_MAX)
    with pytest.raises(InvalidArgument, match="no such operation"):
        decode_plan(msgspec.msgpack.encode(PlanSpec((StepSpec("jump", "e"),))))


@pytest.mark.parametrize("gone", [True, False])
def test_a_first_record_is_not_made_late_after_its_gateway_has_gone(gone: bool) -> None:
    """Others have said that there is no such plan: it does not run then."""
    gateway = Gateway()
    gateway.meet(ME, "b/1")
    answer, taken = gateway.store.answer, []

    def takes(message: Any) -> Any:
        if not isinstance(message, WriteRecords):
            return answer(message)
        taken.append(message)
        return DeadlineExceeded("no answer")

    gateway.store.answer = takes  # type: ignore[method-assign]
    gateway.submit()
    assert len(taken) == 1 and not gateway.steps
    if gone:
        gateway.store.leases.discard(gateway.store.own)
    late = answer(taken[0])
    assert isinstance(late, NotFound) == gone
    assert (plan_key(KEY) in gateway.store.rows) != gone


def test_a_gateway_without_a_lease_begins_no_plan_until_it_has_one() -> None:
    gateway = Gateway()
    gateway.meet(ME, "b/1")
    mine, gateway.store.own = gateway.store.own, 0
    gateway.submit()
    gateway.pass_time(1)
    assert not gateway.store.rows and not gateway.steps
    gateway.store.own = mine
    gateway.pass_time(3)
    assert gateway.store.record().owner == ME and len(gateway.steps) == 1
