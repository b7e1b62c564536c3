"""Workers together: pages saved at one are had at another, and every failure is a miss, soon, and heals."""

import asyncio
import logging

import pytest

from tensorcast_connector.core.placement import home_of_pages
from tensorcast_connector.errors import Unavailable
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.testing.network import FakeNetwork
from tensorcast_connector.types import page_key
from tensorcast_connector.wire.messages import (
    Announce,
    Locate,
    Located,
    Ok,
)
from tensorcast_connector.worker import peers
from tests.cluster import PAGE, SPACE, Cluster, T, hashes
from tests.waiting import until

KEYS = hashes(6)


async def test_saved_at_one_loaded_at_the_other_byte_exact(cluster: Cluster) -> None:
    (a, b), (at_a, at_b) = await cluster.pair()
    assert await at_a.save(KEYS) == 6
    await at_b.finds(KEYS)
    assert await at_b.lookup(KEYS) == (6, 0), "all elsewhere"
    assert await at_b.load(KEYS) == 6
    assert b.pages.counters["pages_fetched"] == 6 == a.pages.counters["pages_sent"]
    assert await at_b.lookup(KEYS) == (6, 6), "all here now"
    assert await at_b.save(KEYS) == 0, "put if absent"
    assert await at_a.lookup([*KEYS, b"nobody-has-this"]) == (6, 6)


async def test_a_gap_ends_what_can_be_had(cluster: Cluster) -> None:
    _, (at_a, at_b) = await cluster.pair()
    await at_a.save([*KEYS[:2], *KEYS[3:]])
    await at_b.save(KEYS[:1])
    await at_b.finds(KEYS[:2])
    assert await at_b.lookup(KEYS) == (2, 1)
    assert await at_b.load(KEYS) == 2 and await at_a.load(KEYS, "other") == 2


async def test_pages_of_several_workers_make_one_prefix(cluster: Cluster) -> None:
    _, engines = await cluster.pair("a", "b", "c")
    for number, engine in enumerate(engines):
        await engine.save(KEYS[2 * number : 2 * number + 2])
    for engine in engines:
        await engine.finds(KEYS)
        assert await engine.load(KEYS) == 6


async def test_what_an_engine_asks_for_twice_at_once_is_fetched_once(cluster: Cluster) -> None:
    (a, b), (at_a, at_b) = await cluster.pair()
    second = await cluster.engine(b)
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    assert await asyncio.gather(at_b.load(KEYS, "1"), second.load(KEYS, "2"), at_b.load(KEYS[:3], "3")) == [6, 6, 3]
    assert a.pages.counters["pages_sent"] == 6 == b.pages.counters["pages_fetched"]


