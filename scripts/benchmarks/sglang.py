"""`scripts/bench sglang`: batches of pages between SGLang's host memory and a storage behind it, and what a storage hit costs.

Every system is driven by SGLang's own controller, in SGLang's environment: ours, the Mooncake and `file` backends that SGLang
brings. Systems take turns, and what is read is compared. Batches are written first to memory of the storages that nobody has
written to yet, as just after the start, and then, like those that are read, to memory that was. The limit is what one thread
takes to copy a batch; ours copies by two.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import model, pool, sglang_engine
from demo.processes import DemoError, Supervisor
from demo.sglang_engine import PYTHON, Answer, SglangOptions, SglangServer

from benchmarks.driver import Driver
from benchmarks.environments import ROOT, install_debian_package, python_of
from benchmarks.face import LIMIT, OURS, BenchError, Figure, Row, Target

REQUIREMENTS = Path(__file__).with_suffix(".requirements.txt")
ALONE = ("mooncake-transfer-engine-non-cuda==0.3.13.post1",)
DEBIAN = ("libibverbs1", "librdmacm1")
MOONCAKE, FILE = "mooncake", "file"
HIT_MODEL = "tiny"  # of a larger one computing the last tokens takes so long that storages make no difference
# Mooncake copies to and from memory of its own process. What another host has it fetches over TCP, and so does this:
OVER_TCP = {"MC_STORE_MEMCPY": "0"}
OWN_MEMORY = "mooncake in its own memory"
TIE = 0.1  # of a first token's time, most of which is SGLang's own
PROMPT_TOKENS = 3000
STORED_TIMEOUT_S = 60.0
LEASE_S = 1.0  # of Mooncake's keys that were read; the master is told so
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        layers: of the pages, 256 KiB each; a batch is 128 pages.
        runs: of each row.
        memory: of every storage, in bytes.
    """

    layers: int
    runs: int
    memory: int


FULL = Size(layers=4, runs=7, memory=1536 << 20)
QUICK = Size(layers=1, runs=3, memory=512 << 20)


