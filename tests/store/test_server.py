"""What the store answers: members and leases, shards to the first who asks, how many shards there are, over a network."""

import asyncio
import random
from pathlib import Path

import pytest

from tensorcast_connector.core.cluster import (
    instance_key,
    replica_key,
    shard_key,
    worker_key,
)
from tensorcast_connector.errors import ConfigError, Conflict, NotFound, Unavailable
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.store import server as store_server
from tensorcast_connector.store.client import read_cluster
from tensorcast_connector.store.kv import Event, Put
from tensorcast_connector.store.server import Store, prepare, serve_store
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.testing.clock import SettableClock
from tensorcast_connector.testing.network import FakeNetwork
from tensorcast_connector.types import Address
from tensorcast_connector.wire.codec import StoreRequest
from tensorcast_connector.wire.messages import GetStatistics, Ok, Statistics
from tensorcast_connector.wire.store_messages import (
    Alive,
    ClaimShards,
    KeepAlive,
    LeaseGranted,
    PutReplica,
    RegisterInstance,
    RegisterWorker,
    ReleaseShards,
    RemoveInstance,
    RemoveReplica,
    ReplicaRecord,
    RevokeLease,
)
from tests.store.served import LIFE, SHARDS, TTL_S, Served, instance, record, replica
from tests.waiting import until

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


async def test_a_watch_does_not_hear_of_each_record_of_a_plan(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was answered with nothing, and asked again by every worker, for every step of every plan."""
    reads: list[int] = []
    changes = served.kv.changes

    async def noted(prefix: str, after_revision: int) -> tuple[int, list[Event]]:
        reads.append(after_revision)
        return await changes(prefix, after_revision)

    monkeypatch.setattr(served.kv, "changes", noted)
    monkeypatch.setattr(store_server, "WATCH_NOTHING_S", 10.0)
    before = await served.watch()
    waiting = asyncio.create_task(served.watch(before.revision, LIFE, wait_ms=10_000))
    await until(lambda: served.store.watchers == 1)
    for number in range(5):
        await served.kv.txn([], [Put(f"plans/t/{number}/", b"x")])
        await served.kv.range("")  # by then who was woken has looked
    assert not waiting.done() and len(reads) == 1, "nor does it ask the database for each"
    await served.join("w/1")
    assert [entry.key for entry in (await waiting).entries] == [worker_key("w/1")]
    assert len(reads) == 2


async def test_a_watch_hears_of_the_revision_soon(served: Served) -> None:
    """Whoever has written something that is nothing to watchers may still wait for its revision."""
    before = await served.watch()
    waiting = asyncio.create_task(served.watch(before.revision, LIFE, wait_ms=10_000))
    await until(lambda: served.store.watchers == 1)
    done = await served.kv.txn([], [Put("plans/t/k/", b"x")])
    changes = await asyncio.wait_for(waiting, 5.0)
    assert changes.revision == done.revision and not changes.entries and not changes.complete
