"""This version beside the one before it: store, workers and engines' side in every mix, as during a rolling upgrade.

The former version is the commit named in `PREVIOUS`, the last one with the protocol version before this; its sources come
from the repository's history and run as programs of their own.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from demo.processes import ROOT, Running, Supervisor, read_ready, ready_file, run_id

from tensorcast_connector.wire.messages import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN
from tests.waiting import until_blocking

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
HERE = Path(__file__).parent
PREVIOUS = (HERE / "PREVIOUS").read_text().split()[0]
NEW, OLD = "new", "old"
COUNT = 64


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each version's package."""
    folder = tmp_path_factory.mktemp("previous")
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", PREVIOUS, "tensorcast_connector"], capture_output=True, check=False
    )
    if archive.returncode:
        pytest.skip(f"the history holds no {PREVIOUS} (a shallow clone?): {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return {NEW: ROOT, OLD: folder}


@dataclass
class Cluster:
    """Programs of both versions."""

    supervisor: Supervisor
    sources: dict[str, Path]

    def environment(self, version: str) -> dict[str, str]:
        return {"PYTHONPATH": str(self.sources[version]), "PYTHONSAFEPATH": "1"}

    def start(self, version: str, name: str, *command: str) -> tuple[Running, dict[str, str]]:
        ready = self.supervisor.folder / f"{name}.ready.json"
        ready.unlink(missing_ok=True)
        line = [sys.executable, "-m", "tensorcast_connector.cli", *command, "--ready-file", str(ready)]
        running = self.supervisor.start(name, line, env=self.environment(version))
        running.wait(ready_file(ready), 30.0)
        return running, read_ready(ready)

    def store(self, version: str, listen: str = "127.0.0.1:0") -> tuple[Running, str]:
        folder = str(self.supervisor.folder / "store")
        running, ready = self.start(version, "store", "store", "--listen", listen, "--data", folder)
        return running, ready["store"]

    def worker(self, version: str, name: str, store: str) -> str:
        folder = Path(tempfile.mkdtemp(prefix="tensorcast-"))
        self.supervisor.cleanup(folder)
        command = ["worker", "--store", store, "--name", name, "--arena", "32MiB", "--socket", f"{folder}/w.sock"]
        return self.start(version, name, *command)[1]["worker"]

    def drive(self, version: str, worker: str, action: str, first: int, count: int = COUNT) -> int:
        done = subprocess.run(
            [sys.executable, str(HERE / "driver.py"), worker, action, str(first), str(count)],
            env={**os.environ, **self.environment(version)}, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def loads_all(self, version: str, worker: str, first: int) -> None:
        until_blocking(lambda: self.drive(version, worker, "load", first) == COUNT, 40.0)

    def log(self, name: str) -> str:
        return (self.supervisor.folder / f"{name}.log").read_text()


@pytest.fixture
def cluster(sources: dict[str, Path], tmp_path: Path) -> Iterator[Cluster]:
    """Nothing is running yet."""
    with Supervisor(ROOT / ".out" / f"versions-{run_id()}-{tmp_path.name}", grace_s=5.0) as supervisor:
        yield Cluster(supervisor, sources)


def test_the_former_version_is_the_one_before_this(cluster: Cluster) -> None:
    program = "from tensorcast_connector.wire import messages as m; print(m.PROTOCOL_VERSION)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **cluster.environment(OLD)}, capture_output=True, check=True
    )
    assert int(done.stdout) == PROTOCOL_VERSION - 1 >= PROTOCOL_VERSION_MIN


@pytest.mark.parametrize(("plugin", "worker"), [(OLD, NEW), (NEW, OLD), (NEW, NEW)])
def test_an_engine_and_its_worker(cluster: Cluster, plugin: str, worker: str) -> None:
    _, store = cluster.store(NEW)
    at = cluster.worker(worker, "w", store)
    assert cluster.drive(plugin, at, "save", 0) == COUNT
    assert cluster.drive(plugin, at, "load", 0) == COUNT
    assert cluster.drive(NEW if plugin is OLD else OLD, at, "load", 0) == COUNT, "and the pages are the same for both"


@pytest.mark.parametrize("store", [OLD, NEW])
@pytest.mark.parametrize(("first", "second"), [(OLD, OLD), (OLD, NEW), (NEW, OLD), (NEW, NEW)])
def test_workers_of_either_version_share_under_either_store(
    cluster: Cluster, store: str, first: str, second: str
) -> None:
    """The first is the home of everything: the second reports to it and asks it, and is found by what it reported."""
    _, address = cluster.store(store)
    a, b = cluster.worker(first, "a", address), cluster.worker(second, "b", address)
    assert cluster.drive(first, a, "save", 0) == COUNT and cluster.drive(second, b, "save", 1000) == COUNT
    cluster.loads_all(second, b, 0)
    cluster.loads_all(first, a, 1000)
    assert "Traceback" not in cluster.log("a") + cluster.log("b") + cluster.log("store")


def test_the_store_is_upgraded_first_and_nothing_is_lost(cluster: Cluster) -> None:
    """New workers share under the former store as they do under the new one."""
    running, store = cluster.store(OLD)
    a, b = cluster.worker(NEW, "a", store), cluster.worker(OLD, "b", store)
    assert cluster.drive(NEW, a, "save", 0) == COUNT == cluster.drive(NEW, a, "load", 0)
    cluster.loads_all(OLD, b, 0)
    cluster.supervisor.stop(running)
    cluster.store(NEW, store)
    assert cluster.drive(NEW, a, "save", 1000) == COUNT
    cluster.loads_all(OLD, b, 1000)
    for name in ("a", "b"):
        assert "Traceback" not in cluster.log(name)


def test_a_version_from_the_future_is_refused_with_one_line(cluster: Cluster) -> None:
    _, store = cluster.store(NEW)
    program = (
        "import asyncio, random\n"
        "from tensorcast_connector.wire import messages\n"
        "from tensorcast_connector.net import rpc_client\n"
        "from tensorcast_connector.net.sockets import SocketNetwork\n"
        "from tensorcast_connector.config import parse_address\n"
        "rpc_client.PROTOCOL_VERSION = 99; rpc_client.PROTOCOL_VERSION_MIN = 98\n"
        "async def main():\n"
        f"    c = rpc_client.RpcClient(SocketNetwork(), parse_address({store!r}, 'store'), 'client', 'x', random.Random())\n"
        "    c.start()\n"
        "    try:\n"
        "        await c.wait_connected(5, patient=False)\n"
        "    except Exception as error:\n"
        "        print(error)\n"
        "    await c.close()\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    expected = (
        f"protocol versions 98-99 of 'x' and {PROTOCOL_VERSION_MIN}-{PROTOCOL_VERSION} of this store do not overlap"
    )
    assert expected in done.stdout and done.stderr == ""
