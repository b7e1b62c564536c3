"""`tensorcast status` and `tensorcast story`: what they say of a cluster, of a broken one, and of none."""

import asyncio
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tensorcast_connector import cli_status
from tensorcast_connector.cli import main
from tensorcast_connector.cli_status import StatusCommand, as_json
from tensorcast_connector.cli_tables import as_size, as_tables, printable
from tensorcast_connector.client.status import ClusterStatus, StatusReader, WorkerStatus, read_story
from tensorcast_connector.core.cluster import ClusterView, ShardHolder
from tensorcast_connector.errors import ConfigError, Unavailable
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.types import Address, InstanceId, Token, WorkerId
from tensorcast_connector.wire.messages import PROTOCOL_VERSION, AttachInstance, Ok
from tensorcast_connector.wire.store_messages import InstanceRecord, ReplicaRecord, WorkerRecord
from tests.cluster import Cluster, T, hashes, plane, quick
from tests.documented import rows, section
from tests.loops import quiet_loop
from tests.scrape import get, scrape
from tests.waiting import until, until_blocking

__all__ = ["quick", "quiet_loop"]
UNIX_S = 1_800_000_000.0  # what the tables take for the wall time of `now`
TENSORCAST = [sys.executable, "-m", "tensorcast_connector.cli"]


@pytest.fixture
async def cluster(tmp_path: Path, quick: None) -> AsyncIterator[Cluster]:
    """On loopback; nothing runs yet."""
    cluster = Cluster(SocketNetwork(), tmp_path)
    yield cluster
    await cluster.close()


def reader(cluster: Cluster) -> StatusReader:
    return StatusReader(cluster.network, [cluster.store_address], "test", cluster.chance, cluster.now)


def text(status: ClusterStatus, now: float, every_shard: bool = False) -> str:
    """The tables, as in a pipe."""
    console = Console(width=cli_status.PIPED_COLUMNS, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(*as_tables(status, now, UNIX_S, every_shard), sep="\n")
    console.file.close()
    return console.export_text()


def table_row(shown: str, begin: str) -> list[str]:
    """The cells of the first row that begins so."""
    line = next(line for line in shown.splitlines() if line.replace("│", "").strip().startswith(begin))
    return [cell.strip() for cell in line.strip("│ ").split("│")]


@pytest.mark.slow
async def test_the_whole_picture(cluster: Cluster) -> None:
    (a, b), (at_a, _) = await cluster.pair()
    await at_a.save(hashes(2), 1 << 20)
    await at_a.load(hashes(1))
    await at_a.client.call(AttachInstance("i-1", "vllm", "a/model[bold]", "n"), Ok, T)
    a.peers.add(ReplicaRecord("sha:1", a.worker_id, "memory", 3 << 30))
    b.peers.add(ReplicaRecord("sha:1", b.worker_id, "disk", 3 << 30))
    await until(lambda: len(plane(b).view.replicas.get("sha:1", ())) == 2 and plane(b).view.instances)
    a._sampler.measure()
    upload = await a.artifacts.open_upload("caller", 3 << 19)
    status = await reader(cluster).status()
    a.artifacts.abort(upload)
    shown = text(status, cluster.now())
    cells = table_row(shown, a.worker_id)
    assert cells[1:10] == [
        str(a.address), "basic gateway shard-home", str(PROTOCOL_VERSION), "50% of 4 MiB", "2", "1.5 MiB of 64 MiB", "25%",
        "-", "0%",
    ]  # fmt: skip
    assert int(cells[10]) == len(plane(a).leases.held) and re.fullmatch(r"\d\.\d s", cells[11])
    assert table_row(shown, b.worker_id)[6] == "0 B of 64 MiB"
    said = {each["worker_id"]: each for each in as_json(status, cluster.now(), 0.0)["workers"]}[a.worker_id]
    assert (said["artifact_bytes_used"], said["artifact_bytes_max"]) == (3 << 19, 64 << 20)
    assert table_row(shown, "i-1") == ["i-1", "vllm", "a/model[bold]", a.worker_id], "names are no markup"
    assert table_row(shown, "sha:1") == ["sha:1", "2", "3.00 GiB", f"{a.worker_id} (memory), {b.worker_id} (disk)"]
    shards = shown.split("Shards (8)")[1]
    for worker in (a, b):
        held = table_row(shards, worker.worker_id)
        assert int(held[1]) == len(plane(worker).leases.held)
    assert "without a home" not in shown
    every = text(status, cluster.now(), every_shard=True).split("Shards (8)")[1]
    token = plane(a).view.shards[3].token
    assert table_row(every, "3 ") == ["3", cluster.at(3).worker_id, f"{token.incarnation}/{token.revision}"]


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2464, "2.4 KiB"), (1 << 20, "1 MiB"), (3 << 19, "1.5 MiB"),
        (64 << 20, "64 MiB"), (1000 << 20, "1000 MiB"), (1 << 30, "1.00 GiB"), (3 << 29, "1.50 GiB"), (5 << 40, "5.00 TiB"),
    ],
)  # fmt: skip
def test_sizes_are_in_the_unit_that_fits(size: int, shown: str) -> None:
    assert as_size(size) == shown


