"""Several store processes of one cluster, and what a worker lists there: engines, and copies of artifacts."""

from collections.abc import Sequence
from typing import Any

import pytest

from tensorcast_connector.config import MEMBER_TTL_S
from tensorcast_connector.errors import Unavailable
from tensorcast_connector.net.rpc import serve_stream
from tensorcast_connector.net.transport import Listener, Stream
from tensorcast_connector.store.kv import Compare, Delete, KvStore, Put, TxnResult
from tensorcast_connector.store.server import Store, serve_store
from tensorcast_connector.types import Address
from tensorcast_connector.wire.messages import AttachInstance, Ok
from tensorcast_connector.wire.store_messages import InstanceRecord, ReplicaRecord
from tensorcast_connector.worker.server import Worker
from tests.cluster import SHARDS, Cluster, T, hashes, plane
from tests.waiting import until

KEYS = hashes(SHARDS)


def replica(worker: Worker, artifact_id: str = "org/model@rev", size: int = 5) -> ReplicaRecord:
    return ReplicaRecord(artifact_id, worker.worker_id, "memory", size)


def seen(worker: Worker) -> dict[str, dict[str, int]]:
    """Per artifact the workers that have a copy by the list of this one, and how large it is."""
    return {
        artifact: {who: record.bytes for who, record in copies.items()}
        for artifact, copies in plane(worker).view.replicas.items()
    }


# --- copies of artifacts ---


async def test_copies_of_artifacts_are_seen_by_everybody_until_they_are_removed(cluster: Cluster) -> None:
    (a, b), _ = await cluster.pair()
    a.peers.add(replica(a))
    b.peers.add(replica(b))
    a.peers.add(replica(a, "other"))
    both = {"org/model@rev": {a.worker_id: 5, b.worker_id: 5}, "other": {a.worker_id: 5}}
    await until(lambda: seen(a) == both and seen(b) == both)
    a.peers.add(replica(a, size=7))
    await until(lambda: seen(b)["org/model@rev"][a.worker_id] == 7)
    a.peers.remove(replica(a))
    a.peers.remove(replica(a, "other"))
    left = {"org/model@rev": {b.worker_id: 5}}
    await until(lambda: seen(a) == left and seen(b) == left)
    cluster.check()


async def test_copies_go_with_their_worker(cluster: Cluster) -> None:
    (a, b, c), _ = await cluster.pair("a", "b", "c")
    for worker in (a, b, c):
        worker.peers.add(replica(worker))
    await until(lambda: all(len(seen(worker).get("org/model@rev", {})) == 3 for worker in (a, b, c)))
    await cluster.leave(a)
    await until(lambda: set(seen(c)["org/model@rev"]) == {b.worker_id, c.worker_id})
    await cluster.crash(b)
    await cluster.expire_crashed()
    await until(lambda: seen(c) == {"org/model@rev": {c.worker_id: 5}})


async def test_copies_and_engines_are_listed_again_by_a_worker_that_comes_back(cluster: Cluster) -> None:
    (a, b), (at_a, _) = await cluster.pair()
    a.peers.add(replica(a))
    await at_a.client.call(AttachInstance("i", "vllm", "m", "n"), Ok, T)
    listed = InstanceRecord("i", a.worker_id, "vllm", "m", "n")
    await until(lambda: seen(b) and plane(b).view.instances == {"i": listed})
    lease = plane(a).member.lease_id
    cluster.clock.advance(MEMBER_TTL_S + 1)
    await until(lambda: plane(a).member.lease_id not in (0, lease))
    await cluster.settled()
    await until(lambda: seen(b) == {"org/model@rev": {a.worker_id: 5}} and plane(b).view.instances == {"i": listed})


async def test_what_was_added_while_the_store_was_away_is_listed_when_it_is_back(cluster: Cluster) -> None:
    (a, b), _ = await cluster.pair()
    a.peers.add(replica(a, "before"))
    await until(lambda: seen(b))
    await cluster.lose_store()
    a.peers.add(replica(a, "meanwhile"))
    a.peers.remove(replica(a, "before"))
    a.peers.add(replica(a, "came and went"))
    a.peers.remove(replica(a, "came and went"))
    await cluster.found_store()
    await until(lambda: seen(b) == {"meanwhile": {a.worker_id: 5}})