@dataclass(slots=True)
class Bench:
    """What runs. The stack ends it."""

    stack: ExitStack
    supervisor: Supervisor
    size: Size
    say: Say
    missing: dict[str, str]

    def storages(self, install: bool) -> dict[str, tuple[dict[str, Any], dict[str, str]]]:
        """Of each system that runs here: its extra configuration and its environment."""
        worker = pool.up(self.supervisor, arena=str(self.size.memory))
        shared = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorcast-bench-", dir="/dev/shm")))
        found: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
            OURS: (sglang_engine.storage(worker["worker"]), {}),
            FILE: ({}, {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(shared)}),
        }
        try:
            found[MOONCAKE] = {}, self._mooncake(install, "over-tcp") | OVER_TCP
            found[OWN_MEMORY] = {}, self._mooncake(install, "own-memory")
        except (BenchError, DemoError) as error:
            self.say(f"{MOONCAKE} does not run: {error}")
            self.missing[MOONCAKE] = str(error)
        return found

    def _mooncake(self, install: bool, name: str) -> dict[str, str]:
        """A master; the environment of the process that uses it, whose memory is all that it knows of."""
        if install:
            for package in DEBIAN:
                install_debian_package(package)
        python = python_of("hicache", REQUIREMENTS, alone=ALONE)
        packages = next(python.parents[1].glob("lib/python*/site-packages"))
        port, metrics, metadata = (self.supervisor.port() for _ in range(3))
        master = self.supervisor.start(
            f"mooncake-master-{name}",
            [
                str(packages / "mooncake" / "mooncake_master"), "-rpc_port", str(port), "-metrics_port", str(metrics),
                "-metrics_host", "127.0.0.1", "-enable_http_metadata_server=true", "-http_metadata_server_host",
                "127.0.0.1", "-http_metadata_server_port", str(metadata), "-default_kv_lease_ttl", str(int(LEASE_S * 1000)),
            ],
        )  # fmt: skip
        master.wait(lambda: str(port) in master.tail(200), 10.0)
        return {
            "PYTHONPATH": str(packages), "MOONCAKE_MASTER": f"127.0.0.1:{port}", "MOONCAKE_PROTOCOL": "tcp",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(self.size.memory), "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
        }  # fmt: skip

    # --- batches ---

    def batches(self, storages: dict[str, tuple[dict[str, Any], dict[str, str]]]) -> list[Row]:
        """Rows of writing and reading 128 pages."""
        drivers: dict[str, Driver] = {}
        with ExitStack() as stack:
            for name, (extra, environment) in storages.items():
                options = {"extra": extra, "layers": self.size.layers, "model": str(model.make("tiny"))}
                variables = [f"{key}={value}" for key, value in (_sglang_environment() | environment).items()]
                path = environment.get("PYTHONPATH")
                variables = [each for each in variables if not each.startswith("PYTHONPATH=")]
                variables.append(
                    "PYTHONPATH=" + os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "scripts"), path]))
                )
                command = ["env", *variables, str(PYTHON), "-m", "benchmarks.programs.hicache", name.split()[0]]
                log = self.supervisor.folder / f"{name.replace(' ', '-')}-batches.log"
                driver = Driver(name, [*command, _json(options)], log, os.sched_getaffinity(0))
                try:
                    drivers[name] = stack.enter_context(driver).ready()
                except BenchError as error:
                    if name == OURS:
                        raise
                    self.missing[name] = str(error)
            return self._measure_batches(drivers)

    def _measure_batches(self, drivers: dict[str, Driver]) -> list[Row]:
        batch = drivers[OURS].ask("copy")["bytes"]
        rows = self._turns(drivers, "batch_set_v1 of 128 pages, memory never written before", ("set",), 0)
        self.say("filling every storage once, so that its memory was written before")
        for name, driver in drivers.items():
            # Ours takes the place of what is oldest, and every place has to be taken once; the others would refuse.
            share = 1.25 if name == OURS else 0.8
            for number in range(int(self.size.memory * share / batch)):
                if "error" in driver.ask("set", key=-1 - number):
                    break
            if name != OURS:
                driver.ask("clear")
        return rows + self._turns(drivers, "batch_{}_v1 of 128 pages", ("set", "get"), self.size.runs)

    def _turns(self, drivers: dict[str, Driver], title: str, kinds: tuple[str, ...], first_key: int) -> list[Row]:
        """All systems after one another, several times. `title` is of the rows, with the kind in it."""
        figures = {
            (what, peer): Figure(f"{title.format(what)}, beside {peer}", "GB/s", (Target("peers", ">=", times),))
            for what in kinds
            for peer, times in ((MOONCAKE, 2), (FILE, 1))
        }
        for run in range(self.size.runs):
            self.say(f"{title.format(' and '.join(kinds))}, run {run + 1} of {self.size.runs}")
            limit = _rate(drivers[OURS].ask("copy"))
            for what in kinds:
                rates = {}
                for name in sorted(drivers, key=lambda each: hash((each, run, what))):
                    rates[name] = _rate(drivers[name].ask(what, key=first_key + run))
                for peer in (MOONCAKE, FILE):
                    figure = figures[what, peer]
                    figure.add(OURS, rates[OURS])
                    figure.add(LIMIT, limit)
                    if peer in rates:
                        figure.add(peer, rates[peer])
                if OWN_MEMORY in rates:
                    figures[what, MOONCAKE].beside.setdefault(OWN_MEMORY, []).append(rates[OWN_MEMORY])
        return [
            figure.made({peer: self.missing[peer]} if peer in self.missing else {})
            for (_, peer), figure in figures.items()
        ]

    # --- storage hits ---

    def hits(self, storages: dict[str, tuple[dict[str, Any], dict[str, str]]]) -> list[Row]:
        """The row of the time to the first token when the prompt is in the storage.

        Beside what SGLang takes for any hit, which is the limit: the same prompt, found on the device. The other server stands
        still meanwhile: with nothing to do SGLang's scheduler keeps a core busy, of which there may be two.
        """
        figure = Figure(
            f"first token, {PROMPT_TOKENS} tokens from the storage (limit: from the device)",
            "ms",
            (Target("peers", "<=", 1, tie=TIE),),
        )
        path = model.make(HIT_MODEL)
        servers: dict[str, SglangServer] = {}
        for name, of in ((OURS, OURS), (MOONCAKE, OWN_MEMORY)):  # as it is when nothing is said
            if of not in storages:
                continue
            extra, environment = storages[of]
            if name == MOONCAKE:  # a master that knows nothing of processes that have ended
                environment = self._mooncake(False, "server")
            more = () if name == OURS else ("--hicache-storage-backend", name)
            options = SglangOptions(
                path, extra if name == OURS else None, kv_tokens=8192, args=more, env=environment
            )  # fmt: skip
            servers[name] = sglang_engine.start(self.supervisor, f"{name}-server", options)
        for server in servers.values():
            server.wait()
        runs = 4 * self.size.runs + 1  # what SGLang takes for any hit differs by a third from one to the next
        prompts = [[10 + (7 * run + 13 * place) % 1900 for place in range(PROMPT_TOKENS)] for run in range(runs)]
        others = {name: [each.running for each in servers.values() if each is not servers[name]] for name in servers}
        for name, server in servers.items():
            self.say(f"{name}: storing {len(prompts)} prompts")
            for prompt in prompts:
                self._stored(server, prompt)
        for run, prompt in enumerate(prompts):
            for name, server in sorted(servers.items(), reverse=run % 2 == 0):
                with self.supervisor.standing_still(*others[name]):
                    server.flush()
                    figure.add(name, 1000 * _first_token(server, prompt, "storage"))
                    device = _first_token(server, prompt, "device")
                if name == OURS:
                    figure.add(LIMIT, 1000 * device)
        self.supervisor.stop(*(server.running for server in servers.values()))
        return [figure.made({MOONCAKE: self.missing[MOONCAKE]} if MOONCAKE in self.missing else {})]

    def _stored(self, server: SglangServer, prompt: list[int]) -> Answer:
        """Once the storage has the prompt."""
        page = 64
        whole = len(prompt) // page * page
        server.generate(prompt, tokens=1)
        deadline = time.monotonic() + STORED_TIMEOUT_S
        while True:
            server.flush()
            answer = server.generate(prompt, tokens=1)
            if answer.cached.get("storage", 0) >= whole - page:
                return answer
            if time.monotonic() > deadline:
                raise BenchError(f"{server.name} has not stored a prompt: {answer.cached}")


