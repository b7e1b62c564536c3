"""What the store answers: members and leases, shards to the first who asks, the watch, and what it refuses."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tensorcast_connector.core.cluster import (
    INCARNATION,
    SHARD_COUNT,
    ClusterView,
    instance_key,
    replica_key,
    shard_key,
    worker_key,
)
from tensorcast_connector.errors import ConfigError, Conflict, NotFound, ProtocolError, TensorcastError, Unavailable
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.store import sqlite_kv
from tensorcast_connector.store.client import read_cluster
from tensorcast_connector.store.incarnation import ensure_incarnation
from tensorcast_connector.store.kv import Delete, Put
from tensorcast_connector.store.server import Store, open_store, prepare, serve_store
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.testing.clock import SettableClock
from tensorcast_connector.testing.network import FakeNetwork
from tensorcast_connector.types import Address
from tensorcast_connector.wire.codec import StoreRequest, encode
from tensorcast_connector.wire.messages import GetStatistics, Hello, Message, Ok, Statistics
from tensorcast_connector.wire.store_messages import (
    Alive,
    Changes,
    ClaimShards,
    InstanceRecord,
    KeepAlive,
    LeaseGranted,
    ListMembers,
    Members,
    PutReplica,
    RegisterInstance,
    RegisterWorker,
    ReleaseShards,
    RemoveInstance,
    RemoveReplica,
    ReplicaRecord,
    RevokeLease,
    Watch,
    WorkerRecord,
)
from tests.waiting import until

TTL_S = 6
LIFE = 7
SHARDS = 64
ROLES = ("basic", "shard-home")


class Served:
    """A store on a database, and what people ask it."""

    def __init__(self, folder: Path) -> None:
        self.clock = SettableClock(1000)
        self.kv = SqliteKv(folder / "store" / "store.db", self.clock)
        self.store = Store(self.kv, "store")

    async def ask(self, message: Message, store: Store | None = None) -> Any:
        return await (store or self.store).handle(message)

    async def join(self, worker_id: str = "a/1", ttl_s: int = TTL_S) -> int:
        """The lease of a new worker."""
        reply = await self.ask(RegisterWorker(record(worker_id), ttl_s))
        assert isinstance(reply, LeaseGranted)
        return reply.lease_id

    async def watch(self, after: int = 0, life: int = 0, wait_ms: int = 0) -> Changes:
        changes = await self.ask(Watch(life, after, wait_ms))
        assert isinstance(changes, Changes)
        return changes

    async def view(self) -> ClusterView:
        """Everything there is."""
        view = ClusterView()
        view.apply(await self.watch())
        view.check()
        return view

    async def revision(self) -> int:
        return await self.kv.revision()


def record(worker_id: str = "a/1", address: str = "h:1") -> WorkerRecord:
    return WorkerRecord(worker_id, worker_id.split("/")[0], address, 1 << 20, 2, ROLES)


def instance(name: str, worker_id: str = "a/1") -> InstanceRecord:
    return InstanceRecord(name, worker_id, "vllm", "m", "n")


def replica(artifact_id: str, worker_id: str = "a/1") -> ReplicaRecord:
    return ReplicaRecord(artifact_id, worker_id, "memory", 5)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    served = Served(tmp_path)
    await ensure_incarnation(served.kv, LIFE)
    await prepare(served.kv, SHARDS)
    yield served
    await served.kv.close()


# --- members ---


async def test_a_worker_is_listed_as_it_registered(served: Served) -> None:
    reply = await served.ask(RegisterWorker(record(), TTL_S))
    assert reply.lease_id > 0 and reply.revision == await served.revision()
    assert (await served.view()).workers == {"a/1": record()}


async def test_the_same_id_twice_waits_for_the_former_lease(served: Served) -> None:
    await served.join()
    with pytest.raises(Conflict, match="worker a/1 is registered already"):
        await served.join()
    assert repr(served.kv) == "<SqliteKv 1 leases>", "the lease of the refused one is not left behind"
    served.clock.advance(TTL_S)
    await served.join()


async def test_a_lease_that_is_not_renewed_ends_with_all_that_hangs_on_it(served: Served) -> None:
    gone, stays = await served.join("a/1"), await served.join("b/1")
    for lease, who in ((gone, "a/1"), (stays, "b/1")):
        await served.ask(RegisterInstance(instance(f"engine of {who}", who), lease))
        await served.ask(PutReplica(replica("m", who), lease))
    await served.ask(ClaimShards("a/1", gone, [0, 1]))
    await served.ask(ClaimShards("b/1", stays, [2]))
    before = await served.revision()
    served.clock.advance(TTL_S - 1)
    assert isinstance(await served.ask(KeepAlive(stays)), Alive)
    served.clock.advance(1)
    changes = await served.watch(before, LIFE)
    assert sorted(changes.deleted) == sorted(
        [worker_key("a/1"), instance_key("engine of a/1"), replica_key("m", "a/1"), shard_key(0), shard_key(1)]
    )
    assert (changes.complete, changes.entries) == (False, [])
    with pytest.raises(NotFound):
        await served.ask(KeepAlive(gone))
    view = await served.view()
    assert set(view.workers) == {"b/1"} and set(view.instances) == {"engine of b/1"} and set(view.shards) == {2}
    assert view.replicas == {"m": {"b/1": replica("m", "b/1")}}


async def test_revoking_is_the_same_at_once(served: Served) -> None:
    lease = await served.join()
    await served.ask(ClaimShards("a/1", lease, [0]))
    assert await served.ask(RevokeLease(lease)) == Ok() == await served.ask(RevokeLease(lease))
    view = await served.view()
    assert not view.workers and not view.shards


async def test_instances_come_and_go(served: Served) -> None:
    lease = await served.join()
    await served.ask(RegisterInstance(instance("one"), lease))
    await served.ask(RegisterInstance(instance("two"), lease))
    await served.ask(RemoveInstance("one"))
    await served.ask(RemoveInstance("never there"))
    assert (await served.view()).instances == {"two": instance("two")}


async def test_copies_of_artifacts_come_and_go(served: Served) -> None:
    a, b = await served.join("a/1"), await served.join("b/1")
    await served.ask(PutReplica(replica("org/m@1"), a))
    await served.ask(PutReplica(replica("org/m@1", "b/1"), b))
    await served.ask(PutReplica(replica("org/m@2"), a))
    again = ReplicaRecord("org/m@1", "a/1", "disk", 6)
    await served.ask(PutReplica(again, a))
    assert (await served.view()).replicas == {
        "org/m@1": {"a/1": again, "b/1": replica("org/m@1", "b/1")}, "org/m@2": {"a/1": replica("org/m@2")},
    }  # fmt: skip
    await served.ask(RemoveReplica("org/m@1", "a/1"))
    await served.ask(RemoveReplica("org/m@1", "nobody"))
    await served.ask(RevokeLease(b))
    assert (await served.view()).replicas == {"org/m@2": {"a/1": replica("org/m@2")}}


# --- shards ---


async def test_shards_are_granted_to_who_asks_first(served: Served) -> None:
    a, b = await served.join("a/1"), await served.join("b/1")
    assert await served.ask(ClaimShards("a/1", a, [3, 1, 3, 2])) == Ok()
    assert await served.ask(ClaimShards("b/1", b, [2, 3, 4])) == Ok(), "what is taken is passed over"
    view = await served.view()
    assert {shard: holder.worker_id for shard, holder in view.shards.items()} == {
        1: "a/1",
        2: "a/1",
        3: "a/1",
        4: "b/1",
    }
    assert view.shards[4].lease_id == b and view.shards[1].lease_id == a
    assert view.shards[4].token > view.shards[1].token


async def test_a_claim_that_is_repeated_changes_nothing(served: Served) -> None:
    """The reply may have been lost."""
    lease = await served.join()
    await served.ask(ClaimShards("a/1", lease, list(range(SHARDS))))
    before = (await served.view()).shards
    assert len(before) == SHARDS
    await served.ask(ClaimShards("a/1", lease, list(range(SHARDS))))
    assert (await served.view()).shards == before


async def test_whoever_claims_at_once_each_shard_has_one_home(served: Served) -> None:
    chance = random.Random(3)
    leases = {f"w{number}/1": await served.join(f"w{number}/1") for number in range(5)}
    wanted = {who: chance.sample(range(SHARDS), 50) for who in leases}
    claims = [ClaimShards(who, lease, wanted[who]) for who, lease in leases.items()] * 2
    chance.shuffle(claims)
    before = await served.revision()
    await asyncio.gather(*map(served.ask, claims))
    view = await served.view()
    assert set(view.shards) == set().union(*wanted.values())
    for shard, holder in view.shards.items():
        assert shard in wanted[str(holder.worker_id)] and holder.lease_id == leases[str(holder.worker_id)]
        assert holder.token.revision > before
    events = (await served.kv.changes("cluster/shards/", before))[1]
    assert len(events) == len(view.shards), "each was granted once"


async def test_every_grant_has_a_higher_token(served: Served) -> None:
    tokens = []
    for number in range(4):
        lease = await served.join(f"w{number}/1")
        await served.ask(ClaimShards(f"w{number}/1", lease, [5]))
        tokens.append((await served.view()).shards[5].token)
        if number % 2:
            await served.ask(ReleaseShards(lease, [5]))
        else:
            await served.ask(RevokeLease(lease))
    assert tokens == sorted(set(tokens)) and {token.incarnation for token in tokens} == {LIFE}


async def test_only_what_hangs_on_the_own_lease_is_given_back(served: Served) -> None:
    a, b = await served.join("a/1"), await served.join("b/1")
    await served.ask(ClaimShards("a/1", a, [1, 2]))
    await served.ask(ClaimShards("b/1", b, [3]))
    await served.ask(ReleaseShards(a, [2, 3, 4]))
    view = await served.view()
    assert {shard: holder.worker_id for shard, holder in view.shards.items()} == {1: "a/1", 3: "b/1"}
    await served.ask(ClaimShards("b/1", b, [2]))
    await served.ask(ReleaseShards(a, [2]))  # the same once more, late
    assert (await served.view()).shards[2].worker_id == "b/1"


# --- the watch ---


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
    # An older copy of the database is in its place: what is granted from now on must outrank what was granted since.
    expected = LIFE + 1 if revision > 1000 else LIFE
    assert changes.complete and changes.incarnation == expected
    assert worker_key("a/1") in [entry.key for entry in changes.entries]


async def test_an_emptied_database_begins_a_new_life(served: Served) -> None:
    await served.join()
    before = await served.watch(0, 0)
    _, found = await served.kv.range("")
    for each in found:
        await served.kv.txn([], [Delete(each.key)])
    after = await served.watch(before.revision, before.incarnation)
    assert after.complete and after.incarnation == LIFE + 1
    assert {entry.key for entry in after.entries} == {INCARNATION, SHARD_COUNT}


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


# --- what is refused ---

REFUSED: dict[str, tuple[Message, type[TensorcastError], str]] = {
    "no time": (RegisterWorker(record(), 0), ProtocolError, r"ttl_s=0 is not within 1..3600"),
    "negative time": (RegisterWorker(record(), -1), ProtocolError, r"ttl_s=-1 is not within 1..3600"),
    "too much time": (RegisterWorker(record(), 3601), ProtocolError, r"ttl_s=3601 is not within 1..3600"),
    "no id": (RegisterWorker(record(""), 6), ProtocolError, "'' is no id: 1 to 256 printable characters"),
    "a long id": (RegisterWorker(record("x" * 257), 6), ProtocolError, "is no id"),
    "an id of two lines": (RegisterWorker(record("a\nb"), 6), ProtocolError, r"'a\\nb' is no id"),
    "no address": (RegisterWorker(record(address="nowhere"), 6), ProtocolError, "address='nowhere' is not an address"),
    "a Unix socket": (
        RegisterWorker(record(address="unix:/a"), 6), ProtocolError, "other workers can only reach a TCP address"),
    "an instance of two lines": (RegisterInstance(instance("a\nb"), 1), ProtocolError, "is no id"),
    "an artifact of two lines": (PutReplica(replica("a\nb"), 1), ProtocolError, "is no id"),
    "a copy at nobody": (PutReplica(replica("m", ""), 1), ProtocolError, "is no id"),
    "an instance without a lease": (RegisterInstance(instance("i"), 0), NotFound, "lease 0 does not exist"),
    "an instance on a lease that is none": (RegisterInstance(instance("i"), 12345), NotFound, "lease 12345 does not exist"),
    "a copy without a lease": (PutReplica(replica("m"), 0), NotFound, "lease 0 does not exist"),
    "a copy on a lease that is none": (PutReplica(replica("m"), 12345), NotFound, "lease 12345 does not exist"),
    "a negative lease": (PutReplica(replica("m"), -3), NotFound, "lease -3 does not exist"),
    "renewing what is none": (KeepAlive(12345), NotFound, "lease 12345"),
    "claiming without a lease": (ClaimShards("a/1", 0, [1]), NotFound, "lease 0 does not exist"),
    "claiming on a lease that is none": (ClaimShards("a/1", 12345, [1]), NotFound, "lease 12345 does not exist"),
    "a shard beyond the last": (ClaimShards("a/1", 1, [0, 64]), ProtocolError, r"shards \[0, 64\] are not all within 0..63"),
    "a negative shard": (ReleaseShards(1, [-1]), ProtocolError, r"shards \[-1\] are not all within 0..63"),
    "no request": (Hello(1, 1, "x", "x"), ProtocolError, "the store does not take Hello"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused_is_refused_in_one_line_and_changes_nothing(served: Served, name: str) -> None:
    message, kind, why = REFUSED[name]
    before = await served.revision()
    with pytest.raises(kind, match=why) as error:
        await served.ask(message)
    assert type(error.value) is kind and "\n" not in str(error.value)
    assert await served.revision() == before and repr(served.kv) == "<SqliteKv 0 leases>"


async def test_a_claim_on_a_lease_that_is_none_takes_no_shard_away(served: Served) -> None:
    lease = await served.join()
    await served.ask(RevokeLease(lease))
    with pytest.raises(NotFound):
        await served.ask(ClaimShards("a/1", lease, [1]))
    other = await served.join("b/1")
    await served.ask(ClaimShards("b/1", other, [1]))
    assert (await served.view()).shards[1].worker_id == "b/1"


async def test_a_database_without_its_incarnation_is_one_line(served: Served) -> None:
    await served.kv.txn([], [Delete(INCARNATION)])
    with pytest.raises(Unavailable, match="has lost its key 'cluster/incarnation'"):
        await served.watch()
    with pytest.raises(Unavailable, match="has lost its key 'cluster/incarnation'"):
        await served.watch(5, LIFE)


# --- the number of shards ---


async def test_the_number_of_shards_is_set_once(tmp_path: Path) -> None:
    kv = SqliteKv(tmp_path / "store" / "store.db", SettableClock())
    assert await prepare(kv, 16) == 16
    assert await prepare(kv, 16) == 16 == await prepare(kv), "a cluster keeps its number"
    with pytest.raises(ConfigError, match="shards=64: this cluster has 16 since it was made, and keeps them"):
        await prepare(kv, 64)
    for wrong in (-1, 3, 512):
        with pytest.raises(ConfigError, match=rf"shards={wrong}: a power of two from 1 to 256 is needed"):
            await prepare(kv, wrong)
    await kv.close()


# --- the first protocol version ---


async def test_requests_of_the_first_version_still_work(served: Served) -> None:
    old = {"worker_id": "old/1", "name": "old", "address": "h:1", "arena_bytes": 5}
    raw = msgspec.msgpack.encode(["RegisterWorker", old, 6])
    lease = (await served.ask(served.store.decoder.decode(raw))).lease_id
    raw = msgspec.msgpack.encode(["RegisterInstance", msgspec.to_builtins(instance("i", "old/1")), lease])
    await served.ask(served.store.decoder.decode(raw))
    before = await served.ask(KeepAlive(lease))
    members = await served.ask(ListMembers())
    assert members == Members(
        before.revision, [WorkerRecord("old/1", "old", "h:1", 5, 1, ("basic",))], [instance("i", "old/1")]
    )
    await served.join("new/1")
    after = await served.ask(KeepAlive(lease))
    assert after.revision > before.revision, "an older worker lists again when it has moved on"
    assert [each.worker_id for each in (await served.ask(ListMembers())).workers] == ["new/1", "old/1"]
    wire = msgspec.msgpack.decode(encode(await served.ask(ListMembers())))
    assert wire[0] == "Members" and wire[2][1]["worker_id"] == "old/1"


# --- over a network ---


async def test_over_a_network_errors_are_the_same_and_connections_hold_nothing(served: Served) -> None:
    network = FakeNetwork(random.Random(1))
    listener = await serve_store(network, Address("tcp", host="s", port=0), served.kv, "store")
    client = RpcClient(network, listener.address, "worker", "a/1", random.Random(1))
    client.start()
    await client.wait_connected(5)
    lease = (await client.call(RegisterWorker(record(), TTL_S), LeaseGranted, 5)).lease_id
    with pytest.raises(Conflict, match="worker a/1 is registered already"):
        await client.call(RegisterWorker(record(), TTL_S), LeaseGranted, 5)
    await client.call(ClaimShards("a/1", lease, list(range(SHARDS))), Ok, 5)
    await client.close()
    view = await read_cluster(network, [listener.address], "test", random.Random(1))
    assert set(view.workers) == {"a/1"} and len(view.shards) == SHARDS == view.shard_count
    asking = RpcClient(network, listener.address, "client", "test", random.Random(1))
    asking.start()
    await asking.wait_connected(5)
    values = (await asking.call(GetStatistics(), Statistics, 5)).values
    assert values["requests"] >= 4 and values["revision"] == await served.revision()
    await asking.close()
    await listener.close()


async def test_reading_the_cluster_asks_the_next_store_if_the_first_is_not_there(served: Served) -> None:
    network = FakeNetwork(random.Random(1))
    listener = await serve_store(network, Address("tcp", host="s", port=0), served.kv, "store")
    nobody = Address("tcp", host="nobody", port=1)
    view = await read_cluster(network, [nobody, listener.address], "test", random.Random(1))
    assert view.shard_count == SHARDS
    with pytest.raises(Unavailable, match="cannot connect to nobody:1: refused"):
        await read_cluster(network, [nobody], "test", random.Random(1))
    await listener.close()


def test_every_request_that_a_store_decodes_it_takes() -> None:
    """Hello and Ping are answered before."""
    taken = {each.__name__ for each in Store._handlers}
    assert {each.__name__ for each in StoreRequest.__args__} - taken == {"Hello", "Ping"}
