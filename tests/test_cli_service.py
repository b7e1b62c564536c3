"""`tensorcast put`, `get`, `ls`, `pin`, `unpin`, `prefetch`, `rm` and `plan`, on a real store and two real workers."""

import asyncio
import json
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo import pool as programs
from demo.pool import Started
from demo.processes import ROOT, Supervisor, run_id

from tensorcast_connector import cli_callers, cli_service
from tensorcast_connector.cli import main
from tensorcast_connector.cli_callers import as_age, parse_seconds, sockets_of_workers
from tensorcast_connector.cli_plan import FileStep, run_plan
from tensorcast_connector.client.files import read_tensors
from tensorcast_connector.client.instance import InstanceLink, StepContext
from tensorcast_connector.client.plan import CallContext
from tensorcast_connector.core.artifact import layout
from tensorcast_connector.core.safetensors import encode_file_header
from tensorcast_connector.errors import ConfigError
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.wire.messages import AttachInstance
from tests.client.callers import Pool
from tests.cluster import quick
from tests.documented import section
from tests.loops import quiet_loop
from tests.waiting import until, until_blocking

__all__ = ["quick", "quiet_loop"]
TENSORCAST = [sys.executable, "-m", "tensorcast_connector.cli"]
pytestmark = pytest.mark.slow


