"""Every backend of the KV port behind one fixture."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tensorcast_connector.core.cluster import YOUNG
from tensorcast_connector.store.etcd_gateway import Answer
from tensorcast_connector.store.etcd_kv import EtcdKv, open_etcd
from tensorcast_connector.store.incarnation import ensure_incarnation
from tensorcast_connector.store.kv import KvStore
from tensorcast_connector.store.server import prepare
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.testing.clock import SettableClock
from tests.loops import quiet_loop
from tests.store.etcd_servers import EtcdCluster
from tests.store.served import LIFE, SHARDS, Served

__all__ = ["quiet_loop"]
_prefixes = (f"test-{number}/" for number in itertools.count())


class Backend:
    """A store, how it is opened again, and how time goes by for its leases."""

    ttl_s = 10  # of a lease that a test lets run out

    def __init__(self, folder: Path) -> None:
        self.clock = SettableClock(1000)
        self._path = folder / "store" / "store.db"
        self.kv: KvStore = SqliteKv(self._path, self.clock)

    async def reopen(self) -> None:
        await self.kv.close()
        self.kv = SqliteKv(self._path, self.clock)

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    async def close(self) -> None:
        await self.kv.close()


class EtcdBackend(Backend):
    """On a cluster that other tests use too; what a test wrote is removed after it."""

    ttl_s = 1

    def __init__(self, servers: EtcdCluster) -> None:
        self.servers = servers
        self.prefix = next(_prefixes)
        self.kv: EtcdKv

    async def open(self) -> EtcdKv:
        """Another store process on the same keys; the caller closes it."""
        return await open_etcd(self.servers.addresses, self.prefix)

    async def reopen(self) -> None:
        await self.kv.close()
        self.kv = await self.open()

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        start, end = self.kv._span("")
        await self.kv._gateway.call("/v3/kv/deleterange", {"key": start, "range_end": end}, Answer, repeatable=True)
        await self.kv.close()


@pytest.fixture(scope="session", params=["sqlite", "etcd-1", "etcd-3"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster | None]:
    """What the backend needs besides this process, for all tests with it."""
    if request.param == "sqlite":
        yield None
        return
    cluster = EtcdCluster(int(request.param[-1]), tmp_path_factory.mktemp(request.param))
    yield cluster
    cluster.close()


@pytest.fixture
async def backend(servers: EtcdCluster | None, tmp_path: Path) -> AsyncIterator[Backend]:
    """One of each."""
    backend: Backend
    if servers is None:
        backend = Backend(tmp_path)
    else:
        backend = etcd = EtcdBackend(servers)
        etcd.kv = await etcd.open()
    yield backend
    await backend.close()


@pytest.fixture
def kv(backend: Backend) -> KvStore:
    """For tests that never open it again."""
    return backend.kv


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A store over SQLite that nobody has asked anything."""
    served = Served(tmp_path)
    await ensure_incarnation(served.kv, LIFE)
    await served.kv.lease_revoke((await served.kv.range(YOUNG))[1][0].lease_id)  # it has been there for a while
    await prepare(served.kv, SHARDS)
    yield served
    await served.kv.close()
