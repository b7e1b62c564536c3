"""One worker and its engines: holds, reservations, limits, and what ends with a connection."""

import asyncio

import pytest
import xxhash

from tensorcast_connector.core.cluster import instance_key
from tensorcast_connector.errors import ConfigError, Exhausted, ProtocolError, TensorcastError, Unavailable
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.settings import WorkerConfig
from tensorcast_connector.testing.network import FakeNetwork
from tensorcast_connector.types import page_key
from tensorcast_connector.wire.messages import (
    Abort,
    Acquire,
    Acquired,
    AttachInstance,
    Commit,
    FindPages,
    GetStatistics,
    Lookup,
    LookupResult,
    MapArena,
    Message,
    Ok,
    PagesFound,
    Reserve,
    Reserved,
    Statistics,
)
from tensorcast_connector.worker.server import Worker, start_worker
from tests.cluster import PAGE, SPACE, Cluster, Engine, T, hashes, plane
from tests.waiting import until

KEYS = hashes(6)
MIB = 1 << 20


async def one(cluster: Cluster) -> tuple[Worker, Engine]:
    """A worker without a store, which it does not need."""
    cluster.store_address = type(cluster.store_address)("tcp", host="127.0.0.1", port=1)
    worker = await cluster.worker("w")
    return worker, await cluster.engine(worker)


async def test_alone_and_without_a_store(cluster: Cluster) -> None:
    worker, engine = await one(cluster)
    assert await engine.save(KEYS) == 6
    assert await engine.lookup([*KEYS, *hashes(2, 50)]) == (6, 6)
    assert await engine.load(KEYS) == 6
    assert worker.pages.statistics()["pages_held"] == 6


async def test_a_worker_that_reaches_no_other_asks_nobody_where_pages_are(cluster: Cluster) -> None:
    """So a lookup is answered at once, by no task and without a look into an index, also when pages are missing."""
    worker, engine = await one(cluster)
    await engine.save(KEYS)
    assert await engine.lookup([*KEYS, *hashes(2, 50)]) == (6, 6)
    assert await engine.lookup(hashes(2, 50)) == (0, 0)
    assert repr(worker.peers.traffic.find_seconds) == "<Histogram of 0 values>"


async def test_a_second_engine_finds_what_the_first_saved(cluster: Cluster) -> None:
    worker, engine = await one(cluster)
    second = await cluster.engine(worker)
    await engine.save(KEYS)
    assert await second.load(KEYS) == 6 and await second.save(KEYS) == 0


async def test_a_connection_that_ends_frees_what_it_held_and_reserved(cluster: Cluster) -> None:
    worker, engine = await one(cluster)
    second = await cluster.engine(worker)
    await engine.save(KEYS[:2])
    await engine.load(KEYS[:2])
    await second.load(KEYS[:1])
    await engine.reserve(KEYS[2:])
    assert await second.reserve(KEYS[2:]) == [-1] * 4, "they are being written"
    counts = worker.pages.statistics()
    assert (counts["pages_held"], counts["pages_reserved"]) == (2, 4)
    await engine.client.close()
    await until(lambda: worker.pages.statistics()["pages_reserved"] == 0)
    await until(lambda: worker.pages.statistics()["pages_held"] == 1)
    assert await second.save(KEYS[2:]) == 4
    worker.pages.check()


async def test_a_full_arena_evicts_what_nobody_holds_and_else_says_so(cluster: Cluster) -> None:
    worker, engine = await one(cluster)
    assert await engine.save(KEYS[:4], MIB) == 4  # all there is room for
    await engine.load(KEYS[:3])
    assert sorted(await engine.reserve(KEYS[4:], MIB))[0] == -1, "one slot could be had, not two"
    await engine.client.call(Abort(SPACE, KEYS[4:]), Ok, T)
    assert await engine.lookup(KEYS[:4]) == (3, 3)
    await engine.release("h", "l")
    assert await engine.save(KEYS[4:], MIB) == 2
    assert await engine.save(hashes(9, 100), MIB) == 4, "as many as there is room for"
    assert worker.pages.statistics()["evictions"] > 0