class Site:
    """Two workers of one store, and the command."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.store = programs.store(supervisor)["store"]
        self.workers = [self.add(name) for name in "ab"]
        self.tenants = 0

    def add(self, name: str) -> Started:
        return programs.worker(self._supervisor, self.store, name, arena="4MiB")

    @property
    def socket(self) -> str:
        return self.workers[0]["worker"]


class Caller:
    """One tenant of the site, which nobody else is."""

    def __init__(self, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
        site.tenants += 1
        self.site = site
        self.tenant = f"t{site.tenants}"
        self._capsys = capsys

    def flags(self, worker: int = 0) -> list[str]:
        return ["--worker", self.site.workers[worker]["worker"], "--tenant", self.tenant]

    def run(self, *args: str, worker: int = 0) -> tuple[int, str, str]:
        """(status, output, errors)."""
        self._capsys.readouterr()
        plan = args[:1] == ("plan",)
        words = (
            [*args[: 1 + plan], *self.flags(worker), *args[1 + plan :]] if args[0] != "get" else [*args, *self.flags()]
        )
        try:
            status = main(words)
        except SystemExit as exit_:
            status = int(str(exit_.code))
        out, err = self._capsys.readouterr()
        return status, out, err

    def done(self, *args: str, worker: int = 0) -> str:
        """The output of a command that succeeds."""
        status, out, err = self.run(*args, worker=worker)
        assert status == 0, err
        return out.strip()

    def fails(self, *args: str) -> tuple[int, str]:
        """(status, the one line on stderr)."""
        status, _, err = self.run(*args)
        assert err.count("\n") == 1 and "Traceback" not in err, err
        return status, err

    def listed(self, worker: int = 0) -> dict[str, Any]:
        """By id."""
        return {each["artifact_id"]: each for each in json.loads(self.done("ls", "--json", worker=worker))["artifacts"]}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """For all tests of this module."""
    with Supervisor(ROOT / ".out" / f"cli-{run_id()}", grace_s=5.0) as supervisor:
        yield Site(supervisor)


@pytest.fixture
def caller(site: Site, capsys: pytest.CaptureFixture[str]) -> Caller:
    """A new one."""
    return Caller(site, capsys)


def model(path: Path, seed: int = 0) -> str:
    """A file with tensors of its own."""
    header, order = encode_file_header(layout([("w", "bfloat16", (300, 4)), ("bias", "float32", (7,))])[0])
    path.write_bytes(header + np.random.default_rng(seed).bytes(sum(each.bytes for each in order)))
    return str(path)


def bytes_of(path: Path) -> dict[str, bytes]:
    return {name: bytes(raw.data) for name, raw in read_tensors(path).items()}


# --- artifacts ---


def test_put_get_and_ls(caller: Caller, tmp_path: Path) -> None:
    path = model(tmp_path / "x.safetensors")
    identity = caller.done("put", path, "--name", "org/m@v1")
    said = json.loads(caller.done("put", path, "--json"))
    assert said == {"artifact_id": identity, "bytes": 64 + 2400, "tensors": 2, "names": ["org/m@v1"]}
    assert caller.done("get", "org/m@v1", str(tmp_path / "y")) == ""
    assert bytes_of(tmp_path / "y") == bytes_of(tmp_path / "x.safetensors")
    caller.done("get", identity, str(tmp_path / "z"), "--tensor", "bias")
    assert set(bytes_of(tmp_path / "z")) == {"bias"}
    listed = caller.listed()[identity]
    assert listed["names"] == ["org/m@v1"] and listed["tensors"] == 2 and listed["lease_id"] == 0
    assert listed["workers"] == [caller.site.workers[0]["worker_id"]]
    row = next(line for line in caller.done("ls").splitlines() if identity in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")][1:5] == ["org/m@v1", "2.4 KiB", "2", "system"]
    assert identity in caller.done("ls", "org/") and caller.run("ls", "other/") == (0, "", "no artifacts\n")
    documented = section("commands.md", "What `--json` says")
    assert all(f"`{name}`" in documented for name in (*said, *listed))


def test_some_tensors_wherever_the_flag_stands(caller: Caller, tmp_path: Path) -> None:
    caller.done("put", model(tmp_path / "x.safetensors", 31), "--name", "m")
    out = str(tmp_path / "y")
    for words, names in [
        (["m", "--tensor", "bias", out], {"bias"}), (["--tensor", "bias", "m", out], {"bias"}), (["m", out, "--tensor=w"], {"w"}),
        (["m", "--tensor", "bias", "--tensor", "w", out], {"bias", "w"}), (["m", out, "--tensor", "bias", "w"], {"bias", "w"}),
        (["m", out, "--tensor=w", "bias", "--tenant", caller.tenant], {"bias", "w"}),
    ]:  # fmt: skip
        assert caller.run("get", *words) == (0, "", "")
        assert set(bytes_of(tmp_path / "y")) == names, words
    (tmp_path / "y").unlink()
    for words, message in [
        (["m", "--tensor", "bias", "w", out], "unrecognized arguments"), (["m", out, "w", "--tensor", "bias"], "unrecognized"),
        (["m", out, "w"], "unrecognized"), (["m", "--tensor", "bias"], "required: OUT.safetensors"),
        (["m", out, "--tensor"], "expected one argument"), (["m", out, "--tensor", "bias", "w", "--none"], "unrecognized"),
    ]:  # fmt: skip
        status, line = caller.fails("get", *words)
        assert status == 2 and message in line
    assert not (tmp_path / "y").exists() and not (tmp_path / "w").exists()


def test_a_worker_elsewhere_and_over_tcp(caller: Caller, tmp_path: Path) -> None:
    identity = caller.done("put", model(tmp_path / "x.safetensors", 1), "--name", "m")
    a, b = (each["worker_id"] for each in caller.site.workers)
    until_blocking(lambda: identity in caller.listed(worker=1))
    caller.done("prefetch", "m", "--to", "b")
    until_blocking(lambda: caller.listed()[identity]["workers"] == [a, b])
    for command in (["pin", "m", "--ttl", "1h", "--on", b], ["unpin", "m", "--on", "b"], ["pin", "m", "--ttl", "60"]):
        assert caller.done(*command) == ""
    peer = caller.site.workers[1]["peer"]
    assert main(["get", "m", str(tmp_path / "y"), "--worker", peer, "--tenant", caller.tenant]) == 0
    assert bytes_of(tmp_path / "y") == bytes_of(tmp_path / "x.safetensors")


def test_progress_is_shown_on_a_terminal(caller: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caller.done("put", model(tmp_path / "x.safetensors", 2), "--name", "m")
    monkeypatch.setattr(cli_service.sys.stderr, "isatty", lambda: True)  # type: ignore[attr-defined]
    _, _, err = caller.run("get", "m", str(tmp_path / "y"))
    assert "2.5/2.5 KiB" in err and bytes_of(tmp_path / "y")


def test_what_cannot_be_done_is_one_line(caller: Caller, tmp_path: Path) -> None:
    path = model(tmp_path / "x.safetensors", 3)
    caller.done("put", path, "--name", "m")
    (tmp_path / "bad.safetensors").write_bytes(b"12345678{}")
    bad = str(tmp_path / "bad.safetensors")
    failures = [
        (["put", str(tmp_path / "none")], 1, "No such file"),
        (["put", bad], 1, f"{bad}: it says that its header has"),
        (["put", path, "--name", "a\nb"], 1, "is no name of an artifact"),
        (["put", path, "--lease", "soon"], 2, "--lease 'soon' is no time"),
        (["put", path, "--lease", "1.5"], 2, "no whole seconds"),
        (["put", path, "--lease", "9d"], 2, "whole seconds from 1 to 3600"),
        (["get", "none", str(tmp_path / "y")], 1, "no artifact has the name 'none'"),
        (["get", "m", str(tmp_path / "no" / "y")], 1, "No such file"),
        (["get", "m", str(tmp_path / "y"), "--tensor", "zz"], 1, "has no tensor 'zz'"),
        (["get", "m"], 2, "required: OUT.safetensors"),
        (["pin", "m"], 2, "required: --ttl"),
        (["pin", "m", "--ttl", "0"], 2, "--ttl '0' is no time"),
        (["pin", "m", "--ttl", "60", "--on", "nobody"], 1, "there is no worker 'nobody'"),
        (["pin", "none", "--ttl", "60"], 1, "no artifact has the name 'none'"),
        (["prefetch", "m"], 2, "required: --to"),
        (["prefetch", "none", "--to", "b"], 1, "no artifact has the name 'none'"),
        (["rm"], 2, "say what to delete"),
        (["rm", "m", "--all"], 2, "say what to delete"),
        (["rm", "none"], 1, "no artifact has the name 'none'"),
        (["rm", "--older-than", "old", "--yes"], 2, "--older-than 'old' is no time"),
    ]
    for command, status, message in failures:
        found, line = caller.fails(*command)
        assert found == status and message in line and line.startswith("tensorcast "), (command, line)
    assert caller.fails("rm", "none", "nothing")[1].startswith("tensorcast rm: 2 of 2 not deleted: none: no artifact")
    assert next(iter(caller.listed().values()))["names"] == ["m"]
    assert not list(tmp_path.glob(".*.partial")) and not (tmp_path / "y").exists()


def test_workers_that_are_none(caller: Caller, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        nobody = f"127.0.0.1:{bound.getsockname()[1]}"
        for worker, status, message in [
            (nobody, 1, "cannot connect"), (caller.site.store, 2, "is a store; give the address that `tensorcast worker`"),
            ("nowhere", 2, "is not an address"), (f"unix:{tmp_path}/none.sock", 1, "cannot connect"),
        ]:  # fmt: skip
            assert main(["ls", "--worker", worker]) == status
            err = capsys.readouterr().err
            assert err.count("\n") == 1 and message in err
    assert main(["ls", "--worker", caller.site.socket, "--tenant", "a/b"]) in (1, 2)
    assert "tenant" in capsys.readouterr().err


def test_the_worker_that_is_meant(
    caller: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_callers, "default_runtime_dir", lambda: tmp_path)
    assert main(["ls"]) == 2 and f"no worker has its socket in {tmp_path}" in capsys.readouterr().err
    real = Path(caller.site.socket.removeprefix("unix:"))
    (tmp_path / "a.sock").symlink_to(real)
    assert main(["ls"]) == 0
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
    (tmp_path / "store").mkdir()
    assert sockets_of_workers(tmp_path) == [tmp_path / "a.sock"], "a dead worker's socket is nobody's"
    assert main(["ls"]) == 0
    (tmp_path / "b.sock").symlink_to(real)
    capsys.readouterr()
    assert main(["ls"]) == 2
    assert f"name one with --worker, of unix:{tmp_path}/a.sock, unix:{tmp_path}/b.sock" in capsys.readouterr().err
    assert sockets_of_workers(tmp_path / "none") == []


def test_the_doctor(caller: Caller, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["doctor", "--worker", caller.site.socket, "--store", caller.site.store, "--json"]
    status = main(where)
    said = json.loads(capsys.readouterr().out)
    bad = [
        each for each in said["findings"] if each["level"] == "problem" and each["check"] not in ("vllm", "packages")
    ]
    assert not bad and status == 0
    checks = [each["check"] for each in said["findings"] if each["level"] == "ok"]
    assert {"socket", "worker", "memory sharing", "memory", "store", "disk", "workers", "clock"} <= set(checks)
    assert checks.count("workers") == 2
    worker = caller.site.add("c")
    worker.running.process.kill()
    worker.running.process.wait()
    with pytest.raises(SystemExit):
        main(["doctor", "--worker", worker["worker"], "--store", caller.site.store])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"problem  worker: {worker['worker']} does not answer") for line in lines), lines


# --- leases ---


def put_and_keep(caller: Caller, path: str, lease: str) -> tuple["subprocess.Popen[str]", str]:
    """The command, and the id it has printed."""
    line = [*TENSORCAST, "put", path, "--name", "leased", "--lease", lease, *caller.flags()]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_leased_artifact_stays_as_long_as_the_command(number: signal.Signals, caller: Caller, tmp_path: Path) -> None:
    process, identity = put_and_keep(caller, model(tmp_path / "x.safetensors", number), "600")
    try:
        assert caller.listed()[identity]["lease_id"] and "lease " in caller.done("ls")
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (0, "", "it stays until this ends; Ctrl-C ends it\n")
    finally:
        process.kill()
    until_blocking(lambda: identity not in caller.listed())


def test_a_leased_artifact_that_goes_ends_the_command(caller: Caller, tmp_path: Path) -> None:
    process, identity = put_and_keep(caller, model(tmp_path / "x.safetensors", 5), "3")
    try:
        caller.done("rm", identity)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 1 and err.splitlines()[1:] == [
            f"tensorcast put: artifact {identity!r} does not exist"
        ]
    finally:
        process.kill()


# --- rm ---


class Typed:
    """Standard input: a terminal at which that is typed."""

    def __init__(self, text: str) -> None:
        self._text = text

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self._text


def test_all_of_a_tenant(
    caller: Caller, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    other = Caller(site, capsys)
    path = model(tmp_path / "x.safetensors", 6)
    kept = other.done("put", path)
    for seed in (7, 8):
        caller.done("put", model(tmp_path / f"{seed}.safetensors", seed), "--name", f"m{seed}")
    assert main(["rm", "--all", "--yes", "--worker", site.socket]) == 2
    assert "say whose with --tenant" in capsys.readouterr().err
    assert caller.fails("rm", "--all") == (2, "tensorcast rm: this deletes what is not named one by one, and nobody is there "
                                               "to be asked: say --yes\n")  # fmt: skip
    monkeypatch.setattr(cli_service.sys, "stdin", Typed("\n"))
    status, _, err = caller.run("rm", "--all")
    assert (
        status == 1
        and f"delete 2 artifact(s) of tenant {caller.tenant!r}, 4.8 KiB and all pages of KV cache? [y/N]" in err
    )
    assert err.endswith("tensorcast rm: nothing was deleted\n") and len(caller.listed()) == 2
    monkeypatch.setattr(cli_service.sys, "stdin", Typed("y\n"))
    _, _, err = caller.run("rm", "--all")
    assert not caller.listed() and "0 page(s) evicted, 0 in use just now and still there" in err
    until_blocking(lambda: caller.run("rm", "--all", "--yes")[0] == 0)  # no worker that was killed is listed any more
    assert set(other.listed()) == {kept}, "another tenant's stay"


def test_a_maximum_age(caller: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = caller.done("put", model(tmp_path / "x.safetensors", 9))
    assert caller.fails("rm", "--older-than", "24h")[0] == 2
    assert caller.run("rm", "--older-than", "1h", "--yes") == (0, "", "nothing to delete\n")
    monkeypatch.setattr(cli_service.time, "time", lambda: 1.0)  # our clock does not count
    until_blocking(lambda: caller.run("rm", "--older-than", "0.001", "--yes")[2].startswith("deleted 1 artifact(s)"))
    assert old not in caller.listed()


# --- plans ---


def plan_file(path: Path, steps: Sequence[Mapping[str, Any]]) -> str:
    path.write_text(json.dumps({"steps": steps}))
    return str(path)


def test_a_plan_runs_is_shown_and_joined(caller: Caller, tmp_path: Path) -> None:
    identity = caller.done("put", model(tmp_path / "x.safetensors", 10), "--name", "m")
    steps: list[dict[str, Any]] = [
        {
            "operation": "pin",
            "target": "b",
            "arguments": {"pin": "p", "ttl_s": 5},
            "inputs": {"artifact": [1, "artifact"]},
        },
        {"operation": "prefetch", "target": "b", "arguments": {"artifact": "m"}},
        {"operation": "unpin", "target": "b", "arguments": {"artifact": "m", "pin": "p"}, "after": [0]},
    ]
    path = plan_file(tmp_path / "p.json", steps)
    said = json.loads(caller.done("plan", "run", path, "--key", "k", "--timeout", "30", "--json"))
    assert said["key"] == "k" and said["state"] == "done" and [each["state"] for each in said["steps"]] == ["done"] * 3
    assert said["steps"][0]["result"] == {"artifact": identity} and said["steps"][1]["result"]["artifact"] == identity
    assert json.loads(caller.done("plan", "run", path, "--key", "k", "--json")) == said, "it was joined"
    assert json.loads(caller.done("plan", "show", "k", "--json", worker=1)) == said
    assert json.loads(caller.done("plan", "cancel", "k", "--json")) == said, "it had ended"
    table = caller.done("plan", "show", "k")
    assert "plan k: done" in table and identity in table and table.count("│ done") == 3
    documented = section("commands.md", "What `--json` says")
    assert all(f"`{name}`" in documented for name in (*said, *said["steps"][0]))
    changed = plan_file(tmp_path / "p.json", steps[1:2])
    status, out, err = caller.run("plan", "run", changed, "--key", "k")
    assert (status, out) == (1, "") and "another plan" in err, "what is shown is never another plan"


def test_a_plan_that_fails_shows_how_far_it_came(caller: Caller, tmp_path: Path) -> None:
    caller.done("put", model(tmp_path / "x.safetensors", 11), "--name", "m")
    path = plan_file(tmp_path / "p.json", [
        {"operation": "prefetch", "target": "b", "arguments": {"artifact": "m"}},
        {"operation": "prefetch", "target": "b", "arguments": {"artifact": "none"}, "after": [0]},
        {"operation": "unpin", "target": "b", "arguments": {"artifact": "m", "pin": ""}, "after": [1]},
    ])  # fmt: skip
    status, out, err = caller.run("plan", "run", path)
    assert status == 1 and err == "tensorcast plan: step 1 (prefetch on b): no artifact has the name 'none'\n"
    assert [state in out for state in ("│ done", "│ failed", "│ skipped")] == [True] * 3


def test_plans_that_are_none(caller: Caller, tmp_path: Path) -> None:
    one = {"operation": "prefetch", "target": "b", "arguments": {"artifact": "m"}}
    bad: list[tuple[Any, int, str]] = [
        ([one | {"argumnts": {}}], 2, "unknown field `argumnts` - at `$.steps[0]`"),
        ([{"operation": "prefetch"}], 2, "missing required field `target`"),
        ([one | {"after": ["0"]}], 2, "$.steps[0].after[0]"),
        ([], 1, "a plan has 1 to"),
        ([one | {"operation": "fetch"}], 1, "step 0 (fetch on b): no such operation"),
        ([one | {"after": [0]}], 1, "the plan has a cycle: step 0"),
        ([one | {"after": [7]}], 1, "step 0 (prefetch on b) depends on step 7, which this plan does not have"),
        ([one | {"inputs": {"artifact": [-1, ""]}, "arguments": {}}], 1, "depends on step -1"),
        ([one, one | {"inputs": {"artifact": [0, ""]}}], 1, "step 1 (prefetch on b) has 'artifact' twice"),
        ([one | {"target": "nobody"}], 1, "there is no worker 'nobody'"),
    ]
    for steps, status, message in bad:
        found, line = caller.fails("plan", "run", plan_file(tmp_path / "p.json", steps))
        assert found == status and message in line, line
    (tmp_path / "p.json").write_text("{")
    assert caller.fails("plan", "run", str(tmp_path / "p.json"))[0] == 2
    assert "No such file" in caller.fails("plan", "run", str(tmp_path / "none"))[1]
    assert caller.fails("plan", "show", "none")[1].startswith("tensorcast plan: there is no plan 'none'")
    assert caller.fails("plan", "cancel", "none")[0] == 1
    path = plan_file(tmp_path / "p.json", [one])
    assert "deadline is within" in caller.fails("plan", "run", path, "--timeout", "9h")[1]


class Slow:
    """An engine that does not come to an end."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def publish(self, arguments: Mapping[str, Any], context: StepContext) -> Mapping[str, Any]:
        self.begun.set()
        await asyncio.Event().wait()
        return {}

    hydrate = evict_local = transform_into = publish


