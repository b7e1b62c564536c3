"""One worker among the others: connections to the store and to them, and the metadata plane's messages.

Decisions are in core/metadata; this module carries what it says and tells it the time.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence

from tensorcast_connector.config import (
    FETCH_CONNECTIONS_PER_PEER,
    FIND_TIMEOUT_S,
    HEARTBEAT_INTERVAL_S,
    PUMP_INTERVAL_MAX_S,
    STORE_TIMEOUT_S,
    parse_address,
)
from tensorcast_connector.core.lookup import Ask, Lookup
from tensorcast_connector.core.member import Listed, StoreCall, refused
from tensorcast_connector.core.metadata import ANSWERS, Call, Metadata, PeerCall
from tensorcast_connector.core.placement import choose_source
from tensorcast_connector.errors import ConfigError, DeadlineExceeded, ProtocolError, TensorcastError, Unavailable
from tensorcast_connector.net.bulk import BulkClient
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.transport import Network
from tensorcast_connector.types import Address, WorkerId
from tensorcast_connector.wire.messages import Message, Ok, PagesFound, in_version
from tensorcast_connector.wire.store_messages import RevokeLease, WorkerRecord
from tensorcast_connector.worker.fetches import Fetches
from tensorcast_connector.worker.links import Lane, StepLanes, without_service
from tensorcast_connector.worker.pages import Pages
from tensorcast_connector.worker.recorder import Record, unrecorded
from tensorcast_connector.worker.state_log import StateLog
from tensorcast_connector.worker.traffic import Traffic

logger = logging.getLogger(__name__)


class Peers:
    """An `Elsewhere`. Owns the metadata plane and all connections to others.

    Args:
        me: this worker as it is listed.
        stores: addresses of store processes of one cluster.
        now: this worker's clock, see core/leases.
        record: for the stories.
    """

    def __init__(
        self, me: WorkerRecord, pages: Pages, network: Network, stores: Sequence[Address], chance: random.Random,
        now: Callable[[], float], record: Record = unrecorded,
    ) -> None:  # fmt: skip
        self._id = WorkerId(me.worker_id)
        self._pages = pages
        self._network = network
        self._chance = chance
        self.now = now
        self._store = RpcClient(network, stores, "worker", me.worker_id, chance, on_connected=self._store_connected)
        self._store_for_callers = RpcClient(network, stores, "worker", me.worker_id, chance)
        self._store_lane = Lane(
            self._store_for_callers,
            self._store,
            another=True,
            explain=lambda error: self.log.store_away(error, self.now()),
        )
        self._clients: dict[WorkerId, RpcClient] = {}
        self._bulk: dict[WorkerId, BulkClient] = {}
        self._lanes: dict[WorkerId, StepLanes] = {}  # to those that have done steps
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumping: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._fetches = Fetches(pages, record)
        self._without_address: set[WorkerId] = set()  # members whose address is none; the log has been told
        self.record = record
        self.on_view: list[Callable[[], None]] = []  # called when the view of the cluster may have changed
        self.metadata = Metadata(me, pages)
        self.log = StateLog(self.metadata, record)
        self.traffic = Traffic(record)

    def __repr__(self) -> str:
        return f"<Peers of {self._id}: {len(self._clients)} others>"

    def start(self) -> None:
        """Joins the cluster in the background; the worker serves whether or not the store is there."""
        self._store.start()
        self._store_for_callers.start()
        self._pumping = asyncio.get_running_loop().create_task(self._pump())

    async def leave(self) -> None:
        """Leaves the cluster at once instead of by expiry. Pages can still be read."""
        if self._pumping is not None:
            self._pumping.cancel()
            await asyncio.gather(self._pumping, return_exceptions=True)
        lease_id = self.metadata.member.lease_id
        if lease_id and self._store.connected:
            try:
                await self._store.call(RevokeLease(lease_id), Ok, STORE_TIMEOUT_S)
            except TensorcastError as error:
                logger.info("leaving by expiry: %s", error)
        await asyncio.gather(self._store.close(), self._store_for_callers.close())

    async def close(self) -> None:
        """Closes all connections; fetches under way fail."""
        for worker_id in list(self._clients):
            self._disconnect(worker_id)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- the metadata plane ---

    async def _pump(self) -> None:
        """Sends what the metadata plane wants to send, when it wants to."""
        with contextlib.suppress(TensorcastError):  # what it first wants is the store
            await self._store.wait_connected(HEARTBEAT_INTERVAL_S)
        while True:
            self._wake.clear()
            now = self.now()
            wait_s = PUMP_INTERVAL_MAX_S
            try:
                for call in self.metadata.poll(now):
                    self._send(call)
                self.log.tell(self._clients, str(self._store.address), now)
                wait_s = min(max(self.metadata.wake_at() - now, 0.0), PUMP_INTERVAL_MAX_S)
            except Exception:  # a fault of our own must not end this worker's membership without a word
                logger.exception("the metadata plane failed; going on")
                self._wake.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def wake(self) -> None:
        """Something was told to the metadata plane: it may have something to send."""
        self._wake.set()

    async def _store_connected(self, _: RpcClient) -> None:
        self.metadata.member.connected(self.now())
        self.wake()

    async def _connected(self, _: RpcClient) -> None:
        self.wake()

    def _send(self, call: Call) -> None:
        self.traffic.sent(call)
        if isinstance(call, PeerCall) and call.to == self._id:
            self._finish(call, self.metadata.serve(call.message, self.now()))
        else:
            self._spawn(self._exchange(call))

    async def _exchange(self, call: Call) -> None:
        client = self._store if isinstance(call, StoreCall) else self._clients.get(call.to)
        try:
            if client is None:
                raise Unavailable("it has left")
            message = in_version(client.version, call.message)
            reply = await client.call(message, ANSWERS.get(type(call.message), Ok), call.timeout_s)
        except TensorcastError as error:
            logger.debug("%s failed: %s", type(call.message).__name__, error)
            if isinstance(call, StoreCall):
                if isinstance(error, Unavailable):
                    self._store.try_another(error)
                if refused(call, error) and call.about is not None:
                    logger.warning("%s is not listed: %s", call.about[0], error)
            self.metadata.failed(call, error, self.now())
            self.traffic.failed(call, error)
            self.wake()
        else:
            self._finish(call, reply)

    def _finish(self, call: Call, reply: Message) -> None:
        self.traffic.answered(call, reply)
        try:
            self.metadata.answered(call, reply, self.now())
        except TensorcastError as error:
            logger.debug("%s", error)  # which member.store_error says as well
        if isinstance(call, StoreCall):
            self._meet()
            for tell in self.on_view:
                tell()
        self.wake()

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def add(self, record: Listed) -> None:
        """Lists an engine of this host, or a copy of an artifact, at the store."""
        self.metadata.member.add(record)
        self.wake()

    def remove(self, record: Listed) -> None:
        """Takes it off the list."""
        self.metadata.member.remove(record)
        self.wake()

    # --- who is there ---

    @property
    def members(self) -> set[WorkerId]:
        """The workers known, this one among them."""
        return {self._id, *self._clients}

    def states(self) -> dict[str, int]:
        """How many of the other workers listed are connected, connecting, and unreachable."""
        apart = {worker_id for worker_id, client in self._clients.items() if not client.connected}
        unreachable = len(apart & self.log.unreachable) + len(self._without_address)
        return {
            "connected": len(self._clients) - len(apart),
            "connecting": len(apart - self.log.unreachable),
            "unreachable": unreachable,
        }

    def _meet(self) -> None:
        """Connects to who is new, forgets who left."""
        workers = self.metadata.view.workers
        self._without_address &= set(workers)
        for gone in set(self._clients) - set(workers):
            self._disconnect(gone)
        for worker_id, record in workers.items():
            if worker_id != self._id and worker_id not in self._clients and worker_id not in self._without_address:
                self._connect(worker_id, record)

    def _connect(self, worker_id: WorkerId, record: WorkerRecord) -> None:
        try:
            address = parse_address(record.address, f"address of worker {worker_id}")
        except ConfigError as error:
            self._without_address.add(worker_id)
            logger.warning("a member that cannot be reached: %s", error)
            return
        client = RpcClient(self._network, address, "worker", self._id, self._chance, on_connected=self._connected)
        client.start()
        self._clients[worker_id] = client
        self._bulk[worker_id] = BulkClient(self._network, address, self._id, FETCH_CONNECTIONS_PER_PEER)

    def _disconnect(self, worker_id: WorkerId) -> None:
        self._bulk.pop(worker_id).close()
        self._spawn(self._clients.pop(worker_id).close())
        if (lanes := self._lanes.pop(worker_id, None)) is not None:
            self._spawn(lanes.client.close())

    @property
    def store(self) -> Lane:
        """To the store, for what callers cause."""
        return self._store_lane

    def client(self, worker_id: WorkerId) -> tuple[RpcClient, BulkClient]:
        """The connections to another worker.

        Raises:
            Unavailable: it is not known here (any more).
        """
        if worker_id not in self._clients:
            raise Unavailable(f"worker {worker_id} is not known here, or has left")
        return self._clients[worker_id], self._bulk[worker_id]

    def without_service(self, worker_id: WorkerId) -> str | None:
        """See links.without_service. Raises as `client`."""
        return without_service(worker_id, self.client(worker_id)[0].version)

    def lanes(self, worker_id: WorkerId) -> StepLanes:
        """To another worker, for plans; its connection is made when first needed. Raises as `client`."""
        main, _ = self.client(worker_id)
        if worker_id not in self._lanes:
            client = RpcClient(self._network, main.address, "worker", self._id, self._chance)
            client.start()
            self._lanes[worker_id] = StepLanes(client, main)
        return self._lanes[worker_id]

    # --- locating ---

    @property
    def alone(self) -> bool:
        """See Elsewhere."""
        return not any(client.connected for client in self._clients.values())

    async def locate(self, keys: Sequence[bytes], avoid: Mapping[bytes, WorkerId]) -> list[WorkerId | None]:
        """See Elsewhere."""
        reachable = {worker_id for worker_id, client in self._clients.items() if client.connected}
        return [
            choose_source(key, [WorkerId(each) for each in who if each in reachable and each != avoid.get(key)])
            for key, who in zip(keys, await self.holders(keys), strict=True)
        ]

    async def holders(self, keys: Sequence[bytes]) -> list[Sequence[str]]:
        """The ids of the workers that hold each key, as far as its home knows and answers in time."""
        started_at = self.now()
        lookup = self.metadata.lookup(keys)
        await self._ask_all(lookup, lookup.first(), started_at + FIND_TIMEOUT_S)
        self.traffic.find_seconds.observe(self.now() - started_at)
        return lookup.holders

    async def _ask_all(self, lookup: Lookup, asks: Sequence[Ask], deadline_s: float) -> None:
        if len(asks) == 1:  # nearly always, and a task costs a turn of the loop
            await self._ask(lookup, asks[0], deadline_s)
        elif asks:
            await asyncio.gather(*(self._ask(lookup, ask, deadline_s) for ask in asks))

    async def _ask(self, lookup: Lookup, ask: Ask, deadline_s: float) -> None:
        """Asks one home, and whom it redirects to: the time is for both, and no home waits for another's answer."""
        try:
            reply = await self._answer(ask, deadline_s - self.now())
        except TensorcastError as error:
            logger.debug("locating %d pages at %s failed: %s", len(ask.positions), ask.home, error)
            self.traffic.find_failed(ask, error)
            return
        try:
            more = lookup.answered(ask, reply) if reply is not None else []
        except ProtocolError as error:
            logger.warning("%s", error)
            return
        for each in more:
            self.traffic.following(each)
        await self._ask_all(lookup, more, deadline_s)

    async def _answer(self, ask: Ask, timeout_s: float) -> PagesFound | None:
        if ask.home == self._id:
            reply = self.metadata.serve(ask.message, self.now())
            assert isinstance(reply, PagesFound)
            return reply
        client = self._clients.get(ask.home)
        if client is None:
            return None
        if timeout_s <= 0:
            raise DeadlineExceeded("no time is left to ask there as well")
        return await client.call(in_version(client.version, ask.message), PagesFound, timeout_s)

    # --- fetching ---

    async def fetch(self, keys: Sequence[bytes], source: WorkerId) -> None:
        """See Elsewhere."""
        bulk = self._bulk.get(source)
        if bulk is None or not self._clients[source].connected:
            self.record("fetched", source, keys, cause="nothing: it left, or does not answer, since it was located")
            return
        await self._fetches.fetch(keys, source, bulk)

    # --- reporting ---

    def changed(self, keys: Sequence[bytes]) -> None:
        """See Elsewhere."""
        if keys:
            self.metadata.changed(keys)
            self.wake()

    def statistics(self) -> dict[str, int | str]:
        """Counts for people and metrics."""
        return {
            **self.metadata.statistics(),
            **self.traffic.counters,
            **self.log.counters,
            "store_connected": int(self.metadata.member.store_error is None),
        }