async def test_a_full_arena_makes_fetches_shorter_and_blocks_nothing(cluster: Cluster) -> None:
    (_a, b), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS[:4], MIB)
    await at_b.save(hashes(3, 100), MIB)
    assert await at_b.load(hashes(3, 100), "busy") == 3
    await at_b.finds(KEYS[:4])
    async with asyncio.timeout(5):
        assert await at_b.load(KEYS[:4]) == 1, "room for one"
        assert await at_b.lookup(KEYS[:4]) == (4, 1)
    await at_b.release("busy")
    assert await at_b.load(KEYS[:4], "more") == 4
    assert b.pages.statistics()["pages_reserved"] == 0


async def test_only_who_reserved_may_commit_or_abort(cluster: Cluster) -> None:
    worker, engine = await one(cluster)
    second = await cluster.engine(worker)
    await engine.reserve(KEYS[:1])
    await second.client.call(Commit(SPACE, KEYS[:1], [1]), Ok, T)
    await second.client.call(Abort(SPACE, KEYS[:1]), Ok, T)
    assert worker.pages.statistics()["pages_reserved"] == 1
    await engine.client.call(Commit(SPACE, KEYS[:1], [1]), Ok, T)
    assert worker.pages.counters["pages_saved"] == 1


async def test_a_lookup_under_the_same_id_replaces_the_former(cluster: Cluster) -> None:
    worker, engine = await one(cluster)
    await engine.save(KEYS)
    await engine.lookup(KEYS)
    await engine.lookup(KEYS[:2])
    assert worker.pages.statistics()["pages_held"] == 2
    await engine.release("l", "unknown")
    assert worker.pages.statistics()["pages_held"] == 0


async def test_several_keyspaces_are_had_together_or_not_at_all(cluster: Cluster) -> None:
    _, engine = await one(cluster)
    other = b"o" * 16
    await engine.save(KEYS)
    client = engine.client
    offsets = (await client.call(Reserve(other, KEYS[:2], PAGE), Reserved, T)).offsets
    digests = [xxhash.xxh3_64_intdigest(engine.arena[offset : offset + PAGE]) for offset in offsets]
    await client.call(Commit(other, KEYS[:2], digests), Ok, T)
    got = await client.call(Lookup("l", [SPACE, other], KEYS), LookupResult, T)
    assert (got.blocks, got.local_blocks) == (2, 2)
    assert await client.call(Lookup("l", [SPACE, other], []), LookupResult, T) == LookupResult(0, 0)


