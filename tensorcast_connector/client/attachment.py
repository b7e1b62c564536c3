"""An engine process attached to its host's worker: the mapped arena and the requests about pages.

Engines are synchronous and must never wait for us, so the connection lives on an event loop in a thread of its own. It
reconnects for ever; while it is down every request fails at once with Unavailable. After a worker's restart the new
arena is mapped before the first request goes out, and old mappings stay valid for those who still copy from them.
"""

import asyncio
import logging
import mmap
import os
import random
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from tensorcast_connector.config import LOAD_TIMEOUT_S, SAVE_TIMEOUT_S, STORE_TIMEOUT_S
from tensorcast_connector.errors import TensorcastError, Unavailable
from tensorcast_connector.net.descriptors import receive_arena
from tensorcast_connector.net.rpc import RpcClient
from tensorcast_connector.net.transport import Network
from tensorcast_connector.types import Address
from tensorcast_connector.wire.messages import (
    Abort,
    Acquire,
    Acquired,
    AttachInstance,
    Commit,
    GetStatistics,
    Lookup,
    LookupResult,
    Message,
    Ok,
    Release,
    Reserve,
    Reserved,
    Statistics,
)

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)
T = TypeVar("T")


@dataclass(frozen=True)
class Mapping:
    """One worker run's arena in our address space."""

    worker_id: str
    memory: memoryview