AWKWARD = ["a\\", "\\[red]", "[red]x", "[/]", "[link=http://a]b", ":rocket:", "a\\\\b", "n" * 3000]


def one_worker(name: str, error: str = "") -> ClusterStatus:
    """Somebody gave everything in the cluster that name."""
    view = ClusterView()
    view.shard_count = 2
    worker_id = WorkerId(f"{name}/1")
    record = WorkerRecord(worker_id, name, f"{name}:1", 1 << 20, 2, ("basic",))
    view.workers[worker_id] = record
    instance = InstanceRecord(InstanceId(f"i-{name}"), worker_id, name, name, name)
    view.instances[instance.instance_id] = instance
    view.shards[0] = ShardHolder(worker_id, 1, Token(1, 1))
    view.shards[1] = ShardHolder(WorkerId(f"gone {name}"), 2, Token(1, 2))
    view.replicas[f"sha:{name}"] = {worker_id: ReplicaRecord(f"sha:{name}", worker_id, name, 1 << 30)}
    return ClusterStatus(view, 0.0, {worker_id: WorkerStatus(record, None, 0.0, error or name)})


@pytest.mark.parametrize("name", AWKWARD, ids=lambda name: name[:12])
def test_names_are_shown_letter_by_letter(name: str) -> None:
    shown = text(one_worker(name), 0.0)
    cells = table_row(shown, f"{name}/1")
    assert cells[:4] == [f"{name}/1", f"{name}:1", "basic", "2"] and cells[11] == f"unreachable: {name}"
    assert table_row(shown, f"i-{name}") == [f"i-{name}", name, name, f"{name}/1"]
    assert table_row(shown, f"gone {name}") == [f"gone {name} (has left)", "1", "1"]
    assert table_row(shown, f"sha:{name}") == [f"sha:{name}", "1", "1.00 GiB", f"{name}/1 ({name})"]
    every = text(one_worker(name), 0.0, every_shard=True).split("Shards (2)")[1]
    assert table_row(every, "0 ")[1] == f"{name}/1"


def test_nothing_in_a_name_is_obeyed_by_a_terminal() -> None:
    shown = text(one_worker("a\x1b[2J\n\r\t\x07\x9b\u202e\udc80b", "one\ntwo"), 0.0)
    name = "a\\x1b[2J\\n\\r\\t\\x07\\x9b\\u202e\\udc80b"
    assert table_row(shown, f"{name}/1")[11] == r"unreachable: one\ntwo"
    assert table_row(shown, f"i-{name}")[1:] == [name, name, f"{name}/1"]
    assert all(each.isprintable() for each in shown.splitlines())
    assert printable("日本 é\\") == "日本 é\\", "what has a picture stays"


def test_when_it_was_read_is_above_the_tables() -> None:
    status = one_worker("w")
    status.view.revision, status.view.incarnation = 57, 1_700_000_000
    lines = text(status, 90.0).splitlines()
    found = re.fullmatch(r"As of (.*), store revision 57, incarnation 1700000000", lines[0])
    assert found and datetime.strptime(found.group(1), "%Y-%m-%d %H:%M:%S %z").timestamp() == UNIX_S - 90
    assert lines[1].strip() == "Workers" and "protocol" in lines[3] and "version" not in lines[3]