REFUSED: dict[str, tuple[Message, type[TensorcastError], str]] = {
    "short keyspace": (Reserve(b"short", KEYS, PAGE), ProtocolError, "a keyspace has 16 bytes"),
    "short hash": (Acquire("h", SPACE, [b"1234567"]), ProtocolError, "a block hash has 8 to 64 bytes"),
    "long hash": (Lookup("l", [SPACE], [b"x" * 65]), ProtocolError, "a block hash has 8 to 64 bytes"),
    "too many": (Lookup("l", [SPACE] * 2, hashes(33_000)), Exhausted, "2 x 33000 keys in one request; the limit is 65536"),
    "no bytes": (Reserve(SPACE, KEYS, 0), ProtocolError, "a page of 0 bytes; this arena takes 1 to 4194304"),
    "negative": (Reserve(SPACE, KEYS, -1), ProtocolError, "a page of -1 bytes"),
    "larger than the arena": (Reserve(SPACE, KEYS, 5 * MIB), ProtocolError, "a page of 5242880 bytes"),
    "digests missing": (Commit(SPACE, KEYS, [1]), ProtocolError, "6 pages but 1 digests"),
    "a peer's message": (FindPages([], KEYS), ProtocolError, "not understood"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_what_a_worker_refuses_its_engine(cluster: Cluster, name: str) -> None:
    worker, engine = await one(cluster)
    message, kind, why = REFUSED[name]
    with pytest.raises(kind, match=why):
        await engine.client.call(message, Ok, T)
    assert await engine.save(KEYS) == 6
    worker.pages.check()


async def test_what_a_worker_refuses_its_peers(cluster: Cluster) -> None:
    worker, _ = await one(cluster)
    peer = type(_.client)(cluster.network, worker.address, "worker", "p", cluster.chance)
    peer.start()
    await peer.wait_connected(T)
    with pytest.raises(ProtocolError, match="not understood"):
        await peer.call(MapArena(), Ok, T)
    with pytest.raises(ProtocolError, match="a worker does not take Fetch here"):
        from tensorcast_connector.wire.messages import (
            Fetch,
        )

        await peer.call(Fetch([b"x"]), Ok, T)
    with pytest.raises(Exhausted, match="65537 keys"):
        await peer.call(FindPages([], [b"x"] * 65_537), PagesFound, T)
    values = (await peer.call(GetStatistics(), Statistics, T)).values
    assert values["shards_held"] == 0 == values["pages"], "there is no store"
    await peer.close()


async def test_the_arena_cannot_be_had_where_descriptors_cannot_be_passed(cluster: Cluster) -> None:
    if isinstance(cluster.network, SocketNetwork):
        return
    _, engine = await one(cluster)
    with pytest.raises(Unavailable, match="only be passed over a Unix socket"):
        await engine.client.call(MapArena(), Ok, T)


async def test_an_engine_is_listed_by_its_latest_connection(cluster: Cluster) -> None:
    worker, first = await one(cluster)
    listed = plane(worker).member._listed
    await first.client.call(AttachInstance("i", "vllm", "m", "n1"), Ok, T)
    second = await cluster.engine(worker)
    await second.client.call(AttachInstance("i", "vllm", "m", "n2"), Ok, T)
    await first.client.close()  # noticed late
    await second.client.call(GetStatistics(), Statistics, T)
    assert {key: record.namespace for key, record in listed.items()} == {instance_key("i"): "n2"}
    await second.client.call(AttachInstance("other", "vllm", "m", "n"), Ok, T)
    assert set(listed) == {instance_key("other")}, "one connection lists one engine"
    await second.client.close()
    await until(lambda: not listed)


async def test_a_locate_answered_late_does_not_outlive_its_connection(cluster: Cluster) -> None:
    (_, other), (_, at_other) = await cluster.pair()
    client = at_other.client
    call = asyncio.create_task(client.call(Acquire("h", SPACE, KEYS), Acquired, T))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(Unavailable):
        await call
    assert other.pages.statistics()["pages_held"] == 0


async def test_hints_are_bounded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorcast_connector.worker import pages

    monkeypatch.setattr(pages, "SOURCE_HINTS_MAX", 3)
    (_, b), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    assert await at_b.lookup(KEYS) == (6, 0)
    assert list(b.pages._hints) == [page_key(SPACE, key) for key in KEYS[3:]]
    assert await at_b.load(KEYS) == 6
    assert not b.pages._hints and not b.pages._fetching


# --- starting ---


def config(cluster: Cluster, **changes: object) -> WorkerConfig:
    values: dict[str, object] = {
        "store": "127.0.0.1:1", "name": "w", "listen": "127.0.0.1:0", "socket": str(cluster.folder / "w.sock"),
        "arena_bytes": MIB, **changes,
    }  # fmt: skip
    return WorkerConfig(**values)  # type: ignore[arg-type]


WRONG = {
    "name": ({"name": "a/b"}, "name='a/b': a worker needs a name"),
    "no name": ({"name": ""}, "a worker needs a name"),
    "lines": ({"name": "a\nb"}, r"name='a\\nb'"),
    "long name": ({"name": "x" * 129}, "at most 128 characters"),
    "store": ({"store": "nowhere"}, "store='nowhere' is not an address"),
    "listen": ({"listen": "nowhere"}, "listen='nowhere' is not an address"),
    "everywhere": ({"listen": "0.0.0.0:0"}, "say with advertise=HOST:PORT what other workers dial"),
    "advertise": ({"advertise": "host"}, "advertise='host' is not an address"),
    "advertise any": ({"advertise": "host:0"}, "port 0 is any port, which nobody can dial"),
    "relative socket": ({"socket": "w.sock"}, "a Unix socket needs an absolute path"),
    "long socket": ({"socket": "/" + "x" * 200}, "a socket path has at most 107 bytes"),
    "arena": ({"arena_bytes": 1 << 50}, "arena=1048576.00 GiB is larger than the memory that is available"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_worker_that_cannot_start_leaves_nothing(cluster: Cluster, name: str) -> None:
    changes, why = WRONG[name]
    with pytest.raises(ConfigError, match=why) as error:
        await start_worker(config(cluster, **changes), cluster.network, cluster.chance, cluster.now)
    assert "\n" not in str(error.value)
    assert list(cluster.folder.iterdir()) == []


async def test_what_is_advertised_is_what_is_listed(cluster: Cluster) -> None:
    worker = await start_worker(
        config(cluster, advertise="far.example:7"), cluster.network, cluster.chance, cluster.now
    )
    assert str(worker.address) == "far.example:7" == plane(worker).member._record.address
    await worker.close()
    unix = f"unix:{cluster.folder}/w.sock"
    worker = await start_worker(config(cluster, socket=unix), cluster.network, cluster.chance, cluster.now)
    assert str(worker.socket) == unix
    await worker.close()


async def test_a_socket_that_is_taken_leaves_the_port_free(cluster: Cluster) -> None:
    first = await start_worker(config(cluster), cluster.network, cluster.chance, cluster.now)
    with pytest.raises(ConfigError, match="cannot listen on unix:"):
        await start_worker(config(cluster), cluster.network, cluster.chance, cluster.now)
    await first.close()


# --- order and overlap ---


async def test_what_is_released_right_after_it_was_asked_for_is_not_held(cluster: Cluster) -> None:
    worker, engine = await one(cluster)
    await engine.save(KEYS)
    for ask in (engine.lookup(KEYS, "x"), engine.load(KEYS, "x")):
        asked = asyncio.create_task(ask)
        released = asyncio.create_task(engine.release("x"))
        await asyncio.gather(asked, released)
        assert worker.pages.statistics()["pages_held"] == 0


async def test_released_while_the_pages_are_on_their_way(faulty: tuple[Cluster, FakeNetwork]) -> None:
    cluster, _ = faulty
    (_, b), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS[:3], MIB)
    await at_b.finds(KEYS[:3])
    loading = asyncio.create_task(at_b.load(KEYS[:3]))
    await until(lambda: b.pages.statistics()["pages_held"])
    await at_b.release("h")
    assert await loading == 0
    counts = b.pages.statistics()
    assert (counts["pages"], counts["pages_held"]) == (3, 0), "they arrived, and nobody holds them"
    assert not b.pages._wanted


async def test_a_second_request_waits_for_the_fetch_of_the_first(faulty: tuple[Cluster, FakeNetwork]) -> None:
    cluster, _ = faulty
    (a, b), (at_a, at_b) = await cluster.pair()
    second = await cluster.engine(b)
    await at_a.save(KEYS[:3], MIB)
    await at_b.finds(KEYS[:3])
    loading = asyncio.create_task(at_b.load(KEYS[:3]))
    await until(lambda: b.pages._segments.owner(page_key(SPACE, KEYS[0])))
    assert await second.load(KEYS[:1]) == 1
    assert await loading == 3 and a.pages.counters["pages_sent"] == 3


async def test_an_engine_that_leaves_does_not_end_the_fetch_for_others(faulty: tuple[Cluster, FakeNetwork]) -> None:
    cluster, _ = faulty
    (a, b), (at_a, at_b) = await cluster.pair()
    second = await cluster.engine(b)
    await at_a.save(KEYS[:3], MIB)
    await at_b.finds(KEYS[:3])
    loading = asyncio.create_task(at_b.load(KEYS[:3]))
    await until(lambda: b.pages.statistics()["pages_reserved"])
    waiting = asyncio.create_task(second.load(KEYS[:3]))
    await asyncio.sleep(0)
    await at_b.client.close()
    assert isinstance((await asyncio.gather(loading, return_exceptions=True))[0], Unavailable)
    assert await waiting == 3 and a.pages.counters["pages_sent"] == 3


async def test_pages_that_an_engine_here_is_writing_are_not_fetched(cluster: Cluster) -> None:
    (a, _), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    await at_b.reserve(KEYS[2:4])
    assert await at_b.load(KEYS) == 2
    await at_b.client.call(Abort(SPACE, KEYS[2:4]), Ok, T)
    assert await at_b.load(KEYS) == 6
    assert a.pages.counters["pages_sent"] == 6
