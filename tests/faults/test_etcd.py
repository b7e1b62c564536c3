"""Two store processes over three etcd nodes: any one of them may die, and nothing that was told them is lost."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from demo import pool
from demo.pool import Started
from demo.processes import Supervisor, program

from tensorcast_connector.config import MEMBER_TTL_S
from tests.faults.conftest import settled
from tests.faults.host import Host, for_seconds, fresh, watching
from tests.store.etcd_servers import EtcdCluster
from tests.waiting import until_blocking

# Leases that nobody renews would be over by then.
LONG = partial(for_seconds, MEMBER_TTL_S + 2.0)
pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three nodes."""
    cluster = EtcdCluster(3, tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture
def stores(supervisor: Supervisor, etcd: EtcdCluster) -> list[Started]:
    """Two store processes over them."""
    return [pool.store(supervisor, name, options=["--etcd", etcd.flag]) for name in ("store-1", "store-2")]


@pytest.fixture
def hosts(stores: list[Started], host: Callable[[str, str], Host]) -> list[Host]:
    """Two workers that know both stores."""
    both = ",".join(each["store"] for each in stores)
    made = [host(both, "a"), host(both, "b")]
    settled(*made)
    return made


def test_a_store_process_is_killed(stores: list[Started], hosts: list[Host]) -> None:
    a, b = hosts
    pages = fresh()
    a.save(pages)
    b.finds(pages)
    with watching("SIGKILL of one of two stores", lambda: b.found(pages) == len(pages), LONG()) as gap:
        stores[0].running.process.kill()
        stores[0].running.process.wait()
    assert gap.longest_s < MEMBER_TTL_S
    until_blocking(lambda: all(each.statistics()["store_connected"] for each in hosts), 30.0)
    more = fresh()
    a.save(more)
    b.finds(more)
    b.loads([*pages, *more])
    assert [each.joins for each in hosts] == [1, 1], "no lease was lost on the way to the other store"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_etcd_leader_is_lost(
    etcd: EtcdCluster, stores: list[Started], hosts: list[Host], host: Callable[[str, str], Host], how: signal.Signals
) -> None:
    a, b = hosts
    pages = fresh()
    a.save(pages)
    b.finds(pages)
    leader = etcd.leader()

    def registered_and_found() -> bool:
        """A page that did not exist before the fault is saved at one worker and found at the other."""
        new = fresh(1)
        a.save(new)
        until_blocking(lambda: b.found(new) == 1, 30.0)
        return b.found(pages) == len(pages)

    with watching(f"{how.name} of the etcd leader", registered_and_found, LONG()) as gap:
        if how is signal.SIGKILL:
            etcd.kill(leader)
        else:
            etcd.signal(leader, how)
    assert gap.longest_s < 2 * MEMBER_TTL_S
    # The control plane goes on as well: what is registered at the store under the next leader is seen by all.
    until_blocking(lambda: all(each.statistics()["store_connected"] for each in hosts), 30.0)
    if how is signal.SIGSTOP:
        etcd.signal(leader, signal.SIGCONT)
    assert [each.joins for each in hosts] == [1, 1], "no lease was lost"
    c = host(",".join(each["store"] for each in stores), "c")
    c.finds(pages)
    c.loads(pages)


def test_a_store_is_stopped_for_longer_than_a_lease(stores: list[Started], hosts: list[Host]) -> None:
    a, b = hosts
    pages = fresh()
    a.save(pages)
    b.finds(pages)
    process = stores[0].running.process
    os.kill(process.pid, signal.SIGSTOP)
    try:
        more = fresh()
        a.save(more)
        with watching("SIGSTOP of one of two stores", lambda: b.found(more) == len(more), LONG()):
            pass
        until_blocking(lambda: all(each.statistics()["store_connected"] for each in hosts), 30.0)
        b.loads([*pages, *more])
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert a.shards_held + b.shards_held == 64


def test_etcd_loses_all_its_data_under_two_stores(
    supervisor: Supervisor, tmp_path: Path, host: Callable[[str, str], Host]
) -> None:
    """Nobody restarts anything but etcd: workers register anew, and nothing of the former life counts."""
    etcd = EtcdCluster(1, tmp_path)
    try:
        both = [pool.store(supervisor, name, options=["--etcd", etcd.flag]) for name in ("store-1", "store-2")]
        a, b = (host(",".join(each["store"] for each in both), name) for name in "ab")
        settled(a, b)
        pages = fresh()
        a.save(pages)
        b.finds(pages)
        etcd.kill(0)
        shutil.rmtree(tmp_path / "n0")
        etcd.start(0)
        until_blocking(lambda: a.joins > 1 and b.joins > 1, 30.0)
        until_blocking(lambda: a.shards_held + b.shards_held == 64, 60.0)
        more = fresh()
        a.save(more)
        b.finds([*pages, *more])
        b.loads([*pages, *more])
    finally:
        etcd.close()


def test_a_restored_cluster_comes_back_by_itself(
    supervisor: Supervisor, etcd: EtcdCluster, stores: list[Started], hosts: list[Host], tmp_path: Path
) -> None:
    """Nobody restarts a worker. Shards are granted only once what the former life had granted is over."""
    a, b = hosts
    pages = fresh()
    a.save(pages)
    b.finds(pages)
    file, flags = str(tmp_path / "backup"), ["--etcd", etcd.flag]
    line = [program("tensorcast"), "store"]
    subprocess.run([*line, "backup", "--to", file, *flags], check=True, capture_output=True)
    served = subprocess.run([*line, "restore", file, "--replace", *flags], check=False, capture_output=True, text=True)
    assert served.returncode == 2 and "store processes serve this database" in served.stderr
    assert all(each["store"] in served.stderr for each in stores)
    supervisor.stop(*(each.running for each in stores))
    subprocess.run([*line, "restore", file, "--replace", *flags], check=True, capture_output=True)
    for name, each in zip(("store-1", "store-2"), stores, strict=True):
        pool.store(supervisor, name, address=each["store"], options=flags)
    until_blocking(lambda: a.joins > 1 and b.joins > 1, 30.0)
    until_blocking(lambda: a.shards_held + b.shards_held == 64, 60.0)
    more = fresh()
    a.save(more)
    b.finds([*pages, *more])
    b.loads([*pages, *more])
    until_blocking(lambda: all(each.statistics()["store_connected"] for each in hosts), 30.0)