@pytest.mark.slow
async def test_the_object_is_the_documented_one(cluster: Cluster) -> None:
    (a, b), (at_a, _) = await cluster.pair(devices="host:0")
    await at_a.client.call(AttachInstance("i-1", "vllm", "m", "n"), Ok, T)
    a.peers.add(ReplicaRecord("sha:1", a.worker_id, "memory", 3))
    await until(lambda: plane(b).view.replicas and plane(b).view.instances)
    await until(lambda: a._sampler._interface)
    a._sampler.measure()
    a._sampler.measure()
    status = await reader(cluster).status()
    found = json.loads(json.dumps(as_json(status, status.read_at_s + 2.0, 1000.0)))
    assert found["as_of_unix_s"] == 998.0, "when the store was asked, not when it was printed"
    documented = section("status.md", "The object of `--json`")
    top, workers, of_signals = (
        documented.split("Each of `workers`:")[0],
        *documented.split("Each of `workers`:")[1].split("\n`signals`:"),
    )

    def names(part: str) -> set[str]:
        return {name for row in rows(part) for name in re.findall(r"`([\w.]+)`", row[0])}

    assert {name.split(".")[0] for name in names(top)} == set(found)
    assert {name.split(".")[1] for name in names(top) if "." in name} == set(found["store"])
    worker = next(each for each in found["workers"] if each["worker_id"] == a.worker_id)
    assert names(workers) == set(worker)
    assert names(of_signals) == set(worker["signals"])
    values = set(re.findall(r"`([\w]+)`", documented.split("`values` holds")[1]))
    assert values == set(worker["signals"]["values"])
    of_devices = next(row for row in rows(of_signals) if row[0] == "`values`")[2]
    assert set(re.findall(r"`(\w+)`", of_devices)) == {"devices", *worker["signals"]["values"]["devices"]["host:0"]}
    for field in ("instances", "shards", "replicas"):
        row = next(row for row in rows(top) if row[0] == f"`{field}`")
        assert set(re.findall(r"`(\w+)`", row[2])) == set(found[field][0])
    assert worker["reachable"] is True and worker["error"] == ""
    assert worker["age_s"] >= worker["signals"]["age_s"] + 1.0, "the wait since the question counts"
    assert worker["shards"] == worker["signals"]["shards"] == sorted(plane(a).leases.held)
    holder = plane(a).view.shards[0]
    assert found["shards"][0] == {"shard": 0, "home": holder.worker_id, **holder.token._asdict()}
    assert found["shard_count"] == 8 and found["shards_without_home"] == []


@pytest.mark.slow
async def test_a_worker_that_cannot_be_reached_is_listed_as_it_was(cluster: Cluster) -> None:
    (a, b), _ = await cluster.pair()
    held = sorted(plane(b).leases.held)
    await cluster.crash(b)
    status = await reader(cluster).status()
    found = as_json(status, cluster.now(), 0.0)
    lost = next(each for each in found["workers"] if each["worker_id"] == b.worker_id)
    assert (lost["reachable"], lost["signals"], lost["age_s"]) == (False, None, None)
    assert lost["shards"] == held and lost["arena_bytes"] == 4 << 20 and "cannot connect" in lost["error"]
    cells = table_row(text(status, cluster.now()), b.worker_id)
    assert cells[3:10] == [str(PROTOCOL_VERSION), "4 MiB", "-", "-", "-", "-", "-"] and cells[11].startswith(
        "unreachable: cannot connect"
    )
    assert next(each for each in found["workers"] if each["worker_id"] == a.worker_id)["reachable"]


