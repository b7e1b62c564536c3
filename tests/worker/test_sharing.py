"""Workers together: pages saved at one are had at another, and every failure is a miss, soon, and heals."""

import asyncio
import logging

import pytest

from tensorcast_connector.config import MEMBER_TTL_S
from tensorcast_connector.core.placement import shard_of, shard_ranking
from tensorcast_connector.testing.network import FakeNetwork
from tensorcast_connector.types import page_key
from tensorcast_connector.worker import peers
from tensorcast_connector.worker.server import Worker
from tests.cluster import PAGE, SPACE, Cluster, Engine, hashes, plane
from tests.waiting import until

KEYS = hashes(6)


def of(workers: list[Worker], engines: list[Engine], worker: Worker) -> Engine:
    """The engine at a worker."""
    return engines[workers.index(worker)]


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
    await cluster.settled()
    assert all(cluster.listed(key) == {a.worker_id, b.worker_id} for key in KEYS)


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


async def test_evicted_pages_are_reported(cluster: Cluster) -> None:
    (a, _b), (at_a, at_b) = await cluster.pair()
    size = 1 << 20  # an arena of four of them
    await at_a.save(KEYS[:4], size)
    await at_b.finds(KEYS[:4])
    await at_a.save(KEYS[4:6], size)
    evicted = [key for key in KEYS[:4] if not a.pages.resident(page_key(SPACE, key))]
    assert len(evicted) == 2
    await until(lambda: not any(cluster.listed(key) for key in evicted))
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


# --- homes come and go ---


async def test_shards_are_shared_out_and_each_home_knows_its_own(cluster: Cluster) -> None:
    workers, engines = await cluster.pair("a", "b", "c")
    for engine in engines:
        await engine.save(hashes(cluster.shards))
    await cluster.settled()
    held = [set(plane(worker).leases.held) for worker in workers]
    assert set().union(*held) == set(range(cluster.shards)) and sum(map(len, held)) == cluster.shards
    for shard in range(cluster.shards):
        best = shard_ranking(shard, [worker.worker_id for worker in workers])[0]
        assert [worker.worker_id for worker, shards in zip(workers, held, strict=True) if shard in shards] == [best]
    for worker, shards in zip(workers, held, strict=True):
        assert plane(worker).catalog.pages == len(shards) == worker.peers.statistics()["shards_held"]


async def test_the_home_dies_and_a_new_one_learns_what_there_is(cluster: Cluster) -> None:
    workers, engines = await cluster.pair("a", "b", "c")
    home = cluster.home(KEYS[0])
    one, two = (of(workers, engines, worker) for worker in workers if worker is not home)
    shards = set(plane(home).leases.held)
    lost = [key for key in hashes(cluster.shards) if shard_of(key, cluster.shards) in shards]
    kept = [key for key in hashes(cluster.shards) if key not in lost]
    await one.save(lost + kept)
    await two.finds(lost + kept)
    await cluster.crash(home)
    assert await two.lookup(lost) == (0, 0), "nobody to ask"
    assert await two.lookup(kept) == (len(kept), 0), "the other homes know theirs"
    assert await one.lookup(lost) == (len(lost), len(lost)), "local pages need nobody"
    await cluster.expire_crashed()
    await cluster.settled()
    await two.finds(lost)
    assert await two.load(lost + kept) == cluster.shards


async def test_a_home_that_leaves_in_order_is_replaced_at_once(cluster: Cluster) -> None:
    workers, engines = await cluster.pair("a", "b", "c")
    home = cluster.home(KEYS[0])
    one, two = (of(workers, engines, worker) for worker in workers if worker is not home)
    await one.save(KEYS)
    await two.finds(KEYS)
    await cluster.leave(home)
    await cluster.settled()
    assert await two.lookup(KEYS) == (6, 0)


async def test_one_after_the_other_dies_until_one_is_left(cluster: Cluster) -> None:
    workers, engines = await cluster.pair("a", "b", "c")
    last = engines[-1]
    await last.save(KEYS)
    for worker in workers[:-1]:
        await cluster.crash(worker)
        await cluster.expire_crashed()
        await cluster.settled()
        assert await last.lookup(KEYS) == (6, 6)
    assert set(plane(workers[-1]).leases.held) == set(range(cluster.shards))
    assert all(cluster.listed(key) == {workers[-1].worker_id} for key in KEYS)


