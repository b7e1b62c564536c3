"""The disk of the store's database is full: a file system of one MiB in memory, filled up."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from demo import pool
from demo.processes import Supervisor

from tensorcast_connector.config import MEMBER_TTL_S
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


def test_nobody_who_lives_is_lost_and_the_dead_go_once_there_is_room(
    disk: Path, supervisor: Supervisor, host: Callable[[str, str], Host]
) -> None:
    store = pool.store(supervisor, options=["--data", str(disk / "store")])
    a, b, c = (host(store["store"], name) for name in "abc")
    settled(a, b, c)
    pages = fresh()
    a.save(pages)
    b.finds(pages)
    fill(disk / "filler")
    c.worker.running.process.kill()
    c.worker.running.process.wait()
    dead = time.monotonic()
    late = host(store["store"], "d")
    until_blocking(lambda: time.monotonic() - dead > MEMBER_TTL_S + 3, 30.0)
    assert [each.joins for each in (a, b, late)] == [1, 1, 0], "no lease was lost, and none can be given"
    for each in (a, b):
        assert each.statistics()["store_connected"] and each.statistics()["workers"] == 3, "c is not forgotten half"
    assert a.shards_held + b.shards_held < 64
    (disk / "filler").unlink()
    until_blocking(lambda: late.joins and a.shards_held + b.shards_held + late.shards_held == 64, 60.0)
    assert [each.joins for each in (a, b, late)] == [1, 1, 1]
    until_blocking(lambda: {each.statistics()["workers"] for each in (a, b, late)} == {3}, 30.0)
    more = fresh()
    late.save(more)
    b.finds([*pages, *more])
    b.loads([*pages, *more])
    told = [line for line in store.running.log.read_text().splitlines() if "store database" in line]
    assert ["cannot be written (database or disk is full)" in line for line in told] == [True, False], told
    assert told[1].endswith("is written again")
    supervisor.stop(*supervisor.running)
