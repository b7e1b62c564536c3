"""`scripts/bench router`: the router beside compiled and Python peers, in front of the same fake engines, in one run.

Routers have a CPU of their own, engines and the load another. The systems take turns within each run. The figure to compare
is the CPU time of all of a router's processes per request, since other work on the machine shows in it least; "added" is
what an answer takes longer than from the engines themselves in the same run.
"""

import asyncio
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from demo.processes import DemoError

from benchmarks import router_behaviour, router_memory
from benchmarks.driver import Driver
from benchmarks.environments import ROOT
from benchmarks.face import LIMIT, OURS, BenchError, Figure, Row, Target
from benchmarks.router_systems import BARE, COMPILED_PEERS, DIRECT, PYTHON_PEER, Machine, Router, machine
from smetric_router.config import RouterConfig

Say = Callable[[str], None]
MS = 1e3
ADDED_MIN_MS = 0.01
"""Less than that is noise, and nothing to divide by."""
CHUNKS, GAP_MS = 50, 10
LARGE, SMALL = 200_000, 2_000
CONVERSATIONS = {
    "sessions": 64, "turns": 8, "live": 16, "system_bytes": 6 * 1024, "turn_bytes": 2 * 1024,
    "control": "[[first_ms=60 chunks=8]]",
}  # fmt: skip
ONE_PROCESS = "one process"
PREDICTION_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        runs: in each of which every system has its turn.
        seconds: of load per turn.
        conversations: runs of the whole set.
        state: of router_memory.py.
        peers_too: whether peers hold conversations and are probed too.
        engine: whether a real engine is asked.
    """

    runs: int
    seconds: float
    conversations: int
    state: router_memory.Scale
    peers_too: bool
    engine: bool


FULL = Size(7, 1.0, 5, router_memory.FULL, True, True)
QUICK = Size(1, 0.25, 1, router_memory.QUICK, False, False)


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of load."""

    bytes: int
    stream: bool
    concurrency: int
    gap_ms: int = 0

    def __str__(self) -> str:
        kind = f"{CHUNKS}-chunk stream" if self.stream else "whole answer"
        return f"{self.bytes // 1000} KB, {kind}{' paced' if self.gap_ms else ''}, {self.concurrency} at a time"

    def told(self, seconds: float) -> dict[str, Any]:
        """For programs/load.py."""
        paced_s = CHUNKS * self.gap_ms / 1e3
        return {
            "bytes": self.bytes, "stream": self.stream, "concurrency": self.concurrency,
            "control": f"[[chunks={CHUNKS} gap_ms={self.gap_ms}]]", "seconds": max(seconds, 2 * paced_s),
            "spread_s": paced_s,
        }  # fmt: skip


AGENTIC = [Load(LARGE, stream, concurrency) for stream in (False, True) for concurrency in (1, 16)]
ROUTER, OTHERS = "router", "others"
BUSY_MAX = 0.6
"""Where the CPUs of engines and load are busy for longer without any router, what a router adds is time in queues."""
ONE, MANY, STREAM = Load(SMALL, False, 1), Load(SMALL, False, 16), Load(SMALL, True, 16)
PACED = Load(SMALL, True, 64, GAP_MS)


@dataclass(slots=True)
class Taken:
    """What was measured of one load: a list per system, a value per run."""

    cpu_ms: dict[str, list[float]] = field(default_factory=dict)
    added_ms: dict[str, list[float]] = field(default_factory=dict)
    added_first_ms: dict[str, list[float]] = field(default_factory=dict)
    busy: dict[str, list[Mapping[str, float]]] = field(default_factory=dict)
    """Shares of the time for which the CPUs of each side had anything to do, also of the engines without a router."""

    def busy_text(self) -> str:
        """The medians, side by side, in percent."""
        found = []
        for name, runs in self.busy.items():
            shares = {side: statistics.median(each[side] for each in runs) for side in runs[0]}
            text = f"{name} {shares[OTHERS]:.0%}"
            found.append(text if name == DIRECT else f"{text} and {shares[ROUTER]:.0%}")
        return f"CPUs of engines and load, and of the router, busy: {', '.join(found)}"


def measure(
    loads: Sequence[Load], routers: Sequence[Router], direct: Sequence[str], load: Driver, size: Size, say: Say,
    cpus: Mapping[str, Sequence[int]],
) -> dict[Load, Taken]:  # fmt: skip
    """All loads on all systems, in turns; every second run backwards, so that drift evens out.

    Args:
        cpus: those of ROUTER and of the OTHERS.

    Raises:
        BenchError: requests failed.
    """
    taken = {each: Taken() for each in loads}
    for run in range(size.runs):
        say(f"run {run + 1} of {size.runs}")
        for each, into in taken.items():
            told = {**each.told(size.seconds), "cpus": cpus}
            bare = _asked(load, DIRECT, told, direct, [])
            into.busy.setdefault(DIRECT, []).append(bare["busy"])
            for router in routers if run % 2 == 0 else routers[::-1]:
                if each.bytes == LARGE and router.name in (BARE, PYTHON_PEER):
                    continue  # no row is about them
                got = _asked(load, router.name, told, [router.url], router.pids())
                values = (
                    (into.cpu_ms, got["cpu_s"] * MS / got["requests"]),
                    (into.added_ms, max(ADDED_MIN_MS, got["p50"] - bare["p50"])),
                    (into.added_first_ms, max(ADDED_MIN_MS, got["first_p50"] - bare["first_p50"])),
                )
                for where, value in values:
                    where.setdefault(router.name, []).append(value)
                into.busy.setdefault(router.name, []).append(got["busy"])
    for each, into in taken.items():
        if each.gap_ms:
            say(f"{each}: {into.busy_text()}")
            if statistics.median(run[OTHERS] for run in into.busy[DIRECT]) > BUSY_MAX:
                say(f"{each}: this machine has too much else to do, the row says more of it than of routers")
    return taken