def _first_token(server: SglangServer, prompt: list[int], where: str) -> float:
    """Seconds to it when the prompt is cached there and nowhere else."""
    began = time.perf_counter()
    answer = server.generate(prompt, tokens=1)
    took = time.perf_counter() - began
    if set(answer.cached) != {where}:
        raise BenchError(f"{server.name}: {answer.cached or 'nothing'} was cached, not the {where} alone")
    return took


def _sglang_environment() -> dict[str, str]:
    return SglangOptions(Path()).environment()


def _json(value: Any) -> str:
    return json.dumps(value)


def _rate(answer: dict[str, Any]) -> float:
    if "error" in answer:
        raise BenchError(str(answer["error"]))
    if answer.get("same") is False:
        raise BenchError("what was read is not what was written")
    return float(answer["bytes"]) / 1e9 / float(answer["seconds"])


def run(size: Size, install_peers: bool, say: Say) -> list[Row]:
    """All rows.

    Raises:
        BenchError: ours cannot run here; a peer that cannot is named in the rows.
    """
    if not PYTHON.exists():
        raise BenchError("there is no SGLang; run scripts/install sglang")
    if shutil.disk_usage("/dev/shm").free < size.memory:
        raise BenchError(f"{size.memory >> 20} MiB in /dev/shm are needed; try --quick")
    try:
        with ExitStack() as stack, Supervisor(ROOT / ".out" / f"bench-sglang-{os.getpid()}") as supervisor:
            bench = Bench(stack, supervisor, size, say, {})
            storages = bench.storages(install_peers)
            return [*bench.batches(storages), *bench.hits(storages)]
    except DemoError as error:
        raise BenchError(str(error)) from error
