"""Pages that are too old or whose tenant is removed, and engines that are switched off."""

from collections.abc import Sequence

import pytest

from tensorcast_connector.client.session import connect
from tensorcast_connector.core.segments import Segments
from tensorcast_connector.wire.messages import AttachInstance, Lookup, LookupResult, Ok
from tensorcast_connector.worker.retention import Retention
from tests.cluster import SPACE, Cluster, Engine, T, hashes
from tests.waiting import until

KEYS = hashes(8)


class FakePages:
    """What Retention sees of Pages, on real segments."""

    def __init__(self) -> None:
        self.segments = Segments(1 << 20, 1 << 20, 4096)

    @property
    def born(self) -> int:
        return self.segments.born

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