def _asked(
    load: Driver, name: str, told: Mapping[str, Any], urls: Sequence[str], pids: Sequence[int]
) -> dict[str, Any]:
    got = load.ask("load", urls=urls, pids=pids, **told)
    if got["failed"]:
        raise BenchError(f"{name}: {got['failed']} of {got['requests']} requests failed: {got['statuses']}")
    return got


def row(
    what: str, target: Target | None, values: Mapping[str, list[float]], missing: Mapping[str, str],
    peers: Sequence[str], limit: str | None = None,
) -> Row:  # fmt: skip
    """A row of what was measured in milliseconds."""
    figure = Figure(what, "ms", target)
    for value in values[OURS]:
        figure.add(OURS, value)
    for value in values[limit] if limit else ():
        figure.add(LIMIT, value)
    for name in peers:
        for value in values.get(name, ()):
            figure.add(name, value)
    return figure.made({name: why for name, why in missing.items() if name in peers})


def load_rows(taken: Mapping[Load, Taken], missing: Mapping[str, str]) -> list[Row]:
    """Of everything that was measured under load."""
    rows = []
    everyone = (*COMPILED_PEERS, PYTHON_PEER)
    for load in filter(taken.__contains__, AGENTIC):
        got = taken[load]
        target = Target("best peer", "<=", 1.1) if load.concurrency == 1 else Target("best peer", "<", 1.0)
        rows.append(row(f"{load}: CPU per request", target, got.cpu_ms, missing, COMPILED_PEERS))
        rows.append(row(f"{load}: added p50", target, got.added_ms, missing, COMPILED_PEERS))
        if load.stream:
            rows.append(row(f"{load}: added first byte p50", None, got.added_first_ms, missing, COMPILED_PEERS))
    if ONE not in taken:
        return rows
    half_more, quarter = Target("ratio", "<=", 1.5), Target("best peer", "<=", 0.25)
    for load in (ONE, MANY):
        what, got = f"{load}: CPU per request", taken[load]
        rows.append(row(f"{what} / {BARE}", half_more, got.cpu_ms, missing, everyone, BARE))
        rows.append(row(f"{what} / Python peer", quarter, got.cpu_ms, missing, [PYTHON_PEER]))
    rows.append(row(f"{ONE}: added p50", Target("ours", "<=", 0.35), taken[ONE].added_ms, missing, everyone, BARE))
    stream = Target("ours", "<=", 0.7)
    rows.append(row(f"{STREAM}: CPU per stream", stream, taken[STREAM].cpu_ms, missing, everyone, BARE))
    first = Target("ours", "<=", 1.0)
    rows.append(row(f"{PACED}: added first byte p50", first, taken[PACED].added_first_ms, missing, everyone, BARE))
    return rows


# --- where requests go ---


def conversation_rows(machine: Machine, load: Driver, size: Size, say: Say) -> list[Row]:
    """Stickiness and balance: four engines, sessions with one system prompt; one process, then as many as there can be."""
    say("conversations")
    peers = (*COMPILED_PEERS, PYTHON_PEER) if size.peers_too else ()
    rows = _conversation_rows(machine, load, size, ONE_PROCESS, [()], peers, 0.99)
    known = RouterConfig.__dataclass_fields__
    if "workers" in known:
        rows += _conversation_rows(machine, load, size, "two worker processes", [("workers=2",)], (), 0.98)
    else:
        say("two worker processes: this router has no setting 'workers'")
    if "peers" in known:
        rows += _conversation_rows(
            machine, load, size, "two routers behind a random balancer", machine.sharing(2), (), 0.98
        )
    else:
        say("two routers: this router has no setting 'peers'")
    return rows


def _conversation_rows(
    machine: Machine, load: Driver, size: Size, how: str, replicas: Sequence[Sequence[str]], peers: Sequence[str],
    sticky: float,
) -> list[Row]:  # fmt: skip
    stuck = Figure(f"follow-ups that stay, {how}", "share", Target("ours", ">=", sticky))
    target = Target("ours", "<=", 1.1) if how == ONE_PROCESS else None
    even = Figure(f"most loaded engine / mean, {how}", "ratio", target)
    engines = machine.engines(4)
    ours = machine.replicas(engines, replicas)
    others = machine.routers(peers, engines)
    for run in range(size.conversations):
        for name, urls in [(OURS, [each.url for each in ours]), *((each.name, [each.url]) for each in others)]:
            got = load.ask("converse", seed=run, urls=urls, **CONVERSATIONS)
            if got["failed"]:
                raise BenchError(f"{name}: {got['failed']} requests failed")
            stuck.add(name, got["stuck"] / got["follow_ups"])
            served = got["served"]
            even.add(name, max(served.values()) * len(engines) / sum(served.values()))
    machine.stop(*ours, *others, *engines)
    return [stuck.made(machine.missing_of(peers)), even.made(machine.missing_of(peers))]


