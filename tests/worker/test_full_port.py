"""Ports full of strangers who say hello at most: those who work get in, and what a living engine holds stays held."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tensorcast_connector.net import admission, rpc_client, sockets
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.worker.server import Worker
from tests.cluster import Cluster, Engine, hashes, plane, quick
from tests.strangers import Strangers
from tests.waiting import until

__all__ = ["quick"]
PLACES = 12


@pytest.fixture
def strangers() -> Iterator[Strangers]:
    """Nobody yet."""
    strangers = Strangers()
    yield strangers
    strangers.leave()


@pytest.fixture
async def cluster(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """On real sockets with few places, where callers ping often and silence is soon too long."""
    monkeypatch.setattr(sockets, "CONNECTIONS_MAX", PLACES)
    monkeypatch.setattr(admission, "SILENCE_MAX_S", 0.3)
    monkeypatch.setattr(rpc_client, "PING_INTERVAL_S", 0.02)
    cluster = Cluster(SocketNetwork(), tmp_path)
    yield cluster
    await cluster.close()


@pytest.fixture
async def engine(cluster: Cluster) -> Engine:
    """Attached to a worker, with pages that it holds."""
    _, [engine] = await cluster.pair("a")
    await engine.save(hashes(3))
    assert await engine.load(hashes(3), "mine") == 3
    return engine


def holds(worker: Worker) -> bool:
    return worker.pages.statistics()["pages_held"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("hello", [False, True], ids=["without a word", "after hello"])
async def test_an_engine_gets_in_and_holds_stay(
    cluster: Cluster, engine: Engine, strangers: Strangers, hello: bool
) -> None:
    [worker] = cluster.workers
    await strangers.come(worker.socket, PLACES - 1, hello)
    await asyncio.sleep(0)
    late = await cluster.engine(worker, "late")
    assert await late.lookup(hashes(3)) == (3, 3) and strangers.closed >= 1
    await late.release("l")
    await strangers.come(worker.socket, 2, hello)
    another = await cluster.engine(worker, "another")
    assert engine.client.connected and holds(worker) and late.client.connected and another.client.connected
    assert await engine.load(hashes(3), "again") == 3, "over the same connection"
    await engine.release("mine", "again")


@pytest.mark.slow
async def test_whoever_asked_on_a_unix_socket_keeps_what_it_holds_however_long_it_stands_still(
    cluster: Cluster, engine: Engine, strangers: Strangers
) -> None:
    """It may be writing to what it has reserved; and it is one of this user's own programs."""
    [worker] = cluster.workers
    await strangers.come(worker.socket, PLACES - 1, ping=True)
    refused = RpcClient(cluster.network, worker.socket, "engine", "late", random.Random(1))
    refused.start()
    await until(lambda: refused._failures > 5)
    await refused.close()
    assert not refused.connected and holds(worker) and engine.client.connected and not strangers.closed
    await engine.release("mine")


@pytest.mark.slow
@pytest.mark.parametrize("which", ["store", "worker"])
@pytest.mark.parametrize("ping", [False, True], ids=["after hello", "after one ping"])
async def test_a_worker_joins_a_cluster_whose_ports_are_full(
    cluster: Cluster, engine: Engine, strangers: Strangers, which: str, ping: bool
) -> None:
    [worker] = cluster.workers
    address = cluster.store_address if which == "store" else worker.address
    await strangers.come(address, PLACES - 1, ping=ping)
    await strangers.come(address, 1, hello=False)
    late = await cluster.worker("b")
    await until(lambda: len(plane(worker).view.workers) == len(plane(late).view.workers) == 2)
    await cluster.settled()
    there = await cluster.engine(late, "late")
    await there.finds(hashes(3))
    assert await there.load(hashes(3)) == 3 and strangers.closed >= 1
    await there.release("h")
    assert holds(worker) and plane(worker).member.store_error is None
    await engine.release("mine")
