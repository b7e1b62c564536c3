"""Discrete events, clocks and processes: one simulated cluster, in which everything follows from one seed.

No threads, no event loop, no real time. An event is a function that runs at an instant of true time, in one process or in
nature. What happens in a process that is paused happens when it goes on, in the same order; what happens in one that has
died never happens. After every event in a process the invariants are checked.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from tests.sim.invariants.base import HOOKS, Invariant, Violation

TIMER_SLACK_S = 1e-6  # an alarm rings a little late, never early
QUIET = "quiet"  # returned by an event that has changed nothing `Invariant.after_event` looks at


class Clock:
    """A host's clock: seconds that go on during suspend, at a rate within the drift bound, and may jump forward."""

    __slots__ = ("_offset", "_world", "rate")

    def __init__(self, world: "World", rate: float, offset: float) -> None:
        self._world = world
        self.rate = rate
        self._offset = offset

    def __call__(self) -> float:
        return self._offset + self.rate * self._world.now

    def when(self, local: float) -> float:
        """The true time at which this clock shows `local`, if it does not jump."""
        return (local - self._offset) / self.rate

    def jump(self, seconds: float) -> None:
        """The clock is suddenly ahead."""
        self._offset += seconds


class Process:
    """One run of one process on one host. A restart is another object."""

    def __init__(self, world: "World", name: str, host: str, clock: Clock) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.clock = clock
        self.alive = True
        self.paused = False
        self.deferred: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        world.processes[name] = self

    def __repr__(self) -> str:
        return f"<{self.name}{' paused' if self.paused else ''}{'' if self.alive else ' dead'}>"

    def after(self, seconds: float, action: Callable[..., Any], *args: Any) -> None:
        """`action` happens here in `seconds` of this process's clock."""
        self.world.schedule(self.world.now + seconds / self.clock.rate + TIMER_SLACK_S, self, action, *args)

    def pause(self) -> None:
        """Stops it (SIGSTOP, a suspended machine): its clock goes on."""
        self.paused = True
        self.world.note(self.name, "paused")

    def resume(self) -> None:
        """It goes on, and everything that was to happen meanwhile happens now."""
        if self.paused and self.alive:
            self.paused = False
            self.world.note(self.name, "resumed")
            deferred, self.deferred = self.deferred, []
            for action, args in deferred:
                self.world.schedule(self.world.now, self, action, *args)

    def die(self) -> None:
        """It is killed: whatever it was doing ends here."""
        self.alive = False
        self.world.note(self.name, "died")
        if self.world.processes.get(self.name) is self:
            del self.world.processes[self.name]

    def clock_jumped(self) -> None:
        """This host's clock is suddenly ahead."""


class World:
    """See the module.

    Args:
        seed: of everything that happens.
        invariants: fresh ones.
    """

    def __init__(self, seed: int, invariants: Iterable[Invariant]) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.counts: Counter[str] = Counter()  # of what has happened, so that tests can tell that it does
        self.processes: dict[str, Process] = {}
        self.committed: dict[bytes, set[bytes]] = {}  # page key -> all bytes that were ever committed for it
        self.exempt_until = -1.0  # until then two homes of one shard are no fault: the store's clock jumped
        self.former_until = -1.0  # until then a worker may believe in a life of the database that was lost
        self._heap: list[tuple[float, int, Process | None, Callable[..., Any], tuple[Any, ...]]] = []
        self._count = 0
        self._log: list[tuple[float, str, str, tuple[Any, ...]]] = []
        self.hooks: dict[str, list[Callable[..., None]]] = {name: [] for name in HOOKS}
        for invariant in invariants:
            for name in HOOKS:
                if getattr(type(invariant), name) is not getattr(Invariant, name):
                    self.hooks[name].append(getattr(invariant, name))

    def __repr__(self) -> str:
        return f"<World {self.seed} at {self.now:.3f} s, {self.events} events>"

    # --- what happens ---

    def schedule(self, when: float, process: Process | None, action: Callable[..., Any], *args: Any) -> None:
        """`action(*args)` happens at true time `when`, in `process` or in nature.

        If it returns False nothing happened; see also QUIET.
        """
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, process, action, args))

    def after(self, seconds: float, action: Callable[..., Any], *args: Any) -> None:
        """Something happens in nature in `seconds` of true time."""
        self.schedule(self.now + seconds, None, action, *args)

    def run(self, until: float) -> None:
        """Everything up to true time `until`.

        Raises:
            Violation: an invariant does not hold any more.
        """
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, process, action, args = heapq.heappop(heap)
            if process is None:
                action(*args)
            else:
                self.enter(process, action, *args)
        self.now = until

    def enter(self, process: Process, action: Callable[..., Any], *args: Any) -> None:
        """`action` happens in `process` now, or when it goes on."""
        if not process.alive:
            return
        if process.paused:
            process.deferred.append((action, args))
        elif (what := action(*args)) is not False:
            self.events += 1
            for check in self.hooks["after_event"] if what is not QUIET else ():
                check(self, process)

    def tell(self, hook: str, *facts: Any) -> None:
        """Tells the invariants a fact; see Invariant."""
        for check in self.hooks[hook]:
            check(self, *facts)

    # --- the record ---

    def note(self, who: str, what: str, *objects: Any) -> None:
        """A line of the log. `objects` are never changed afterwards."""
        self._log.append((self.now, who, what, objects))

    def log(self) -> list[str]:
        """What has happened, as text: the same for the same seed."""
        return [
            " ".join([f"{now:.6f}", who, what, *(each if isinstance(each, str) else repr(each) for each in objects)])
            for now, who, what, objects in self._log
        ]

    def require(self, holds: object, problem: str) -> None:
        """Raises Violation with `problem` unless `holds`."""
        if not holds:
            raise Violation(problem)