def behaviour_row(machine: Machine, size: Size, say: Say) -> Row:
    """Of 32 results, how many are right."""
    figure: Figure | None = None
    peers = COMPILED_PEERS if size.peers_too else ()
    for name in (OURS, *peers):
        if name in machine.missing:
            continue
        say(f"behaviour of {name}")
        results = asyncio.run(router_behaviour.probe(machine, name))
        for result in results:
            if not result.right:
                say(f"{name} is wrong about {result.name}: {result.seen}")
        if figure is None:
            figure = Figure(f"behaviour: right of {len(results)}", "results", Target("ours", ">=", len(results)))
        figure.add(name, sum(result.right for result in results))
    assert figure is not None
    return figure.made(machine.missing_of(peers))


# --- real engines, decisions ---


def prediction_rows(say: Say) -> list[Row]:
    """Predicted against reported cached tokens on a real engine; tests/e2e/test_router_index.py prints the shares."""
    test = ROOT / "tests" / "e2e" / "test_router_index.py"
    if find_spec("vllm") is None or not test.exists():
        say("prediction: there is no vLLM here" if test.exists() else f"prediction: there is no {test.name}")
        return []
    say("prediction on a real engine")
    command = [sys.executable, "-m", "pytest", "-m", "engine", "-s", "-q", "-k", "within", str(test)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PREDICTION_TIMEOUT_S, check=False)
    rows = []
    for mode, blocks, least in (("exact", "one block", 99), ("observed", "two blocks", 90)):
        figure = Figure(f"prediction, {mode} mode: within {blocks}", "%", Target("ours", ">=", least))
        found = re.search(rf"{mode}: within {blocks} ([\d.]+)%", said.stdout)
        if found is None:
            raise BenchError(f"{test.name} says nothing of {mode} mode: {said.stdout.strip().splitlines()[-1:]}")
        figure.add(OURS, float(found[1]))
        rows.append(figure.made({}))
    return rows


def decision_rows(size: Size, say: Say) -> list[Row]:
    """Of router_decision.py."""
    name = "benchmarks.router_decision"
    if find_spec(name) is None:
        say("decisions: there is no router_decision.py")
        return []
    decision = import_module(name)
    rows: list[Row] = decision.run(decision.QUICK if size == QUICK else decision.FULL, say)
    return rows


def loaded_rows(machine: Machine, load: Driver, size: Size, say: Say, loads: Sequence[Load]) -> list[Row]:
    """All systems under these loads.

    Raises:
        BenchError: ours or the bare proxy does not run here.
    """
    engines = machine.engines(2)
    say("starting the routers")
    routers = machine.routers((OURS, BARE, *COMPILED_PEERS, PYTHON_PEER), engines)
    for name in (OURS, BARE):
        if name in machine.missing:
            raise BenchError(machine.missing[name])
    for name, why in machine.missing.items():
        say(f"{name} does not run: {why}")
    cpus = {ROUTER: machine.router_cpus, OTHERS: machine.other_cpus}
    taken = measure(loads, routers, [each.url for each in engines], load, size, say, cpus)
    machine.stop(*routers, *engines)
    return load_rows(taken, machine.missing)


Part = Callable[[Machine, Driver, Size, Say], list[Row]]
PARTS: dict[str, Part] = {
    "large": partial(loaded_rows, loads=AGENTIC),
    "small": partial(loaded_rows, loads=[ONE, MANY, STREAM, PACED]),
    "conversations": conversation_rows,
    "behaviour": lambda machine, _, size, say: [behaviour_row(machine, size, say)],
    "decisions": lambda _, __, size, say: decision_rows(size, say),
    "index": lambda machine, _, size, say: router_memory.index_rows(machine, size.state, say),
    "memory": lambda machine, load, size, say: router_memory.memory_rows(machine, load, size.state, say),
    "million": lambda machine, load, size, say: router_memory.million_rows(machine, load, size.state, say),
    "prediction": lambda _, __, size, say: prediction_rows(say) if size.engine else [],
}
"""What can be run by itself, a few minutes each."""


def run(size: Size, say: Say, parts: Collection[str] = (), folder: Path | None = None) -> list[Row]:
    """The rows of these PARTS, or of all.

    Raises:
        BenchError: ours cannot run here; a peer that cannot is named in the rows.
    """
    try:
        with ExitStack() as stack:
            made = machine(stack, folder)
            load = made.driver("load")
            return [row for name in parts or PARTS for row in PARTS[name](made, load, size, say)]
    except DemoError as error:
        raise BenchError(str(error)) from error
