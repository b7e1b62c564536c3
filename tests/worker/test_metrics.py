"""A worker's metrics are what the documents say, and count what happens."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector

from tensorcast_connector.core.homes import Homes
from tensorcast_connector.net.metrics_server import Family, MetricsListener, serve_metrics
from tensorcast_connector.types import Address, Token, page_key
from tensorcast_connector.wire.messages import PROTOCOL_VERSION, AttachInstance, Ok
from tensorcast_connector.worker import metrics
from tensorcast_connector.worker.metrics import WorkerMetrics
from tensorcast_connector.worker.server import Worker
from tests.cluster import SPACE, Cluster, T, hashes, plane
from tests.documented import check_documented, families
from tests.scrape import get, scrape
from tests.waiting import until

W = "tensorcast_worker_"
KEYS = hashes(6)
Serve = Callable[[Worker], Awaitable[Address]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serves a worker's metrics until the test is over."""
    listeners: list[MetricsListener] = []

    async def serve(worker: Worker) -> Address:
        listeners.append(await serve_metrics(Address("tcp", host="127.0.0.1"), [WorkerMetrics(worker)]))
        return listeners[-1].address

    yield serve
    for listener in listeners:
        await listener.close()


def test_the_documented_families_are_those_of_the_code() -> None:
    assert families("Worker") == list(metrics.FAMILIES)
    names = [each.name.removesuffix("_total") for each in metrics.FAMILIES]
    assert len(set(names)) == len(names), "a counter and a gauge of one name are one family in OpenMetrics"


def test_the_documented_process_metrics_are_those_of_the_library() -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    exported = [
        Family(each.type, each.name + ("_total" if each.type == "counter" else ""), each.documentation)
        for each in registry.collect()
    ]
    assert families("Every process") == exported


@pytest.mark.slow
async def test_a_worker_exports_what_is_documented(cluster: Cluster, serve: Serve) -> None:
    (a, _), _ = await cluster.pair(devices="host:0")
    a._sampler._signals.network = 0.5  # type: ignore[union-attr]  # no link of a test has a speed
    found = await scrape(await serve(a))
    assert found.labels(W + "info") == [
        {"worker_id": a.worker_id, "roles": "basic,gateway,shard-home", "protocol": str(PROTOCOL_VERSION)},
    ]
    check_documented(found, "Worker", W)


@pytest.mark.slow
async def test_what_is_counted(cluster: Cluster, serve: Serve) -> None:
    (a, b), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS)
    await at_b.client.call(AttachInstance("i", "vllm", "m", "n"), Ok, T)
    await at_b.finds(KEYS)
    assert await at_b.load(KEYS) == 6
    await at_b.lookup([*KEYS, *hashes(2, 50)], "partly")
    await at_b.lookup(hashes(3, 60), "not")
    await at_b.lookup(KEYS, "all")
    await cluster.settled()
    at = await scrape(await serve(a))
    there = await scrape(await serve(b))
    operations = "page_operations_total"
    assert at.value(W + operations, action="saved") == at.value(W + operations, action="sent") == 6
    assert there.value(W + operations, action="fetched") == there.value(W + operations, action="loaded") == 6
    sent = at.value(W + "page_bytes_total", action="sent")
    assert sent == there.value(W + "page_bytes_total", action="fetched") == 30_000
    assert at.value(W + "pages") == there.value(W + "pages") == 6
    assert there.value(W + "pages_held") == 6 and at.value(W + "pages_held") == 0
    assert there.value(W + "arena_bytes", state="pinned") == there.value(W + "arena_bytes", state="used") == 6 * 8192
    assert there.value(W + "arena_bytes", state="total") == 4 << 20
    missed = there.value(W + "lookups_total", outcome="missed")
    assert there.value(W + "lookups_total", outcome="partial") >= 1 and missed >= 1
    assert there.value(W + "lookups_total", outcome="full") >= 2
    assert there.value(W + "lookup_blocks_total", where="local") >= 12
    assert there.value(W + "lookup_blocks_total", where="missed") >= 5
    assert there.value(W + "lookup_blocks_total", where="elsewhere") == 6
    assert there.value(W + "find_seconds_count") >= 3 and there.value(W + "find_seconds_sum") > 0
    assert at.value(W + "catalog_pages") + there.value(W + "catalog_pages") == 6, "six pages, each at its one home"
    held = [each.value(W + "shards", state="held") for each in (at, there)]
    assert sum(held) == cluster.shards == at.value(W + "shards", state="all")
    assert held == [len(plane(each).leases.held) for each in (a, b)]
    for each, held_now in zip((at, there), held, strict=True):
        gained = each.value(W + "shard_takeovers_total")
        assert gained - each.value(W + "shard_losses_total") == held_now and gained >= held_now
        assert each.value(W + "shards", state="homeless") == 0
        assert each.value(W + "store_reachable") == each.value(W + "lease_valid") == 1
        assert each.value(W + "workers", state="connected") == 1
        assert each.value(W + "reports_total", outcome="applied") > 0
    assert at.value(W + "engines") == 0 and there.value(W + "engines") == 1
    assert there.value(W + "connections", listener="engines") == 1


@pytest.mark.slow
async def test_evictions_failures_and_redirects_are_counted(
    cluster: Cluster, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a, b), (at_a, _) = await cluster.pair()
    address = await serve(a)
    await at_a.save(hashes(4), 1 << 20)  # as many as fit
    await at_a.save(hashes(2, 10), 1 << 20)
    assert (await scrape(address)).value(W + "evictions_total") == 2

    mine = next(shard for shard in plane(a).leases.held)
    key = page_key(SPACE, bytes(31) + bytes([mine]))
    stale = Homes(cluster.shards)
    assert stale.observe(mine, Token(0, 1), b.worker_id), "what was true before a took the shard"
    monkeypatch.setattr(plane(a), "homes", stale)
    await a.peers.holders([key])
    at, there = await scrape(address), await scrape(await serve(b))
    assert at.value(W + "redirects_total", side="followed") == 1 == there.value(W + "redirects_total", side="given")
    assert at.value(W + "redirects_total", side="given") == 0 == there.value(W + "redirects_total", side="followed")
    assert at.value(W + "finds_failed_total") == 0

    stale = Homes(cluster.shards)
    stale.observe(mine, Token(0, 1), b.worker_id)
    monkeypatch.setattr(plane(a), "homes", stale)
    monkeypatch.setattr(a.peers._clients[b.worker_id], "_stream", None)
    assert await a.peers.holders([key]) == [()]
    assert (await scrape(address)).value(W + "finds_failed_total") == 1

    await cluster.lose_store()
    await until(lambda: a.peers.statistics()["store_losses"])
    lost = await scrape(address)
    assert lost.value(W + "store_reachable") == 0 and lost.value(W + "store_losses_total") == 1
    assert (await get(address, "/healthz"))[0] == 200, "it serves its engines all the same"
