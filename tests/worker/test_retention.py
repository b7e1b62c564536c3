"""Pages that are too old or whose tenant is removed, and engines that are switched off."""

from collections.abc import Sequence

import pytest

from tensorcast_connector.client.session import connect
from tensorcast_connector.core.segments import Segments
from tensorcast_connector.types import page_key
from tensorcast_connector.wire.messages import AttachInstance, Commit, Lookup, LookupResult, Ok, Reserve, Reserved
from tensorcast_connector.worker.retention import Retention
from tensorcast_connector.worker.server import Worker
from tests.cluster import SPACE, Cluster, Engine, T, hashes
from tests.waiting import until

KEYS = hashes(8)


class FakePages:
    """What Retention sees of Pages, on real segments."""

    def __init__(self) -> None:
        self.segments = Segments(1 << 20, 1 << 20, 4096)

    def evict_older(self, born: int) -> None:
        self.segments.evict_older(born)
        self.segments.check()

    def save(self, *keys: bytes) -> None:
        for key in keys:
            assert self.segments.reserve("e", key, 4096) is not None
            assert self.segments.commit("e", key, 0)


def test_a_page_goes_when_it_is_old_however_often_it_is_used() -> None:
    pages, now = FakePages(), [0.0]
    retention = Retention(pages, 10.0, lambda: now[0])  # type: ignore[arg-type]
    pages.save(b"a")
    for at in range(1, 31):
        now[0] = float(at)
        if at == 5:
            pages.save(b"b", b"held")
            pages.segments.hold("h", [b"held"])
        if pages.segments.resident(b"a"):
            pages.segments.hold("use", [b"a"])
            pages.segments.release("use")
        retention.look()
        assert pages.segments.resident(b"a") == (at <= 10), at
        assert pages.segments.resident(b"b") == (5 <= at < 15), at
        assert pages.segments.resident(b"held") == (5 <= at < 25), at
        if at == 24:
            pages.segments.release("h")


def test_nothing_goes_before_anything_is_old() -> None:
    pages = FakePages()
    retention = Retention(pages, 10.0, lambda: 0.0)  # type: ignore[arg-type]
    retention.look()
    pages.save(b"a")
    retention.look()
    assert pages.segments.resident(b"a")


@pytest.mark.parametrize("cluster", ["loopback"], indirect=True)
async def test_a_page_that_moves_between_workers_grows_old_all_the_same(cluster: Cluster) -> None:
    workers, engines = await cluster.pair("a", "b", "c")
    retentions = [Retention(each.pages, 100.0, cluster.now) for each in workers]

    def look() -> None:
        for each in retentions:
            each.look()

    look()
    await engines[0].save(KEYS)
    for number, worker in enumerate(workers[1:], 1):
        cluster.pass_time(40)  # 40 s at a, then 40 s at b
        look()
        await engines[number].finds(KEYS[:4])
        assert await engines[number].load(KEYS[:4]) == 4
        await engines[number].release("h")
        assert all(40 * number <= worker.pages.ages.age_of(page_key(SPACE, key)) < 40 * number + 20 for key in KEYS[:4])  # type: ignore[union-attr]
        await engines[number - 1].release("l")
        workers[number - 1].pages.evict_of({SPACE})  # it moves
        await until(lambda left=number - 1: located_nowhere(cluster, workers[left]))
    look()
    assert len(workers[2].pages.inventory()) == 4
    await engines[2].load(KEYS[:1], "held")
    cluster.pass_time(25)
    look()
    assert len(workers[2].pages.inventory()) == 1, "it is in use"
    await engines[2].release("held")
    look()
    assert not workers[2].pages.inventory() and not retentions[2]._carried


def located_nowhere(cluster: Cluster, worker: Worker) -> bool:
    """Whether no page is listed at that worker any more."""
    return all(worker.worker_id not in cluster.listed(key) for key in KEYS)


class OfTenant(Engine):
    """An engine whose connection has the name that the plugin gives it."""

    async def asks(self, space: bytes, keys: Sequence[bytes]) -> int:
        return (await self.client.call(Lookup("l", [space], list(keys)), LookupResult, T)).blocks


