"""`--devices`, `prefetch --device` and what shows it, on real processes; the owner of device memory ends with its worker."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo import pool
from demo.pool import Started
from demo.processes import ROOT, DemoError, Supervisor, run_id

from tensorcast_connector.cli import main
from tensorcast_connector.client.blocking import connect_blocking
from tensorcast_connector.errors import DeadlineExceeded, Exhausted
from tests.conftest import children
from tests.waiting import until_blocking

pytestmark = pytest.mark.slow
OWNER = "tensorcast_connector.engines.devices.process"


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """Owns the programs of one test."""
    with Supervisor(ROOT / ".out" / f"devices-{run_id()}-{tmp_path.name}", grace_s=5.0) as made:
        yield made


def start(supervisor: Supervisor, store: Started, name: str = "a", *options: str) -> Started:
    chosen = options or ("--devices", "host:0,host:1", "--device-memory", "8MiB")
    return pool.worker(supervisor, store["store"], name, arena="4MiB", options=chosen)


def owner_of(worker: Started) -> int:
    """The process that owns its device memory."""
    found = [int(pid) for pid in Path(f"/proc/{worker.running.process.pid}/task").parent.glob("task/*/children")
             for pid in pid.read_text().split() if OWNER in command(int(pid))]  # fmt: skip
    assert len(found) == 1, found
    return found[0]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def document(seed: int = 0) -> dict[str, Any]:
    """Tensors with a key document, as the loader of engines puts them."""
    text = json.dumps({"model": "org/m", "rank": "tp 0 of 1", "facts": {"engine": ["vllm", "0.1", "2.0"]}})
    return {"w": np.full(700_000, seed, np.float32), "tensorcast.key": np.frombuffer(text.encode(), np.uint8)}


def test_loaded_parameters_are_brought_to_a_device_and_shown(
    supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    store = pool.store(supervisor)
    a, b = start(supervisor, store), start(supervisor, store, "b", "--artifacts", "64MiB")

    def run(*args: str, at: Started = a) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([*args, "--worker", at["worker"]])
        return status, *capsys.readouterr()

    def devices() -> dict[str, Any]:
        (listed,) = json.loads(run("weights", "ls", "--json", at=b)[1])["materialised"]
        found: dict[str, Any] = listed["devices"]
        return found

    with connect_blocking(b["worker"]) as session:
        session.put(document(), name="weights/0123")
        session.weight_publisher("policy").publish({"w": np.ones(10)}, 1)
    until_blocking(lambda: run("weights", "ls")[0] == 0 and "weights/0123" in run("weights", "ls")[1])
    assert devices() == {}
    assert run("prefetch", "weights/0123", "--to", "a", "--device", "host:1", at=b) == (0, "", "")
    until_blocking(lambda: devices() == {a["worker_id"]: ["host:1"]})
    text = run("weights", "ls", at=b)[1]
    assert "host:1" in text and "devices" in text
    for args, words in [
        (
            ("weights/0123", "--to", "a", "--device", "host:7"),
            "this worker has no device 'host:7'; there are host:0, host:1",
        ),
        (("weights/0123", "--to", "b", "--device", "host:0"), "it has none (--devices)"),
        (("weights/0123", "--to", "a", "--device", "gpu0"), "'gpu0' is no device; write for example cuda:0"),
        (("policy", "--to", "a", "--device", "host:0"), "policy is a published version, which is in parts"),
    ]:
        status, _, err = run("prefetch", *args)
        assert status and words in err and err.count("\n") == 1, err

    def shown() -> str:
        capsys.readouterr()
        assert main(["status", "--store", store["store"]]) == 0
        return capsys.readouterr()[0]

    def signals() -> dict[str, Any]:
        capsys.readouterr()
        assert main(["status", "--store", store["store"], "--json"]) == 0
        return {each["name"]: each["signals"]["values"] for each in json.loads(capsys.readouterr()[0])["workers"]}

    # It measures itself once a second, and may have done so while it copied.
    expected = {"replicas": 1, "open": 0, "bytes_used": 4 << 20, "bytes_max": 8 << 20}
    until_blocking(lambda: signals()["a"]["devices"]["host:1"] == expected)
    assert "host:0 0 B of 8 MiB, host:1 4 MiB of 8 MiB" in shown()
    assert "devices" not in signals()["b"]

    assert run("weights", "rm", "weights/0123")[0] == 0
    until_blocking(lambda: signals()["a"]["devices"]["host:1"]["bytes_used"] == 0)


@pytest.mark.parametrize("stopped", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_owner_of_device_memory_ends_with_its_worker(supervisor: Supervisor, number: int, stopped: bool) -> None:
    """Also if it reads nothing just now, as while it copies."""
    worker = start(supervisor, pool.store(supervisor))
    owner = owner_of(worker)
    if stopped:
        os.kill(owner, signal.SIGSTOP)
    worker.running.process.send_signal(number)
    worker.running.process.wait(20)
    until_blocking(lambda: OWNER not in command(owner))


def test_a_signal_to_all_does_not_end_it_before_its_worker(supervisor: Supervisor) -> None:
    worker = start(supervisor, pool.store(supervisor))
    owner = owner_of(worker)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(owner, number)
    with connect_blocking(worker["worker"]) as session:
        session.put(document(), name="weights/1").replicate("host:0")
    assert owner_of(worker) == owner


def test_a_worker_whose_device_is_not_there_says_so(supervisor: Supervisor) -> None:
    store = pool.store(supervisor)
    with pytest.raises(DemoError, match=r"tensorcast worker: (no CUDA driver|no GPU|there is no cuda:998)"):
        start(supervisor, store, "a", "--devices", "cuda:998")


def test_the_worker_loads_no_torch_and_no_driver(supervisor: Supervisor) -> None:
    worker = start(supervisor, pool.store(supervisor))
    with connect_blocking(worker["worker"]) as session:
        session.put(document(), name="weights/1").replicate("host:0")
    maps = Path(f"/proc/{worker.running.process.pid}/maps").read_text()
    assert "libtorch" not in maps and "libcuda" not in maps
    assert "libtorch" not in Path(f"/proc/{owner_of(worker)}/maps").read_text()


OPENER = """
import sys, time
from tensorcast_connector.client.blocking import connect_blocking
session = connect_blocking(sys.argv[1])
opened = session.artifact("weights/1").open_replica("host:0")
print("open", flush=True)
time.sleep(60)
"""


def test_what_a_process_has_open_it_lets_go_of_when_it_is_killed(supervisor: Supervisor) -> None:
    worker = start(supervisor, pool.store(supervisor), "a", "--devices", "host:0", "--device-memory", "4MiB")
    with connect_blocking(worker["worker"]) as session:
        first, second = session.put(document(1), name="weights/1"), session.put(document(2), name="weights/2")
        first.replicate("host:0")
        opener = subprocess.Popen([sys.executable, "-c", OPENER, worker["worker"]], stdout=subprocess.PIPE, text=True)
        try:
            assert opener.stdout is not None and opener.stdout.readline() == "open\n"
            assert [each.open for each in first.replicas()] == [1]
            # Tried again until then: somebody may close it. The last try may still be under way.
            with pytest.raises((Exhausted, DeadlineExceeded), match="what engines have open stays"):
                second.replicate("host:0", timeout_s=2.0)
        finally:
            opener.kill()
            opener.communicate()
        second.replicate("host:0")
        assert not first.replicas() and [each.open for each in second.replicas()] == [0]


def test_none_of_them_are_left() -> None:
    assert not [each for each in children().values() if OWNER in each]