async def test_a_page_without_a_lookup_is_located_on_the_way(cluster: Cluster) -> None:
    _, (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    assert await at_b.load(KEYS[2:4]) == 2


async def test_evicted_pages_are_announced(cluster: Cluster) -> None:
    (a, _b), (at_a, at_b) = await cluster.pair()
    size = 1 << 20  # an arena of four of them
    await at_a.save(KEYS[:4], size)
    await at_b.finds(KEYS[:4])
    await at_a.save(KEYS[4:6], size)
    evicted = [key for key in KEYS[:4] if not a.pages.resident(page_key(SPACE, key))]
    assert len(evicted) == 2
    index = cluster.home.peers.catalog
    await until(lambda: not any(index.locate([page_key(SPACE, key) for key in evicted])))
    await at_b.finds(KEYS[4:6])
    assert await at_b.lookup(evicted) == (0, 0)
    assert await at_b.load(KEYS[4:6]) == 2


async def test_the_owner_dies(cluster: Cluster) -> None:
    (a, _b), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    await at_b.lookup(KEYS)
    await cluster.crash(a)
    async with asyncio.timeout(2):
        assert await at_b.load(KEYS) == 0
        assert await at_b.lookup(KEYS) == (0, 0)
    assert await at_b.save(KEYS) == 6 and await at_b.load(KEYS) == 6


async def test_the_home_dies_and_a_new_one_learns_what_there_is(cluster: Cluster) -> None:
    workers, engines = await cluster.pair("a", "b", "c")
    by_worker = dict(zip([each.worker_id for each in workers], engines, strict=True))
    home = cluster.home
    one, two = (by_worker[each.worker_id] for each in cluster.others())
    await one.save(KEYS)
    await two.finds(KEYS)
    await cluster.crash(home)
    assert await two.lookup(KEYS) == (0, 0), "nobody to ask"
    assert await one.lookup(KEYS) == (6, 6), "local pages need nobody"
    await cluster.expire_crashed()
    await cluster.settled()
    await two.finds(KEYS)
    assert await two.load(KEYS) == 6
    for worker in cluster.workers:
        assert (worker is cluster.home) == bool(worker.peers.catalog.statistics()["catalog_pages"])


async def test_a_former_home_keeps_and_says_nothing(cluster: Cluster) -> None:
    """Workers join until one of them is the home instead of the first."""
    await cluster.start_store()
    first = await cluster.worker("a")
    at_first = await cluster.engine(first)
    await at_first.save(KEYS)
    await until(lambda: first.peers.catalog.statistics()["catalog_pages"] == 6)
    joined = []
    while cluster.home is first:
        joined.append(await cluster.worker(f"w{len(joined)}"))
    await cluster.settled()
    assert first.peers.catalog.statistics()["catalog_pages"] == 0
    key = page_key(SPACE, KEYS[0])
    client = RpcClient(cluster.network, first.address, "worker", "late", cluster.chance)
    client.start()
    await client.wait_connected(T)
    with pytest.raises(Unavailable, match="does not locate pages"):
        await client.call(Locate([key]), Located, T)
    with pytest.raises(Unavailable, match="does not locate pages"):
        await client.call(Announce(joined[0].worker_id, True, [key], []), Ok, T)
    with pytest.raises(Unavailable, match="stranger/1 is not known here yet"):
        await client.call(Announce("stranger/1", True, [key], []), Ok, T)
    await client.close()
    at_other = await cluster.engine(joined[0])
    await at_other.finds(KEYS)
    assert await at_other.load(KEYS) == 6
    while cluster.home is not first:
        await cluster.crash(cluster.home)
    await cluster.expire_crashed()
    await cluster.settled()
    assert first.peers.catalog.statistics()["catalog_pages"] == 6


async def test_a_home_that_forgot_a_worker_is_told_again(cluster: Cluster) -> None:
    """As after a membership list that lagged behind: nothing changes, and yet it heals."""
    _, (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    for worker in cluster.workers:
        cluster.home.peers.catalog.drop_worker(worker.worker_id)
    await at_b.finds(KEYS)


async def test_the_store_goes_away_and_everything_else_goes_on(cluster: Cluster) -> None:
    (a, b), (at_a, at_b) = await cluster.pair()
    await cluster.lose_store(a.membership, b.membership)
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    assert await at_b.load(KEYS) == 6
    await cluster.start_store()
    await until(lambda: not a.membership._store_lost)
    late = await cluster.worker("c")
    await cluster.settled()
    at_late = await cluster.engine(late)
    await at_late.finds(KEYS)
    assert await at_late.load(KEYS) == 6


async def test_a_worker_whose_lease_expired_comes_back(cluster: Cluster) -> None:
    (a, b), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS)
    leases = {each.membership._lease_id for each in (a, b)}
    cluster.clock.advance(7)
    await until(lambda: not leases & {0, a.membership._lease_id, b.membership._lease_id})
    await cluster.settled()
    await at_b.finds(KEYS)
    assert await at_b.load(KEYS) == 6


async def test_a_worker_that_starts_again_under_its_name(cluster: Cluster) -> None:
    (a, _), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    await cluster.crash(a)
    again = await cluster.worker("a")
    assert again.worker_id != a.worker_id and again.socket == a.socket
    await cluster.expire_crashed()
    await cluster.settled()
    at_again = await cluster.engine(again)
    assert await at_b.lookup(KEYS) == (0, 0), "its arena is a new one"
    await at_again.save(KEYS)
    await at_b.finds(KEYS)
    assert await at_b.load(KEYS) == 6


async def test_leaving_is_noticed_at_once(cluster: Cluster) -> None:
    (a, b), _ = await cluster.pair()
    cluster.workers.remove(a)
    await a.close()
    await cluster.settled()
    assert b.peers.statistics()["workers"] == 1 and "0 others" in repr(b.peers)


async def test_a_member_with_an_address_that_is_none(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    (a, b), _ = await cluster.pair()
    record = a.membership._record
    odd = type(record)("odd/1", "odd", "nowhere", 1)
    a.peers.members_changed({b.worker_id: b.membership._record, "odd/1": odd})  # type: ignore[dict-item]
    assert a.peers._members == {a.worker_id, b.worker_id}
    assert "odd/1" in caplog.text


# --- faults of the network ---


async def test_a_stale_hint_is_asked_about_once_more(faulty: tuple[Cluster, FakeNetwork]) -> None:
    cluster, _ = faulty
    workers, engines = await cluster.pair("a", "b", "c")
    (a, at_a), (_, at_b), (_, at_c) = zip(workers, engines, strict=True)
    await at_a.save(KEYS)
    await at_c.finds(KEYS)
    await at_c.lookup(KEYS)  # c will read from a
    await at_b.save(KEYS)
    await until(
        lambda: all(len(who) == 2 for who in cluster.home.peers.catalog.locate([page_key(SPACE, k) for k in KEYS]))
    )
    await cluster.crash(a)
    assert await at_c.load(KEYS) == 6, "from b"


async def test_a_page_that_was_evicted_since_the_lookup(cluster: Cluster) -> None:
    (a, _), (at_a, at_b) = await cluster.pair()
    size = 1 << 20
    await at_a.save(KEYS[:4], size)
    await at_b.finds(KEYS[:4])
    await at_b.lookup(KEYS[:4])
    await at_a.save(hashes(4, 100), size)
    assert await at_b.load(KEYS[:4]) == 0
    assert a.pages.counters["pages_sent"] == 0


async def test_the_peer_dies_in_the_middle_of_a_page(faulty: tuple[Cluster, FakeNetwork]) -> None:
    cluster, network = faulty
    (a, b), (at_a, at_b) = await cluster.pair()
    size = 1 << 20
    await at_a.save(KEYS[:3], size)
    await at_b.finds(KEYS[:3])
    loading = asyncio.create_task(at_b.load(KEYS[:3]))
    await until(lambda: b.pages.statistics()["pages_reserved"])
    network.cut(a.address)
    network.refuse(a.address)
    network.refuse(b.address)
    assert await loading < 3
    await until(lambda: not b.pages.statistics()["pages_reserved"])
    network.heal(a.address)
    network.heal(b.address)
    await at_b.release("h")
    await at_b.finds(KEYS[:3])
    assert await at_b.load(KEYS[:3]) == 3


async def test_a_flipped_byte_is_dropped_and_counted(
    faulty: tuple[Cluster, FakeNetwork], caplog: pytest.LogCaptureFixture
) -> None:
    cluster, network = faulty
    (a, b), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    await at_b.load(KEYS[:1])  # the connection for pages is open
    network.flip_byte(a.address, PAGE * 2)  # of five pages that will follow a few short messages
    assert await at_b.load(KEYS) < 6
    assert b.pages.counters["digest_mismatches"] == 1
    assert caplog.text.count("arrived with wrong bytes and was dropped") == 1
    await at_b.finds(KEYS)
    assert await at_b.load(KEYS, "again") == 6


async def test_a_home_that_does_not_answer_is_a_miss_in_time(
    faulty: tuple[Cluster, FakeNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, network = faulty
    workers, engines = await cluster.pair()
    monkeypatch.setattr(peers, "LOCATE_TIMEOUT_S", 0.02)
    at = dict(zip([each.worker_id for each in workers], engines, strict=True))
    home, other = cluster.home, cluster.others()[0]
    await at[home.worker_id].save(KEYS)
    await at[other.worker_id].save(KEYS[:2])
    network.silence(home.address)
    network.cut(home.address)
    async with asyncio.timeout(2):
        assert await at[other.worker_id].lookup(KEYS) == (2, 2)
    network.heal(home.address)
    network.cut(home.address)
    await at[other.worker_id].finds(KEYS)


@pytest.mark.parametrize("seed", range(6))
async def test_connections_that_keep_breaking_lose_no_page_and_corrupt_none(
    faulty: tuple[Cluster, FakeNetwork], seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    cluster, network = faulty
    cluster.chance.seed(seed)
    workers, engines = await cluster.pair("a", "b", "c")
    addresses = [cluster.store_address, *(each.address for each in workers)]
    for round_ in range(8):
        mine = hashes(4, 10 * round_)
        await engines[round_ % 3].save(mine)
        network.cut(cluster.chance.choice(addresses))
        for engine in engines:
            await engine.lookup(mine, "x")
            await engine.load(mine, "y")
            await engine.release("x", "y")
        cluster.check()
    await cluster.settled()
    for round_ in range(8):
        for engine in engines:
            await engine.finds(hashes(4, 10 * round_))
            assert await engine.load(hashes(4, 10 * round_)) == 4
            await engine.release("h")
    assert not caplog.records


async def test_ids_and_so_the_home_come_from_the_seed(cluster: Cluster) -> None:
    await cluster.start_store()
    a, b = await cluster.worker("a"), await cluster.worker("b")
    assert (a.worker_id, b.worker_id) == ("a/d82c07cd", "b/629f6fbe")
    assert home_of_pages([a.worker_id, b.worker_id]) == cluster.home.worker_id