async def engine(cluster: Cluster, worker: object, name: str, tenant: str, model: str = "m") -> OfTenant:
    attached = await cluster.engine(worker, f"{name}/scheduler")  # type: ignore[arg-type]
    client = attached.client
    await client.call(AttachInstance(name, "vllm", model, f"namespace of {model}", tenant), Ok, T)
    return OfTenant(worker, client)  # type: ignore[arg-type]


@pytest.fixture
async def pair(cluster: Cluster) -> tuple[Cluster, OfTenant, OfTenant]:
    (a, b), _ = await cluster.pair()
    return cluster, await engine(cluster, a, "i", "t"), await engine(cluster, b, "j", "t")


async def test_the_pages_of_a_tenant_are_evicted_everywhere(pair: tuple[Cluster, OfTenant, OfTenant]) -> None:
    cluster, at_a, at_b = pair
    assert await at_a.asks(SPACE, KEYS) == 0
    assert await at_a.save(KEYS) == len(KEYS)
    await at_b.finds(KEYS)
    assert await at_b.load(KEYS[:3]) == 3  # they are there too now, and held
    async with await connect(f"unix:{at_a._worker.socket.path}", tenant="other", network=cluster.network) as other:
        gone = await other.forget_pages()
        assert (gone.evicted, gone.in_use) == (0, 0)
    async with await connect(f"unix:{at_a._worker.socket.path}", tenant="t", network=cluster.network) as session:
        gone = await session.forget_pages()
        assert (gone.evicted, gone.in_use, gone.unreachable) == (8, 3, [])
        await at_b.release("h", "l")
        gone = await session.forget_pages()
        assert (gone.evicted, gone.in_use) == (3, 0)
    await until(lambda: not at_a._worker.pages.inventory() and not at_b._worker.pages.inventory())
    cluster.check()


async def test_pages_of_engines_without_a_tenant_are_the_default_ones(cluster: Cluster) -> None:
    (a, _), (stranger, _) = await cluster.pair()
    at_a = await engine(cluster, a, "i", "")
    await at_a.asks(SPACE, KEYS)
    await at_a.save(KEYS)
    address = f"unix:{a.socket.path}"
    async with await connect(address, tenant="t", network=cluster.network) as session:
        gone = await session.forget_pages()
        assert (gone.evicted, gone.nobodys) == (0, len(KEYS)), "they may be this tenant's: it is told"
    async with await connect(address, network=cluster.network) as session:
        gone = await session.forget_pages()
        assert (gone.evicted, gone.nobodys) == (len(KEYS), 0)
        await at_a.release("l")
        await stranger.client.call(Reserve(b"n" * 16, KEYS[:2], 4096), Reserved, T)
        await stranger.client.call(Commit(b"n" * 16, KEYS[:2], [0, 0]), Ok, T)
        gone = await session.forget_pages()
        assert (gone.evicted, gone.nobodys) == (0, 2), "no engine has said whose they are"


@pytest.mark.parametrize("what", ["i", "m", "namespace of m"])
async def test_an_engine_that_is_switched_off_serves_without_the_pool(
    pair: tuple[Cluster, OfTenant, OfTenant], what: str
) -> None:
    cluster, at_a, _ = pair
    assert await at_a.save(KEYS) == len(KEYS)
    assert await at_a.asks(SPACE, KEYS) == len(KEYS)
    async with await connect(f"unix:{at_a._worker.socket.path}", network=cluster.network) as session:
        await session.disable(what, "because")
        assert await session.list_disabled() == {what: "because"}
        assert await at_a.asks(SPACE, KEYS) == 0
        assert await at_a.reserve(hashes(3, 100)) == [-1, -1, -1]
        another = await engine(cluster, at_a._worker, "k", "t", "another model")
        assert await another.asks(SPACE, KEYS) == len(KEYS)
        await session.enable(what)
        assert await session.list_disabled() == {}
        assert await at_a.asks(SPACE, KEYS) == len(KEYS)
        assert min(await at_a.reserve(hashes(3, 100))) >= 0