async def test_shards_go_to_a_better_home_and_the_former_one_keeps_nothing(cluster: Cluster) -> None:
    (first,), (at_first,) = await cluster.pair("a")
    await at_first.save(KEYS)
    await cluster.settled()
    assert len(plane(first).leases.held) == cluster.shards
    late = await cluster.worker("b")
    await cluster.settled()
    assert plane(first).leases.held and plane(late).leases.held, "each has those that it ranks first for"
    assert plane(first).catalog.pages + plane(late).catalog.pages == 6
    at_late = await cluster.engine(late)
    await at_late.finds(KEYS)
    assert await at_late.load(KEYS) == 6


async def test_a_home_that_forgot_a_worker_asks_it_again(cluster: Cluster) -> None:
    """As after a list of members that lagged behind: nothing changes, and yet it heals."""
    (a, b), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    for worker in (a, b):
        plane(worker).catalog.keep_only([])
    assert await at_b.lookup(KEYS) == (0, 0)
    await cluster.settled()
    assert await at_b.lookup(KEYS) == (6, 0)


# --- members come and go ---


async def test_a_worker_whose_lease_expired_comes_back(cluster: Cluster) -> None:
    (a, b), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    leases = {plane(each).member.lease_id for each in (a, b)}
    cluster.clock.advance(MEMBER_TTL_S + 1)
    await until(lambda: not leases & {0, plane(a).member.lease_id, plane(b).member.lease_id})
    await cluster.settled()
    assert await at_b.lookup(KEYS) == (6, 0)
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
    await cluster.leave(a)
    await cluster.settled()
    assert b.peers.statistics()["workers"] == 1 and "0 others" in repr(b.peers)


async def test_a_member_with_an_address_that_is_none_is_told_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    (a, b), (at_a, at_b) = await cluster.pair()
    view = plane(a).view
    odd = type(view.workers[b.worker_id])("odd/1", "odd", "nowhere", 1)
    view.workers[type(b.worker_id)("odd/1")] = odd
    for _ in range(3):
        a.peers._meet()
    assert a.peers.members == {a.worker_id, b.worker_id}
    assert [record.getMessage() for record in caplog.records if "odd/1" in record.getMessage()] == [
        "a member that cannot be reached: address of worker odd/1='nowhere' is not an address; "
        "write unix:/path, host:port or [ipv6]:port"
    ]
    del view.workers[type(b.worker_id)("odd/1")]
    await at_a.save(KEYS)
    await at_b.finds(KEYS)


async def test_ids_and_so_the_homes_come_from_the_seed(cluster: Cluster) -> None:
    await cluster.start_store()
    a, b = await cluster.worker("a"), await cluster.worker("b")
    assert (a.worker_id, b.worker_id) == ("a/d82c07cd", "b/629f6fbe")
    await cluster.settled()
    assert "".join(plane(a).view.shards[shard].worker_id[0] for shard in range(cluster.shards)) == "bbaaabbb"


# --- the store ---


async def test_the_store_goes_away_and_everything_else_goes_on(cluster: Cluster) -> None:
    (a, _), (at_a, at_b) = await cluster.pair()
    lease, held = plane(a).member.lease_id, dict(plane(a).leases.held)
    await cluster.lose_store()
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    assert await at_b.load(KEYS) == 6
    await cluster.found_store()
    assert plane(a).member.lease_id == lease and plane(a).leases.held == held, "as if nothing had been"
    late = await cluster.worker("c")
    await cluster.settled()
    at_late = await cluster.engine(late)
    assert await at_late.load(KEYS) == 6


async def test_homes_whose_leases_could_have_ended_answer_lookups_and_take_no_reports(cluster: Cluster) -> None:
    (a, b), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    await cluster.settled()
    await cluster.lose_store()
    cluster.pass_time(MEMBER_TTL_S)
    assert not plane(a).leases.may_write(cluster.now())
    more = hashes(4, 100)
    assert await at_a.save(more) == 4
    refused = [a.peers.traffic.counters["reports_refused"], b.peers.traffic.counters["reports_refused"]]
    await until(lambda: a.peers.traffic.counters["reports_refused"] > refused[0] + 3)
    assert await at_b.lookup(KEYS) == (6, 0) and await at_b.load(KEYS) == 6
    assert await at_a.lookup(more) == (4, 4), "local pages need nobody"
    assert await at_b.lookup(more) == (0, 0) and not any(map(cluster.listed, more))
    await cluster.found_store()
    await cluster.settled()
    assert await at_b.lookup(more) == (4, 0)
    assert await at_b.load(more, "more") == 4


