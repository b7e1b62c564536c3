"""The nemesis: what goes wrong in one world, drawn from its seed.

Each world has a few kinds of faults only, some of them often, so that none hides another. A fault that lasts has an end;
`stop` ends all of them.
"""

from collections.abc import Callable
from pathlib import Path

from tensorcast_connector.config import MEMBER_TTL_S
from tests.sim.cluster import Cluster
from tests.sim.store_process import STORE
from tests.sim.world import Process

LONG_PAUSE_S = (1.1 * MEMBER_TTL_S, 2.5 * MEMBER_TTL_S)
SHORT_PAUSE_S = (0.05, 3.0)
CUT_S = (0.5, 14.0)
KINDS_MAX = 5
# Faults that need each other to do harm.
THEMES = (
    ("duplication", "delay", "artifacts", "engine gives up"),
    ("duplication", "loss", "worker crash", "worker leaves"),
    ("partition", "one-way partition", "congestion", "worker pause"),
    ("congestion", "one-way partition", "worker crash"),
    ("store crash", "torn write", "artifacts", "worker leaves"),
    ("engine pause", "engine gives up", "engine crash"),
    ("store clock", "worker clock", "one-way partition", "loss"),
    ("database lost", "store pause", "partition", "duplication"),
)
PLAN_THEMES = (
    ("worker pause", "delay"),
    ("worker pause", "one-way partition", "duplication"),
    ("worker crash", "loss", "duplication"),
    ("worker crash", "worker pause", "engine crash"),
    ("store crash", "torn write", "worker pause", "worker clock"),
)


