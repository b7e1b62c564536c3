"""Plans in small worlds of their own: their gateway is killed at every step boundary, and what the simulation has found."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from tensorcast_connector.core.plan import DONE, FAILED, PlanRecord, PlanSpec, StepSpec
from tensorcast_connector.errors import DeadlineExceeded, NotFound
from tests.sim.caller_process import CallerProcess, Conversation, Job
from tests.sim.cluster import Cluster, Shape, limits
from tests.sim.invariants.base import Invariant
from tests.sim.invariants.every import every_invariant
from tests.sim.invariants.settled import unsettled
from tests.sim.plan_service import BROKEN
from tests.sim.world import Process, World

SHAPE = Shape(workers=3, shards=1, engines=1, callers=1, caller_interval_s=1e9)
LIMITS = {"tensorcast_connector.core.leases:HANDOVER_AFTER_S": 1.0}
BEGIN_S = 4.0
TAKEOVER_S = 14.0  # the lease of the dead, then the deadline of the plan at most
KEY = "k"


def plan(*artifacts: str, engine: str = "host0/engine1") -> PlanSpec:
    """A step on a worker, one on an engine that uses its result, one on another worker after both."""
    names = artifacts or ("a", "b")
    return PlanSpec(
        (
            StepSpec("prefetch", "host1", {"artifact": names[0]}),
            StepSpec("hydrate", engine, {}, {"artifact": (0, "artifact")}),
            StepSpec("prefetch", "host2", {"artifact": names[1]}, {}, (0, 1)),
        )
    )


class Killer(Invariant):
    """Kills a process after so many events that happened in any process since it was armed."""

    def __init__(self) -> None:
        self.left = -1
        self.seen = 0
        self.victim: Process | None = None

    def is_done(self) -> bool:
        return self.victim is None

    def after_event(self, world: World, process: Process) -> None:
        self.seen += 1
        if self.victim is not None and self.seen > self.left:
            getattr(self.victim, "crash", self.victim.die)()
            self.victim = None


class Scene:
    """A quiet cluster whose caller submits one plan."""

    def __init__(self, cluster: Cluster, killer: Killer) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.killer = killer
        self.told: list[PlanRecord] = []
        [self.caller] = cluster.callers()
        cluster.world.hooks["told"].append(self._told)

    def _told(self, world: World, caller: CallerProcess, key: str, digest: str, record: PlanRecord) -> None:
        if record.finished:
            self.told.append(record)

    def submit(self, spec: PlanSpec, gateway: str = "host0/1", timeout_s: float = 10.0, key: str = KEY) -> Conversation:
        job = next((each for each in self.cluster.jobs if each.key == key), None)
        if job is None:
            job = Job(key, [], timeout_s)
            self.cluster.jobs.append(job)
        return self.caller.begin(job, spec, gateway)

    def run(self, seconds: float, until: Callable[[], object] = lambda: False) -> None:
        end = self.world.now + seconds
        while self.world.now < end and not until():
            self.world.run(min(end, self.world.now + 0.01))

    def end(self, *conversations: Conversation, within_s: float = TAKEOVER_S) -> PlanRecord:
        """What everybody is told in the end."""
        self.run(within_s, lambda: all(each.over for each in conversations))
        assert all(each.over for each in conversations), unsettled(self.world)
        assert self.told and all(each == self.told[0] for each in self.told)
        return self.told[0]


@contextmanager
def scene(killer: Killer | None = None, seed: int = 1) -> Iterator[Scene]:
    killer = killer or Killer()
    with limits(LIMITS), closing(Cluster(seed, SHAPE, [*every_invariant(), killer])) as cluster:
        for process in [*cluster.engines(), *cluster.callers()]:
            process.idle = True
        cluster.world.run(BEGIN_S)
        assert not unsettled(cluster.world)
        killer.seen = 0
        yield Scene(cluster, killer)


@pytest.fixture
def quiet() -> Iterator[Scene]:
    with scene() as one:
        yield one


def boundaries(seed: int) -> int:
    """How many events there are in the life of that plan."""
    with scene(seed=seed) as quiet:
        conversation = quiet.submit(plan())
        record = quiet.end(conversation)
        assert record.state == DONE
        return quiet.killer.seen


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("victim", "seed", "gateways"),
    [
        ("host0/1", 1, ["host0/1"]),
        ("host0/1", 2, ["host0/1", "host1/1"]),
        ("host1/1", 3, ["host0/1", "host2/1"]),
        ("store", 4, ["host0/1"]),
    ],
)
def test_whoever_is_killed_at_any_boundary_the_plan_has_one_outcome(
    victim: str, seed: int, gateways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that was asked to run it, a worker that does a step, the store: after every single event.

    All invariants hold meanwhile: one outcome, visible once it is recorded, no step twice at one who lives.
    """
    monkeypatch.setattr("tests.sim.world.QUIET", object())  # every event is a boundary
    count = boundaries(seed)
    assert count >= 30
    taken_over = 0
    for number in range(count + 1):
        killer = Killer()
        with scene(killer, seed) as quiet:
            killer.left, killer.victim = number, quiet.world.processes[victim]
            conversations = [quiet.submit(plan(), gateway) for gateway in gateways]
            quiet.run(1.0, killer.is_done)
            if victim == "store":
                quiet.cluster.restart_store()
            else:
                quiet.cluster.start_worker(victim.partition("/")[0])
            record = quiet.end(*conversations)
            assert record.state == DONE, f"killed after {number} events: {record.message}"
            taken_over += quiet.world.counts["plan taken over"]
            quiet.run(1.0)
            assert "plan" not in unsettled(quiet.world)
    assert (taken_over > 0) == (victim == "host0/1")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_plan_that_nobody_waits_for_ends_as_well() -> None:
    """Its gateway and its caller are killed at every boundary; the others find it, or it was never there."""
    found = 0
    with scene() as quiet:
        quiet.submit(plan())
        quiet.run(1.0, lambda: "plans/t/k/" in quiet.cluster.store.snapshot.rows)
        first = quiet.killer.seen
    for number in range(first - 4, first + 20, 2):
        with scene(Killer()) as quiet:
            quiet.submit(plan())
            while quiet.killer.seen <= number:
                quiet.world.run(quiet.world.now + 0.0001)
            quiet.caller.die()
            quiet.world.processes["host0/1"].die()
            quiet.cluster.start_worker("host0")
            quiet.run(TAKEOVER_S)
            rows = quiet.cluster.store.read().rows
            assert not unsettled(quiet.world)
            found += "plans/t/k/" in rows
    assert found