class Attachment:
    """See the module. All methods may be called from any thread.

    Args:
        network: dials the worker.
        worker: its Unix socket.
        name: who we are, for the worker's log.
        instance: listed in the store while we are connected; None for the helper processes of an engine.
    """

    def __init__(self, network: Network, worker: Address, name: str, instance: AttachInstance | None = None) -> None:
        self._network = network
        self._worker = worker
        self._name = name
        self._instance = instance
        self._mapping: Mapping | None = None
        self._loop = asyncio.new_event_loop()
        self._client: RpcClient | None = None
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="tensorcast", daemon=True)
        self._started = threading.Event()
        self._thread.start()
        self._started.wait()

    def __repr__(self) -> str:
        return f"<Attachment {self._worker} {'up' if self.connected else 'down'}>"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._client = RpcClient(
            self._network, self._worker, "engine", self._name, random.Random(),
            on_connected=self._on_connected, on_disconnected=self._on_disconnected,
        )  # fmt: skip
        self._loop.call_soon(self._client.start)
        self._loop.call_later(2 * STORE_TIMEOUT_S, self._warn_if_never_connected)
        self._loop.call_soon(self._started.set)
        self._loop.run_forever()

    def _warn_if_never_connected(self) -> None:
        if not self.connected and not self._warned:
            self._warned = True
            logger.warning("no worker at %s; serving without the pool until there is one", self._worker)

    async def _on_connected(self, client: RpcClient) -> None:
        descriptor, info = await asyncio.to_thread(receive_arena, self._worker.path, self._name)
        try:
            if info.worker_id != client.server_id:
                raise Unavailable("the worker was restarted meanwhile")
            memory = memoryview(mmap.mmap(descriptor, info.arena_bytes))
        finally:
            os.close(descriptor)
        if self._instance is not None:
            await client.call(self._instance, Ok, STORE_TIMEOUT_S)
        self._mapping = Mapping(info.worker_id, memory)
        self._warned = False
        logger.info("attached to worker %s, arena of %d MiB", info.worker_id, info.arena_bytes >> 20)

    def _on_disconnected(self, error: TensorcastError) -> None:
        self._mapping = None
        if not self._warned:
            self._warned = True
            logger.warning("lost the worker (%s); serving without the pool until it is back", error)

    @property
    def connected(self) -> bool:
        """Whether requests have a chance."""
        return self._client is not None and self._client.connected

    @property
    def mapping(self) -> Mapping:
        """The current arena.

        Raises:
            Unavailable: not attached.
        """
        mapping = self._mapping
        if mapping is None:
            raise Unavailable(f"not attached to {self._worker}")
        return mapping

    def describe(self, instance: AttachInstance) -> None:
        """Changes what is listed about this engine, now and at every reconnect."""
        self._instance = instance
        if self.connected:
            self._forget(self._submit(instance, Ok, STORE_TIMEOUT_S))

    # --- requests ---

    def _submit(self, message: Message, expected: type[M], timeout_s: float) -> "Future[M]":
        assert self._client is not None
        return self._run_on_loop(self._client.call(message, expected, timeout_s))

    def _run_on_loop(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @staticmethod
    def _forget(future: "Future[Any]") -> None:
        # The result is of no use to us, and a failure means that the worker has forgotten us anyway.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def lookup(
        self, lookup_id: str, keyspaces: Sequence[bytes], hashes: Sequence[bytes], timeout_s: float
    ) -> "Future[LookupResult]":
        """How many leading blocks can be had in all keyspaces; those that are local are held under `lookup_id`."""
        return self._submit(Lookup(lookup_id, list(keyspaces), list(hashes)), LookupResult, timeout_s)

    def release(self, hold_ids: Sequence[str]) -> None:
        """Ends holds; never waits, never fails."""
        if hold_ids and self.connected:
            self._forget(self._submit(Release(list(hold_ids)), Ok, STORE_TIMEOUT_S))

    def acquire(self, hold_id: str, keyspace: bytes, hashes: Sequence[bytes], mapping: Mapping) -> list[memoryview]:
        """The leading pages that could be had, in place in the arena and held under `hold_id`. Waits.

        Raises:
            TensorcastError: none could be asked for.
        """
        reply = self._submit(Acquire(hold_id, keyspace, list(hashes)), Acquired, LOAD_TIMEOUT_S).result()
        self._check(mapping)
        return [mapping.memory[offset : offset + length] for offset, length in reply.ranges]

    def reserve(
        self, keyspace: bytes, hashes: Sequence[bytes], page_bytes: int, mapping: Mapping
    ) -> list[memoryview | None]:
        """Memory to write pages into; None: exists already, or no room. Waits.

        Raises:
            TensorcastError: none could be asked for.
        """
        reply = self._submit(Reserve(keyspace, list(hashes), page_bytes), Reserved, SAVE_TIMEOUT_S).result()
        self._check(mapping)
        if len(reply.offsets) != len(hashes):
            raise Unavailable(f"the worker answered {len(reply.offsets)} slots for {len(hashes)} pages")
        return [None if offset < 0 else mapping.memory[offset : offset + page_bytes] for offset in reply.offsets]

    def commit(self, keyspace: bytes, hashes: Sequence[bytes], digests: Sequence[int]) -> None:
        """Makes written pages readable. Waits.

        Raises:
            TensorcastError: they will not be; the worker gives the memory back when the connection ends.
        """
        self._submit(Commit(keyspace, list(hashes), list(digests)), Ok, SAVE_TIMEOUT_S).result()

    def abort(self, keyspace: bytes, hashes: Sequence[bytes]) -> None:
        """Gives reserved pages back; never waits, never fails."""
        if hashes and self.connected:
            self._forget(self._submit(Abort(keyspace, list(hashes)), Ok, STORE_TIMEOUT_S))

    def statistics(self) -> dict[str, Any]:
        """What the worker counts. Waits.

        Raises:
            TensorcastError: it did not answer.
        """
        return self._submit(GetStatistics(), Statistics, STORE_TIMEOUT_S).result().values

    def _check(self, mapping: Mapping) -> None:
        # An answer of a restarted worker speaks of another arena than the one mapped before the question.
        if self._mapping is not mapping:
            raise Unavailable("the worker was restarted meanwhile")

    def close(self) -> None:
        """Detaches; the worker releases everything held and reserved by us."""
        if self._client is not None and self._thread.is_alive():
            try:
                self._run_on_loop(self._client.close()).result(timeout=STORE_TIMEOUT_S)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(timeout=STORE_TIMEOUT_S)
                self._loop.close()
