"""One simulated cluster: what it consists of is drawn from the seed, and so is what happens to it."""

import contextlib
import importlib
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tensorcast_connector.config import CLOCK_DRIFT_MAX, MEMBER_TTL_S, ROLES
from tests.sim.caller_process import CallerProcess, Job
from tests.sim.engine_process import EngineProcess
from tests.sim.invariants.base import Invariant
from tests.sim.network import Network
from tests.sim.plan_service import PlanService
from tests.sim.store_process import StoreProcess
from tests.sim.worker_process import WorkerProcess
from tests.sim.world import Clock, World

SHM = Path("/dev/shm")
SHARD_COUNTS = (1, 2, 4, 8)
CONNECT_DELAY_MAX_S = 2.0  # net/rpc_client.py: how long after a store is there again its clients notice


@dataclass(frozen=True)
class Shape:
    """What a cluster consists of, and the limits it runs with."""

    workers: int = 3
    shards: int = 4
    blocks: int = 24  # of how many blocks there are pages, per keyspace
    arena_bytes: int = 1024
    engines: int = 3
    engines_together: bool = False  # all on the first host
    engine_interval_s: float = 0.6
    copy_max_s: float = 0.02
    basic_only: int = 0  # how many of the workers are no shard homes
    reconnects: bool = True  # whether workers notice that a store is there again
    callers: int = 0  # who submit plans
    caller_interval_s: float = 1.5
    wall_offsets_s: tuple[float, ...] = (0.0,)  # of the wall clocks of the hosts, in turn
    limits: dict[str, float] = field(default_factory=dict)  # "module:NAME" -> another value than in config.py

    @property
    def plans(self) -> bool:
        """Whether there are any."""
        return self.callers > 0


# Small limits make rare situations frequent: inventories in several messages, compacted histories, many handovers.
LIMITS: dict[str, Sequence[float]] = {
    "tensorcast_connector.core.reports:REPORT_KEYS_PER_MESSAGE": (2, 5, 4096),
    "tensorcast_connector.core.reports:REPORT_BACKLOG_KEYS_MAX": (8, 1 << 20),
    "tensorcast_connector.store.sqlite_kv:HISTORY_REVISIONS_MAX": (8, 40, 10_000),
    "tensorcast_connector.store.sqlite_kv:HISTORY_BYTES_MAX": (1500, 64 << 20),
    "tensorcast_connector.store.server:CLAIMS_PER_TXN": (2, 32),
    "tensorcast_connector.core.leases:HANDOVER_AFTER_S": (1.0, 3.0, 10.0),
    "tensorcast_connector.core.leases:HANDOVER_SHARDS_MAX": (1, 8),
    "tensorcast_connector.core.member:WATCH_WAIT_S": (1.0, 10.0),
    "tensorcast_connector.core.gateway_plans:PLAN_FOLLOW_INTERVAL_S": (0.2, 0.5),
    "tensorcast_connector.core.gateway_plans:PLAN_ORPHANS_INTERVAL_S": (1.0, 4.0),
    "tensorcast_connector.store.answers:LISTING_BYTES_MAX": (600, 4 << 20),
}
WALL_OFFSETS_S = (0.0, 0.0, 0.4, -0.4, 3600.0, -3600.0)


def draw_shape(seed: int) -> Shape:
    """A small cluster."""
    chance = random.Random(f"shape {seed}")
    workers = chance.choice((2, 3, 3, 4, 5))
    return Shape(
        workers=workers,
        shards=chance.choice(SHARD_COUNTS),
        blocks=chance.choice((8, 16, 24)),
        arena_bytes=chance.choice((512, 1024, 2048)),
        engines=chance.randint(1, workers + 2),
        engines_together=chance.random() < 0.3,
        engine_interval_s=chance.choice((0.3, 0.6, 1.2)),
        copy_max_s=chance.choice((0.005, 0.02, 0.4)),
        basic_only=chance.choice((0, 0, 0, 1)),
        reconnects=chance.random() < 0.7,
        limits={name: chance.choice(values) for name, values in LIMITS.items()},
        callers=chance.choice((0, 0, 0, 0, 1, 2)),
        caller_interval_s=chance.choice((0.8, 1.6)),
        wall_offsets_s=tuple(chance.choice(WALL_OFFSETS_S) for _ in range(workers)),
    )


@contextlib.contextmanager
def limits(values: dict[str, float]) -> Iterator[None]:
    """The production code runs with these limits meanwhile."""
    before = []
    for name, value in values.items():
        module_name, _, constant = name.partition(":")
        module = importlib.import_module(module_name)
        before.append((module, constant, getattr(module, constant)))
        setattr(module, constant, value)
    try:
        yield
    finally:
        for module, constant, value in before:
            setattr(module, constant, value)