async def test_a_store_that_lost_everything_is_told_everything(cluster: Cluster) -> None:
    """Under a later life of it: the token of each shard is a higher one."""
    (a, b), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    tokens = {shard: holder.token for shard, holder in plane(a).view.shards.items()}
    await cluster.lose_store()
    for file in (cluster.folder / "store").iterdir():
        file.unlink()
    cluster.life += 1
    await cluster.found_store()
    await cluster.outlive_former_life()
    await cluster.settled()
    assert await at_b.lookup(KEYS) == (6, 0)
    now = {shard: holder.token for shard, holder in plane(b).view.shards.items()}
    assert all(now[shard] > tokens[shard] for shard in range(cluster.shards))


async def test_a_store_of_an_earlier_life_is_not_followed_and_told_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    (a, b), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    await cluster.lose_store()
    for file in (cluster.folder / "store").iterdir():
        file.unlink()
    cluster.life -= 1
    caplog.clear()
    await cluster.start_store()
    await until(lambda: all("earlier life" in str(plane(each).member.store_error) for each in (a, b)))
    assert await at_a.lookup(KEYS) == (6, 6) and set(plane(a).view.workers) == {a.worker_id, b.worker_id}
    tried: set[float] = set()
    await until(lambda: tried.add(plane(a).member._watch_at) or len(tried) > 5)
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) <= 2 and all("earlier life" in each for each in warned), "each worker once at most"
    await cluster.lose_store()
    for file in (cluster.folder / "store").iterdir():
        file.unlink()
    cluster.life += 2
    await cluster.found_store()
    await cluster.outlive_former_life()
    await cluster.settled()
    assert await at_b.lookup(KEYS) == (6, 0)


# --- faults of the network ---


async def test_a_stale_hint_is_asked_about_once_more(faulty: tuple[Cluster, FakeNetwork]) -> None:
    cluster, _ = faulty
    await cluster.start_store()
    homes = [await cluster.worker(name) for name in "abc"]
    owner = await cluster.worker("owner", roles="basic")
    await cluster.settled()
    at_owner, at_b, at_c = [await cluster.engine(worker) for worker in (owner, *homes[1:])]
    await at_owner.save(KEYS)
    await at_c.finds(KEYS)
    await at_c.lookup(KEYS)  # c will read from the owner
    await at_b.save(KEYS)
    await until(lambda: all(len(cluster.listed(key)) == 2 for key in KEYS))
    await cluster.crash(owner)
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
    monkeypatch.setattr(peers, "FIND_TIMEOUT_S", 0.02)
    home = cluster.home(KEYS[2])
    other = next(worker for worker in workers if worker is not home)
    await of(workers, engines, home).save(KEYS)
    await of(workers, engines, other).save(KEYS[:2])
    network.silence(home.address)
    network.cut(home.address)
    at_other = of(workers, engines, other)
    async with asyncio.timeout(2):
        assert await at_other.lookup(KEYS) == (2, 2)
    network.heal(home.address)
    network.cut(home.address)
    await at_other.finds(KEYS)


async def test_an_answer_that_comes_late_harms_nothing(faulty: tuple[Cluster, FakeNetwork]) -> None:
    """The home is slow: the lookup is a miss, its late answer is dropped, and the connection goes on."""
    cluster, _ = faulty
    workers, engines = await cluster.pair()
    home = cluster.home(KEYS[0])
    other = next(worker for worker in workers if worker is not home)
    at_other = of(workers, engines, other)
    await of(workers, engines, home).save(KEYS[:1])
    await at_other.finds(KEYS[:1])
    client = other.peers._clients[home.worker_id]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "FIND_TIMEOUT_S", 0.0)  # over before any answer can come
        failed = other.peers.traffic.counters["finds_failed"]
        assert await at_other.lookup(KEYS[:1]) == (0, 0)
        assert other.peers.traffic.counters["finds_failed"] == failed + 1
    assert await at_other.lookup(KEYS[:1]) == (1, 0)
    assert other.peers._clients[home.worker_id] is client and client.connected


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
