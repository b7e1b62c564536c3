"""A store and workers in this process, on any network, with short intervals and a clock for the leases."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import xxhash

from tensorcast_connector.config import MEMBER_TTL_S, WorkerConfig
from tensorcast_connector.core.placement import home_of_pages
from tensorcast_connector.net import rpc_client
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.transport import Listener, Network
from tensorcast_connector.store import client as store_client
from tensorcast_connector.store.client import Membership
from tensorcast_connector.store.server import serve_store
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.testing.clock import SettableClock
from tensorcast_connector.types import Address
from tensorcast_connector.wire.messages import (
    Acquire,
    Acquired,
    Commit,
    Lookup,
    LookupResult,
    Ok,
    Release,
    Reserve,
    Reserved,
)
from tensorcast_connector.wire.store_messages import (
    ListMembers,
    Members,
)
from tensorcast_connector.worker import peers
from tensorcast_connector.worker.server import Worker, start_worker
from tests.waiting import until

T = 5.0
SPACE = b"k" * 16
PAGE = 5000


def hashes(count: int, start: int = 0) -> list[bytes]:
    """Block hashes that are not each other's."""
    return [number.to_bytes(32, "big") for number in range(start, start + count)]


def content(block_hash: bytes, size: int = PAGE) -> bytes:
    """The bytes of a page, different for every page."""
    return random.Random(block_hash).randbytes(size)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Intervals of milliseconds: the tests wait for what happens then, not for the time."""
    monkeypatch.setattr(store_client, "HEARTBEAT_INTERVAL_S", 0.005)
    monkeypatch.setattr(rpc_client, "RECONNECT_DELAY_MIN_S", 0.002)
    monkeypatch.setattr(rpc_client, "RECONNECT_DELAY_MAX_S", 0.01)
    monkeypatch.setattr(peers, "ANNOUNCE_INTERVAL_S", 0.02)
    monkeypatch.setattr(peers, "ANNOUNCE_RETRY_S", 0.002)
    yield


class Engine:
    """An engine's connection to its worker; writes and reads the worker's arena directly."""

    def __init__(self, worker: Worker, client: RpcClient) -> None:
        self.client = client
        self._worker = worker

    @property
    def arena(self) -> memoryview:
        return self._worker.pages._arena.view

    async def reserve(self, keys: Sequence[bytes], size: int = PAGE) -> list[int]:
        return (await self.client.call(Reserve(SPACE, list(keys), size), Reserved, T)).offsets

    async def save(self, keys: Sequence[bytes], size: int = PAGE) -> int:
        """How many pages were saved that had not been there."""
        digests, saved = [], []
        for key, offset in zip(keys, await self.reserve(keys, size), strict=True):
            if offset >= 0:
                data = content(key, size)
                self.arena[offset : offset + size] = data
                digests.append(xxhash.xxh3_64_intdigest(data))
                saved.append(key)
        await self.client.call(Commit(SPACE, saved, digests), Ok, T)
        return len(saved)

    async def lookup(self, keys: Sequence[bytes], name: str = "l") -> tuple[int, int]:
        got = await self.client.call(Lookup(name, [SPACE], list(keys)), LookupResult, T)
        return got.blocks, got.local_blocks

    async def finds(self, keys: Sequence[bytes]) -> None:
        """Waits until a lookup finds all of them; nothing stays held."""
        async with asyncio.timeout(10):
            while (await self.lookup(keys))[0] != len(keys):  # noqa: ASYNC110 - on another process, as it were
                await asyncio.sleep(0.002)
        await self.release("l")

    async def load(self, keys: Sequence[bytes], name: str = "h") -> int:
        """How many leading pages could be had; asserts that they are the pages' bytes. They stay held."""
        ranges = (await self.client.call(Acquire(name, SPACE, list(keys)), Acquired, T)).ranges
        for key, (offset, length) in zip(keys, ranges, strict=False):
            assert self.arena[offset : offset + length] == content(key, length), "other bytes than were saved"
        return len(ranges)

    async def release(self, *names: str) -> None:
        await self.client.call(Release(list(names)), Ok, T)


