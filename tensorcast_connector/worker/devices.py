"""Artifacts in the memory of devices (VRAM replicas), which a child process of this worker owns; engines copy from there.

The child is started anew when it dies, and what it had is forgotten: a replica is a copy of what is elsewhere, and nobody relies
on it. What goes when is decided in core/replicas.py.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Any

from tensorcast_connector.config import DEVICE_RESTART_MAX_S, DEVICE_RESTART_MIN_S, DEVICE_STAYS_S
from tensorcast_connector.core.cluster import ClusterView
from tensorcast_connector.core.replicas import Replica, Replicas
from tensorcast_connector.errors import NotFound, TensorcastError, Unavailable
from tensorcast_connector.wire.caller_messages import ReplicaListed, ReplicaOpened
from tensorcast_connector.worker.artifacts import Copy
from tensorcast_connector.worker.device_process import DeviceProcess

logger = logging.getLogger(__name__)


class Devices:
    """See the module. Without devices there is no child, and everything is refused.

    Args:
        names: of the devices, as the child counts them.
        bytes_max: of replicas on each.
        view: of the cluster; kept current by somebody else, who calls `reconcile`.
        now: this worker's clock in seconds.
        start: a child that has these devices.
    """

    def __init__(
        self, names: Sequence[str], bytes_max: int, view: ClusterView, now: Callable[[], float],
        start: Callable[[Sequence[str]], Awaitable[DeviceProcess]] = DeviceProcess.start,
    ) -> None:  # fmt: skip
        self.table = Replicas(names, bytes_max)
        self._view = view
        self._now = now
        self._start = start
        self._process: DeviceProcess | None = None
        self._why = "it is not started yet"
        self._keeper: asyncio.Task[None] | None = None
        self._making: dict[tuple[str, str], asyncio.Task[Replica]] = {}
        self._freeing: set[asyncio.Task[None]] = set()
        self._seen: set[str] = set()  # artifacts with replicas that the view has had
        self.counters = {"made": 0, "opened": 0, "restarts": 0}

    def __repr__(self) -> str:
        return f"<Devices {self.table}, {self._process or self._why}>"

    @property
    def process(self) -> DeviceProcess | None:
        """The child, while there is one."""
        return self._process

    # --- the child ---

    async def start(self) -> None:
        """Starts it, if there are devices.

        Raises:
            ConfigError: there is no such device, or no driver.
            TensorcastError: it does not come up otherwise.
        """
        if self.table.devices:
            self._process = await self._start(self.table.devices)
            self._tell(self._process)
            self._keeper = asyncio.get_running_loop().create_task(self._keep())

    @staticmethod
    def _tell(process: DeviceProcess) -> None:
        for each in process.devices:
            logger.info("device %s (%s): %.1f of %.1f GB are free", each.name, each.identity, each.free_bytes / 1e9,
                        each.total_bytes / 1e9)  # fmt: skip

    async def _keep(self) -> None:
        """Starts it anew whenever it has died, later each time if it does not stay."""
        delay_s = DEVICE_RESTART_MIN_S
        while True:
            if self._process is not None:
                begun = self._now()
                why = await asyncio.shield(self._process.gone)
                if self._now() - begun >= DEVICE_STAYS_S:
                    delay_s = DEVICE_RESTART_MIN_S
                await self._lost(self._process, why)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, DEVICE_RESTART_MAX_S)
            try:
                process = await self._start(self.table.devices)
            except TensorcastError as error:
                self._why = str(error)
                logger.warning("the owner of device memory does not come up: %s; tried again in %.1f s", error, delay_s)
                continue
            except Exception:  # a fault of our own is no reason to do without devices for ever
                self._why = "it cannot be started"
                logger.exception("the owner of device memory cannot be started; tried again in %.1f s", delay_s)
                continue
            self.counters["restarts"] += 1
            self._process = process
            self._tell(process)

    async def _lost(self, process: DeviceProcess, why: str) -> None:
        self._process, self._why = None, why
        lost = self.table.lose()
        logger.warning(
            "the owner of device memory has died (%s), and with it %d replica(s); it is started anew", why, lost
        )
        await process.end()

    def _running(self) -> DeviceProcess:
        if self._process is None or not self._process.alive:
            raise Unavailable(f"the owner of device memory does not run just now: {self._why}")
        return self._process

    # --- making ---

    async def make(self, artifact: str, device: str, copy: Copy) -> Replica:
        """A replica of an artifact that is here; the one that there is, if so.

        Raises:
            InvalidArgument: there is no such device, or it is larger than what replicas may have.
            Exhausted: what is there is in use, or the device has no room.
            Unavailable: the owner of the device's memory is away.
            NotFound: the artifact was deleted meanwhile.
        """
        self.table.check_device(device)
        if (found := self.table.find(artifact, device)) is not None:
            return found
        key = artifact, device
        if key not in self._making:
            task = self._making[key] = asyncio.get_running_loop().create_task(self._make(artifact, device, copy))
            task.add_done_callback(lambda done: self._made(key, done))
        return await asyncio.shield(self._making[key])  # it outlives the one that began it

    def _made(self, key: tuple[str, str], task: "asyncio.Task[Replica]") -> None:
        del self._making[key]
        if not task.cancelled():
            task.exception()  # whoever waits for it gets it

    async def _make(self, artifact: str, device: str, copy: Copy) -> Replica:
        process = self._running()
        descriptor = os.dup(copy.blob.descriptor)  # it may be evicted here meanwhile
        try:
            replica, gone = self.table.reserve(artifact, device, copy.header.size)
            try:
                await self._free(process, gone)
                handle = await process.make(replica.number, device, copy.header.size, descriptor)
            except BaseException:
                self.table.freed(replica.number)
                raise
        finally:
            os.close(descriptor)
        if not self.table.filled(replica.number, handle, copy.encoded):
            await self._free(process, [replica])
            raise NotFound(f"artifact {artifact} was deleted, or the owner of device memory has died, meanwhile")
        self.counters["made"] += 1
        return replica

    async def _free(self, process: DeviceProcess, replicas: Iterable[Replica]) -> None:
        for each in replicas:
            try:
                await process.free(each.number)
            except TensorcastError as error:
                logger.info("replica %d of %s: %s", each.number, each.artifact, error)
            self.table.freed(each.number)

    def _free_soon(self, replicas: Sequence[Replica]) -> None:
        if replicas and self._process is not None:
            task = asyncio.get_running_loop().create_task(self._free(self._process, replicas))
            self._freeing.add(task)
            task.add_done_callback(self._freeing.discard)

    # --- using ---

    def open(self, opener: Hashable, artifact: str, device: str) -> ReplicaOpened:
        """Holds a replica for `opener`.

        Args:
            device: its name here, or its identity.

        Raises:
            NotFound: there is none.
            Unavailable: the owner of device memory is away.
        """
        if not self.table.devices:
            raise NotFound("the worker has no devices (--devices)")
        process = self._running()
        name = next((each.name for each in process.devices if device in (each.name, each.identity)), "")
        found = self.table.find(artifact, name)
        if found is None:
            where = name or f"{device[:80]}, which is none of the worker's devices"
            raise NotFound(f"there is no replica of it on {where}")
        self.table.open(found.number, opener)
        self.counters["opened"] += 1
        return ReplicaOpened(artifact, found.header, found.number, name, found.handle)

    def close_replica(self, opener: Hashable, number: int) -> None:
        """Ends that.

        Raises:
            NotFound: it has gone meanwhile, so what was read of it is nothing.
        """
        gone = self.table.close(number, opener)
        if self._process is None or not self._process.alive:
            raise NotFound(f"replica {number} has gone: the process that owned it has died")
        self._free_soon(gone)

    def end_session(self, opener: Hashable) -> None:
        """Whoever that was has gone."""
        self._free_soon(self.table.end(opener))

    def listed(self, artifact: str) -> list[ReplicaListed]:
        """The replicas of an artifact that can be opened."""
        return [
            ReplicaListed(each.device, each.size, sum(each.openers.values())) for each in self.table.listed(artifact)
        ]

    def reconcile(self) -> None:
        """The view has changed: forgets replicas of what was deleted."""
        there = self.table.artifacts
        known = {each for each in there if each in self._view.artifact_ids}
        for artifact in (there & self._seen) - known:
            self._free_soon(self.table.forget(artifact))
        self._seen = known

    def statistics(self) -> dict[str, Any]:
        """Counts for people and metrics."""
        return {f"device_replicas_{name}": count for name, count in self.counters.items()}

    async def close(self) -> None:
        """Ends the child, and with it everything on devices."""
        tasks = [*self._making.values(), *self._freeing, *([self._keeper] if self._keeper is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        process, self._process, self._why = self._process, None, "the worker ends"
        self.table.lose()
        if process is not None:
            await process.end()
