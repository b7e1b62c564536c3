"""The command: a mistake is one line and status 2; what serves, serves on, and leaves nothing behind."""

import asyncio
import json
import os
import platform
import random
import re
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tensorcast_connector.cli import main
from tensorcast_connector.config import parse_address
from tensorcast_connector.errors import Unavailable
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.wire.messages import PROTOCOL_VERSION, GetStatistics, Statistics
from tensorcast_connector.wire.store_messages import Changes, Watch
from tests.waiting import until_blocking

TENSORCAST = [sys.executable, "-m", "tensorcast_connector.cli"]


def fails(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """(status, the one line on stderr)."""
    try:
        status = main(args)
    except SystemExit as exit_:  # argparse
        status = int(str(exit_.code))
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "Traceback" not in err, err
    return status, err


def bad(name: str, tmp_path: Path) -> list[str]:
    """The arguments of one mistake; what it needs is in `tmp_path`."""
    worker = ["worker", "--socket", str(tmp_path / "w.sock"), "--arena", "1MiB"]
    up = ["up", "--dir", str(tmp_path / "up"), "--store-listen", "127.0.0.1:0", "--arena", "1MiB"]
    toml = tmp_path / "c.toml"
    texts = {"unknown key": "areana_bytes = 1", "wrong type": "name = 5", "no toml": "name"}
    if name in texts:
        toml.write_text(texts[name])
        return [*worker, "--config", str(toml)]
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    return {
        "no file": [*worker, "--config", str(tmp_path / "none.toml")],
        "a folder": [*worker, "--config", str(tmp_path)],
        "size": ["worker", "--arena", "lots"],
        "small": ["worker", "--arena", "4KiB"],
        "large": ["worker", "--socket", str(tmp_path / "w.sock"), "--arena", "100TiB"],
        "store": [*worker, "--store", "nowhere"],
        "listen": [*worker, "--listen", "host:port"],
        "advertise": [*worker, "--advertise", "host:0"],
        "name": [*worker, "--name", "a/b"],
        "roles": [*worker, "--roles", "basic,home"],
        "up roles": [*up, "--roles", "x"],
        "second store": [*worker, "--store", "127.0.0.1:1,nowhere"],
        "long path": ["worker", "--socket", "/" + "x" * 120, "--arena", "1MiB"],
        "shared folder": ["worker", "--socket", str(shared / "w.sock"), "--arena", "1MiB"],
        "shared data": ["store", "--listen", "127.0.0.1:0", "--data", str(shared)],
        "shared up": ["up", "--dir", str(shared), "--store-listen", "127.0.0.1:0"],
        "file as folder": ["store", "--listen", "127.0.0.1:0", "--data", "/proc/version"],
        "ready file": ["store", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "s"), "--ready-file", str(tmp_path / "no/r")],
        "up ready file": [*up, "--ready-file", str(tmp_path / "no/r")],
        "up arena": ["up", "--dir", str(tmp_path / "up"), "--arena", "x"],
        "up listen": ["up", "--dir", str(tmp_path / "up"), "--store-listen", "x"],
        "up worker listen": [*up, "--listen", "nix"],
        "up advertise": [*up, "--advertise", "host:0"],
        "up large": ["up", "--dir", str(tmp_path / "up"), "--store-listen", "127.0.0.1:0", "--arena", "100TiB"],
        "up long path": [*up, "--dir", str(tmp_path / ("x" * 107))],
        "metrics": [*worker, "--metrics", "foo"],
        "status": ["status", "--store", "x"],
        "flag": ["worker", "--arenas", "1"],
        "command": ["wroker"],
        "no command": [],
        "log format": ["store", "--log-format", "xml"],
    }[name]  # fmt: skip


