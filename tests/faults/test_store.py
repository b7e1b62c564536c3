"""The store is killed or stopped: real processes over SQLite."""

import os
import shutil
import signal
import time
from collections.abc import Callable

import pytest
from demo import pool
from demo.pool import Started
from demo.processes import Supervisor

from tensorcast_connector.config import MEMBER_TTL_S
from tests.faults.host import Host, fresh, watching
from tests.waiting import until_blocking

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]


def test_the_store_is_killed_and_started_again(
    supervisor: Supervisor, store: Started, trio: tuple[Host, Host, Host]
) -> None:
    a, b, c = trio
    pages = fresh()
    a.save(pages)
    b.finds(pages)
    with watching("SIGKILL of the store", lambda: b.found(pages) == len(pages), lambda: True) as gap:
        store.running.process.kill()
        store.running.process.wait()
        pool.store(supervisor, address=store["store"])
    assert gap.longest_s < MEMBER_TTL_S, "lookups need no store"
    until_blocking(lambda: all(each.statistics()["store_connected"] for each in trio), 30.0)
    assert [each.joins for each in trio] == [1, 1, 1], "no lease was lost"
    more = fresh()
    a.save(more)
    b.finds(more)
    c.loads([*pages, *more])


def test_the_store_is_away_for_longer_than_a_lease(store: Started, trio: tuple[Host, Host, Host]) -> None:
    """Homes take no registrations once their lease may have ended; what they know they tell all the same."""
    a, b, c = trio
    pages = fresh()
    a.save(pages)
    b.finds(pages)
    process = store.running.process
    os.kill(process.pid, signal.SIGSTOP)
    try:
        stopped = time.monotonic()
        until_blocking(lambda: time.monotonic() - stopped > MEMBER_TTL_S + 2, 30.0)
        assert b.found(pages) == len(pages)
        b.loads(pages[:20])
        late = fresh()
        a.save(late)
        assert c.found(late) == 0, "nobody may be told while another home may hold the shard"
        assert a.found(late) == len(late), "at their own worker they are found"
    finally:
        os.kill(process.pid, signal.SIGCONT)
    with watching("SIGSTOP of the store", lambda: c.found([*pages, *late]) == 2 * len(pages), lambda: True):
        pass
    c.loads([*pages, *late])


def test_workers_that_start_before_their_store(supervisor: Supervisor, host: Callable[[str, str], Host]) -> None:
    address = f"127.0.0.1:{supervisor.port()}"
    a, b = host(address, "a"), host(address, "b")
    pages = fresh()
    a.save(pages)
    assert a.found(pages) == len(pages) and b.found(pages) == 0
    pool.store(supervisor, address=address)
    b.finds(pages)
    b.loads(pages)


def test_an_older_copy_of_the_database_is_put_in_its_place(
    supervisor: Supervisor, store: Started, trio: tuple[Host, Host, Host]
) -> None:
    """As after a machine was set back to a snapshot, without `tensorcast store restore`."""
    a, b, c = trio
    pages = fresh()
    a.save(pages)
    b.finds(pages)
    database, copy = supervisor.folder / "store", supervisor.folder / "copy"
    supervisor.stop(store.running)
    shutil.copytree(database, copy)
    later = pool.store(supervisor, address=store["store"])
    until_blocking(lambda: all(each.statistics()["store_connected"] for each in trio), 30.0)
    c.worker.running.process.kill()  # its shards are granted anew, under tokens that the copy does not know
    until_blocking(lambda: a.shards_held + b.shards_held == 64, 30.0)
    supervisor.stop(later.running)
    shutil.rmtree(database)
    copy.rename(database)
    pool.store(supervisor, address=store["store"])
    more = fresh()
    a.save(more)
    until_blocking(lambda: a.shards_held + b.shards_held == 64, 60.0)
    b.finds([*pages, *more])
    b.loads([*pages, *more])
