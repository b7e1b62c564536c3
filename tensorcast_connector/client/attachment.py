"""An engine process attached to its host's worker: the mapped arena and the requests about pages.

Engines are synchronous and must never wait for us, so the connection lives on an event loop in a thread of its own. It
reconnects for ever; while it is down every request fails at once with Unavailable. After a worker's restart the new
arena is mapped before the first request goes out, and old mappings stay valid for those who still copy from them.
"""

import asyncio
import contextlib
import logging
import os
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tensorcast_connector.config import LOAD_TIMEOUT_S, SAVE_TIMEOUT_S, STORE_TIMEOUT_S
from tensorcast_connector.errors import DeadlineExceeded, ProtocolError, TensorcastError, Unavailable
from tensorcast_connector.net.descriptors import receive_arena
from tensorcast_connector.net.mapping import FirstTouch, map_shared
from tensorcast_connector.net.rpc_client import RpcClient
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
from tensorcast_connector.wire.plan_messages import ReportInstance

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Mapping:
    """One worker run's arena in our address space."""

    worker_id: str
    memory: memoryview
    first_touch: FirstTouch = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "first_touch", FirstTouch(self.memory))


class Attachment:
    """See the module. All methods may be called from any thread.

    Args:
        network: dials the worker.
        worker: its Unix socket.
        name: who we are, for the worker's log.
        instance: listed in the store while we are connected; None for the helper processes of an engine.
    """

    def __init__(self, network: Network, worker: Address, name: str, instance: AttachInstance | None = None) -> None:
        self._worker = worker
        self._name = name
        self._instance = instance
        self._mapping: Mapping | None = None
        self._writers = 0  # threads that are writing into reserved memory just now
        self._lock = threading.Lock()  # of these two: the mapping, and its writers
        self._warned = False
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._client = RpcClient(
            network, worker, "engine", name, random.Random(),
            on_connected=self._on_connected, on_disconnected=self._on_disconnected, settle=self._settle,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="tensorcast", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Attachment {self._worker} {'up' if self.connected else 'down'}>"

    def _run(self) -> None:
        """The thread. Whatever ends it, everything that waits for it is told."""
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels what is left at its end
                runner.run(self._serve())
        except BaseException:
            logger.exception("the connection to the worker failed; serving without the pool")
        finally:
            self._mapping = None

    async def _serve(self) -> None:
        self._loop.call_later(2 * STORE_TIMEOUT_S, self._warn_if_never_connected)
        self._client.start()
        try:
            await self._stop.wait()
        finally:
            self._forget_mapping()
            await self._settle()
            await self._client.close()

    def _warn_if_never_connected(self) -> None:
        if not self.connected and not self._warned:
            self._warned = True
            logger.warning("no worker (%s); serving without the pool until there is one", self._client.error)

    async def _on_connected(self, client: RpcClient) -> None:
        descriptor, info = await receive_arena(self._worker.path, self._name)
        try:
            if info.worker_id != client.server_id:
                raise Unavailable("the worker was restarted meanwhile")
            memory = map_shared(descriptor, info.arena_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise Unavailable(f"cannot map the arena of {self._worker}: {error}") from error
        finally:
            os.close(descriptor)
        if self._instance is not None:
            await client.call(self._instance, Ok, STORE_TIMEOUT_S)
        self._mapping = Mapping(info.worker_id, memory)
        self._warned = False
        logger.info("attached to worker %s, arena of %d MiB", info.worker_id, info.arena_bytes >> 20)

    def _forget_mapping(self) -> None:
        with self._lock:
            self._mapping = None

    async def _settle(self) -> None:
        """Until nobody writes any more: the worker gives reserved memory to others once the socket is closed."""
        while self._writers:  # noqa: ASYNC110 - other threads, and one page's copy at most
            await asyncio.sleep(0.0005)

    def _on_disconnected(self, error: TensorcastError) -> None:
        self._forget_mapping()
        if not self._warned and not self._stop.is_set():
            self._warned = True
            logger.warning("lost the worker (%s); serving without the pool until it is back", error)

    @property
    def connected(self) -> bool:
        """Whether requests have a chance."""
        return self._mapping is not None

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

    def still_holds(self, mapping: Mapping) -> bool:
        """Whether the connection that `mapping` came with is up; if not, nothing is held or reserved for us any more."""
        return self._mapping is mapping

    @contextlib.contextmanager
    def writing(self, mapping: Mapping) -> Iterator[None]:
        """Around every copy into reserved memory. However the connection ends, its socket is closed after the copy.

        Raises:
            Unavailable: the connection that `mapping` came with is lost; what was reserved may be somebody else's.
        """
        with self._lock:
            if self._mapping is not mapping:
                raise Unavailable("lost the worker while pages were copied")
            self._writers += 1
        try:
            yield
        finally:
            with self._lock:
                self._writers -= 1

    def describe(self, instance: AttachInstance) -> None:
        """Changes what is listed about this engine, now and at every reconnect."""
        self._instance = instance
        self._tell(instance)

    def report(self, running: int, waiting: int, kv_usage: float | None) -> None:
        """How many requests the engine computes and keeps waiting, how full its KV cache is; never waits, never fails."""
        if self._instance is not None:
            self._tell(ReportInstance("serving", running, waiting, kv_usage))

    # --- requests ---

    def _submit(
        self, message: Message, expected: type[M], timeout_s: float, mapping: Mapping | None = None
    ) -> "Future[M]":
        """Sends from the loop's thread, unless the worker's run is no longer the one that `mapping` belongs to."""
        result: Future[M] = Future()
        if not self._thread.is_alive():
            result.set_exception(Unavailable(f"not attached to {self._worker}"))
            return result

        async def exchange() -> M:
            if mapping is not None and mapping is not self._mapping:
                raise Unavailable("the worker was restarted meanwhile")
            return await self._client.call(message, expected, timeout_s)

        work = exchange()
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop was closed this very moment
            work.close()
            result.set_exception(Unavailable(f"not attached to {self._worker}"))
            return result

    def _ask(self, message: Message, expected: type[M], timeout_s: float, mapping: Mapping | None = None) -> M:
        future = self._submit(message, expected, timeout_s, mapping)
        try:
            return future.result(1.5 * timeout_s)  # the loop's own deadline comes first, while there is a loop
        except CancelledError:
            raise Unavailable("detached from the worker") from None
        except TimeoutError:
            future.cancel()
            raise DeadlineExceeded(f"{self._worker} did not answer within {timeout_s:g} s") from None

    def _tell(self, message: Message) -> None:
        """Never waits, never fails: when it does not arrive, the worker has forgotten us anyway."""
        if self.connected:
            future = self._submit(message, Ok, STORE_TIMEOUT_S)
            future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def lookup(
        self, lookup_id: str, keyspaces: Sequence[bytes], hashes: Sequence[bytes], timeout_s: float
    ) -> "Future[LookupResult]":
        """How many leading blocks can be had in all keyspaces; those that are local are held under `lookup_id`."""
        return self._submit(Lookup(lookup_id, list(keyspaces), list(hashes)), LookupResult, timeout_s)

    def release(self, hold_ids: Sequence[str]) -> None:
        """Ends holds; never waits, never fails."""
        if hold_ids:
            self._tell(Release(list(hold_ids)))

    def acquire(
        self,
        hold_id: str,
        keyspace: bytes,
        hashes: Sequence[bytes],
        mapping: Mapping,
        timeout_s: float | None = None,
    ) -> list[memoryview]:
        """The leading pages that could be had, in place in the arena and held under `hold_id`. Waits.

        Raises:
            TensorcastError: none could be asked for.
        """
        reply = self._ask(Acquire(hold_id, keyspace, list(hashes)), Acquired, timeout_s or LOAD_TIMEOUT_S, mapping)
        return [_range(mapping, offset, length) for offset, length in reply.ranges]

    def reserve(
        self,
        keyspace: bytes,
        hashes: Sequence[bytes],
        page_bytes: int,
        mapping: Mapping,
        timeout_s: float | None = None,
    ) -> list[memoryview | None]:
        """Memory to write pages into; None: exists already, or no room. Waits.

        Raises:
            TensorcastError: none could be asked for.
        """
        try:
            reply = self._ask(
                Reserve(keyspace, list(hashes), page_bytes), Reserved, timeout_s or SAVE_TIMEOUT_S, mapping
            )
        except TensorcastError:
            # The worker may have reserved them all the same, for as long as this connection lives: take it back.
            self.abort(keyspace, hashes)
            raise
        if len(reply.offsets) != len(hashes):
            raise ProtocolError(f"the worker answered {len(reply.offsets)} slots for {len(hashes)} pages")
        slots = [None if offset < 0 else _range(mapping, offset, page_bytes) for offset in reply.offsets]
        mapping.first_touch.write([(offset, page_bytes) for offset in reply.offsets if offset >= 0])
        return slots

    def commit(
        self, keyspace: bytes, hashes: Sequence[bytes], digests: Sequence[int], timeout_s: float | None = None
    ) -> None:
        """Makes written pages readable. Waits.

        Raises:
            TensorcastError: they will not be; the worker gives the memory back when the connection ends.
        """
        self._ask(Commit(keyspace, list(hashes), list(digests)), Ok, timeout_s or SAVE_TIMEOUT_S)

    def abort(self, keyspace: bytes, hashes: Sequence[bytes]) -> None:
        """Gives reserved pages back; never waits, never fails."""
        if hashes:
            self._tell(Abort(keyspace, list(hashes)))

    def statistics(self) -> dict[str, Any]:
        """What the worker counts. Waits.

        Raises:
            TensorcastError: it did not answer.
        """
        return self._ask(GetStatistics(), Statistics, STORE_TIMEOUT_S).values

    def close(self) -> None:
        """Detaches, at once in every state; the worker releases everything held and reserved by us. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ended this very moment
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout=STORE_TIMEOUT_S)


def _range(mapping: Mapping, offset: int, length: int) -> memoryview:
    if not 0 <= offset <= offset + length <= mapping.memory.nbytes:
        raise ProtocolError(f"the worker named {length} bytes at {offset} of an arena of {mapping.memory.nbytes}")
    return mapping.memory[offset : offset + length]