@pytest.mark.slow
async def test_silent_workers_are_waited_for_all_at_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the three answers, and the wait is one deadline, not three."""
    workers, _ = await cluster.pair("a", "b", "c")

    async def nothing(*_: Any) -> None:
        await asyncio.Event().wait()

    for worker in workers:
        monkeypatch.setattr(worker.observer, "answer", nothing)
    started_at = cluster.now()
    status = await reader(cluster).status(timeout_s=0.5)
    assert cluster.now() - started_at < 1.4
    assert [each.error for each in status.workers.values()] == [
        f"{worker.address} did not answer within 0.5 s" for worker in workers
    ]


@pytest.mark.slow
async def test_another_worker_at_the_address_of_one_that_is_listed(cluster: Cluster) -> None:
    (a,), _ = await cluster.pair("a")
    a._sampler._signals.worker_id = "a/other"  # type: ignore[union-attr]
    status = await reader(cluster).status()
    assert status.workers[a.worker_id].error == "a/other serves at its address now"


@pytest.mark.slow
async def test_shards_without_a_home_and_homes_that_left(cluster: Cluster) -> None:
    await cluster.start_store()
    await cluster.worker("a", roles="basic")
    await until(lambda: plane(cluster.workers[0]).view.workers)
    status = await reader(cluster).status()
    assert as_json(status, 0.0, 0.0)["shards_without_home"] == list(range(8))
    shown = text(status, cluster.now())
    assert table_row(shown, "without a home") == ["without a home", "8", "0-7"] and "Instances: none" in shown
    assert table_row(text(status, 0.0, every_shard=True), "3 ")[1] == "without a home"
    status.view.shards[5] = ShardHolder(WorkerId("gone/1"), 1, Token(1, 1))
    assert table_row(text(status, cluster.now()), "gone/1") == ["gone/1 (has left)", "1", "5"]


@pytest.mark.slow
async def test_who_is_asked_by_mistake_says_so(cluster: Cluster) -> None:
    (a,), _ = await cluster.pair("a")
    mistaken = StatusReader(cluster.network, [a.address], "test", cluster.chance, cluster.now)
    with pytest.raises(
        ConfigError, match=rf"^store='{a.address}' is a worker \({a.worker_id}\); give the address that"
    ):
        await mistaken.status()
    with pytest.raises(
        ConfigError, match=rf"^worker='{cluster.store_address}' is a store; stories are told by workers"
    ):
        await read_story(cluster.network, cluster.store_address, "x", "test", cluster.chance)
    nobody = StatusReader(
        cluster.network, [Address("tcp", host="127.0.0.1", port=1)], "test", cluster.chance, cluster.now
    )
    with pytest.raises(Unavailable, match=r"cannot connect to 127\.0\.0\.1:1"):
        await nobody.status()


async def test_an_empty_cluster_is_one_line(cluster: Cluster) -> None:
    await cluster.start_store()
    status = await reader(cluster).status()
    as_of, nobody = text(status, cluster.now()).strip().splitlines()
    assert nobody == "No workers yet: start one with `tensorcast worker --store ADDRESS`."
    assert as_of.endswith(f"store revision {status.view.revision}, incarnation {cluster.life}")
    assert as_json(status, 0.0, 0.0)["workers"] == []


@pytest.mark.slow
async def test_a_store_that_is_lost_while_it_is_watched(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """Objects go on after it is back; the reason is on the other stream."""
    await cluster.start_store()
    command = StatusCommand(reader(cluster), cluster.now, cluster.now, json_lines=True, every_shard=False)
    watching = asyncio.create_task(command.watch(0.01))
    out, err = "", ""

    def read() -> tuple[str, str]:
        nonlocal out, err
        more = capsys.readouterr()
        out, err = out + more.out, err + more.err
        return out, err

    await until(lambda: read()[0].count("\n") > 2)
    await cluster.stop_store()
    await until(lambda: "cannot connect" in read()[1])
    before = read()[0].count("\n")
    await cluster.start_store()
    await until(lambda: read()[0].count("\n") > before)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert all(json.loads(line)["shard_count"] == 8 for line in out.splitlines())


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_an_interval_that_is_none(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", f"--watch={seconds}"]) == 2
    assert "seconds above 0 are needed" in capsys.readouterr().err


def test_nobody_there_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["status"], ["status", "--watch"], ["status", "--json"]):
        assert main([*args, "--store", "127.0.0.1:1"]) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "tensorcast status: cannot connect to 127.0.0.1:1" in err
        assert "no store answers; lookups, reads and transfers of the workers go on without it" in err
    assert main(["story", "x", "--worker", "127.0.0.1:1"]) == 1
    assert "tensorcast story: cannot connect to 127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["store", "worker", "up"])
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nonsense", "is not an address"),
        ("unix:/m", "Prometheus reads from HOST:PORT"),
        ("taken", "cannot listen there"),
    ],
)
def test_metrics_that_cannot_be_served_are_one_line(
    command: str, address: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {
        "store": ["--listen", "127.0.0.1:0", "--data", str(tmp_path / "s")],
        "worker": ["--socket", str(tmp_path / "w.sock"), "--arena", "1MiB"],
        "up": ["--dir", str(tmp_path / "up"), "--store-listen", "127.0.0.1:0", "--arena", "1MiB"],
    }[command]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}" if address == "taken" else address
        assert main([command, *own, "--metrics", where]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"tensorcast {command}: metrics='{where}'" in err and why in err
    assert not list(tmp_path.rglob("*.sock")), "what was started is stopped"


class Up:
    """`tensorcast up` as a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        ready = folder / "ready"
        args = ["up", "--dir", str(folder / "up"), "--store-listen", "127.0.0.1:0", "--arena", "4MiB", "--name", "w",
                "--metrics", "127.0.0.1:0", "--log-format", "json", "--ready-file", str(ready)]  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*TENSORCAST, *args], stdout=log, stderr=log)
        try:
            until_blocking(lambda: ready.exists() or self.process.poll() is not None, 30.0)
            self.ready = json.loads(ready.read_text())
            until_blocking(lambda: '"event": "joined"' in self.log.read_text(), 30.0)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise


@pytest.fixture
def up(tmp_path: Path) -> Any:
    """Ends with status 0."""
    up = Up(tmp_path)
    yield up
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(10) == 0


@pytest.mark.slow
def test_the_command_against_real_processes(up: Up, capsys: pytest.CaptureFixture[str]) -> None:
    store, peer = up.ready["store"], up.ready["peer"]
    assert main(["status", "--store", store]) == 0
    assert table_row(capsys.readouterr().out, up.ready["worker_id"])[1] == peer
    assert main(["status", "--store", f"127.0.0.1:1,{store}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workers"][0]["reachable"]
    assert main(["status", "--store", peer]) == 2
    assert "is a worker" in capsys.readouterr().err
    for address in (peer, up.ready["worker"]):
        assert main(["story", "joined", "--worker", address]) == 0
        assert f"joined {up.ready['worker_id']}" in capsys.readouterr().out
    assert main(["story", "abcdef", "--worker", peer]) == 0
    said = capsys.readouterr()
    assert said.out == "" and f"{peer} has nothing recorded about 'abcdef': only the latest" in said.err
    assert main(["story", "abc", "--worker", peer]) == 0
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "at least 4 hex digits of its block hash" in said.err
    lines = [json.loads(line) for line in up.log.read_text().splitlines() if line.startswith("{")]
    assert {line["process"] for line in lines} == {"up"} and {line["pid"] for line in lines} == {up.process.pid}
    joined = next(line for line in lines if line.get("event") == "joined")
    assert joined["worker_id"] == up.ready["worker_id"] and joined["level"] == "info" and joined["lease_id"] > 0
    asyncio.run(check_metrics(up.ready["metrics"]))


async def check_metrics(address: str) -> None:
    host, _, port = address.rpartition(":")
    where = Address("tcp", host=host, port=int(port))
    found = await scrape(where)
    assert found.value("tensorcast_store_workers") == 1 == found.value("tensorcast_worker_store_reachable")
    assert (await get(where, "/healthz"))[0] == 200


@pytest.mark.slow
def test_watching_in_a_terminal_refreshes_in_place_and_ends_with_ctrl_c(up: Up) -> None:
    main_end, other_end = pty.openpty()
    args = ["status", "--store", up.ready["store"], "--watch", "0.05"]
    process = subprocess.Popen([*TENSORCAST, *args], stdin=other_end, stdout=other_end, stderr=other_end)
    os.close(other_end)
    seen = b""
    try:
        while seen.count(b"Workers") < 3:
            seen += os.read(main_end, 10_000)
        process.send_signal(signal.SIGINT)
        try:
            while more := os.read(main_end, 10_000):
                seen += more
        except OSError:  # the other end is closed
            pass
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main_end)
    assert b"\x1b[1A" in seen, "the cursor goes up again"
    assert b"Traceback" not in seen and b"KeyboardInterrupt" not in seen


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}])
def test_watching_in_a_pipe_repeats_plain_text(up: Up, variables: dict[str, str]) -> None:
    args = ["status", "--store", up.ready["store"], "--watch", "0.05"]
    with subprocess.Popen(
        [*TENSORCAST, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **variables}
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        seen = ""
        while seen.count("As of") < 4:
            seen += process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert process.stderr.read() == ""
    assert "\x1b" not in seen and seen.count(up.ready["worker_id"]) >= 6
    first, *others = seen.splitlines()
    begins = [number for number, line in enumerate(others) if line.startswith("As of ")]
    assert first.startswith("As of ") and len(begins) == 3
    blank = [number for number, line in enumerate(others) if not line.strip()]
    assert blank == [number - 1 for number in begins], "one empty line before each picture but the first"