async def test_a_plan_whose_command_is_interrupted_goes_on(tmp_path: Path, quick: None, capsys: Any) -> None:
    pool = Pool(SocketNetwork(), tmp_path)
    try:
        [a] = await pool.start()
        session, engine = await pool.session(a), Slow()
        link = InstanceLink(pool.network, a.socket, AttachInstance("e", "test", "m", "n"), engine, random.Random(1))
        await link.start()
        await until(lambda: a.peers.metadata.view.instances)
        steps = [FileStep("publish", "e")]
        task = asyncio.create_task(run_plan(session, steps, CallContext(idempotency_key="k"), False))
        await engine.begun.wait()
        assert (await session.plan_record("k")).state == "running"
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert capsys.readouterr().err == "plan k goes on; `tensorcast plan cancel k` ends it\n"
        assert (await session.plan_record("k")).state == "running"
        assert (await session.cancel_plan("k")).state == "cancelled"
        await link.close()
    finally:
        await pool.close()


# --- times ---


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("1.5", 1.5), ("90s", 90), ("15m", 900), (" 24h ", 86_400), ("7d", 604_800)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text, "ttl") == seconds


@pytest.mark.parametrize("text", ["", "0", "0h", "-1", "1w", "h", "1e9", "nan", "inf", "1h30m", "9" * 13])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="is no time; write"):
        parse_seconds(text, "ttl")