class Nemesis:
    """See the module. `start` it once; it strikes until `stop`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._chance = cluster.world.random
        self._ends: dict[int, Callable[[], None]] = {}
        self._count = 0
        self._stopped = False
        self._backup: Path | None = None
        kinds = self._kinds
        if self._chance.random() < 0.5:
            self.kinds = list(self._chance.choice((*THEMES, *PLAN_THEMES) if cluster.shape.plans else THEMES))
        else:
            self.kinds = self._chance.sample(sorted(kinds), self._chance.randint(1, KINDS_MAX))
        self._interval_s = self._chance.choice((0.7, 1.5, 3.0))
        self._wrong_bytes = self._chance.random() < 0.3

    def start(self) -> None:
        """From now on things go wrong."""
        self._world.note("nemesis", "brings", ", ".join(self.kinds))
        self._cluster.network.corruption = 0.2 if self._wrong_bytes else 0.0
        self._strike()

    def stop(self) -> None:
        """Everything that is broken is mended now, and stays so."""
        self._stopped = True
        for end in list(self._ends.values()):
            end()
        cluster = self._cluster
        cluster.network.corruption = 0.0
        if not cluster.store.alive:
            cluster.restart_store()
        cluster.store.crash_inside = False
        for process in list(self._world.processes.values()):
            process.resume()
        for host in cluster.hosts:
            if cluster.worker_on(host) is None:
                cluster.start_worker(host)
        cluster.store_is_back()

    def _strike(self) -> None:
        if self._stopped:
            return
        kind = self._chance.choice(self.kinds)
        self._kinds[kind](self)
        self._world.counts[kind] += 1
        self._world.after(self._interval_s * 2 * self._chance.random(), self._strike)

    def _for_a_while(self, seconds: float, end: Callable[[], None]) -> None:
        """`end` happens in `seconds`, or when everything ends."""
        self._count += 1
        number = self._count

        def ended() -> None:
            if self._ends.pop(number, None):
                end()

        self._ends[number] = ended
        self._world.after(seconds, ended)

    def _uniform(self, bounds: tuple[float, float]) -> float:
        return self._chance.uniform(*bounds)

    # --- the network ---

    def _messages(self, name: str, chance: float) -> None:
        network = self._cluster.network
        setattr(network, name, chance)
        self._world.note("nemesis", f"{name} of messages: {chance:.2f}")
        self._for_a_while(self._uniform((0.5, 8.0)), lambda: setattr(network, name, 0.0))

    def _loss(self) -> None:
        self._messages("loss", self._chance.choice((0.05, 0.3, 0.7)))

    def _delay(self) -> None:
        self._messages("slow", self._chance.choice((0.1, 0.5)))

    def _duplication(self) -> None:
        self._messages("duplication", self._chance.choice((0.2, 0.7)))

    def _partition(self) -> None:
        """Some hosts on each side."""
        hosts = [STORE, *self._cluster.hosts]
        side = set(self._chance.sample(hosts, self._chance.randint(1, len(hosts) - 1)))
        self._cut([(a, b) for a in hosts for b in hosts if (a in side) != (b in side)], self._uniform(CUT_S))

    def _one_way_partition(self) -> None:
        """One host, or a few, cannot send to some others, but hear them."""
        hosts = [STORE, *self._cluster.hosts]
        source = self._chance.choice(hosts)
        others = [each for each in hosts if each != source]
        targets = self._chance.sample(others, self._chance.randint(1, len(others)))
        backwards = self._chance.random() < 0.5
        self._cut([(each, source) if backwards else (source, each) for each in targets], self._uniform(CUT_S))

    def _congestion(self) -> None:
        """Everything is slow, and then one host is cut off from the store, one way or both."""
        self._cluster.network.slow = 0.8
        host = self._chance.choice(self._cluster.hosts)
        ways = self._chance.choice(([(host, STORE)], [(STORE, host)], [(host, STORE), (STORE, host)]))

        def cut() -> None:
            self._cluster.network.slow = 0.0
            if not self._stopped:
                self._cut(ways, self._uniform(LONG_PAUSE_S))

        self._for_a_while(self._uniform((1.0, 3.0)), cut)

    def _cut(self, ways: list[tuple[str, str]], seconds: float) -> None:
        cuts = self._cluster.network.cuts
        for way in ways:
            cuts[way] = cuts.get(way, 0) + 1
        self._world.note("nemesis", "cuts", ", ".join(f"{a}>{b}" for a, b in ways))

        def mend() -> None:
            for way in ways:
                cuts[way] -= 1
            self._world.note("nemesis", "mends", ", ".join(f"{a}>{b}" for a, b in ways))

        self._for_a_while(seconds, mend)

    # --- processes ---

    def _pause(self, process: Process, seconds: float) -> None:
        if not process.paused:
            process.pause()
            self._for_a_while(seconds, process.resume)

    def _worker_pause(self) -> None:
        if workers := self._cluster.workers():
            bounds = self._chance.choice((SHORT_PAUSE_S, LONG_PAUSE_S))
            self._pause(self._chance.choice(workers), self._uniform(bounds))

    def _store_pause(self) -> None:
        if self._cluster.store.alive:
            bounds = self._chance.choice((SHORT_PAUSE_S, LONG_PAUSE_S))
            self._pause(self._cluster.store, self._uniform(bounds))

    def _worker_crash(self) -> None:
        if workers := self._cluster.workers():
            worker = self._chance.choice(workers)
            worker.die()
            self._start_later(worker.host)

    def _worker_leaves(self) -> None:
        if workers := [each for each in self._cluster.workers() if not each.paused]:
            worker = self._chance.choice(workers)
            worker.leave()
            self._start_later(worker.host)

    def _start_later(self, host: str) -> None:
        def start() -> None:
            if self._cluster.worker_on(host) is None:
                self._cluster.start_worker(host)

        self._for_a_while(self._uniform((0.1, 1.5 * MEMBER_TTL_S)), start)

    def _store_crash(self) -> None:
        store = self._cluster.store
        if store.alive and not store.paused:
            store.crash()
            self._for_a_while(self._uniform((0.1, 1.5 * MEMBER_TTL_S)), self._cluster.restart_store)

    def _store_torn(self) -> None:
        """It crashes inside its next transaction."""
        store = self._cluster.store
        if store.alive:
            store.crash_inside = True
            store.on_crash = lambda _: self._for_a_while(self._uniform((0.1, 3.0)), self._cluster.restart_store)

    def _database_lost(self) -> None:
        """The store starts again with an empty database, or with what a backup has kept."""
        cluster = self._cluster
        if cluster.store.alive and not cluster.store.paused and self._chance.random() < 0.5:
            self._backup = cluster.back_up()
        else:
            if cluster.store.alive:
                cluster.store.crash()
            self._for_a_while(self._uniform((0.0, 1.5 * MEMBER_TTL_S)), lambda: cluster.start_anew(self._backup))

    def _engine_crash(self) -> None:
        if engines := self._cluster.engines():
            engine = self._chance.choice(engines)
            engine.resume()
            engine.die()
            self._for_a_while(self._uniform((0.1, 3.0)), lambda: self._start_engine(engine.host))

    def _start_engine(self, host: str) -> None:
        self._cluster.start_engine(host)

    def _engine_pause(self) -> None:
        engines = self._cluster.engines()
        if engines := [each for each in engines if each.copies] or engines:
            bounds = self._chance.choice((SHORT_PAUSE_S, LONG_PAUSE_S))
            self._pause(self._chance.choice(engines), self._uniform(bounds))

    def _engine_gives_up(self) -> None:
        """Now, or while the threads that copy have been without a processor for a while."""
        if engines := [each for each in self._cluster.engines() if not each.paused]:
            engine = self._chance.choice(engines)
            if self._chance.random() < 0.3:
                engine.give_up()
            else:
                engine.stall_s = self._uniform(SHORT_PAUSE_S)

    def _artifacts(self) -> None:
        if workers := [each for each in self._cluster.workers() if not each.paused]:
            worker = self._chance.choice(workers)
            name = f"weights/{self._chance.randrange(3)}"
            if name in worker.artifacts:
                worker.remove_artifact(name)
            else:
                worker.put_artifact(name)

    # --- clocks ---

    def _worker_clock(self) -> None:
        if workers := self._cluster.workers():
            self._jump(self._chance.choice(workers))

    def _store_clock(self) -> None:
        if self._cluster.store.alive:
            self._jump(self._cluster.store)
            self._world.exempt_until = self._world.now + 1.05 * MEMBER_TTL_S

    def _jump(self, process: Process) -> None:
        seconds = self._uniform(self._chance.choice((SHORT_PAUSE_S, LONG_PAUSE_S)))
        process.clock.jump(seconds)
        self._world.note("nemesis", f"{process.name}'s clock jumps {seconds:.3f} s ahead")
        process.clock_jumped()

    _kinds: dict[str, Callable[["Nemesis"], None]] = {  # noqa: RUF012 - a constant table
        "loss": _loss,
        "delay": _delay,
        "duplication": _duplication,
        "partition": _partition,
        "one-way partition": _one_way_partition,
        "congestion": _congestion,
        "worker pause": _worker_pause,
        "worker crash": _worker_crash,
        "worker leaves": _worker_leaves,
        "worker clock": _worker_clock,
        "store pause": _store_pause,
        "store crash": _store_crash,
        "torn write": _store_torn,
        "database lost": _database_lost,
        "store clock": _store_clock,
        "engine crash": _engine_crash,
        "engine pause": _engine_pause,
        "engine gives up": _engine_gives_up,
        "artifacts": _artifacts,
    }
