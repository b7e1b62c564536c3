"""`scripts/bench metadata`: how fast one shard home looks pages up and takes reports, and what a page costs it.

Everything runs in real processes over loopback TCP: a store and a worker as `tensorcast` starts them, with 1,000,000 pages
reported to it by members of its cluster; the same pages in a dictionary behind grpc.aio, in a redis-server, and in a
dictionary on bare frames; and a bare echo of frames of the same sizes, which is the limit. A second echo goes through our own
frames and streams: what it is slower than the first is the price of the transport, the rest that of messages and index.

Servers are kept on one CPU and clients on another, since two CPUs that wake each other and one that switches between both
give quite different figures. The systems take turns within each run. Other work on the machine shows in the spread.
"""

import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from demo import pool
from demo.processes import DemoError, Running, Supervisor, read_ready, ready_file

from benchmarks.driver import Driver, pin, python_path
from benchmarks.environments import install_debian_package, python_of
from benchmarks.face import LIMIT, OURS, BenchError, Figure, Row, Target
from benchmarks.programs.measure import HOLDERS, PAGES_PER_LOOKUP, PAGES_PER_REPORT

REQUIREMENTS = Path(__file__).with_suffix(".requirements.txt")
PAGES = 1_000_000
MEMBERS_FOR_MEMORY = 12  # with more than eight the sets of holders are no longer among the numbers that Python shares
START_TIMEOUT_S = 30.0
STREAMS = "streams"  # the second echo, which is no peer but the limit of a row of its own
PER_CPU_S = "pages per CPU second of the server"


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        pages: in the index meanwhile.
        runs: in each of which every system has its turn.
        calls: lookups per turn for the latency.
        burst: lookups per turn for the throughput.
        reports: per turn.
        memory_runs: each with a new cluster, or a new index for the stalls.
    """

    pages: int
    runs: int
    calls: int
    burst: int
    reports: int
    memory_runs: int


FULL = Size(pages=PAGES, runs=9, calls=1500, burst=3000, reports=100, memory_runs=3)
QUICK = Size(pages=PAGES, runs=3, calls=400, burst=600, reports=25, memory_runs=1)


@dataclass(frozen=True, slots=True)
class System:
    """A server and the program that measures it."""

    driver: Driver
    server: int  # its process


@dataclass(slots=True)
class Bench:
    """Everything that runs. The stack ends it."""

    stack: ExitStack
    supervisor: Supervisor
    size: Size
    say: Callable[[str], None]
    server_cpu: int
    client_cpu: int
    systems: dict[str, System] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    peer_bytes: dict[str, float] = field(default_factory=dict)

    # --- starting ---

    def module(self, name: str, *arguments: str, python: Path | None = None) -> list[str]:
        """The command line of one of our programs."""
        return [str(python or sys.executable), "-m", f"benchmarks.programs.{name}", *arguments]

    def drive(self, name: str, command: Sequence[str]) -> Driver:
        """Starts a measuring program."""
        log = self.supervisor.folder / f"{name}-client.log"
        return self.stack.enter_context(Driver(name, command, log, [self.client_cpu])).ready()

    def serve(self, name: str, command: Sequence[str]) -> tuple[Running, int]:
        """Starts a server of ours or of a peer that writes a ready file; and its port."""
        ready = self.supervisor.folder / f"{name}.ready.json"
        line = [str(ready) if each == "READY" else each for each in command]
        running = self.supervisor.start(name, line, env=python_path())
        pin(running.process.pid, [self.server_cpu])
        running.wait(ready_file(ready), START_TIMEOUT_S)
        return running, int(read_ready(ready)["port"])

    def ours(self, name: str, members: int) -> System:
        """A store, a worker that is the home of everything, and a client with so many members."""
        store = pool.store(self.supervisor, f"{name}-store")
        worker = pool.worker(self.supervisor, store["store"], name, arena="16MiB")
        pin(worker.running.process.pid, [self.server_cpu])
        pin(store.running.process.pid, [self.client_cpu])
        driver = self.drive(name, self.module("ours", store["store"], worker["peer"], str(members)))
        return System(driver, worker.running.process.pid)

    def start_ours(self) -> None:
        """Ours with its pages, and the limits."""
        self.say(f"ours: a store, a worker, {self.size.pages:,} pages")
        ours = self.systems[OURS] = self.ours("home", HOLDERS)
        ours.driver.ask("fill", pages=self.size.pages, holders=HOLDERS, pid=ours.server)
        sizes = ours.driver.ask("sizes")
        self.say(f"limits: echoes of {sizes['request']:,} and {sizes['reply']:,} bytes")
        for name, program in ((LIMIT, "echo"), (STREAMS, "streams")):
            echo, port = self.serve(program, self.module(program, "serve", "READY", str(sizes["reply"])))
            driver = self.drive(program, self.module(program, "measure", str(port), str(sizes["request"])))
            self.systems[name] = System(driver, echo.process.pid)

    def start_peers(self, install: bool) -> None:
        """Each peer, or the reason why not."""
        starts: dict[str, Callable[[], System]] = {
            "bare index": self._bare,
            "grpc.aio": self._grpc,
            "redis": lambda: self._redis(install),
        }
        for name, start in starts.items():
            self.say(f"{name}: {self.size.pages:,} pages")
            try:
                system = start()
                filled = system.driver.ask("fill", pages=self.size.pages, holders=1, pid=system.server)
            except (BenchError, DemoError) as error:
                self.missing[name] = str(error)
                self.say(f"{name} does not run: {error}")
            else:
                self.systems[name] = system
                self.peer_bytes[name] = filled["bytes_per_page"]

    def _bare(self) -> System:
        server, port = self.serve("bare", self.module("bare", "serve", "READY"))
        return System(self.drive("bare", self.module("bare", "measure", str(port))), server.process.pid)

    def _grpc(self) -> System:
        python = python_of("metadata", REQUIREMENTS)
        server, port = self.serve("grpc", self.module("grpc_peer", "serve", "READY", python=python))
        driver = self.drive("grpc", self.module("grpc_peer", "measure", str(port), python=python))
        return System(driver, server.process.pid)

    def _redis(self, install: bool) -> System:
        if shutil.which("redis-server") is None and install:
            install_debian_package("redis-server")
        program = shutil.which("redis-server")
        if program is None:
            raise BenchError("there is no redis-server; on Debian: apt-get install redis-server, or --install-peers")
        python = python_of("metadata", REQUIREMENTS)
        port = self.supervisor.port()
        command = [program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no",
                   "--dir", str(self.supervisor.folder)]  # fmt: skip
        server = self.supervisor.start("redis", command)
        pin(server.process.pid, [self.server_cpu])
        server.wait(lambda: listening(port), START_TIMEOUT_S)
        return System(self.drive("redis", self.module("redis_peer", str(port), python=python)), server.process.pid)

    # --- measuring ---

    def measure(self, figures: Sequence[Figure], values: Sequence[str], what: str, **how: int) -> None:
        """All runs of one command; `values` are the names of what it answers, one for each figure."""
        self.say(f"{what}: {self.size.runs} runs of {', '.join(self.systems)}")
        for _ in range(self.size.runs):
            for name, system in self.systems.items():
                if what in ("registrations", "churn") and name in (LIMIT, STREAMS):
                    continue  # what there is to register has no limit of this kind
                answer = system.driver.ask(what, pid=system.server, **how)
                for figure, value in zip(figures, values, strict=True):
                    figure.add(name, answer[value])

    def rows(self) -> list[Row]:
        """Everything but the memory."""
        p50, p99, lookups, registrations, churn = figures = [
            Figure(f"lookup of {PAGES_PER_LOOKUP} pages, p50", "us", Target("ratio", "<=", 1.5)),
            Figure(f"lookup of {PAGES_PER_LOOKUP} pages, p99", "us", None),
            Figure("page lookups", PER_CPU_S, Target("ours", ">=", 1e6)),
            Figure("registrations", PER_CPU_S, Target("ours", ">=", 3e5)),
            Figure("registrations, each with a removal", PER_CPU_S, Target("ours", ">=", 3e5)),
        ]
        self.measure([p50, p99], ["p50", "p99"], "latency", calls=self.size.calls)
        self.measure([lookups], ["per_cpu_s"], "lookups", calls=self.size.burst)
        self.measure([registrations], ["per_cpu_s"], "registrations", reports=self.size.reports)
        self.measure([churn], ["per_cpu_s"], "churn", reports=self.size.reports)
        streams = [figure.peers.pop(STREAMS, []) for figure in figures]
        beside = Figure(f"{p50.row}, limit: an echo through our streams", p50.unit, None, p50.ours, streams[0])
        return [p50.made(self.missing), beside.made({}), *(figure.made(self.missing) for figure in figures[1:])]

    def stall_rows(self) -> list[Row]:
        """How long the home stands still for the largest things it does at once."""
        figures = {
            "hold": Figure("stall of the home when a quarter of its shards changes hands", "ms", None),
            "forget": Figure("the same when a worker leaves that has a third of the pages", "ms", None),
            "report": Figure(f"the longest of the reports of {PAGES_PER_REPORT} pages that filled it", "ms", None),
        }
        log = self.supervisor.folder / "stall.log"
        self.say(f"stalls with {self.size.pages:,} pages: {self.size.memory_runs} runs")
        with Driver("stall", self.module("stall"), log, [self.server_cpu]) as driver:
            driver.ready()
            for _ in range(self.size.memory_runs):
                for what, value in driver.ask("stall", pages=self.size.pages).items():
                    figures[what].add(OURS, value)
        return [figure.made({}) for figure in figures.values()]

    def memory_rows(self) -> list[Row]:
        """The memory of a page, with one holder, two and three."""
        figures = [
            Figure(f"memory of a page that {who}", "bytes", Target("ours", "<=", 250))
            for who in ("one worker has", "two workers have", "three workers have")
        ]
        for run in range(self.size.memory_runs):
            self.say(f"memory of {self.size.pages:,} pages: run {run + 1} of {self.size.memory_runs}")
            system = self.ours(f"memory-{run}", MEMBERS_FOR_MEMORY)
            total = system.driver.ask("fill", pages=self.size.pages, holders=1, pid=system.server)["bytes_per_page"]
            figures[0].add(OURS, total)
            for holder, figure in enumerate(figures[1:], 1):
                total += system.driver.ask("share", holder=holder, pid=system.server)["bytes_per_page"]
                figure.add(OURS, total)
        for name, value in self.peer_bytes.items():
            figures[0].add(name, value)
        return [figures[0].made(self.missing), *(figure.made({}) for figure in figures[1:])]


def listening(port: int) -> bool:
    """Whether somebody accepts connections there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def run(size: Size, install_peers: bool, say: Callable[[str], None], folder: Path | None = None) -> list[Row]:
    """All rows.

    Args:
        size: how much is measured.
        install_peers: see `scripts/bench --help`.
        say: is told what goes on.
        folder: for logs; `.out/RUN` unless told.

    Raises:
        BenchError: ours cannot run here; a peer that cannot is named in the rows.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise BenchError("two CPUs are needed, one for servers and one for clients")
    with ExitStack() as stack:
        try:
            supervisor = stack.enter_context(Supervisor(folder))
            bench = Bench(stack, supervisor, size, say, cpus[-1], cpus[0])
            bench.start_ours()
            bench.start_peers(install_peers)
            rows = bench.rows()
            return rows + bench.memory_rows() + bench.stall_rows()
        except DemoError as error:
            raise BenchError(str(error)) from error
