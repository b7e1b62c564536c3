"""A store and workers in this process, on any network, with short intervals and a clock for the leases."""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import xxhash

from tensorcast_connector.config import MEMBER_TTL_S
from tensorcast_connector.core import fingerprints, leases, member, metadata, reports
from tensorcast_connector.core.metadata import Metadata
from tensorcast_connector.core.placement import shard_of, shard_ranking
from tensorcast_connector.net import rpc_client
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.transport import Listener, Network
from tensorcast_connector.settings import WorkerConfig
from tensorcast_connector.store.incarnation import ensure_incarnation
from tensorcast_connector.store.server import serve_store
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.testing.clock import SettableClock
from tensorcast_connector.types import Address, page_key
from tensorcast_connector.wire.codec import unpack_indexes
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
from tensorcast_connector.worker.server import Worker, start_worker
from tests.waiting import until

T = 5.0
SPACE = b"k" * 16
PAGE = 5000
SHARDS = 8


def hashes(count: int, start: int = 0) -> list[bytes]:
    """Block hashes that are not each other's."""
    return [number.to_bytes(32, "big") for number in range(start, start + count)]


def content(block_hash: bytes, size: int = PAGE) -> bytes:
    """The bytes of a page, different for every page."""
    return random.Random(block_hash).randbytes(size)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Intervals of milliseconds: the tests wait for what happens then, not for the time."""
    intervals_s = {
        (rpc_client, "RECONNECT_DELAY_MIN_S"): 0.002,
        (rpc_client, "RECONNECT_DELAY_MAX_S"): 0.01,
        (member, "HEARTBEAT_INTERVAL_S"): 0.01,
        (leases, "CLAIM_STAGGER_S"): 0.1,  # the best home is always there to claim, if slowly
        (leases, "CLAIM_RETRY_S"): 0.01,
        (leases, "HANDOVER_AFTER_S"): 0.01,
        (reports, "REPORT_INTERVAL_S"): 0.02,
        (reports, "REPORT_RETRY_S"): 0.002,
        (metadata, "ASK_INVENTORY_INTERVAL_S"): 0.02,
    }
    for (module, name), interval_s in intervals_s.items():
        monkeypatch.setattr(module, name, interval_s)
    yield


def located(worker: Worker, key: bytes) -> set[str]:
    """The workers that hold a page, as far as this one lists it."""
    holders, which = plane(worker).catalog.locate(fingerprints.of([key]))
    [number] = unpack_indexes(which)
    return set(holders[number])


def plane(worker: Worker) -> Metadata:
    """The metadata plane of a worker."""
    return worker.peers.metadata


def is_home(worker: Worker) -> bool:
    """Whether it can be the home of shards."""
    return leases.SHARD_HOME in plane(worker).member._record.roles


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
    """Starts and stops everything; `close` asserts the invariants of all that still runs.

    Leases at the store run out when a test moves `clock`. The workers' own clock runs, and a test can move it ahead.
    """

    def __init__(self, network: Network, folder: Path, seed: int = 0, shards: int = SHARDS) -> None:
        self.network = network
        self.folder = folder
        self.shards = shards
        self.chance = random.Random(seed)
        self.clock = SettableClock(1000)
        self.ahead_s = 0.0
        self.life = 5  # of a store that is started with an empty database
        self.store_address = Address("tcp", host="127.0.0.1", port=0)
        self.kv: SqliteKv | None = None
        self.workers: list[Worker] = []
        self._stores: list[Listener] = []
        self._engines: list[RpcClient] = []

    def now(self) -> float:
        """The workers' clock."""
        return time.monotonic() + self.ahead_s

    async def start_store(self) -> None:
        """With its database as it was left."""
        self.kv = SqliteKv(self.folder / "store" / "store.db", self.clock)
        await ensure_incarnation(self.kv, self.life)
        self.store_address = await self.another_store(self.store_address)

    async def another_store(self, address: Address | None = None) -> Address:
        """One more store process on the same database; its address."""
        assert self.kv is not None
        address = address or Address("tcp", host="127.0.0.1", port=0)
        listener = await serve_store(self.network, address, self.kv, "store", self.shards)
        self._stores.append(listener)
        return listener.address

    async def stop_one_store(self, address: Address) -> None:
        """The others on its database go on."""
        [listener] = [each for each in self._stores if each.address == address]
        self._stores.remove(listener)
        await listener.close()

    async def stop_store(self) -> None:
        """All of it."""
        for listener in list(self._stores):
            await self.stop_one_store(listener.address)
        if self.kv is not None:
            await self.kv.close()
            self.kv = None

    async def lose_store(self) -> None:
        """Stops it, and waits until all workers have noticed."""
        await self.stop_store()
        await until(lambda: all(plane(worker).member.store_error for worker in self.workers))

    async def found_store(self) -> None:
        """Starts it, and waits until all workers have noticed."""
        await self.start_store()
        await until(lambda: not any(plane(worker).member.store_error for worker in self.workers))

    async def worker(
        self, name: str, arena_bytes: int = 4 << 20, roles: str = "basic,gateway,shard-home", stores: Sequence[Address] = (),
        artifact_bytes: int = 64 << 20, devices: str = "", device_bytes: int = 64 << 20,
    ) -> Worker:  # fmt: skip
        """A worker; `stores` are those it knows, the one there is unless told."""
        config = WorkerConfig(
            store=",".join(map(str, stores or [self.store_address])), name=name, listen="127.0.0.1:0",
            socket=str(self.folder / f"{name}.sock"), arena_bytes=arena_bytes, roles=roles,
            artifact_bytes=artifact_bytes, devices=devices, device_bytes=device_bytes,
        )  # fmt: skip
        worker = await start_worker(config, self.network, self.chance, self.now)
        self.workers.append(worker)
        return worker

    async def pair(self, *names: str, devices: str = "") -> tuple[list[Worker], list[Engine]]:
        """Workers that know each other, and an engine at each."""
        await self.start_store()
        workers = [await self.worker(name, devices=devices) for name in names or ("a", "b")]
        await self.settled()
        return workers, [await self.engine(worker) for worker in workers]

    async def engine(self, worker: Worker, name: str = "e") -> Engine:
        client = RpcClient(self.network, worker.socket, "engine", name, self.chance)
        client.start()
        self._engines.append(client)
        await client.wait_connected(T)
        return Engine(worker, client)

    # --- who is the home of what ---

    def home(self, block_hash: bytes) -> Worker:
        """Of the shard of this page, when all is settled: the worker that ranks first for it."""
        return self.at(shard_of(block_hash, self.shards))

    def at(self, shard: int) -> Worker:
        """The worker that ranks first for this shard."""
        best = shard_ranking(shard, [worker.worker_id for worker in self.workers if is_home(worker)])[0]
        return next(worker for worker in self.workers if worker.worker_id == best)

    def listed(self, block_hash: bytes) -> set[str]:
        """The workers that hold this page according to its home."""
        return located(self.home(block_hash), page_key(SPACE, block_hash))

    async def settled(self) -> None:
        """All workers agree on who is there and who is the home of what, are connected, and have reported everything.

        And nothing is about to change: every shard is where it belongs.
        """
        try:
            await until(lambda: not self._unsettled())
        except TimeoutError:
            raise AssertionError(f"not settled: {self._unsettled()}") from None

    def _unsettled(self) -> str:
        ids = {worker.worker_id for worker in self.workers}
        homes = {shard: self.at(shard) for shard in range(self.shards)} if any(map(is_home, self.workers)) else {}
        best = {shard: home.worker_id for shard, home in homes.items()}
        for worker in self.workers:
            mine, view = plane(worker), plane(worker).view
            if set(view.workers) != ids or worker.peers.members != ids:
                return f"{worker.worker_id} knows {sorted(view.workers)}"
            if not all(client.connected for client in worker.peers._clients.values()):
                return f"{worker.worker_id} is not connected to everybody"
            if (known := {shard: holder.worker_id for shard, holder in view.shards.items()}) != best:
                return f"{worker.worker_id} sees shards at {known} instead of {best}"
            leases = {each.worker_id: plane(each).member.lease_id for each in self.workers}
            if former := {shard for shard, each in view.shards.items() if each.lease_id != leases[each.worker_id]}:
                return f"{worker.worker_id} sees shards {sorted(former)} under leases that have ended"
            if set(mine.catalog.held) != {shard for shard, home in best.items() if home == worker.worker_id}:
                return f"{worker.worker_id} holds {sorted(mine.catalog.held)}"
            if {shard: mine.homes.home(shard) for shard in best} != best:
                return f"{worker.worker_id} asks others than {best}"
        for shard, home in homes.items():
            there = {
                worker.worker_id: {key for key in worker.pages.inventory() if shard_of(key, self.shards) == shard}
                for worker in self.workers
            }
            listed = plane(home).catalog.holdings()[shard]
            if listed != {worker: set(fingerprints.of(list(keys)).tolist()) for worker, keys in there.items()}:
                return f"{home.worker_id} lists {listed} of shard {shard}, and there is {there}"
        return ""

    # --- faults ---

    async def crash(self, worker: Worker) -> None:
        """Ends without a word to the store: its lease stays until it expires."""
        plane(worker).leases.lost()
        self.workers.remove(worker)
        await worker.close()

    async def leave(self, worker: Worker) -> None:
        """Ends as it should."""
        self.workers.remove(worker)
        await worker.close()

    async def expire_crashed(self) -> None:
        """Time passes until leases that nobody renews are over; those of the living are renewed meanwhile."""
        kv = self.kv
        assert kv is not None
        for _ in range(4):
            self.clock.advance(MEMBER_TTL_S / 3)
            end = self.clock() + MEMBER_TTL_S
            await until(
                lambda end=end: all(kv._deadline.get(plane(each).member.lease_id) == end for each in self.workers)
            )

    async def outlive_former_life(self) -> None:
        """Time passes at a store that has lost everything, until nobody can believe in what it had granted."""
        await until(lambda: all(plane(worker).view.restored for worker in self.workers))
        await self.expire_crashed()

    def pass_time(self, seconds: float) -> None:
        """On the workers' clock."""
        self.ahead_s += seconds
        for worker in self.workers:
            worker.peers.wake()

    def check(self) -> None:
        for worker in self.workers:
            worker.pages.check()
            worker.devices.table.check()
            plane(worker).check()

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()
        self.check()
        for worker in self.workers:
            await until(lambda worker=worker: worker.pages.statistics()["pages_held"] == 0)
            assert worker.pages.statistics()["pages_reserved"] == 0
            await worker.close()
        await self.stop_store()
