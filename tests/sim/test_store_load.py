"""Store requests per second depend on workers and shards, not on pages: counted, not argued."""

from collections import Counter
from dataclasses import dataclass

import pytest

from tests.sim.cluster import Cluster, Shape, limits

SHARDS = 64
SETTLE_S = 6.0  # everybody has registered, and every shard is with its best placed worker
MEASURE_S = 10
BURSTS = 2
PAGE_BYTES = 16
ARENA_BYTES = 1 << 16
KEYSPACE = b"A" * 16
# Sooner than by default, so that less has to be simulated. Reports go to homes, never to the store; with 64 workers they
# are nearly all that happens.
LIMITS = {
    "tensorcast_connector.core.leases:HANDOVER_AFTER_S": 1.0,
    "tensorcast_connector.core.reports:REPORT_INTERVAL_S": 10.0,
}


@dataclass(frozen=True)
class Load:
    """What the store was asked while pages were saved."""

    workers: int
    pages: int  # saved meanwhile
    listed: int  # in the homes' catalogs afterwards
    requests: Counter[str]

    @property
    def per_second(self) -> float:
        """Requests of all kinds."""
        return self.requests.total() / MEASURE_S

    def row(self) -> str:
        """A line of the table."""
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.requests.items()))
        return f"{self.workers:7d}  {self.pages:6d}  {self.per_second:12.1f}  {kinds}"


def measure(workers: int, pages: int) -> Load:
    """A quiet cluster in which `pages` are saved, evenly over the workers."""
    with limits(LIMITS):
        cluster = Cluster(1, Shape(workers=workers, shards=SHARDS, engines=0, arena_bytes=ARENA_BYTES), [])
        try:
            world = cluster.world
            world.run(SETTLE_S)
            before = Counter(cluster.store.served)
            sessions = {worker.name: worker.open_session() for worker in cluster.workers()}
            saved = 0
            for _ in range(BURSTS):
                for number, worker in enumerate(cluster.workers()):
                    count = pages // BURSTS // workers + (number < pages // BURSTS % workers)
                    hashes = [(saved + index).to_bytes(8, "big") for index in range(count)]
                    worker.reserve(sessions[worker.name], KEYSPACE, hashes, PAGE_BYTES)
                    worker.commit(sessions[worker.name], KEYSPACE, hashes, [0] * count)
                    saved += count
                world.run(world.now + MEASURE_S / BURSTS)
            requests = Counter(cluster.store.served) - before
            listed = sum(worker.metadata.catalog.pages for worker in cluster.workers())
            return Load(workers, pages, listed, requests)
        finally:
            cluster.close()


@pytest.mark.slow
@pytest.mark.timeout(300)  # it computes for 12 s: long for one that waits for nothing, and longer beside others
def test_pages_cost_the_store_nothing() -> None:
    fewer, few, many = (measure(*each) for each in ((32, 1_000), (64, 1_000), (64, 50_000)))
    print("\nworkers   pages  requests / s  by kind")
    print("\n".join(load.row() for load in (fewer, few, many)))
    for load in (fewer, few, many):
        assert load.listed == load.pages, "every page was reported to its home"
        assert load.requests.keys() <= {"KeepAlive", "Watch"}, (
            "nothing else is asked of the store while nothing happens"
        )
    beats = few.workers * 2  # one request more or less of each kind per worker, at the edges of the time
    assert abs(many.requests.total() - few.requests.total()) <= beats
    assert few.per_second < 2 * few.workers, "a heartbeat a second, and now and then a watch that has nothing to tell"
    assert 1.7 <= few.per_second / fewer.per_second <= 2.3
