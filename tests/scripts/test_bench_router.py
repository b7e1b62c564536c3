"""`scripts/bench router`: its rows, its processes, and that its probe tells right from wrong."""

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from benchmarks import router, router_memory, router_systems
from benchmarks.face import LIMIT, OURS, BenchError, Figure, Target
from benchmarks.programs import engine, router_state
from benchmarks.programs.load import busy_s, cpu_s, family
from benchmarks.router_behaviour import Probe, probe
from benchmarks.router_systems import BARE, COMPILED_PEERS, PYTHON_PEER, Machine, machine
from demo.processes import ROOT

TWO_CPUS = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="routers and engines need a CPU each")
CPUS = {router.ROUTER: [0], router.OTHERS: [0]}
TINY = router.Size(2, 0.05, 1, router_memory.Scale(5000, 20_000, 500, 200, 200), False, False)


# --- rows ---


def test_a_row_may_be_judged_by_the_best_peer() -> None:
    figure = Figure("row", "ms", Target("best peer", "<", 1.0))
    for name, values in {OURS: [9, 8, 10], "fast": [10, 10, 9], "slow": [1, 30, 30]}.items():
        for value in values:
            figure.add(name, value)
    row = figure.made({"other": "not here"})
    assert (row.ratio, row.holds, row.target) == (0.9, True, "best peer < 1"), (
        "fast is the best, whatever slow did once"
    )
    equal = Figure("row", "ms", Target("best peer", "<", 1.0), ours=[1.0], peers={"a": [1.0]})
    assert not equal.made({}).holds


def test_without_peers_such_a_row_is_for_information() -> None:
    row = Figure("row", "ms", Target("best peer", "<", 1.0), ours=[1.0]).made({"a": "not here"})
    assert (row.target, row.holds, row.ratio, row.peers) == (None, True, None, {"a": "not here"})


def taken(ours: float, peers: float, bare: float) -> dict[router.Load, router.Taken]:
    values = {OURS: [ours], BARE: [bare], **{name: [peers] for name in (*COMPILED_PEERS, PYTHON_PEER)}}
    loads = [*router.AGENTIC, router.ONE, router.MANY, router.STREAM, router.PACED]
    return {load: router.Taken(values, values, values) for load in loads}


def test_the_targets_of_the_rows_under_load() -> None:
    good = router.load_rows(taken(ours=0.2, peers=1.0, bare=0.15), {})
    assert all(row.holds for row in good) and len(good) == 17
    assert [row.target for row in good].count("best peer < 1") == 4
    slow = [row.row for row in router.load_rows(taken(ours=1.2, peers=1.0, bare=0.5), {}) if row.holds]
    assert all("added first byte" in name for name in slow), "only what is for information holds"


class Told:
    """A load program that says what it was told to."""

    def __init__(self, direct_busy: float) -> None:
        self.direct_busy = direct_busy

    def ask(self, _: str, *, pids: list[int], **__: Any) -> dict[str, Any]:
        busy = {"router": 0.3, "others": 0.5} if pids else {"router": 0.0, "others": self.direct_busy}
        return {"requests": 10, "failed": 0, "cpu_s": 0.01, "p50": 500.0, "first_p50": 1.0, "busy": busy}


@pytest.mark.parametrize("busy", [0.2, 0.9])
def test_of_a_paced_load_is_said_how_busy_the_cpus_were(busy: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.Router, "pids", lambda _: [1])
    routers = [router.Router(OURS, None, "http://ours")]  # type: ignore[arg-type]
    said: list[str] = []
    loads = [router.MANY, router.PACED]
    router.measure(loads, routers, ["http://engine"], Told(busy), TINY, said.append, CPUS)  # type: ignore[arg-type]
    text = f"engines and load, and of the router, busy: direct {busy:.0%}, ours 50% and 30%"
    assert [each.endswith(text) for each in said if "busy" in each] == [True]
    assert any("too much else to do" in each for each in said) == (busy > router.BUSY_MAX)


# --- processes ---


def test_busy_is_a_cpu_on_which_somebody_works() -> None:
    cpus = sorted(os.sched_getaffinity(0))[:1]
    with router_systems.on_cpus(cpus):
        before, end = busy_s(cpus), time.perf_counter() + 0.1
        while time.perf_counter() < end:
            pass
        assert 0.03 < busy_s(cpus) - before < 0.5
    assert busy_s([]) == 0


def test_cpu_time_of_a_process_and_its_children() -> None:
    assert os.getpid() in family(os.getppid())
    before = cpu_s([os.getpid()])
    until = time.process_time() + 0.02
    while time.process_time() < until:
        pass
    assert 0.015 < cpu_s([os.getpid()]) - before < 1.0
    assert cpu_s([2**22 + 1]) == 0.0, "it has ended"