class Cluster:
    """A world with a store, workers and engines in it. Close it."""

    def __init__(self, seed: int, shape: Shape, invariants: Sequence[Invariant]) -> None:
        self.shape = shape
        self.world = World(seed, invariants)
        self.network = Network(self.world)
        self._folder = tempfile.TemporaryDirectory(dir=SHM if os.access(SHM, os.W_OK) else None)
        self._databases = 0
        self._runs: dict[str, int] = {}
        self._engines = 0
        self.clocks: dict[str, Clock] = {}
        chance = self.world.random
        self.hosts = [f"host{number}" for number in range(shape.workers)]
        for host in ["store", *self.hosts]:
            rate = 1 + CLOCK_DRIFT_MAX * chance.choice((-1, 1, 0, chance.uniform(-1, 1)))
            self.clocks[host] = Clock(self.world, rate, chance.uniform(0, 1000))
        self.stores = StoreProcess(self.world, self.clocks["store"], self._next_folder(), shape.shards)
        for host in self.hosts:
            self.start_worker(host)
        for number in range(shape.engines):
            self.start_engine(self.hosts[0 if shape.engines_together else number % len(self.hosts)])
        self.jobs: list[Job] = []
        for number in range(shape.callers):
            host = self.hosts[number % len(self.hosts)]
            CallerProcess(
                self.world, self.network, host, number, self.clocks[host], self.jobs,
                lambda: [each.name for each in self.workers()],
                lambda: (self.hosts, [each.name for each in self.engines()]), shape.caller_interval_s,
            )  # fmt: skip

    def _next_folder(self) -> Path:
        self._databases += 1
        return Path(self._folder.name) / f"{self._databases}"

    # --- processes ---

    @property
    def store(self) -> StoreProcess:
        """The store's latest run, dead or alive."""
        return self.stores

    def workers(self) -> list[WorkerProcess]:
        """Those that live."""
        return [each for each in self.world.processes.values() if isinstance(each, WorkerProcess)]

    def engines(self) -> list[EngineProcess]:
        """Those that live."""
        return [each for each in self.world.processes.values() if isinstance(each, EngineProcess)]

    def callers(self) -> list[CallerProcess]:
        """Those who submit plans."""
        return [each for each in self.world.processes.values() if isinstance(each, CallerProcess)]

    def worker_on(self, host: str) -> WorkerProcess | None:
        """The one that runs there, if any."""
        return next((each for each in self.workers() if each.host == host), None)

    def start_worker(self, host: str) -> WorkerProcess:
        """A new run of the worker on `host`, with an empty arena."""
        run = self._runs[host] = self._runs.get(host, 0) + 1
        basic = self.hosts.index(host) >= len(self.hosts) - self.shape.basic_only
        roles = ROLES[:1] if basic else ROLES
        worker = WorkerProcess(
            self.world, self.network, host, run, self.clocks[host], roles, self.shape.arena_bytes
        )  # fmt: skip
        if self.shape.plans:
            offsets = self.shape.wall_offsets_s
            worker.plans = PlanService(worker, offsets[self.hosts.index(host) % len(offsets)])
        return worker

    def start_engine(self, host: str) -> EngineProcess:
        """A new engine."""
        self._engines += 1
        return EngineProcess(
            self.world, host, self._engines, self.clocks[host], lambda: self.worker_on(host), self.shape.blocks,
            self.shape.engine_interval_s, self.shape.copy_max_s,
        )  # fmt: skip

    def restart_store(self) -> None:
        """On the file as the crash left it."""
        if not self.store.alive:
            self.stores = self.store.restarted()
            self.store_is_back()

    def start_anew(self, backup: Path | None) -> None:
        """The store starts on another database: an empty one or one from a backup, there or on its former file.

        It knows nothing of the leases that the former one had granted: until they are over there may be two homes, unless
        it was told that it is restored, and waits, or hears of the former life before it grants anything.
        """
        if self.store.alive:
            self.store.crash()
        if backup is None:
            self.world.former_until = self.store.died_at + 1.05 * MEMBER_TTL_S
        in_place = backup is not None and self.world.random.random() < 0.5
        folder = self.store.path.parent if in_place else self._next_folder()
        if backup is None and self.world.random.random() < 0.3:
            self.store.shards = self.world.random.choice(SHARD_COUNTS)
        self.stores = self.store.replaced(folder, backup)
        self.store_is_back()

    def back_up(self) -> Path:
        """A backup of the store's database as it is now."""
        self._databases += 1
        path = Path(self._folder.name) / f"{self._databases}.backup"
        self.store.back_up(path)
        return path

    def store_is_back(self) -> None:
        """Workers connect again, if they notice."""
        if self.shape.reconnects:
            for worker in self.workers():
                delay = self.world.random.random() * CONNECT_DELAY_MAX_S
                self.world.schedule(self.world.now + delay, worker, self._connected, worker)

    def _connected(self, worker: WorkerProcess) -> object:
        both_ways = self.network.reachable(worker.host, "store") and self.network.reachable("store", worker.host)
        if not (self.store.alive and both_ways):
            return False
        worker.store_connected()
        return True

    def close(self) -> None:
        """Ends everything; no file is left."""
        self.store.stop()
        self._folder.cleanup()
