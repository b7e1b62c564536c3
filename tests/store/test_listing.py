"""A cluster that is larger than one answer: listed in pages while it changes, and taken for the whole only when it is."""

import asyncio
import random

import msgspec
import pytest

from tensorcast_connector.core.cluster import CLUSTER, INCARNATION, ClusterView, instance_key, shard_key, worker_key
from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.store import answers, etcd_watch, sqlite_kv
from tensorcast_connector.store.client import read_cluster
from tensorcast_connector.store.incarnation import ensure_incarnation
from tensorcast_connector.store.kv import Delete, KvStore, Put
from tensorcast_connector.store.measured_kv import MeasuredKv
from tensorcast_connector.store.metrics import StoreMetrics
from tensorcast_connector.store.server import Store, open_store, serve_store
from tensorcast_connector.testing.clock import SettableClock
from tensorcast_connector.testing.network import FakeNetwork
from tensorcast_connector.types import Address
from tensorcast_connector.wire.codec import encode
from tensorcast_connector.wire.frames import FRAME_BODY_BYTES_MAX
from tensorcast_connector.wire.store_messages import Changes, ShardRecord, Watch
from tests.store.served import LIFE, instance, record

WORKERS, INSTANCES = 12, 30


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few records fill one."""
    monkeypatch.setattr(answers, "LISTING_BYTES_MAX", 900)


@pytest.fixture
async def store(kv: KvStore, small_pages: None) -> Store:
    """With a cluster of many pages."""
    await ensure_incarnation(kv, LIFE)
    store = await open_store(kv, "s", 16)
    await kv.txn([], [Put(worker_key(f"w{n:02}/1"), msgspec.json.encode(record(f"w{n:02}/1"))) for n in range(WORKERS)])
    await kv.txn([], [listed(n, 0) for n in range(INSTANCES)])
    return store


def listed(number: int, worker: int) -> Put:
    value = instance(f"i{number:02}", f"w{worker:02}/1")
    return Put(instance_key(f"i{number:02}"), msgspec.json.encode(value))


async def whole(kv: KvStore) -> ClusterView:
    """The cluster as it is, read at once."""
    view = ClusterView()
    revision, found = await kv.range(CLUSTER)
    view.apply(Changes(LIFE, revision, True, answers._entries(found), []))
    return view


def same(view: ClusterView, read: ClusterView) -> bool:
    parts = ("incarnation", "shard_count", "workers", "instances", "shards", "replicas")
    return all(getattr(view, part) == getattr(read, part) for part in parts)


async def follow(view: ClusterView, store: Store, revision: int) -> None:
    """Until it is there."""
    async with asyncio.timeout(10):
        while view.listing or view.revision < revision:
            view.apply(await store.watch(view.ask(1000)))
            view.check()


async def test_a_cluster_at_rest_is_listed_in_pages(store: Store, kv: KvStore) -> None:
    view, answered = ClusterView(), []
    while view.listing or not answered:
        assert not view.workers and view.revision == 0, "a part is not the whole"
        answered.append(await store.changes(view.ask(0)))
        view.apply(answered[-1])
    assert len(answered) > 5 and all(len(encode(each)) < 2000 for each in answered)
    assert [each.more for each in answered] == [True] * (len(answered) - 1) + [False]
    assert len(view.workers) == WORKERS and len(view.instances) == INSTANCES and same(view, await whole(kv))
    assert answered[-1].after_key and view.revision == answered[0].revision, (
        "nothing has happened: nothing more is asked"
    )


@pytest.mark.parametrize("seed", range(3))
async def test_changes_between_the_pages_are_not_missed(store: Store, kv: KvStore, seed: int) -> None:
    chance = random.Random(seed)
    view, last, asked = ClusterView(), 0, 0
    while view.listing or not asked:
        view.apply(await store.watch(view.ask(0)))
        asked += 1
        if asked < 30:
            number = chance.randrange(2 * INSTANCES)
            home = msgspec.json.encode(ShardRecord(f"w{number % WORKERS:02}/1", 5))
            changed = chance.choice(
                [
                    Delete(instance_key(f"i{number:02}")), listed(number, chance.randrange(WORKERS)),
                    Delete(worker_key(f"w{number:02}/1")), Put(shard_key(number % 16), home), Delete(shard_key(number % 16)),
                ]
            )  # fmt: skip
            last = (await kv.txn([], [changed])).revision
        assert not view.workers or not view.listing
    view.check()
    await follow(view, store, last)
    assert same(view, await whole(kv))


async def test_a_worker_that_goes_while_it_is_listed_is_gone(store: Store, kv: KvStore) -> None:
    """Its page may have been told already, or come later."""
    view, gone = ClusterView(), (0, WORKERS - 1)
    answer = await store.changes(view.ask(0))
    view.apply(answer)
    while worker_key("w02/1") not in [entry.key for entry in answer.entries]:
        answer = await store.changes(view.ask(0))
        view.apply(answer)
    assert answer.more and view.listing
    last = (await kv.txn([], [Delete(worker_key(f"w{n:02}/1")) for n in gone] + [listed(99, 1)])).revision
    await follow(view, store, last)
    assert set(view.workers) == {f"w{n:02}/1" for n in range(WORKERS) if n not in gone} and "i99" in view.instances


async def test_a_new_life_in_the_middle_begins_the_listing_anew(store: Store, kv: KvStore) -> None:
    view = ClusterView()
    for _ in range(3):
        view.apply(await store.changes(view.ask(0)))
    last = (await kv.txn([], [Put(INCARNATION, b"%d" % (LIFE + 1)), Delete(worker_key("w00/1"))])).revision
    await follow(view, store, last)
    assert view.incarnation == LIFE + 1 and len(view.workers) == WORKERS - 1


async def test_a_listing_that_the_history_has_left_behind_begins_anew(
    store: Store, kv: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sqlite_kv, etcd_watch):
        monkeypatch.setattr(module, "HISTORY_REVISIONS_MAX", 8)
    view = ClusterView()
    view.apply(await store.changes(view.ask(0)))
    for number in range(20):
        last = (await kv.txn([], [listed(number, number % WORKERS)])).revision
    await follow(view, store, last)
    assert same(view, await whole(kv))


async def test_news_that_are_much_come_one_revision_after_the_other(store: Store, kv: KvStore) -> None:
    view = ClusterView()
    await follow(view, store, (await kv.range(""))[0])
    for number in range(40):
        last = (await kv.txn([], [listed(2 * number, 1), listed(2 * number + 1, 2)])).revision
    answered = []
    while view.revision < last:
        answered.append(await store.watch(view.ask(1000)))
        view.apply(answered[-1])
        assert not answered[-1].complete and len(view.instances) % 2 == 0, "a revision comes as a whole"
    assert len(answered) > 3 and max(len(encode(each)) for each in answered) < 3000
    assert same(view, await whole(kv))


async def test_who_knows_no_pages_is_told_everything_at_once(store: Store) -> None:
    """A worker of the version before: it would take the first page for the whole."""
    old = store.decoder.decode(msgspec.msgpack.encode(["Watch", 0, 0, 0]))
    assert old == Watch(0, 0, 0, None)
    answer = await store.changes(old)
    assert answer.complete and not answer.more and len(answer.entries) == WORKERS + INSTANCES + 3
    raw = msgspec.msgpack.decode(encode(answer))
    assert raw[:4] == ["Changes", LIFE, answer.revision, True] and raw[6:] == ["", False]


async def test_a_store_that_knows_no_pages_takes_over_in_the_middle(store: Store, kv: KvStore) -> None:
    """It skips what it does not know of the request, and tells what has changed."""
    view = ClusterView()
    for _ in range(3):
        view.apply(await store.changes(view.ask(0)))
    for _ in range(2):
        assert view.listing or not view.workers
        asked = view.ask(0)
        view.apply(await store.changes(Watch(asked.incarnation, asked.after_revision, 0)))
    assert not view.listing and same(view, await whole(kv))


@pytest.mark.parametrize("servers", ["sqlite"], indirect=True)
async def test_everybody_who_reads_the_cluster_reads_all_pages(store: Store, kv: KvStore) -> None:
    network = FakeNetwork(random.Random(1))
    listener = await serve_store(network, Address("tcp", host="s", port=0), kv, "store")
    view = await read_cluster(network, [listener.address], "test", random.Random(1))
    assert same(view, await whole(kv))
    await listener.close()
    source = StoreMetrics(store, MeasuredKv(kv, SettableClock()))
    await source.refresh()
    assert ("tensorcast_store_workers", (), WORKERS) in list(source.values()) and source.ill() == ""


@pytest.mark.slow
@pytest.mark.parametrize("servers", ["sqlite"], indirect=True)
async def test_a_cluster_beyond_a_frame(kv: KvStore) -> None:
    await ensure_incarnation(kv, LIFE)
    pad = "x" * 200_000
    for number in range(100):
        value = msgspec.json.encode(instance(f"i{number}", pad))
        await kv.txn([], [Put(instance_key(f"i{number}"), value)])
    network = FakeNetwork(random.Random(1))
    listener = await serve_store(network, Address("tcp", host="s", port=0), kv, "store")
    view = await read_cluster(network, [listener.address], "test", random.Random(1))
    assert len(view.instances) * len(pad) > FRAME_BODY_BYTES_MAX
    client = RpcClient(network, listener.address, "worker", "old", random.Random(1))
    client.start()
    await client.wait_connected(5)
    with pytest.raises(ProtocolError, match="bytes"):
        await client.call(Watch(0, 0, 0), Changes, 10)
    await client.close()
    await listener.close()
