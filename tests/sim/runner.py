"""Plays one world from its beginning to its end."""

import gc
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tensorcast_connector.config import FIND_TIMEOUT_S
from tests.sim.cluster import Cluster, Shape, draw_shape, limits
from tests.sim.faults import Nemesis
from tests.sim.invariants.base import Violation
from tests.sim.invariants.every import every_invariant
from tests.sim.invariants.settled import expected_holders, unsettled
from tests.sim.network import CALLER_PATIENCE

QUIET_S = 30.0  # within so long after the last fault everything has to agree
LOOK_S = 1.0
STABLE_LOOKS = 2  # one after the other


@dataclass(frozen=True)
class Outcome:
    """How one world ended."""

    seed: int
    events: int
    duration_s: float  # simulated
    problem: str  # empty: every invariant held
    log: list[str]  # kept if there was a problem, or if asked for
    counts: Counter[str]  # what has happened how often, see World.count


def play(seed: int, shape: Shape | None = None, keep_log: bool = False) -> Outcome:
    """One world. Nothing is left behind."""
    shape = shape or draw_shape(seed)
    collecting = gc.isenabled()
    gc.disable()  # a world is thrown away as a whole
    try:
        with limits(shape.limits):
            cluster = Cluster(seed, shape, every_invariant())
            try:
                return _play(cluster, keep_log)
            finally:
                cluster.close()
    finally:
        if collecting:
            gc.enable()


def _play(cluster: Cluster, keep_log: bool) -> Outcome:
    world = cluster.world
    world.note("world", repr(cluster.shape))
    nemesis = Nemesis(cluster)
    problem = ""
    try:
        world.run(world.random.uniform(0.0, 3.0))
        nemesis.start()
        world.run(world.now + world.random.uniform(4.0, 16.0))
        nemesis.stop()
        _settle(cluster)
    except Violation as violation:
        problem = str(violation)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    if problem:
        world.note("world", "is broken:", problem)
    log = world.log() if problem or keep_log else []
    return Outcome(world.seed, world.events, world.now, problem, log, world.counts)


def _settle(cluster: Cluster) -> None:
    """Engines finish what they do; then everything agrees, and every lookup finds every page."""
    world = cluster.world
    world.run(world.now + 1.0)
    for process in [*cluster.engines(), *cluster.callers()]:
        process.idle = True
    deadline = world.now + QUIET_S
    wrong = "nobody has looked"
    while wrong:
        stable = 0
        while stable < STABLE_LOOKS:
            world.run(world.now + LOOK_S)
            problem = unsettled(world)
            stable = 0 if problem else stable + 1
            world.require(world.now < deadline, f"not settled {QUIET_S:g} s after the last fault: {problem or wrong}")
        wrong = _look_up(cluster)  # as it may be once, while a shard changes hands


def _look_up(cluster: Cluster) -> str:
    """Every worker looks up every page; what is wrong with the answers."""
    workers = cluster.workers()
    keys = sorted({key for worker in workers for key in worker.pages.inventory()})
    found: dict[str, list[Sequence[str]]] = {}
    for worker in workers:
        worker.holders(keys, lambda who, name=worker.name: found.__setitem__(name, who))  # type: ignore[misc]
    cluster.world.run(cluster.world.now + FIND_TIMEOUT_S * CALLER_PATIENCE * 2.1)
    there = expected_holders(cluster.world, keys)
    for name, answers in found.items():
        if [set(each) for each in answers] != there:
            return f"{name} finds {answers}, and there are {there}"
    return "" if len(found) == len(workers) else "a lookup has not ended"