def test_every_peer_is_pinned() -> None:
    for name in (*COMPILED_PEERS, PYTHON_PEER):
        text = Path(router.__file__).with_name(f"router.{name}.requirements.txt").read_text()
        lines = [line for line in text.splitlines() if line and line[0] != "#"]
        assert lines and all("==" in line or line.rpartition("@")[2].isalnum() for line in lines)


@pytest.mark.slow
async def test_the_hit_index_and_the_memory_are_measured() -> None:
    got = await router_state.index({"blocks": 20_000})
    assert got["per_s"] > 0
    got = await router_state.requests({"requests": 500})
    assert abs(got["grown"]) < 64 << 20
    got = await router_state.exact({"blocks": 20_000})
    assert got["decoded_per_s"] > got["per_s"] < got["taken_per_s"] and got["single_per_s"] > 0


@pytest.mark.slow
def test_the_memory_of_an_index_whose_prompts_change_is_measured() -> None:
    """In a process of its own: in that of the tests so much may have been freed that it does not grow at all."""
    program = (
        "import asyncio, json; from benchmarks.programs import router_state; "
        "print(json.dumps(asyncio.run(router_state.replaced({'blocks': 40_000}))))"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "scripts")))}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=paths)
    got = json.loads(ran.stdout)
    assert got["bytes"] > 0 and got["longest_s"] > 0 and abs(got["grown"]) < 64 << 20


def test_a_chunked_body_and_controls_are_understood() -> None:
    parts = engine.chunk(b"ab") + engine.chunk(b"c" * 20) + b"0\r\n\r\n"
    assert engine.unchunked(parts) == b"ab" + b"c" * 20
    event = engine.event_bytes(None, usage={"a": 1})
    assert event.startswith(b'data: {"id"') and b'"choices": [], "usage": {"a": 1}' in event and event.endswith(b"\n\n")


@pytest.fixture
def processes(tmp_path: Path) -> Any:
    with ExitStack() as stack:
        yield machine(stack, tmp_path / "run")


@TWO_CPUS
@pytest.mark.slow
def test_a_peer_that_cannot_run_is_named(processes: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = router_systems.command_of

    def command(name: str, *rest: Any) -> Any:
        if name == "smg":
            raise BenchError("no network")
        return ([sys.executable, "-c", "exit('broken')"], {}) if name in COMPILED_PEERS else real(name, *rest)

    monkeypatch.setattr(router_systems, "command_of", command)
    engines = processes.engines(1)
    started = processes.routers((OURS, "smg", "sglang-router"), engines)
    assert [each.name for each in started] == [OURS] and started[0].pids()
    assert processes.missing["smg"] == "no network"
    assert processes.missing["sglang-router"] == "sglang-router does not start: broken"


def test_of_several_pythons_one_that_runs_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, status in (("shims", 127), ("real", 0)):
        (tmp_path / name).mkdir()
        made = tmp_path / name / "python3.12"
        made.write_text(f"#!/bin/sh\nexit {status}\n")
        made.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/shims:{tmp_path}/real")
    assert router_systems.newer_python() == f"{tmp_path}/real/python3.12"
    monkeypatch.setenv("PATH", f"{tmp_path}/shims")
    with pytest.raises(BenchError, match="none that runs"):
        router_systems.newer_python()


@TWO_CPUS
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_tiny_run_of_the_real_thing(processes: Machine) -> None:
    """Ours and the bare proxy, really; all that needs no peers."""
    engines = processes.engines(2)
    routers = processes.routers((OURS, BARE), engines)
    load = processes.driver("load")
    loads = [router.AGENTIC[0], router.MANY, router.STREAM]
    got = router.measure(loads, routers, [each.url for each in engines], load, TINY, lambda _: None, CPUS)
    for each in loads:
        names = {OURS} if each in router.AGENTIC else {OURS, BARE}
        assert set(got[each].cpu_ms) == names
        assert all(len(values) == 2 and min(values) > 0 for values in got[each].cpu_ms.values())
    processes.stop(*routers, *engines)
    rows = [row for name in ("memory", "million") for row in router.PARTS[name](processes, load, TINY, lambda _: None)]
    assert [row.unit for row in rows] == ["MiB"] * 3
    row = router.row("row", Target("ratio", "<=", 99.0), got[router.MANY].cpu_ms, {}, (), BARE)
    assert row.limit and row.ratio and row.holds and LIMIT not in row.peers


@TWO_CPUS
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ours_behaves(processes: Machine) -> None:
    results = asyncio.run(probe(processes, OURS))
    assert len({result.name for result in results}) == 32
    assert [result for result in results if not result.right] == []


@TWO_CPUS
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_proxy_without_care_does_not(processes: Machine) -> None:
    """The bare proxy loses headers, and answers nothing of its own."""
    steps = (Probe.passed_on, Probe.errors)
    wrong = {result.name for result in asyncio.run(probe(processes, BARE, steps)) if not result.right}
    assert {"the client's headers", "x-request-id comes back", "malformed JSON"} <= wrong and "an answer" not in wrong
