"""After a restore: shards are granted only when nobody believes in the former life any more; and no restore under a store."""

import asyncio
import re
import signal
import time
from pathlib import Path

import pytest

from tensorcast_connector.cli import main
from tensorcast_connector.config import MEMBER_TTL_S
from tensorcast_connector.core.cluster import RESTORED, SHARD_COUNT
from tensorcast_connector.errors import ConfigError, NotFound, Unavailable
from tensorcast_connector.store import alive, backup, incarnation
from tensorcast_connector.store.alive import Presence
from tensorcast_connector.store.backup import Backup, restore_backup, write_backup
from tensorcast_connector.store.incarnation import ensure_incarnation
from tensorcast_connector.store.kv import ALIVE, RESTORING_KEY, Delete
from tensorcast_connector.store.server import Store, open_store
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.testing.clock import SettableClock
from tensorcast_connector.wire.messages import Ok
from tensorcast_connector.wire.store_messages import (
    Alive,
    ClaimShards,
    KeepAlive,
    RegisterInstance,
    RegisterWorker,
    Watch,
)
from tests.store.conftest import Backend, EtcdBackend
from tests.store.served import instance, record
from tests.store.test_backup import run, running_store

BACKUP = Backup(40, 7, [(SHARD_COUNT, b"8")])
NOW = 1_800_000_000
WHY = f"was restored a moment ago: shards are granted after {MEMBER_TTL_S} s"
on_etcd = pytest.mark.parametrize("servers", ["etcd-1"], indirect=True)


async def shards(store: Store) -> set[str]:
    return {each.key for each in (await store._kv.range("cluster/shards/"))[1]}


@pytest.mark.slow
async def test_claims_wait_and_everything_else_goes_on(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "MEMBER_TTL_S", backend.ttl_s)
    kv = backend.kv
    await restore_backup(kv, BACKUP, replace=False, now_unix_s=NOW)
    restored = (await kv.range(RESTORED))[1]
    stores = [await open_store(kv, "one"), await open_store(kv, "two")]
    lease = (await stores[0].handle(RegisterWorker(record(), 3600))).lease_id  # type: ignore[attr-defined]  # fmt: skip
    assert await stores[1].handle(RegisterInstance(instance("i"), lease)) == Ok()
    assert isinstance(await stores[1].handle(KeepAlive(lease)), Alive)
    with pytest.raises(Unavailable, match=WHY):
        await stores[1].handle(ClaimShards("a/1", lease, [1, 2]))
    refused = 0
    async with asyncio.timeout(20):
        while not await shards(stores[0]):
            try:
                await stores[0].handle(ClaimShards("a/1", lease, [1]))
            except Unavailable:
                refused += 1
                await backend.pass_time(backend.ttl_s / 4)
    assert refused and not (await kv.range(RESTORED))[1]
    for store in stores:
        assert await store.handle(ClaimShards("a/1", lease, [1, 2])) == Ok()
    assert len(await shards(stores[0])) == 2
    with pytest.raises(NotFound):
        await kv.lease_keepalive(restored[0].lease_id)


async def test_the_time_begins_when_a_store_on_sqlite_is_there(tmp_path: Path) -> None:
    """And again after each start: late, never early."""
    clock = SettableClock(1000)
    path = tmp_path / "store.db"
    kv = SqliteKv(path, clock)
    await restore_backup(kv, BACKUP, replace=False, now_unix_s=NOW)
    for _ in range(2):
        await kv.close()
        clock.advance(MEMBER_TTL_S - 1)
        kv = SqliteKv(path, clock)
        store = await open_store(kv, "s")
        lease = await kv.lease_grant(3600)
        clock.advance(MEMBER_TTL_S - 1)
        with pytest.raises(Unavailable, match=WHY):
            await store.handle(ClaimShards("a/1", lease, [1]))
    clock.advance(1)
    assert await store.handle(ClaimShards("a/1", lease, [1])) == Ok()
    await kv.close()


async def test_a_lease_of_the_former_life_is_none_of_the_restored(tmp_path: Path) -> None:
    kv = SqliteKv(tmp_path / "store.db", SettableClock(1000))
    await ensure_incarnation(kv, 5)
    before = [await kv.lease_grant(3600) for _ in range(3)]
    await restore_backup(kv, BACKUP, replace=True, now_unix_s=NOW)
    [restored] = (await kv.range(RESTORED))[1]
    assert restored.lease_id > max(before) and await kv.lease_grant(10) > restored.lease_id
    for lease in before:
        with pytest.raises(NotFound):
            await kv.lease_keepalive(lease)
    await kv.close()


async def test_a_new_cluster_waits_for_nothing(tmp_path: Path) -> None:
    kv = SqliteKv(tmp_path / "store.db", SettableClock(1000))
    await ensure_incarnation(kv, NOW)
    store = await open_store(kv, "s")
    assert await store.handle(ClaimShards("a/1", await kv.lease_grant(10), [1])) == Ok()
    await kv.close()


# --- a database that was lost, without a restore ---


