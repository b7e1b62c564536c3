"""The story of a page as the workers it passed through tell it, over the wire."""

import itertools
import time
from datetime import UTC, datetime

import pytest

from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.types import Address
from tensorcast_connector.wire.messages import GetStory, Story
from tensorcast_connector.worker.server import Worker
from tests.cluster import Cluster, T, hashes
from tests.waiting import until

PAGE = bytes.fromhex("c0ffee") + bytes(29)
KEYS = [*hashes(3), PAGE]


async def story(cluster: Cluster, address: Address, text: str) -> list[str]:
    """The lines about `text` without their times."""
    client = RpcClient(cluster.network, address, "client", "test", cluster.chance)
    client.start()
    try:
        await client.wait_connected(T)
        lines = (await client.call(GetStory(text), Story, T)).lines
    finally:
        await client.close()
    for line in lines:
        at = datetime.strptime(line.split("  ")[0], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
        assert 0 <= time.time() - at.timestamp() < 60, "wall time"
    return [line.split("  ", 1)[1] for line in lines]


def heads(lines: list[str]) -> list[str]:
    """What happened and to whom."""
    return [line.split(",")[0] for line in lines]


@pytest.mark.slow
async def test_a_page_that_is_saved_at_one_worker_and_loaded_at_another(cluster: Cluster) -> None:
    (a, b), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS)
    await cluster.settled()
    assert await at_b.lookup(KEYS, "req-1") == (4, 0)
    assert await at_b.load(KEYS, "req-1") == 4
    await at_b.release("req-1")
    await cluster.settled()
    for address in (a.address, a.socket):
        told = await story(cluster, address, "C0FFEE")
        assert heads(told)[:2] == ["reserve", "commit"] and heads(told)[-1] in ("sent", "told b/" + b.worker_id[2:])
        assert all("page 4 of 4 (c0ffee0000000000)" in line for line in told[:1])
    home = cluster.home(PAGE)
    report = await story(cluster, a.address, "report answered")
    assert any(home.worker_id in line and "held; applied" in line for line in report)
    told = heads(await story(cluster, b.address, "c0ffee"))
    mine = [line for line in told if not line.startswith(("report", "told"))]
    assert mine == [
        "hold req-1", "located req-1", "hold req-1", f"fetch {a.worker_id}", f"fetched {a.worker_id}",
    ]  # fmt: skip
    assert any(f", {a.worker_id}" in line for line in await story(cluster, b.address, "located"))
    assert [line for line in await story(cluster, b.address, "fetched") if line.endswith("arrived")]
    assert heads(await story(cluster, b.address, "req-1"))[-1] == "release req-1"
    if home is b:
        assert f"told {a.worker_id}" in told, "a has told b that it has the page"
    other = await story(cluster, b.address, "c0ffef")
    assert other == []


@pytest.mark.slow
async def test_why_a_page_was_missed(cluster: Cluster) -> None:
    """Its holder has evicted it since it was located."""
    (a, b), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS, 1 << 20)
    await at_b.finds(KEYS)
    await at_b.lookup(KEYS, "req-2")
    await at_a.save(hashes(4, 100), 1 << 20)
    assert await at_b.load(KEYS, "req-2") == 0
    assert "evict" in heads(await story(cluster, a.address, "c0ffee"))
    fetched = [line for line in await story(cluster, b.address, "c0ffee") if line.startswith("fetched")]
    assert fetched and fetched[0].endswith("gone")
    sent = [line for line in await story(cluster, a.address, "c0ffee") if line.startswith("sent")]
    assert sent and sent[0].endswith("were gone")


@pytest.mark.slow
async def test_shards_that_move(cluster: Cluster) -> None:
    await cluster.start_store()
    a = await cluster.worker("a")
    await cluster.settled()
    b = await cluster.worker("b")
    await cluster.settled()
    moved = next(shard for shard in range(cluster.shards) if cluster.at(shard) is b)
    stayed = next(shard for shard in range(cluster.shards) if cluster.at(shard) is a)

    async def of(worker: Worker, shard: int) -> list[str]:
        return [line for line in heads(await story(cluster, worker.address, f"shard {shard}")) if "shards" in line]

    await until(lambda: a.peers.log.counters["shards_lost"] and b.peers.log.counters["shards_gained"])
    gained, lost = ([f"shards {what} {each.worker_id}" for each in (a, b)] for what in ("gained", "lost"))
    # On a machine that stands still for longer than a lease a home loses shards and gains them again in between.
    for worker, shard, first, last in (
        (a, moved, gained[0], lost[0]),
        (b, moved, gained[1], gained[1]),
        (a, stayed, gained[0], gained[0]),
    ):
        told = await of(worker, shard)
        assert (told[0], told[-1]) == (first, last)
        assert all(one != other for one, other in itertools.pairwise(told)), "gained and lost in turns"
    # Unless a has reported before b came to ask.
    asks = f"ask inventory {a.worker_id}" in heads(await story(cluster, b.address, f"shard {moved}"))
    asked = f"asked for inventory {b.worker_id}" in heads(await story(cluster, a.address, f"shard {moved}"))
    assert asks == asked
