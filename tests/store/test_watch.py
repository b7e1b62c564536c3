"""What the store tells those who follow it."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tensorcast_connector.core.cluster import (
    INCARNATION,
    RESTORED,
    SHARD_COUNT,
    ClusterView,
    instance_key,
    worker_key,
)
from tensorcast_connector.store import sqlite_kv
from tensorcast_connector.store.incarnation import ensure_incarnation
from tensorcast_connector.store.kv import Delete, Put
from tensorcast_connector.store.server import Store, open_store
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.testing.clock import SettableClock
from tensorcast_connector.wire.messages import Message
from tensorcast_connector.wire.store_messages import (
    Alive,
    Changes,
    ClaimShards,
    KeepAlive,
    PutReplica,
    RegisterInstance,
    ReleaseShards,
    RemoveInstance,
    RemoveReplica,
    RevokeLease,
    Watch,
)
from tests.store.served import LIFE, Served, instance, replica
from tests.waiting import until


async def test_the_first_answer_is_everything_and_then_come_changes(served: Served) -> None:
    lease = await served.join()
    everything = await served.watch()
    assert everything.complete and everything.incarnation == LIFE and everything.deleted == []
    assert {entry.key for entry in everything.entries} >= {worker_key("a/1"), INCARNATION, "cluster/shard-count"}
    assert await served.watch(everything.revision, LIFE) == Changes(LIFE, everything.revision, False, [], [])
    await served.ask(RegisterInstance(instance("one"), lease))
    await served.ask(RegisterInstance(instance("two"), lease))
    await served.ask(RemoveInstance("one"))
    await served.kv.txn([], [Put("another/prefix", b"x")])
    changes = await served.watch(everything.revision, LIFE)
    assert [entry.key for entry in changes.entries] == [instance_key("two")], "only the last state of each key"
    assert (changes.deleted, changes.complete) == ([instance_key("one")], False)
    assert changes.revision == await served.revision()


async def test_a_key_that_was_deleted_and_written_again_is_no_deletion(served: Served) -> None:
    lease = await served.join()
    await served.ask(RegisterInstance(instance("one"), lease))
    before = await served.revision()
    await served.ask(RemoveInstance("one"))
    await served.ask(RegisterInstance(instance("one"), lease))
    changes = await served.watch(before, LIFE)
    assert [entry.key for entry in changes.entries] == [instance_key("one")] and changes.deleted == []
    assert changes.entries[0].revision == before + 2


BEHIND: dict[str, tuple[int, int]] = {
    "who knows nothing": (0, 0),
    "who knows another life of the store": (LIFE - 1, 3),
    "who knows a later life of it": (LIFE + 1, 3),
    "who has seen revisions that are still to come": (LIFE, 10**6),
}


@pytest.mark.parametrize("name", BEHIND)
async def test_who_cannot_go_on_is_sent_everything(served: Served, name: str) -> None:
    life, revision = BEHIND[name]
    await served.join()
    changes = await served.watch(revision, life, wait_ms=10_000)
    # An older copy of the database is in its place: what is granted from now on must outrank what was granted since, and
    # workers have to register anew.
    gone_back = revision > 1000
    assert changes.complete and changes.incarnation == LIFE + gone_back
    keys = {entry.key for entry in changes.entries}
    assert SHARD_COUNT in keys and (worker_key("a/1") in keys) != gone_back


async def test_an_emptied_database_begins_a_new_life(served: Served) -> None:
    await served.join()
    before = await served.watch(0, 0)
    _, found = await served.kv.range("")
    for each in found:
        await served.kv.txn([], [Delete(each.key)])
    after = await served.watch(before.revision, before.incarnation)
    assert after.complete and after.incarnation == LIFE + 1
    assert {entry.key for entry in after.entries} == {INCARNATION, SHARD_COUNT, RESTORED}


async def test_a_new_life_has_as_many_shards_as_the_former(tmp_path: Path) -> None:
    kv = SqliteKv(tmp_path / "store" / "store.db", SettableClock())
    await ensure_incarnation(kv, LIFE)
    store = await open_store(kv, "s", 16)
    for key in (INCARNATION, SHARD_COUNT):
        await kv.txn([], [Delete(key)])
    changes = await store.changes(Watch(LIFE, 3, 0))
    assert changes.incarnation == LIFE + 1
    assert {entry.key: entry.value for entry in changes.entries}[SHARD_COUNT] == b"16"
    await kv.close()


async def test_who_is_too_far_behind_is_sent_everything(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_kv, "HISTORY_REVISIONS_MAX", 8)
    lease = await served.join()
    before = await served.revision()
    for number in range(20):
        await served.ask(RegisterInstance(instance(str(number % 3)), lease))
    changes = await served.watch(before, LIFE)
    assert changes.complete and len([e for e in changes.entries if e.key.startswith("cluster/instances/")]) == 3
    recent = await served.watch(changes.revision - 2, LIFE)
    assert not recent.complete and len(recent.entries) == 2


async def test_a_watch_waits_for_what_happens(served: Served) -> None:
    lease = await served.join()
    before = await served.revision()
    waiting = asyncio.create_task(served.watch(before, LIFE, wait_ms=10_000))
    await until(lambda: served.store.watchers)
    assert not waiting.done()
    await served.ask(RegisterInstance(instance("one"), lease))
    changes = await waiting
    assert [entry.key for entry in changes.entries] == [instance_key("one")]
    await until(lambda: not served.store.watchers)


async def test_a_watch_with_nothing_to_tell_is_answered_in_time(served: Served) -> None:
    before = await served.revision()
    assert await served.watch(before, LIFE, wait_ms=20) == Changes(LIFE, before, False, [], [])
    assert await served.watch(before, LIFE, wait_ms=-5) == Changes(LIFE, before, False, [], [])


async def test_after_a_restore_everybody_is_sent_everything_of_the_new_life(served: Served) -> None:
    """Also who was waiting, and whatever the revisions are."""
    await served.join()
    before = await served.revision()
    waiting = asyncio.create_task(served.watch(before, LIFE, wait_ms=10_000))
    await until(lambda: served.store.watchers)
    await served.kv.txn([], [Put(INCARNATION, b"%d" % (LIFE + 1)), Delete(worker_key("a/1"))])
    for changes in (await waiting, await served.watch(before, LIFE)):
        assert changes.complete and changes.incarnation == LIFE + 1
        view = ClusterView()
        view.apply(changes)
        assert not view.workers
    now = await served.revision()
    assert await served.watch(now, LIFE + 1) == Changes(LIFE + 1, now, False, [], [])


async def test_a_restore_in_the_middle_of_an_answer_is_noticed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    before = await served.revision()
    changes = served.kv.changes

    async def restored_meanwhile(prefix: str, after_revision: int) -> Any:
        await served.kv.txn([], [Put(INCARNATION, b"%d" % (LIFE + 1))])
        return await changes(prefix, after_revision)

    monkeypatch.setattr(served.kv, "changes", restored_meanwhile)
    got = await served.watch(before, LIFE)
    assert got.complete and got.incarnation == LIFE + 1


async def test_following_the_changes_gives_the_same_as_reading_everything(served: Served) -> None:
    chance = random.Random(11)
    view, leases = ClusterView(), dict[str, int]()
    names = [f"w{number}/1" for number in range(4)]
    for step in range(120):
        who = chance.choice(names)
        lease = leases.get(who)
        if lease is None:
            leases[who] = await served.join(who, ttl_s=3600)
        else:
            shards = chance.sample(range(8), 3)
            often: list[Message] = [
                ClaimShards(who, lease, shards), RegisterInstance(instance(f"i{step % 5}", who), lease),
                PutReplica(replica(f"m{step % 3}", who), lease), RemoveReplica(f"m{step % 3}", who),
            ]  # fmt: skip
            seldom: list[Message] = [RevokeLease(lease), ReleaseShards(lease, shards), RemoveInstance(f"i{step % 5}")]
            message = chance.choice(often * 2 + seldom)
            await served.ask(message)
            if isinstance(message, RevokeLease):
                del leases[who]
        if chance.random() < 0.3:
            view.apply(await served.watch(view.revision, view.incarnation))
            view.check()
    view.apply(await served.watch(view.revision, view.incarnation))
    read = await served.view()
    for part in ("workers", "instances", "shards", "replicas", "revision", "incarnation", "shard_count"):
        assert getattr(view, part) == getattr(read, part), part
    assert read.workers and read.shards and read.replicas


async def test_several_stores_on_one_database_are_one(served: Served) -> None:
    other = Store(served.kv, "other")
    lease = await served.join()
    await served.ask(ClaimShards("a/1", lease, [1]), other)
    assert isinstance(await served.ask(KeepAlive(lease), other), Alive)
    before = await served.revision()
    waiting = asyncio.create_task(served.watch(before, LIFE, wait_ms=10_000))
    await until(lambda: served.store.watchers)
    await served.ask(RegisterInstance(instance("one"), lease), other)
    assert [entry.key for entry in (await waiting).entries] == [instance_key("one")]
