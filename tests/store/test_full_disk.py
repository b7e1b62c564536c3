"""SQLite on a disk without room: reading goes on, writing says why, and what has expired goes once there is room."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tensorcast_connector.core.cluster import instance_key, worker_key
from tensorcast_connector.errors import Exhausted, NotFound
from tensorcast_connector.store import sqlite_kv
from tensorcast_connector.store.incarnation import ensure_incarnation
from tensorcast_connector.store.kv import Event, Put
from tensorcast_connector.store.server import open_store
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.wire.messages import Message
from tensorcast_connector.wire.store_messages import (
    Alive,
    ClaimShards,
    KeepAlive,
    RegisterInstance,
    RegisterWorker,
    ReleaseShards,
    RevokeLease,
    Watch,
)
from tests.store.served import LIFE, SHARDS, TTL_S, Served, instance, record
from tests.waiting import until


class Disk:
    """Of a store: it can be full. SQLite then refuses what would write, before it writes anything."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def fill(self, full: bool = True) -> None:
        kv = self._served.kv

        def on_thread() -> None:
            kv._db.execute(f"PRAGMA query_only={int(full)}")

        await kv._on_thread(on_thread)


@pytest.fixture
async def disk(served: Served) -> AsyncIterator[Disk]:
    """Of the served store; room again at the end."""
    disk = Disk(served)
    yield disk
    await disk.fill(False)


async def test_who_renews_stays_and_who_does_not_goes_when_there_is_room(served: Served, disk: Disk) -> None:
    stays, goes = await served.join("a/1"), await served.join("b/1")
    for lease, who in ((stays, "a/1"), (goes, "b/1")):
        await served.ask(RegisterInstance(instance(f"of {who}", who), lease))
    await served.ask(ClaimShards("a/1", stays, [0]))
    await served.ask(ClaimShards("b/1", goes, [1, 2]))
    before = await served.revision()
    await disk.fill()
    for _ in range(4):
        served.clock.advance(TTL_S - 2)
        assert isinstance(await served.ask(KeepAlive(stays)), Alive)
        view = await served.view()
        assert set(view.workers) == {"a/1", "b/1"} and set(view.instances) == {"of a/1", "of b/1"}
        assert set(view.shards) == {0, 1, 2}, "nobody is forgotten half"
        assert (await served.watch(before, LIFE)).entries == [] and await served.revision() == before
    for _ in range(2):
        with pytest.raises(NotFound, match=f"lease {goes} has expired"):
            await served.ask(KeepAlive(goes))
    await disk.fill(False)
    served.clock.advance(sqlite_kv.EXPIRY_RETRY_S)
    changes = await served.watch(before, LIFE)
    assert {worker_key("b/1"), instance_key("of b/1")} < set(changes.deleted) and len(changes.deleted) == 4
    view = await served.view()
    assert (
        set(view.workers) == {"a/1"}
        and set(view.shards) == {0}
        and isinstance(await served.ask(KeepAlive(stays)), Alive)
    )
    await served.join("b/1")


WRITES: dict[str, Message] = {
    "a worker": RegisterWorker(record("c/1"), TTL_S),
    "an engine": RegisterInstance(instance("i"), 1),
    "a claim": ClaimShards("a/1", 1, [5]),
    "what is given back": ReleaseShards(1, [0]),
    "a lease given back": RevokeLease(1),
}


@pytest.mark.parametrize("expired", [False, True])
@pytest.mark.parametrize("name", WRITES)
async def test_what_writes_fails_in_one_line_and_changes_nothing(
    served: Served, disk: Disk, name: str, expired: bool
) -> None:
    lease = await served.join("a/1", ttl_s=3600)
    await served.ask(ClaimShards("a/1", lease, [0]))
    await served.join("b/1")
    served.clock.advance(TTL_S if expired else 0)
    message = WRITES[name]
    if hasattr(message, "lease_id"):
        message.lease_id = lease
    await disk.fill()
    before = await served.kv.range("")
    for _ in range(2):
        with pytest.raises(Exhausted, match=r"^store database .*store\.db cannot be written \(") as error:
            await served.ask(message)
        assert "\n" not in str(error.value) and await served.kv.range("") == before
    await disk.fill(False)
    await served.ask(message)


