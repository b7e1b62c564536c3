"""The store's database cannot be written: its disk, a file system of one MiB in memory, is full, or it may write nothing."""

import itertools
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from demo import pool
from demo.processes import Supervisor

from tensorcast_connector.client.blocking import connect_blocking
from tensorcast_connector.config import MEMBER_TTL_S
from tensorcast_connector.errors import TensorcastError
from tests.faults.conftest import settled
from tests.faults.host import Host, fresh
from tests.waiting import until_blocking

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small one, with nothing on it."""
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", str(where)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def fill(path: Path) -> None:
    """Takes all the room there is."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert "No space left" in str(error)


def use_up(worker: str) -> None:
    """Writes as long as the room that the database has of its own lasts."""
    failed = 0
    with connect_blocking(worker) as session:
        for at in itertools.count():
            try:
                session.disable(f"nobody-{at}", "-" * (400 if failed else 4000))
                failed = 0
            except TensorcastError as error:
                assert "full" in str(error), error
                failed += 1
                if failed > 5:
                    return


def said_of_writing(store: pool.Started) -> list[str]:
    """What the store has said of its database."""
    return [line for line in store.running.log.read_text().splitlines() if "store database" in line]


def test_nobody_who_lives_is_lost_and_the_dead_go_once_there_is_room(
    disk: Path, supervisor: Supervisor, host: Callable[[str, str], Host]
) -> None:
    """On a disk without room a small change may fit where a larger one does not: the list may change or not."""
    store = pool.store(supervisor, options=["--data", str(disk / "store")])
    a, b, c = (host(store["store"], name) for name in "abc")
    pages = shared_pages(a, b, c)
    fill(disk / "filler")
    use_up(a.worker["worker"])
    assert "cannot be written (database or disk is full)" in said_of_writing(store)[-1]
    late = outlived(c, lambda: host(store["store"], "d"))
    for each in (a, b):
        assert each.joins == 1, "no lease was lost"
        assert each.statistics()["store_connected"] and each.statistics()["workers"] in (2, 3, 4)
    assert a.found(pages) == len(pages), "what a worker has itself it finds without homes"
    (disk / "filler").unlink()
    whole_again(a, b, late, pages)
    assert said_of_writing(store)[-1].endswith("is written again")
    supervisor.stop(*supervisor.running)


def test_while_nothing_can_be_written_the_list_stays_as_it_is(
    tmp_path: Path, supervisor: Supervisor, host: Callable[[str, str], Host]
) -> None:
    """The store may write no byte into any file: its log goes through a pipe."""
    piped = ["bash", "-c", 'exec "$@" > >(cat) 2>&1', "bash"]
    store = pool.store(supervisor, options=["--data", str(tmp_path / "store")], prefix=piped)
    a, b, c = (host(store["store"], name) for name in "abc")
    pages = shared_pages(a, b, c)
    pid = store.running.process.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    late = outlived(c, lambda: host(store["store"], "d"))
    assert [each.joins for each in (a, b, late)] == [1, 1, 0], "no lease was lost, and none can be given"
    for each in (a, b):
        assert each.statistics()["store_connected"] and each.statistics()["workers"] == 3, "c is not forgotten half"
    assert a.shards_held + b.shards_held < 64
    before = said_of_writing(store)
    assert len(before) == 1 and "cannot be written" in before[0], "once"
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    whole_again(a, b, late, pages)
    assert [line.endswith("is written again") for line in said_of_writing(store)[1:]] == [True]
    supervisor.stop(*supervisor.running)


def shared_pages(a: Host, b: Host, c: Host) -> list[bytes]:
    """Pages that `a` has saved and `b` finds, in a cluster whose shards all have homes."""
    settled(a, b, c)
    pages = fresh()
    a.save(pages)
    b.finds(pages)
    return pages


def outlived(dead: Host, join: Callable[[], Host]) -> Host:
    """A worker is killed and another one comes, and the lease of the dead one runs out."""
    dead.worker.running.process.kill()
    dead.worker.running.process.wait()
    since = time.monotonic()
    late = join()
    until_blocking(lambda: time.monotonic() - since > MEMBER_TTL_S + 3, 30.0)
    return late


def whole_again(a: Host, b: Host, late: Host, pages: list[bytes]) -> None:
    """Those who live are in the cluster, each once, hold all shards, and find and load what there is."""
    until_blocking(lambda: late.joins and a.shards_held + b.shards_held + late.shards_held == 64, 60.0)
    assert [each.joins for each in (a, b, late)] == [1, 1, 1]
    until_blocking(lambda: {each.statistics()["workers"] for each in (a, b, late)} == {3}, 30.0)
    more = fresh()
    late.save(more)
    b.finds([*pages, *more])
    b.loads([*pages, *more])
