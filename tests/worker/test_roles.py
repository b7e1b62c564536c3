"""Roles: who can be the home of shards, and who shares its pages all the same."""

import asyncio

import pytest

from tensorcast_connector.core import leases
from tensorcast_connector.errors import ConfigError
from tests.cluster import SHARDS, Cluster, hashes, plane
from tests.waiting import until

KEYS = hashes(SHARDS)


async def test_a_worker_that_is_no_home_holds_no_shard_and_shares_its_pages(cluster: Cluster) -> None:
    await cluster.start_store()
    home = await cluster.worker("home")
    plain = [await cluster.worker(name, roles="basic,gateway") for name in ("one", "two")]
    await cluster.settled()
    at_one, at_two = [await cluster.engine(worker) for worker in plain]
    await at_one.save(KEYS)
    await at_two.finds(KEYS)
    assert await at_two.load(KEYS) == SHARDS
    await cluster.settled()
    assert set(plane(home).leases.held) == set(range(SHARDS))
    for worker in plain:
        assert plane(worker).leases.held == {} and plane(worker).catalog.pages == 0
        assert plane(home).view.workers[worker.worker_id].roles == ("basic", "gateway")


async def test_it_does_not_take_over_when_the_last_home_leaves(cluster: Cluster) -> None:
    await cluster.start_store()
    home = await cluster.worker("home")
    plain = [await cluster.worker(name, roles="basic") for name in ("one", "two")]
    await cluster.settled()
    at_one, at_two = [await cluster.engine(worker) for worker in plain]
    await at_one.save(KEYS)
    await at_two.finds(KEYS)
    await cluster.leave(home)
    await cluster.settled()
    async with asyncio.timeout(2):
        assert await at_two.lookup(KEYS) == (0, 0), "nobody knows"
    assert await at_one.lookup(KEYS) == (SHARDS, SHARDS)
    assert not plane(plain[0]).view.shards
    await cluster.worker("another")
    await cluster.settled()
    await at_two.finds(KEYS)


async def test_without_any_home_lookups_miss_and_nothing_breaks(cluster: Cluster) -> None:
    await cluster.start_store()
    workers = [await cluster.worker(name, roles="basic") for name in ("one", "two")]
    await cluster.settled()
    at_one, at_two = [await cluster.engine(worker) for worker in workers]
    assert await at_one.save(KEYS) == SHARDS
    async with asyncio.timeout(2):
        assert await at_two.lookup(KEYS) == (0, 0) and await at_two.load(KEYS) == 0
    assert await at_two.save(KEYS) == SHARDS and await at_two.load(KEYS) == SHARDS
    assert workers[0].peers.statistics()["shards_without_home"] == SHARDS


async def test_when_all_die_that_compete_the_next_ones_do(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contenders are the first few of those that live."""
    monkeypatch.setattr(leases, "SHARD_CONTENDERS", 1)
    await cluster.start_store()
    workers = [await cluster.worker(name) for name in ("a", "b", "c")]
    await cluster.settled()
    for worker in workers[:-1]:
        await cluster.crash(worker)
    await cluster.expire_crashed()
    await cluster.settled()
    assert set(plane(workers[-1]).leases.held) == set(range(SHARDS))


@pytest.mark.parametrize("roles", ["gatway", "basic,home", "basic;gateway"])
async def test_a_role_that_does_not_exist_is_one_line(cluster: Cluster, roles: str) -> None:
    with pytest.raises(ConfigError, match="is no role; choose among basic, gateway, shard-home") as error:
        await cluster.worker("w", roles=roles)
    assert "\n" not in str(error.value) and list(cluster.folder.iterdir()) == [], "and nothing is left of it"


async def test_basic_is_a_role_of_every_worker(cluster: Cluster) -> None:
    await cluster.start_store()
    worker = await cluster.worker("w", roles=" shard-home ")
    await until(lambda: plane(worker).view.workers)
    assert plane(worker).view.workers[worker.worker_id].roles == ("basic", "shard-home")
