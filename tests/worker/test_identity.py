"""Workers that disagree about the time, and two that claim to be one."""

import random
from collections.abc import Callable

import pytest

from tensorcast_connector.settings import WorkerConfig
from tensorcast_connector.wire.messages import GetSignals, Signals
from tensorcast_connector.worker.server import Worker, start_worker
from tests.cluster import Cluster, T, hashes, plane
from tests.waiting import until

KEYS = hashes(6)


async def start(cluster: Cluster, name: str, seed: int, now: Callable[[], float], wall: Callable[[], float]) -> Worker:
    config = WorkerConfig(
        store=str(cluster.store_address), name=name, listen="127.0.0.1:0", arena_bytes=4 << 20,
        socket=str(cluster.folder / f"{name}-{len(cluster.workers)}.sock"),
    )  # fmt: skip
    return await start_worker(config, cluster.network, random.Random(seed), now, wall)


@pytest.mark.parametrize("hours", [-7, 7])
async def test_a_worker_whose_clocks_are_hours_away(cluster: Cluster, hours: int) -> None:
    """Leases are counted in durations, and nothing that matters is read off a wall clock."""
    (a,), (at_a,) = await cluster.pair("a")
    off_s = hours * 3600.0
    odd = await start(cluster, "odd", 5, lambda: cluster.now() + abs(off_s), lambda: 1_800_000_000.0 + off_s)
    cluster.workers.append(odd)
    await cluster.settled()
    at_odd = await cluster.engine(odd)
    await at_a.save(KEYS[:3])
    await at_odd.save(KEYS[3:])
    await at_a.finds(KEYS)
    await at_odd.finds(KEYS)
    assert await at_odd.load(KEYS) == 6 == await at_a.load(KEYS)
    assert plane(odd).leases.may_write(odd.peers.now()) and plane(a).leases.may_write(a.peers.now())
    signals = await at_odd.client.call(GetSignals(), Signals, T)
    assert 0 <= signals.age_s < 60, "by its own clock"
    assert abs(signals.as_of_unix_s - 1_800_000_000.0 - off_s) < 60, "for people, who see that it is off"


async def test_two_workers_with_one_id(cluster: Cluster) -> None:
    """As after a virtual machine was cloned with its random numbers: the second serves its own engines and says why."""
    await cluster.start_store()
    first = await start(cluster, "twin", 1, cluster.now, cluster.now)
    cluster.workers.append(first)
    await cluster.settled()
    second = await start(cluster, "twin", 1, cluster.now, cluster.now)
    assert second.worker_id == first.worker_id
    try:
        await until(lambda: plane(second).member.store_error)
        assert str(plane(second).member.store_error) == f"worker {first.worker_id} is registered already"
        at_first, at_second = await cluster.engine(first), await cluster.engine(second)
        assert await at_second.save(KEYS) == 6 == await at_second.load(KEYS)
        assert await at_first.save(KEYS) == 6 == await at_first.load(KEYS)
        assert not plane(second).leases.held and plane(first).leases.held
        await at_second.release("h")
    finally:
        await second.close()