@pytest.mark.parametrize("pause", ["host0/1", "store"])
def test_the_deadline_holds_whatever_stands_still(pause: str, quiet: Scene) -> None:
    conversation = quiet.submit(plan(), timeout_s=2.0)
    quiet.world.run(quiet.world.now + 0.004)
    quiet.world.processes[pause].pause()
    quiet.run(5.0)
    assert not conversation.over or pause == "host0/1"
    quiet.world.processes[pause].resume()
    record = quiet.end(conversation)
    assert record.state in (DONE, FAILED)
    if record.state == FAILED:
        assert record.error == DeadlineExceeded.code


def test_two_gateways_at_once_are_one_plan(quiet: Scene) -> None:
    record = quiet.end(*(quiet.submit(plan(), f"host{number}/1") for number in range(3)))
    assert record.state == DONE and quiet.world.counts["step dispatched"] == 3


def test_a_finished_plan_is_not_run_again_by_the_gateway_that_ran_it(quiet: Scene) -> None:
    first = quiet.end(quiet.submit(plan()))
    assert quiet.end(quiet.submit(plan()), quiet.submit(plan(), "host1/1")) == first
    assert quiet.world.counts["step dispatched"] == 3


def test_the_outcome_is_told_also_when_the_targets_have_gone(quiet: Scene) -> None:
    first = quiet.end(quiet.submit(plan()))
    quiet.cluster.engines()[0].die()
    quiet.run(3.0)
    assert quiet.end(quiet.submit(plan())) == first
    unknown = quiet.submit(plan(), key="another")
    quiet.run(3.0)
    assert unknown.over and quiet.world.counts["plan NotFound"] == 1


def test_another_plan_under_the_same_key_is_a_conflict(quiet: Scene) -> None:
    mine = quiet.submit(plan("a", "b"))
    other = quiet.submit(plan("c", "c"), "host1/1")
    quiet.run(3.0)
    assert mine.over and other.over
    assert quiet.world.counts["plan Conflict"] == quiet.world.counts["plan done"] == 1


def test_a_step_that_fails_ends_the_plan_for_everybody(quiet: Scene) -> None:
    record = quiet.end(*(quiet.submit(plan(BROKEN, "b"), f"host{number}/1") for number in range(2)))
    assert record.state == FAILED and record.error == NotFound.code and "step 0" in record.message


def test_the_plan_of_a_gateway_that_has_gone_can_be_cancelled(quiet: Scene) -> None:
    quiet.submit(plan("slow", "slow"))
    quiet.run(0.05)
    quiet.world.processes["host0/1"].die()
    quiet.run(6.8)  # its lease has run out, and nobody has looked yet
    conversation = quiet.caller.conversations[0]
    conversation.cancel()
    assert quiet.end(conversation).state in ("cancelled", DONE)


def test_a_record_is_looked_up_alone(quiet: Scene) -> None:
    """Not with all whose keys begin like it."""
    conversations = [quiet.submit(plan(), key=key) for key in ("k", "k/", "k1", "k%2F")]
    quiet.run(3.0, lambda: all(each.over for each in conversations))
    assert quiet.world.counts["plan done"] == 4
    rows = [row for row in quiet.cluster.store.read().rows if row.startswith("plans/")]
    assert len(rows) == 4 and not any(one != other and one.startswith(other) for one in rows for other in rows)


def test_plans_go_on_in_the_store_s_next_life(quiet: Scene) -> None:
    """A lost database knows neither the plan nor the lease of its record."""
    first = quiet.end(quiet.submit(plan()))
    quiet.cluster.start_anew(None)
    quiet.run(20.0)  # everybody has heard of it
    quiet.told.clear()
    again = quiet.end(quiet.submit(plan()))
    assert again.state == DONE and again.epoch > first.epoch