def test_ages() -> None:
    shown = [as_age(seconds) for seconds in (0.4, 59, 119, 120, 7199, 7200, 86_400, 1e6, float("inf"))]
    assert shown == ["0 s", "59 s", "119 s", "2 m", "120 m", "2 h", "24 h", "12 d", "-"]


def test_a_name_of_several_goes_alone(caller: Caller, tmp_path: Path) -> None:
    path = model(tmp_path / "x.safetensors", 21)
    caller.done("put", path, "--name", "v7")
    caller.done("put", path, "--name", "v8")
    status, _, err = caller.run("rm", "v8")
    assert (status, err) == (0, "v8: this name is gone; the artifact stays under v7\n")
    assert [each["names"] for each in caller.listed().values()] == [["v7"]]
    assert caller.run("rm", "v7") == (0, "", "") and not caller.listed()


def test_a_dead_worker_and_how_long_a_command_may_take(caller: Caller, tmp_path: Path) -> None:
    path = model(tmp_path / "x.safetensors", 32)
    caller.done("put", path, "--name", "m", "--timeout", "30")
    caller.done("get", "m", str(tmp_path / "y"), "--timeout", "1m")
    dead = caller.site.add("dead")
    until_blocking(lambda: caller.run("prefetch", "m", "--to", "dead")[0] == 0)
    dead.running.process.kill()
    dead.running.process.wait()
    for command in (
        ["prefetch", "m", "--to", "dead"],
        ["pin", "m", "--on", "dead", "--ttl", "9"],
        ["unpin", "m", "--on", "dead"],
    ):
        status, line = caller.fails(*command)
        assert status == 1 and "dead" in line and "those that answer are a, b" in line and "deadline" not in line, line
    steps = [{"operation": "prefetch", "target": target, "arguments": {"artifact": "m"}} for target in ("b", "dead")]
    (tmp_path / "plan").write_text(json.dumps({"steps": steps}))
    status, _, err = caller.run("plan", "run", str(tmp_path / "plan"), "--key", "k", "--timeout", "9")
    note, end = err.splitlines()
    assert status == 1 and end.startswith("tensorcast plan: ") and "step 1 (prefetch on dead)" in end, err
    assert re.match(
        r"step 1 \(prefetch on dead\): (there is no worker 'dead'|worker 'dead' does not answer \(.*\)); it is tried until "
        r"the plan's deadline, and `tensorcast plan cancel k` ends it$", note
    ), note  # fmt: skip
    for command in (["prefetch", "m", "--to", "b"], ["put", path], ["get", "m", str(tmp_path / "z")]):
        assert caller.fails(*command, "--timeout", "soon")[1].endswith("or for example 15m, 24h or 7d\n")
    status, line = caller.fails("put", path, "--timeout", "0.000001")
    assert (status, line) == (1, f"tensorcast put: the put of {path} has not ended within 1e-06 s\n")
    assert caller.fails("get", "m", str(tmp_path / "z"), "--timeout", "0.000001")[0] == 1
    assert not (tmp_path / "z").exists() and not list(tmp_path.glob(".*.partial"))
