"""A worker's membership: registers with the store, keeps its lease alive, and follows who else is there.

While the store is away the last known members stay valid and everything else goes on.
"""

import asyncio
import logging
from collections.abc import Callable

from tensorcast_connector.config import HEARTBEAT_INTERVAL_S, MEMBER_TTL_S, STORE_TIMEOUT_S
from tensorcast_connector.errors import Conflict, NotFound, TensorcastError, Unavailable
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.types import InstanceId, WorkerId
from tensorcast_connector.wire.messages import (
    Alive,
    InstanceRecord,
    KeepAlive,
    LeaseGranted,
    ListMembers,
    Members,
    Ok,
    RegisterInstance,
    RegisterWorker,
    RemoveInstance,
    RevokeLease,
    WorkerRecord,
)

logger = logging.getLogger(__name__)


class Membership:
    """Owner of what this worker knows of the cluster. `on_change(workers)` runs after every change."""

    def __init__(
        self, client: RpcClient, record: WorkerRecord, on_change: Callable[[dict[WorkerId, WorkerRecord]], None]
    ) -> None:
        self._client = client
        self._record = record
        self._on_change = on_change
        self._lease_id = 0
        self._revision = -1
        self._instances: dict[InstanceId, InstanceRecord] = {}
        self._unlisted: set[InstanceId] = set()
        self._task: asyncio.Task[None] | None = None
        self._store_lost = False
        self.workers: dict[WorkerId, WorkerRecord] = {WorkerId(record.worker_id): record}

    async def start(self) -> None:
        """Begins in the background; the worker serves whether or not the store is there."""
        self._client.start()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Leaves the cluster at once instead of by expiry."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._lease_id and self._client.connected:
            try:
                await self._client.call(RevokeLease(self._lease_id), Ok, STORE_TIMEOUT_S)
            except TensorcastError as error:
                logger.info("leaving by expiry: %s", error)
        await self._client.close()

    def add_instance(self, record: InstanceRecord) -> None:
        """Lists an engine with the next heartbeat."""
        self._instances[InstanceId(record.instance_id)] = record
        self._unlisted.add(InstanceId(record.instance_id))

    def remove_instance(self, instance_id: InstanceId) -> None:
        """Takes an engine off the list with the next heartbeat."""
        if self._instances.pop(instance_id, None) is not None:
            self._unlisted.add(instance_id)

    async def _run(self) -> None:
        while True:
            try:
                await self._client.wait_connected(STORE_TIMEOUT_S)
                await self._beat()
                if self._store_lost:
                    self._store_lost = False
                    logger.info("store %s is back", self._client.address)
            except Conflict:
                # Our record from before the store's connection broke; its lease runs out within one ttl.
                logger.info("waiting for the former lease of %s to run out", self._record.worker_id)
            except TensorcastError as error:
                if not self._store_lost:
                    self._store_lost = True
                    logger.warning("store: %s; going on with the members known", error)
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    async def _beat(self) -> None:
        revision = await self._renewed() if self._lease_id else None
        if revision is None:
            granted = await self._client.call(RegisterWorker(self._record, MEMBER_TTL_S), LeaseGranted, STORE_TIMEOUT_S)
            self._lease_id = granted.lease_id
            self._revision = -1  # of another store, maybe
            self._unlisted = set(self._instances)
            logger.info("joined the cluster as %s", self._record.worker_id)
            revision = granted.revision
        for instance_id in list(self._unlisted):
            record = self._instances.get(instance_id)
            request = RegisterInstance(record, self._lease_id) if record else RemoveInstance(instance_id)
            try:
                await self._client.call(request, Ok, STORE_TIMEOUT_S)
            except Unavailable:
                raise
            except TensorcastError as error:
                logger.warning("engine %r is not listed: %s", instance_id[:64], error)
            if self._instances.get(instance_id) is record:  # else it changed meanwhile, and is told again
                self._unlisted.discard(instance_id)
        if revision != self._revision:
            members = await self._client.call(ListMembers(), Members, STORE_TIMEOUT_S)
            self._revision = members.revision
            workers = {WorkerId(each.worker_id): each for each in members.workers}
            if workers != self.workers:
                self.workers = workers
                self._on_change(workers)

    async def _renewed(self) -> int | None:
        """The store's revision; None: the lease expired while we or the store were away."""
        try:
            return (await self._client.call(KeepAlive(self._lease_id), Alive, STORE_TIMEOUT_S)).revision
        except NotFound:
            self._lease_id = 0
            return None