async def test_what_the_store_refuses_is_told_once_and_holds_nothing_up(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    (a, b), _ = await cluster.pair()
    a.peers.add(replica(a, "two\nlines"))
    a.peers.add(replica(a, "fine"))
    await until(lambda: seen(b) == {"fine": {a.worker_id: 5}})
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1 and "is not listed: 'two\\nlines' is no id" in warned[0] and "\n" not in warned[0]


# --- a store that is none, and a fault of our own ---


class Nonsense:
    """A Service that answers everything with Ok, and a Session."""

    server = server_id = "store"
    decoder = Store.decoder

    def open_session(self, *_: object) -> "Nonsense":
        return self

    def handle(self, _: object) -> Ok:
        return Ok()

    def close(self) -> None:
        """Nothing is held."""


async def test_a_store_that_answers_nonsense_is_told_and_engines_are_served(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async def on_stream(stream: Stream) -> None:
        await serve_stream(stream, Nonsense())

    listener = await cluster.network.listen(cluster.store_address, on_stream)
    worker = await cluster.worker("a", stores=[listener.address])
    engine = await cluster.engine(worker)
    await until(lambda: plane(worker).member.store_error)
    tried: set[float] = set()
    await until(lambda: tried.add(plane(worker).member._lease_at) or len(tried) > 3)
    assert await engine.save(KEYS) == SHARDS and await engine.lookup(KEYS) == (SHARDS, SHARDS)
    warned = [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert len(warned) == 1 and "expected" in warned[0] and "got Ok; not joined yet, serving" in warned[0]
    await listener.close()


async def test_a_fault_of_our_own_is_logged_and_does_not_end_the_membership(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    (a, b), _ = await cluster.pair()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plane(a), "poll", lambda now: 1 / 0)
        a.peers.wake()
        await until(lambda: "the metadata plane failed; going on" in caplog.text)
    assert "ZeroDivisionError" in caplog.text
    caplog.clear()
    a.peers.wake()
    a.peers.add(replica(a))
    await until(lambda: seen(b))


# --- several store processes ---


class Fickle:
    """A KV store that can be told to fail, as one whose etcd is out of reach."""

    def __init__(self, kv: KvStore) -> None:
        self._kv = kv
        self.away = False

    def __getattr__(self, name: str) -> Any:
        if self.away:
            raise Unavailable("etcd cannot be reached")
        return getattr(self._kv, name)

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        """As it is the one that is looked up on the class."""
        return await self.__getattr__("txn")(compares, operations)  # type: ignore[no-any-return]


async def fickle(cluster: Cluster) -> tuple[Fickle, Listener]:
    """One more store process, that can be told to answer Unavailable."""
    assert cluster.kv is not None
    kv = Fickle(cluster.kv)
    nowhere = Address("tcp", host="127.0.0.1", port=0)
    return kv, await serve_store(cluster.network, nowhere, kv, "fickle", cluster.shards)  # type: ignore[arg-type]


async def test_workers_at_different_store_processes_are_one_cluster(cluster: Cluster) -> None:
    await cluster.start_store()
    second = await cluster.another_store()
    workers = [await cluster.worker("a"), await cluster.worker("b", stores=[second])]
    await cluster.settled()
    at_a, at_b = [await cluster.engine(worker) for worker in workers]
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    assert all(plane(worker).leases.held for worker in workers)


async def test_a_worker_moves_on_when_its_store_process_dies_and_keeps_its_lease_and_shards(cluster: Cluster) -> None:
    await cluster.start_store()
    second = await cluster.another_store()
    worker = await cluster.worker("a", stores=[cluster.store_address, second])
    await cluster.settled()
    assert worker.peers._store.address == cluster.store_address
    lease, held = plane(worker).member.lease_id, dict(plane(worker).leases.held)
    await cluster.stop_one_store(cluster.store_address)
    await until(lambda: worker.peers._store.connected and worker.peers._store.address == second)
    await until(lambda: plane(worker).member.store_error is None)
    late = await cluster.worker("late", roles="basic", stores=[second])
    await cluster.settled()
    assert late.worker_id in plane(worker).view.workers, "the watch goes on as well"
    assert plane(worker).member.lease_id == lease and plane(worker).leases.held == held


async def test_it_starts_although_the_first_of_its_stores_is_not_there(cluster: Cluster) -> None:
    await cluster.start_store()
    nobody = Address("tcp", host="127.0.0.1", port=1) if cluster.store_address.port != 1 else None
    first = nobody or Address("tcp", host="127.0.0.1", port=9)
    await cluster.worker("a", stores=[first, cluster.store_address])
    await cluster.settled()


async def test_a_worker_moves_on_when_its_store_process_cannot_serve(cluster: Cluster) -> None:
    """It answers, but is cut off from its database: another one is asked, and not the same again and again."""
    await cluster.start_store()
    kv, listener = await fickle(cluster)
    worker = await cluster.worker("a", stores=[listener.address, cluster.store_address])
    await cluster.settled()
    assert worker.peers._store.address == listener.address
    lease, held = plane(worker).member.lease_id, dict(plane(worker).leases.held)
    kv.away = True
    await until(lambda: worker.peers._store.connected and worker.peers._store.address == cluster.store_address)
    await cluster.worker("late", roles="basic")
    await cluster.settled()
    assert plane(worker).member.lease_id == lease and plane(worker).leases.held == held
    await until(lambda: plane(worker).member.store_error is None)
    await listener.close()


async def test_when_no_store_process_can_serve_all_are_tried_again_until_one_can(cluster: Cluster) -> None:
    await cluster.start_store()
    one, first = await fickle(cluster)
    two, second = await fickle(cluster)
    worker = await cluster.worker("a", stores=[first.address, second.address])
    await cluster.settled()
    one.away = two.away = True
    tried = set()
    await until(lambda: tried.add(worker.peers._store.address) or len(tried) == 2)
    assert plane(worker).member.store_error is not None and "etcd cannot be reached" in str(
        plane(worker).member.store_error
    )
    two.away = False
    await until(lambda: plane(worker).member.store_error is None and worker.peers._store.address == second.address)
    await cluster.settled()
    await first.close()
    await second.close()


async def test_the_only_store_that_cannot_serve_is_not_left(cluster: Cluster) -> None:
    await cluster.start_store()
    kv, listener = await fickle(cluster)
    worker = await cluster.worker("a", stores=[listener.address])
    await cluster.settled()
    at = worker.peers._store._stream
    kv.away = True
    await until(lambda: plane(worker).member.store_error)
    kv.away = False
    await until(lambda: plane(worker).member.store_error is None)
    assert worker.peers._store._stream is at, "the same connection"
    await listener.close()