async def test_it_is_told_once_and_that_it_is_over_too(
    served: Served, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    await served.join("a/1")
    await disk.fill()
    served.clock.advance(TTL_S)
    with caplog.at_level(logging.INFO, sqlite_kv.__name__):
        for _ in range(5):
            await served.view()
            served.clock.advance(sqlite_kv.EXPIRY_RETRY_S)
            with pytest.raises(Exhausted):
                await served.join("c/1")
        await disk.fill(False)
        await served.view()
        await served.join("c/1")
    first, last = (each.getMessage() for each in caplog.records if each.name == sqlite_kv.__name__)
    assert "cannot be written" in first and "what is known is still told, nothing new is written" in first
    assert last.endswith("store.db is written again")


@pytest.mark.slow
async def test_whoever_waits_waits_until_there_is_room(served: Served, disk: Disk) -> None:
    """And does not try without a pause."""
    await served.join("a/1")
    before = await served.revision()
    tried = 0
    end_leases = served.kv._end_leases

    def counted(lease_ids: list[int]) -> None:
        nonlocal tried
        tried += 1
        end_leases(lease_ids)

    served.kv._end_leases = counted  # type: ignore[method-assign,assignment]
    await disk.fill()
    served.clock.advance(TTL_S)
    waiting = asyncio.create_task(served.kv.wait(before, 30))
    await until(lambda: tried)
    for _ in range(100):
        await asyncio.sleep(0)
        await served.kv.revision()
    assert not waiting.done() and tried == 1
    await disk.fill(False)
    served.clock.advance(sqlite_kv.EXPIRY_RETRY_S)
    await asyncio.wait_for(waiting, 10)
    assert (await served.kv.changes("", before))[1] == [Event(worker_key("a/1"), None, before + 1, 0)]


async def test_a_history_that_cannot_be_trimmed_is_still_told(
    served: Served, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await served.join("a/1", ttl_s=3600)
    before = await served.revision()
    for number in range(10):
        await served.ask(RegisterInstance(instance(f"i{number}"), lease))
    monkeypatch.setattr(sqlite_kv, "HISTORY_REVISIONS_MAX", 4)
    await disk.fill()
    assert len((await served.watch(before, LIFE)).entries) == 10
    await disk.fill(False)
    served.clock.advance(sqlite_kv.EXPIRY_RETRY_S)
    assert (await served.watch(before, LIFE)).complete


async def test_a_store_starts_on_a_full_disk(served: Served, disk: Disk, tmp_path: Path) -> None:
    await served.join("a/1")
    await served.kv.close()
    kv = served.kv = SqliteKv(tmp_path / "store" / "store.db", served.clock)
    await disk.fill()
    assert await ensure_incarnation(kv, 9) == LIFE
    store = await open_store(kv, "again")
    assert worker_key("a/1") in [entry.key for entry in (await store.changes(Watch(0, 0, 0))).entries]
    assert store._shards == SHARDS


async def test_what_failed_does_not_count_as_history(served: Served) -> None:
    """A database that may not grow: what needs no new page is written."""
    before = served.kv._history_bytes
    served.kv._db.execute("PRAGMA max_page_count=1")  # as many as it has
    for _ in range(3):
        with pytest.raises(Exhausted, match=r"cannot be written \(database or disk is full\)"):
            await served.kv.txn([], [Put("small", bytes(100)), Put("large", bytes(200_000))])
    assert served.kv._history_bytes == before
    served.kv._db.execute("PRAGMA max_page_count=1000000")
    await served.kv.txn([], [Put("small", bytes(100)), Put("large", bytes(200_000))])
