"""A store on a database of its own, and what people ask it."""

from pathlib import Path
from typing import Any

from tensorcast_connector.core.cluster import ClusterView
from tensorcast_connector.store.server import Store
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.testing.clock import SettableClock
from tensorcast_connector.wire.messages import Message
from tensorcast_connector.wire.store_messages import (
    Changes,
    InstanceRecord,
    LeaseGranted,
    RegisterWorker,
    ReplicaRecord,
    Watch,
    WorkerRecord,
)

TTL_S = 6
LIFE = 7
SHARDS = 64
ROLES = ("basic", "shard-home")


class Served:
    """A store on a database, and what people ask it."""

    def __init__(self, folder: Path) -> None:
        self.clock = SettableClock(1000)
        self.kv = SqliteKv(folder / "store" / "store.db", self.clock)
        self.store = Store(self.kv, "store")

    async def ask(self, message: Message, store: Store | None = None) -> Any:
        return await (store or self.store).handle(message)

    async def join(self, worker_id: str = "a/1", ttl_s: int = TTL_S) -> int:
        """The lease of a new worker."""
        reply = await self.ask(RegisterWorker(record(worker_id), ttl_s))
        assert isinstance(reply, LeaseGranted)
        return reply.lease_id

    async def watch(self, after: int = 0, life: int = 0, wait_ms: int = 0) -> Changes:
        changes = await self.ask(Watch(life, after, wait_ms))
        assert isinstance(changes, Changes)
        return changes

    async def view(self) -> ClusterView:
        """Everything there is."""
        view = ClusterView()
        view.apply(await self.watch())
        view.check()
        return view

    async def revision(self) -> int:
        return await self.kv.revision()


def record(worker_id: str = "a/1", address: str = "h:1") -> WorkerRecord:
    return WorkerRecord(worker_id, worker_id.split("/")[0], address, 1 << 20, 2, ROLES)


def instance(name: str, worker_id: str = "a/1") -> InstanceRecord:
    return InstanceRecord(name, worker_id, "vllm", "m", "n")


def replica(artifact_id: str, worker_id: str = "a/1") -> ReplicaRecord:
    return ReplicaRecord(artifact_id, worker_id, "memory", 5)