async def claims(store: Store, lease: int) -> bool:
    """Whether a worker gets a shard now; otherwise it is told why."""
    try:
        await store.handle(ClaimShards("a/1", lease, [1]))
    except Unavailable as error:
        assert re.search(WHY, str(error))
        assert not await shards(store)
        return False
    return "cluster/shards/1" in await shards(store)


async def granted_after_a_while(backend: Backend, store: Store, lease: int) -> None:
    """Not now, and then."""
    assert not await claims(store, lease)
    async with asyncio.timeout(20):
        while not await claims(store, lease):
            await backend.pass_time(backend.ttl_s / 4)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["emptied", "gone back", "emptied while no store ran"])
async def test_nobody_is_a_home_while_one_of_the_former_life_may_be(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(incarnation, "MEMBER_TTL_S", backend.ttl_s)
    kv = backend.kv
    await ensure_incarnation(kv, NOW)
    store = await open_store(kv, "s")
    lease = await kv.lease_grant(3600)
    assert await claims(store, lease), "a first start waits for nothing"
    life, after = NOW, await kv.revision()
    if how == "gone back":
        after += 1000  # a worker has seen more than there is
    else:
        for each in (await kv.range(""))[1]:
            await kv.txn([], [Delete(each.key)])
    if how == "emptied while no store ran":
        life -= 100
        await ensure_incarnation(kv, NOW)
        store = await open_store(kv, "t")
        # Somebody who is new gets it, since nobody knows better yet.
        lease = await kv.lease_grant(3600)
        assert await claims(store, lease)
    assert (await store.changes(Watch(life, after, 0))).incarnation > life
    assert not await shards(store)
    if how != "emptied":  # there the grant was gone already, and nobody knows under which lease it was
        with pytest.raises(NotFound):
            await kv.lease_keepalive(lease)
    await granted_after_a_while(backend, store, await kv.lease_grant(3600))
    # Whoever comes back after a long time holds nobody up.
    await store.changes(Watch(life, after, 0))
    assert await shards(store) == {"cluster/shards/1"} and not (await kv.range(RESTORED))[1]


async def test_a_store_that_has_served_a_former_life_knows_it_whoever_asks(backend: Backend) -> None:
    kv = backend.kv
    await ensure_incarnation(kv, NOW)
    former = await open_store(kv, "one")
    for each in (await kv.range(""))[1]:
        await kv.txn([], [Delete(each.key)])
    await ensure_incarnation(kv, NOW + 5)  # by another store, which is new
    store, lease = await open_store(kv, "two"), await kv.lease_grant(3600)
    assert await claims(store, lease)
    assert (await former.changes(Watch(0, 0, 0))).incarnation == NOW + 5
    assert not await shards(store) and (await kv.range(RESTORED))[1][0].lease_id
    with pytest.raises(NotFound):
        await kv.lease_keepalive(lease)


async def test_the_wait_begins_when_the_last_home_of_before_cannot_renew(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes to end all leases."""
    kv = backend.kv
    await ensure_incarnation(kv, NOW)
    store = await open_store(kv, "s")
    leases = [(await store.handle(RegisterWorker(record(f"{each}/1"), 3600))).lease_id for each in "ab"]  # type: ignore[attr-defined]  # fmt: skip
    assert await claims(store, leases[0])
    seen: list[bool] = []
    revoke, grant = kv.lease_revoke, kv.lease_grant

    async def slow_revoke(lease_id: int) -> None:
        seen.append(bool((await kv.range(RESTORED))[1][0].lease_id))
        await revoke(lease_id)

    async def grant_later(ttl_s: int) -> int:
        for lease_id in leases:
            with pytest.raises(NotFound):
                await kv.lease_keepalive(lease_id)
        seen.append(False)
        return await grant(ttl_s)

    monkeypatch.setattr(kv, "lease_revoke", slow_revoke)
    monkeypatch.setattr(kv, "lease_grant", grant_later)
    await store.changes(Watch(NOW - 100, 5, 0))
    assert seen == [False] * 3 and (await kv.range(RESTORED))[1][0].lease_id


async def test_a_store_that_died_before_the_wait_began_leaves_that_to_others(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers ask for no shards while the mark is there; so it is finished by whoever shows it to them."""
    kv = backend.kv
    await ensure_incarnation(kv, NOW)
    store = await open_store(kv, "s")
    lease = await kv.lease_grant(3600)
    assert await claims(store, lease)
    with monkeypatch.context() as patch:
        patch.setattr(kv, "lease_revoke", dies)
        with pytest.raises(Unavailable):
            await store.changes(Watch(NOW - 100, 5, 0))
    [left] = (await kv.range(RESTORED))[1]
    assert not left.lease_id
    await backend.reopen()
    again = await open_store(backend.kv, "t")
    shown = await again.changes(Watch(0, 0, 0))
    assert RESTORED in [each.key for each in shown.entries]
    assert (await backend.kv.range(RESTORED))[1][0].lease_id and not await shards(again)
    with pytest.raises(NotFound):
        await backend.kv.lease_keepalive(lease)


async def dies(_: int) -> None:
    raise Unavailable("killed")


async def test_two_stores_that_see_it_begin_one_life(backend: Backend) -> None:
    kv = backend.kv
    await ensure_incarnation(kv, NOW)
    stores = [await open_store(kv, each) for each in ("one", "two")]
    after = await kv.revision()
    for each in (await kv.range(""))[1]:
        await kv.txn([], [Delete(each.key)])
    lives = [each.incarnation for each in await asyncio.gather(*(s.changes(Watch(NOW, after, 0)) for s in stores))]
    assert lives == [NOW + 1] * 2
    [held] = (await kv.range(RESTORED))[1]
    assert held.lease_id


# --- a store serves the database ---


@on_etcd
async def test_no_restore_while_a_store_serves(backend: EtcdBackend) -> None:
    kv = backend.kv
    await ensure_incarnation(kv, NOW)
    one, two = Presence(kv, "h:1 on here"), Presence(kv, "h:1 on there")
    await one.announce()
    await two.announce()
    before = await kv.range("")
    for replace in (False, True):
        with pytest.raises(
            ConfigError, match=r"^store processes serve this database \(h:1 on (t?here), h:1 on"
        ) as error:
            await restore_backup(kv, BACKUP, replace=replace, now_unix_s=NOW)
        assert "\n" not in str(error.value) and "stop them first" in str(error.value)
    assert await kv.range("") == before
    await one.close()
    with pytest.raises(ConfigError, match=r"serve this database \(h:1 on there\)"):
        await restore_backup(kv, BACKUP, replace=True, now_unix_s=NOW)
    await two.close()
    assert not (await kv.range(ALIVE))[1]
    await restore_backup(kv, BACKUP, replace=True, now_unix_s=NOW)


@on_etcd
@pytest.mark.slow
async def test_who_is_overrun_says_again_that_it_is_there(
    backend: EtcdBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alive, "HEARTBEAT_INTERVAL_S", 0.01)
    presence = Presence(backend.kv, "h:1 on here")
    await presence.announce()
    await restore_backup(backend.kv, BACKUP, replace=True, now_unix_s=NOW, even_if_served=True)
    async with asyncio.timeout(10):
        while not (found := (await backend.kv.range(ALIVE))[1]):  # noqa: ASYNC110 - of another process, as it were
            await asyncio.sleep(0.01)
    assert [each.value for each in found] == [b"h:1 on here"]
    await presence.close()


@on_etcd
async def test_a_store_that_starts_during_a_restore_stops_one_of_the_two(
    backend: EtcdBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each says what it is about before it looks for the other."""
    kv, other = backend.kv, await backend.open()
    await ensure_incarnation(kv, NOW)
    presence = Presence(other, "h:1 on here")
    txn = kv.txn

    async def starts_meanwhile(*args: object) -> object:
        await presence.announce()
        monkeypatch.setattr(kv, "txn", txn)
        return await txn(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(kv, "txn", starts_meanwhile)
    with pytest.raises(ConfigError, match="store processes serve this database"):
        await restore_backup(kv, BACKUP, replace=True, now_unix_s=NOW)
    assert not (await kv.range(RESTORING_KEY))[1] and await ensure_incarnation(other, 1) == NOW, "as if it had not been"
    await presence.close()
    await other.close()


@on_etcd
@pytest.mark.slow
async def test_a_killed_store_is_forgotten(backend: EtcdBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alive, "MEMBER_TTL_S", 1)
    presence = Presence(backend.kv, "h:1 on here")
    await presence.announce()
    assert presence._task is not None
    presence._task.cancel()
    async with asyncio.timeout(20):
        while (await backend.kv.range(ALIVE))[1]:  # noqa: ASYNC110 - of another process, as it were
            await asyncio.sleep(0.05)
    await restore_backup(backend.kv, BACKUP, replace=True, now_unix_s=NOW)


@on_etcd
@pytest.mark.slow
def test_the_command(backend: EtcdBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    etcd = ["--etcd", backend.servers.flag, "--etcd-prefix", backend.prefix]
    path = str(tmp_path / "b")
    write_backup(Path(path), BACKUP)
    with running_store(tmp_path, etcd) as store:
        status, line = run(capsys, "restore", path, "--replace", *etcd)
        assert status == 2 and "store processes serve this database (127.0.0.1:" in line, line
        assert run(capsys, "restore", path, "--replace", "--force", *etcd)[0] == 0
        store.send_signal(signal.SIGTERM)
        assert store.wait(10) == 0
    started = time.monotonic()
    assert run(capsys, "restore", path, "--replace", *etcd)[0] == 0, "it said good-bye"
    assert time.monotonic() - started < MEMBER_TTL_S


def test_a_folder_needs_no_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is locked by whoever has it open; that cannot be wrong."""
    write_backup(tmp_path / "b", BACKUP)
    served = SqliteKv(tmp_path / "store.db", time.monotonic, executor=None)
    arguments = ["store", "restore", str(tmp_path / "b"), "--replace", "--force", "--data", str(tmp_path)]
    assert main(arguments) == 2 and "another store uses it; stop that one" in capsys.readouterr().err
    served._db.close()
    assert main(arguments) == 0