BAD = {
    "unknown key": "unknown key 'areana_bytes'; did you mean 'arena_bytes'?",
    "wrong type": "name=5 should be text",
    "no toml": "not TOML",
    "no file": "No such file or directory",
    "a folder": "Is a directory",
    "size": "arena='lots' is not a size; write for example 512MiB",
    "small": "arena=4096 bytes is below the least size of 1048576 bytes (1MiB)",
    "large": "arena=102400.00 GiB is larger than the memory that is available",
    "store": "store='nowhere' is not an address",
    "listen": "listen='host:port' is not an address",
    "advertise": "port 0 is any port, which nobody can dial",
    "name": "name='a/b': a worker needs a name",
    "roles": "roles='basic,home': 'home' is no role; choose among basic, gateway, shard-home",
    "up roles": "roles='x': 'x' is no role",
    "second store": "store='nowhere' is not an address",
    "long path": "a socket path has at most 107 bytes; use a shorter one",
    "shared folder": "is writable by others",
    "shared data": "is writable by others",
    "shared up": "is writable by others",
    "file as folder": "a file of that name is in the way",
    "ready file": "ready file",
    "up ready file": "no/r: No such file or directory",
    "up arena": "arena='x' is not a size",
    "up listen": "listen='x' is not an address",
    "up worker listen": "listen='nix' is not an address; write host:port or [ipv6]:port",
    "up advertise": "port 0 is any port, which nobody can dial",
    "up large": "arena=102400.00 GiB is larger than the memory that is available",
    "up long path": "a socket path has at most 107 bytes; use a shorter one",
    "metrics": "metrics='foo' is not an address; write host:port or [ipv6]:port",
    "status": "store='x' is not an address",
    "flag": "unrecognized arguments: --arenas 1",
    "command": "invalid choice: 'wroker'",
    "no command": "the following arguments are required: command",
    "log format": "invalid choice: 'xml'",
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line_and_status_2(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, line = fails(capsys, *bad(name, tmp_path))
    assert status == 2 and BAD[name] in line and line.startswith("tensorcast"), line
    assert not list(tmp_path.rglob("*.sock")) and not list(tmp_path.rglob("*.partial"))
    assert not list(tmp_path.rglob("store.db")), "nothing is made by what does not start"


def test_the_versions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    python = re.escape(platform.python_version())
    line = rf"tensorcast {re.escape(version('tensorcast-connector'))}, protocol {PROTOCOL_VERSION}, Python {python}\n"
    assert re.fullmatch(line, capsys.readouterr().out)


def test_a_port_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        status, line = fails(capsys, "store", "--listen", address, "--data", str(tmp_path / "s"))
        assert status == 2 and f"cannot listen on {address}" in line and "in use" in line
        worker = ["worker", "--socket", str(tmp_path / "w.sock"), "--arena", "1MiB", "--listen", address]
        status, line = fails(capsys, *worker)
        assert status == 2 and "in use" in line
        status, line = fails(capsys, "up", "--dir", str(tmp_path / "up"), "--store-listen", address, "--arena", "1MiB")
        assert status == 2 and "in use" in line


@pytest.mark.parametrize("which", ["listen", "metrics"])
def test_a_store_that_cannot_listen_makes_nothing(
    which: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        store = ["store", "--data", str(folder), f"--{which}", address]
        status, line = fails(capsys, *store, *([] if which == "listen" else ["--listen", "127.0.0.1:0"]))
        assert status == 2 and address in line and "in use" in line and not folder.exists()
        up = ["up", "--dir", str(tmp_path / "up"), "--arena", "1MiB"]
        ports = [f"--{which}", address] if which == "metrics" else []
        status, line = fails(capsys, *up, *ports, "--store-listen", "127.0.0.1:0" if ports else address)
        assert status == 2 and "in use" in line and not list((tmp_path / "up").iterdir())
        with running(tmp_path, "store", "--listen", "127.0.0.1:0", "--data", str(folder)):
            pass
        before = (folder / "store.db").read_bytes()
        fails(capsys, *store, *([] if which == "listen" else ["--listen", "127.0.0.1:0"]))
        assert (folder / "store.db").read_bytes() == before, "what was there stays"


def test_a_store_that_stops_says_good_bye_before_it_closes_its_database(tmp_path: Path) -> None:
    with running(tmp_path, "store", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "s")) as (process, ready):

        async def watched() -> str:
            client = RpcClient(SocketNetwork(), parse_address(ready["store"], "store"), "client", "w", random.Random(1))
            client.start()
            await client.wait_connected(5)
            now = await client.call(Watch(0, 0, 0), Changes, 5)
            waiting = asyncio.create_task(client.call(Watch(now.incarnation, now.revision, 9000), Changes, 9))
            await client.call(GetStatistics(), Statistics, 5)  # what was sent before it is under way
            process.send_signal(signal.SIGTERM)
            with pytest.raises(Unavailable) as error:
                await waiting
            await client.close()
            return str(error.value)

        assert "database" not in asyncio.run(watched())
        assert process.wait(10) == 0


@pytest.mark.parametrize("where", ["127.0.0.1:7700", "10.9.9.9:1"])
def test_up_has_a_store_of_its_own(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "worker.toml"
    config.write_text(f'store = "{where}"\nname = "w"\n')
    status, line = fails(capsys, "up", "--dir", str(tmp_path / "up"), "--config", str(config))
    assert status == 2 and f"config file {config}: store='{where}': `tensorcast up` runs its own store" in line
    assert not (tmp_path / "up").exists()


@pytest.mark.slow
def test_up_takes_all_else_from_its_config(tmp_path: Path) -> None:
    config = tmp_path / "worker.toml"
    config.write_text(
        f'name = "w"\narena_bytes = "4MiB"\nsocket = "{tmp_path}/w.sock"\nmetrics = "127.0.0.1:0"\nroles = "shard-home"\n'
    )
    up = ["up", "--dir", str(tmp_path / "up"), "--store-listen", "127.0.0.1:0", "--config", str(config)]
    with running(tmp_path, *up) as (_, ready):
        assert ready["worker"] == f"unix:{tmp_path}/w.sock" and ready["worker_id"].startswith("w/")
        assert ready.keys() >= {"store", "peer", "metrics"}
        for each in ("store", "peer", "worker"):
            throw(ready[each], b"GET / HTTP/1.1\r\n\r\n")
        name = "tensorcast_connections_refused_total"
        with urllib.request.urlopen(f"http://{ready['metrics']}/metrics", timeout=10) as page:
            lines = [line for line in page.read().decode().splitlines() if line.startswith(name)]
        assert lines == [f'{name}{{reason="{why}"}} {count}' for why, count in EXPECTED_REFUSALS]


EXPECTED_REFUSALS = (("full", 0.0), ("unauthorized", 0.0), ("protocol", 3.0))
SERVING = (("--shards", "8"), ("--listen", "127.0.0.1:0"), ("--metrics", "127.0.0.1:0"), ("--ready-file", "r"))


@pytest.mark.parametrize("action", [["backup", "--to", "b"], ["restore", "b"]], ids=["backup", "restore"])
@pytest.mark.parametrize("flag", SERVING, ids=lambda flag: flag[0].strip("-"))
def test_flags_that_an_action_would_ignore_are_refused(
    flag: tuple[str, str], action: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, line = fails(capsys, "store", "--data", str(tmp_path / "s"), *flag, *action)
    assert status == 2 and line.endswith(f"{flag[0]} is for a store that serves; `store {action[0]}` takes none\n")
    assert not (tmp_path / "s").exists()


def test_a_socket_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.sock"
    worker = ["worker", "--socket", str(path), "--arena", "1MiB"]
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        status, line = fails(capsys, *worker)
        assert status == 2 and "another process serves there" in line and path.exists()
    path.unlink()
    path.write_text("mine")
    status, line = fails(capsys, *worker)
    assert status == 2 and "a file that is no socket is in the way" in line and path.read_text() == "mine"


def test_a_database_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "store.db").write_bytes(b"garbage " * 1000)
    status, line = fails(capsys, "store", "--listen", "127.0.0.1:0", "--data", str(tmp_path))
    assert status == 2 and "file is not a database; move it away to start with an empty one" in line


def test_status_of_nothing_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        status, line = fails(capsys, "status", "--store", address)
    assert status == 1 and line.startswith(f"tensorcast status: cannot connect to {address}: ")


@contextmanager
def running(tmp_path: Path, *args: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """The command as a process, once it serves; killed if the test did not end it."""
    ready = tmp_path / f"ready-{args[0]}"
    with (tmp_path / f"log-{args[0]}").open("w") as log:
        process = subprocess.Popen(
            [*TENSORCAST, *args, "--ready-file", str(ready)], stdout=log, stderr=subprocess.STDOUT, text=True
        )
    try:
        until_blocking(lambda: ready.exists() or process.poll() is not None, 30)
        assert process.poll() is None, (tmp_path / f"log-{args[0]}").read_text()
        yield process, json.loads(ready.read_text())
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@contextmanager
def killed_in_the_end(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process with pipes for what it says, which ends with the block, whatever fails in it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()  # nothing to one that has ended


def throw(address: str, data: bytes) -> None:
    family = socket.AF_UNIX if address.startswith("unix:") else socket.AF_INET
    with socket.socket(family) as sock:
        host, _, port = address.rpartition(":")
        sock.connect(address.removeprefix("unix:") if family == socket.AF_UNIX else (host, int(port)))
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(10)
        try:
            while sock.recv(1000):
                pass
        except ConnectionError:
            pass


def status(capsys: pytest.CaptureFixture[str], store: str) -> Any:
    assert main(["status", "--store", store, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_up_serves_privately_survives_garbage_and_leaves_nothing(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "up"
    args = ["up", "--dir", str(folder), "--store-listen", "127.0.0.1:0", "--arena", "4MiB", "--name", "w"]
    old = os.umask(0)
    try:
        with running(tmp_path, *args) as (process, ready):
            os.umask(old)
            modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in [folder, *folder.rglob("*")]}
            assert modes.pop("up") == modes.pop("store") == 0o700
            assert modes["worker.sock"] == modes["store.db"] == 0o600 and set(modes.values()) == {0o600}
            assert not Path(f"{tmp_path}/ready-up.partial").exists()
            for address in (ready["store"], ready["worker"], ready["peer"]):
                throw(address, b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
                throw(address, os.urandom(1000))
                throw(address, b"")
            until_blocking(lambda: (tmp_path / "log-up").read_text().count(" closed: ") == 6)
            log = (tmp_path / "log-up").read_text()
            assert "Traceback" not in log and f"worker = {ready['worker']}" in log
            until_blocking(lambda: status(capsys, ready["store"])["workers"])
            members = status(capsys, ready["store"])
            assert [each["worker_id"] for each in members["workers"]] == [ready["worker_id"]] and not members[
                "instances"
            ]
            assert main(["status", "--store", ready["store"]]) == 0
            table = capsys.readouterr().out
            assert ready["worker_id"] in table and "Instances" in table
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
    finally:
        os.umask(old)
    assert sorted(each.name for each in folder.rglob("*") if not each.is_dir()) == ["store.db"]
    assert not (tmp_path / "ready-up").exists(), "it is there only while its addresses are served"


@pytest.mark.slow
def test_a_store_and_a_worker_apart_killed_and_started_again(tmp_path: Path, capsys: Any) -> None:
    store_args = ["store", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "s"), "--log-format", "json"]
    with running(tmp_path, *store_args) as (store, ready):
        worker_args = [
            "worker",
            "--store",
            ready["store"],
            "--name",
            "w",
            "--socket",
            str(tmp_path / "w.sock"),
            "--arena",
            "1MiB",
        ]
        with running(tmp_path, *worker_args) as (worker, first):
            worker.kill()
            worker.wait()
        assert (tmp_path / "w.sock").exists(), "it had no time to tidy up"
        (tmp_path / "ready-worker").unlink()
        with running(tmp_path, *worker_args) as (worker, second):
            assert second["worker"] == first["worker"] and second["worker_id"] != first["worker_id"]
            until_blocking(
                lambda: second["worker_id"] in [each["worker_id"] for each in status(capsys, ready["store"])["workers"]]
            )
            worker.send_signal(signal.SIGINT)
            assert worker.wait(10) == 0
        assert not (tmp_path / "w.sock").exists()
        store.send_signal(signal.SIGTERM)
        assert store.wait(10) == 0
    for line in (tmp_path / "log-store").read_text().splitlines():
        assert json.loads(line)["level"] in ("info", "warning")


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (["--store", "10.9.9.9:1"], True),
        (["--store", "127.0.0.1:1,store.example:1"], True),
        (["--store", "10.9.9.9:1", "--advertise", "localhost:7"], True),
        (["--store", "10.9.9.9:1", "--advertise", "10.9.9.8:7"], False),
        (["--store", "localhost:1"], False),
    ],
)
def test_a_worker_that_others_cannot_reach_is_refused(
    flags: list[str], refused: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["worker", *flags, "--name", "w", "--socket", str(tmp_path / "w.sock"), "--arena", "1MiB"]
    if refused:
        assert main(line) == 2
        assert "can be reached from this host only, and the store is elsewhere" in capsys.readouterr().err
    else:
        with running(tmp_path, *line):
            pass


def test_the_number_of_shards_of_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = ["store", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "s")]
    with running(tmp_path, *at, "--shards", "8"):
        pass
    assert main([*at, "--shards", "16"]) == 2
    assert "shards=16: this cluster has 8 since it was made, and keeps them" in capsys.readouterr().err


def test_a_reader_that_has_enough_and_a_user_who_stops_end_it_without_a_word(tmp_path: Path) -> None:
    with running(tmp_path, "store", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "s")) as (_, ready):
        watch = [*TENSORCAST, "status", "--store", ready["store"], "--json", "--watch", "0.05"]
        with killed_in_the_end(watch) as reader:
            assert reader.stdout is not None and reader.stderr is not None
            assert reader.stdout.readline().startswith("{")
            reader.stdout.close()
            assert (reader.wait(20), reader.stderr.read()) == (1, "")
        with socket.socket() as silent:  # a store that never answers
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            program = (
                "import signal, sys\n"
                "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
                "from tensorcast_connector import cli\n"
                f"sys.exit(cli.main(['status', '--store', '127.0.0.1:{silent.getsockname()[1]}']))\n"
            )
            silent.settimeout(20)
            with killed_in_the_end([sys.executable, "-c", program]) as user:
                connection, _ = silent.accept()
                with connection:
                    user.send_signal(signal.SIGINT)
                    out, error = user.communicate(timeout=20)
            assert (user.returncode, out, error) == (130, "", "")


@pytest.mark.parametrize(
    "words",
    [
        ["rm", "--all", "--yes", "--tenant", ""],
        ["put", "x.safetensors", "--name="],
        ["prefetch", "n", "--to", ""],
        ["pin", "n", "--ttl", "1h", "--on", ""],
        ["weights", "pin", "m", "--ttl", "1h", "--on", ""],
        ["get", "n", "x.safetensors", "--tensor", ""],
        ["plan", "run", "x.json", "--key", ""],
        ["worker", "--token-file", ""],
        ["store", "--tls-ca", ""],
        ["store", "--data", "", "restore", "file"],
    ],
    ids=lambda words: words[0],
)
def test_an_empty_flag_never_means_the_default(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It is what is left of a shell variable that is not set: another tenant's artifacts would go, or a port be open to all."""
    status, err = fails(capsys, *words)
    assert status == 2 and re.search(r"argument --[a-z-]+: is empty; give it a value, or leave it out", err), err