class Cluster:
    """Starts and stops everything; `close` asserts the invariants of all that still runs."""

    def __init__(self, network: Network, folder: Path, seed: int = 0) -> None:
        self.network = network
        self.folder = folder
        self.chance = random.Random(seed)
        self.clock = SettableClock(1000)
        self.store_address = Address("tcp", host="127.0.0.1", port=0)
        self.kv: SqliteKv | None = None
        self.workers: list[Worker] = []
        self._listener: Listener | None = None
        self._engines: list[RpcClient] = []

    async def start_store(self) -> None:
        self.kv = SqliteKv(self.folder / "store" / "store.db", self.clock)
        self._listener = await serve_store(self.network, self.store_address, self.kv, "store")
        self.store_address = self._listener.address

    async def stop_store(self) -> None:
        if self._listener is not None and self.kv is not None:
            await self._listener.close()
            await self.kv.close()
            self._listener = self.kv = None

    async def lose_store(self, *memberships: Membership) -> None:
        """Stops it, and waits until these have noticed, which takes them less long than it would."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store_client, "STORE_TIMEOUT_S", 0.05)
            await self.stop_store()
            await until(lambda: all(each._store_lost for each in memberships))

    async def worker(self, name: str, arena_bytes: int = 4 << 20) -> Worker:
        config = WorkerConfig(
            str(self.store_address), name, "127.0.0.1:0", "", str(self.folder / f"{name}.sock"), arena_bytes
        )
        worker = await start_worker(config, self.network, self.chance)
        self.workers.append(worker)
        return worker

    async def pair(self, *names: str) -> tuple[list[Worker], list[Engine]]:
        """Workers that know each other, and an engine at each."""
        await self.start_store()
        workers = [await self.worker(name) for name in names or ("a", "b")]
        await self.settled()
        return workers, [await self.engine(worker) for worker in workers]

    async def engine(self, worker: Worker, name: str = "e") -> Engine:
        client = RpcClient(self.network, worker.socket, "engine", name, self.chance)
        client.start()
        self._engines.append(client)
        await client.wait_connected(T)
        return Engine(worker, client)

    @property
    def home(self) -> Worker:
        ranked = home_of_pages(worker.worker_id for worker in self.workers)
        return next(worker for worker in self.workers if worker.worker_id == ranked)

    def others(self) -> list[Worker]:
        return [worker for worker in self.workers if worker is not self.home]

    async def settled(self) -> None:
        """Every worker knows exactly these workers, is connected to them, and has announced itself to the home."""
        ids = {worker.worker_id for worker in self.workers}

        def done() -> bool:
            return (
                all(
                    worker.peers._members == ids
                    and worker.peers._home == self.home.worker_id
                    and all(client.connected for client in worker.peers._clients.values())
                    for worker in self.workers
                )
                and set(self.home.peers.catalog._held) == ids
            )

        await until(done)

    async def crash(self, worker: Worker) -> None:
        """Ends without a word to the store: its lease stays until it expires."""
        worker.membership._lease_id = 0
        self.workers.remove(worker)
        await worker.close()

    async def expire_crashed(self) -> None:
        """Time passes until leases that nobody renews are over; those of the living are renewed meanwhile."""
        kv = self.kv
        assert kv is not None
        for _ in range(4):
            self.clock.advance(MEMBER_TTL_S / 3)
            await until(
                lambda: all(
                    kv._deadline.get(worker.membership._lease_id, 0) == self.clock() + MEMBER_TTL_S
                    for worker in self.workers
                )
            )

    async def members(self) -> Members:
        client = RpcClient(self.network, self.store_address, "client", "test", self.chance)
        client.start()
        try:
            await client.wait_connected(T)
            return await client.call(ListMembers(), Members, T)
        finally:
            await client.close()

    def check(self) -> None:
        for worker in self.workers:
            worker.pages.check()
            worker.peers.catalog.check()

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()
        self.check()
        for worker in self.workers:
            await until(lambda worker=worker: worker.pages.statistics()["pages_held"] == 0)
            assert worker.pages.statistics()["pages_reserved"] == 0
            await worker.close()
        await self.stop_store()
