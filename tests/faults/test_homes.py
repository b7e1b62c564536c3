"""A shard home is killed, or stopped for longer than its lease: real processes, pages compared byte by byte."""

import os
import signal

import pytest

from tests.faults.host import Host, fresh, watching
from tests.waiting import until_blocking

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]


def test_a_home_is_killed(trio: tuple[Host, Host, Host]) -> None:
    a, b, c = trio
    pages = fresh()
    a.save(pages)
    b.finds(pages)
    assert c.shards_held > 0
    with watching("SIGKILL of a shard home", lambda: b.found(pages) == len(pages), lambda: True):
        c.worker.running.process.kill()
        c.worker.running.process.wait()
    assert a.shards_held + b.shards_held == 64
    more = fresh()
    a.save(more)
    b.finds(more)
    b.loads([*pages, *more])


def test_a_home_is_stopped_for_longer_than_its_lease_and_goes_on(trio: tuple[Host, Host, Host]) -> None:
    a, b, c = trio
    pages = fresh()
    a.save(pages)
    b.finds(pages)
    process = c.worker.running.process
    try:
        with watching(
            "SIGSTOP of a shard home",
            lambda: b.found(pages) == len(pages),
            lambda: a.shards_held + b.shards_held == 64,
        ):
            os.kill(process.pid, signal.SIGSTOP)
        # While it stands still its shards go on elsewhere; pages saved now are told to the new homes.
        more = fresh()
        a.save(more)
        b.finds(more)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    c.reattached()
    until_blocking(lambda: c.found([*pages, *more]) == len(pages) + len(more), 30.0)
    c.loads([*pages, *more])
    until_blocking(lambda: a.shards_held + b.shards_held + c.shards_held == 64, 30.0)


def test_the_worker_with_the_pages_is_killed_while_they_are_loaded(trio: tuple[Host, Host, Host]) -> None:
    a, b, _ = trio
    pages = fresh()
    a.save(pages)
    b.finds(pages)
    assert b.load(pages[:20]) == 20
    a.worker.running.process.kill()
    assert b.load(pages) >= 20, "what is here stays, the rest is a miss"
    again = fresh()
    b.save(again)
    until_blocking(lambda: b.found(again) == len(again), 30.0)
    until_blocking(lambda: b.found(pages[20:]) == 0, 30.0)
