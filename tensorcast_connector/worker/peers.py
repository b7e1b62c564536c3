"""The other workers, seen from one: the home of page locations, announcing to it, and fetching pages."""

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Mapping, Sequence

from tensorcast_connector.config import (
    ANNOUNCE_INTERVAL_S,
    ANNOUNCE_KEYS_PER_MESSAGE,
    ANNOUNCE_RETRY_S,
    FETCH_CONNECTIONS_PER_PEER,
    FETCH_PAGES_PER_REQUEST,
    LOCATE_TIMEOUT_S,
    STORE_TIMEOUT_S,
    parse_address,
)
from tensorcast_connector.core.catalog import Catalog
from tensorcast_connector.core.placement import choose_source, home_of_pages
from tensorcast_connector.errors import ConfigError, ProtocolError, TensorcastError, Unavailable
from tensorcast_connector.net.bulk import BulkClient
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.transport import Network
from tensorcast_connector.types import WorkerId
from tensorcast_connector.wire.messages import Announce, Locate, Located, Ok, WorkerRecord
from tensorcast_connector.worker.pages import Pages

logger = logging.getLogger(__name__)


class Peers:
    """An `Elsewhere`. Owns the connections to other workers, and the catalog while this worker is the home."""

    def __init__(self, me: WorkerRecord, pages: Pages, network: Network, chance: random.Random) -> None:
        self._me = me
        self._id = WorkerId(me.worker_id)
        self._pages = pages
        self._network = network
        self._chance = chance
        self._members: set[WorkerId] = {self._id}
        self._clients: dict[WorkerId, RpcClient] = {}
        self._bulk: dict[WorkerId, BulkClient] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._home = self._id
        self._added: list[bytes] = []
        self._wake = asyncio.Event()
        self._reset = True
        self._announcing: asyncio.Task[None] | None = None
        self._fetches = itertools.count()
        self.catalog = Catalog()

    def __repr__(self) -> str:
        return f"<Peers of {self._id}: {len(self._clients)} others, home {self._home}>"

    def start(self) -> None:
        """Begins to announce."""
        self._announcing = asyncio.get_running_loop().create_task(self._announce_for_ever())

    async def close(self) -> None:
        """Closes all connections; fetches under way fail."""
        if self._announcing is not None:
            self._announcing.cancel()
            await asyncio.gather(self._announcing, return_exceptions=True)
        for worker_id in list(self._clients):
            self._disconnect(worker_id)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def members_changed(self, workers: Mapping[WorkerId, WorkerRecord]) -> None:
        """The cluster has changed: connects to who is new, forgets who left, and announces anew to a new home."""
        for gone in set(self._clients) - set(workers):
            self._disconnect(gone)
        for worker_id, record in workers.items():
            if worker_id != self._id and worker_id not in self._clients:
                self._connect(worker_id, record)
        # A worker whose own lease lapsed for a moment still knows itself.
        self._members = {self._id, *self._clients}
        self.catalog.keep_only(self._members)
        home = home_of_pages(self._members) or self._id
        if home != self._home:
            logger.info("pages are located by %s now", home)
            if self._home == self._id:
                self.catalog.keep_only([])  # the new home is told everything anew; nothing stale may stay here
            self._home = home
            self._reset = True
            self._wake.set()

    def _connect(self, worker_id: WorkerId, record: WorkerRecord) -> None:
        try:
            address = parse_address(record.address, f"address of worker {worker_id}")
        except ConfigError as error:
            logger.warning("a member that cannot be reached: %s", error)
            return

        async def connected(_: RpcClient) -> None:
            # A home that restarted, or that we lost for a while, may have missed something: tell it everything.
            self._reset = self._reset or worker_id == self._home
            self._wake.set()

        client = RpcClient(self._network, address, "worker", self._me.worker_id, self._chance, on_connected=connected)
        client.start()
        self._clients[worker_id] = client
        self._bulk[worker_id] = BulkClient(self._network, address, self._me.worker_id, FETCH_CONNECTIONS_PER_PEER)

    def _disconnect(self, worker_id: WorkerId) -> None:
        self._bulk.pop(worker_id).close()
        task = asyncio.get_running_loop().create_task(self._clients.pop(worker_id).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # --- the index, while this worker is the home ---

    def index(self) -> Catalog:
        """Where pages are.

        Raises:
            Unavailable: another worker is the home, as far as this one knows; the caller learns of it too, or we do.
        """
        if self._home != self._id:
            raise Unavailable(f"{self._id} does not locate pages, {self._home} does")
        return self.catalog

    def announced(self, message: Announce) -> None:
        """Another worker says what it holds.

        Raises:
            Unavailable: this is not the home, or does not know that worker yet; it tries again.
            NotFound: see Catalog.announce.
        """
        worker = WorkerId(message.worker_id)
        if worker not in self._members:
            raise Unavailable(f"{worker} is not known here yet")
        self.index().announce(worker, message.reset, message.added, message.removed)

    # --- locating ---

    async def locate(self, keys: Sequence[bytes], avoid: Mapping[bytes, WorkerId]) -> list[WorkerId | None]:
        """See Elsewhere."""
        holders: Sequence[Sequence[str]]
        if self._home == self._id:
            holders = self.catalog.locate(keys)
        else:
            try:
                located = await self._clients[self._home].call(Locate(list(keys)), Located, LOCATE_TIMEOUT_S)
                holders = located.workers
                if len(holders) != len(keys):
                    raise ProtocolError(f"{len(holders)} answers for {len(keys)} pages")
            except TensorcastError as error:
                logger.debug("locating %d pages failed: %s", len(keys), error)
                return [None] * len(keys)
        reachable = {worker_id for worker_id, client in self._clients.items() if client.connected}
        return [
            choose_source(key, [WorkerId(each) for each in who if each in reachable and each != avoid.get(key)])
            for key, who in zip(keys, holders, strict=True)
        ]

    # --- fetching ---

    async def fetch(self, keys: Sequence[bytes], source: WorkerId) -> None:
        """See Elsewhere. Requests are small, so that the first pages are usable early and two connections share the work."""
        bulk = self._bulk.get(source)
        if bulk is None:
            return
        parts = [
            keys[start : start + FETCH_PAGES_PER_REQUEST] for start in range(0, len(keys), FETCH_PAGES_PER_REQUEST)
        ]
        results = await asyncio.gather(*(self._fetch_part(part, bulk) for part in parts), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, TensorcastError):
                raise result
            if isinstance(result, TensorcastError):
                logger.info("fetching from %s: %s", source, result)

    async def _fetch_part(self, keys: Sequence[bytes], bulk: BulkClient) -> None:
        owner = f"fetch/{next(self._fetches)}"
        memory: memoryview | None = None

        def target(index: int, length: int) -> memoryview:
            nonlocal memory
            memory = self._pages.receive(owner, keys[index], length)
            # Another way was faster, or there is no room: the bytes are on their way all the same.
            return memoryview(bytearray(length)) if memory is None else memory

        def done(index: int, digest: int) -> None:
            if memory is not None:
                self._pages.received(owner, keys[index], memory, digest)

        try:
            await bulk.fetch(keys, target, done)
        finally:
            self._pages.give_up(owner)

    # --- announcing ---

    def changed(self, added: Sequence[bytes]) -> None:
        """See Elsewhere."""
        if not self._reset:  # else everything will be told
            self._added += added
        self._wake.set()

    async def _announce_for_ever(self) -> None:
        """Tells the home of every change at once, and now and then of none, which finds out that it has forgotten us."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANNOUNCE_INTERVAL_S):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._announce()
            except TensorcastError as error:
                logger.debug("announcing to %s failed: %s", self._home, error)
                self._reset = True
                await asyncio.sleep(ANNOUNCE_RETRY_S)

    async def _announce(self) -> None:
        removed = self._pages.take_evicted()
        added, self._added = self._added, []
        reset, self._reset = self._reset, False
        home = self._home
        if reset:
            if home != self._id and not self._clients[home].connected:
                raise Unavailable(f"not connected to {home}")
            added, removed = self._pages.inventory(), []
        elif removed and added:
            # A page evicted and saved again, or saved and evicted again: only the last state counts.
            gone = set(removed)
            still = {key for key in gone.intersection(added) if self._pages.resident(key)}
            added = [key for key in added if key not in gone or key in still]
            removed = [key for key in removed if key not in still]
        step = ANNOUNCE_KEYS_PER_MESSAGE
        for at in range(0, max(len(added), len(removed), 1), step):
            message = Announce(self._id, reset and at == 0, added[at : at + step], removed[at : at + step])
            if home != self._home:
                return  # the new one is told everything
            elif home == self._id:
                self.announced(message)
            else:
                await self._clients[home].call(message, Ok, STORE_TIMEOUT_S)

    def statistics(self) -> dict[str, int | str]:
        """Counts for people and metrics."""
        return {**self.catalog.statistics(), "home": self._home, "workers": len(self._members)}
