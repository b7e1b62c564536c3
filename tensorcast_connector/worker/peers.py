"""The other workers, seen from one: the home of page locations, announcing to it, and fetching pages."""

import asyncio
import itertools
import logging
import random
from collections.abc import Sequence

from tensorcast_connector.config import (
    ANNOUNCE_KEYS_PER_MESSAGE,
    FETCH_CONNECTIONS_PER_PEER,
    FETCH_PAGES_PER_REQUEST,
    FETCH_TIMEOUT_S,
    LOCATE_TIMEOUT_S,
    STORE_TIMEOUT_S,
    parse_address,
)
from tensorcast_connector.core.catalog import Catalog
from tensorcast_connector.core.placement import choose_source, home_of_pages
from tensorcast_connector.errors import TensorcastError, Unavailable
from tensorcast_connector.net.bulk import BulkClient
from tensorcast_connector.net.rpc import RpcClient
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
        self._records: dict[WorkerId, WorkerRecord] = {self._id: me}
        self._clients: dict[WorkerId, RpcClient] = {}
        self._bulk: dict[WorkerId, BulkClient] = {}
        self._home: WorkerId | None = self._id
        self._added: list[bytes] = []
        self._wake = asyncio.Event()
        self._reset = True
        self._announcing: asyncio.Task[None] | None = None
        self._fetches = itertools.count()
        self.catalog = Catalog()

    def start(self) -> None:
        """Begins to announce."""
        self._announcing = asyncio.get_running_loop().create_task(self._announce_for_ever())

    async def close(self) -> None:
        """Closes all connections."""
        if self._announcing is not None:
            self._announcing.cancel()
            await asyncio.gather(self._announcing, return_exceptions=True)
        for client in self._clients.values():
            await client.close()
        for bulk in self._bulk.values():
            bulk.close()

    def members_changed(self, workers: dict[WorkerId, WorkerRecord]) -> None:
        """The cluster has changed: connects to who is new, forgets who left, and announces anew to a new home."""
        # A worker whose own lease lapsed for a moment still knows itself.
        self._records = {**workers, self._id: self._me}
        for gone in set(self._clients) - set(self._records):
            asyncio.get_running_loop().create_task(self._clients.pop(gone).close())
            if bulk := self._bulk.pop(gone, None):
                bulk.close()
        for worker_id, record in self._records.items():
            if worker_id != self._id and worker_id not in self._clients:
                self._connect(worker_id, record)
        self.catalog.keep_only(self._records)
        home = home_of_pages(self._records)
        if home != self._home:
            logger.info("pages are located by %s now", home)
            self._home = home
            self._reset = True
            self.catalog.keep_only([])  # whoever is the home now is told everything anew
            self._wake.set()

    def _connect(self, worker_id: WorkerId, record: WorkerRecord) -> None:
        address = parse_address(record.address, f"address of worker {worker_id}")

        async def connected(_: RpcClient) -> None:
            # A home that restarted, or that we lost for a while, may have missed something: tell it everything.
            self._reset = self._reset or worker_id == self._home
            self._wake.set()

        client = RpcClient(self._network, address, "worker", self._me.worker_id, self._chance, on_connected=connected)
        client.start()
        self._clients[worker_id] = client
        self._bulk[worker_id] = BulkClient(self._network, address, self._me.worker_id, FETCH_CONNECTIONS_PER_PEER)

    # --- locating ---

    async def locate(self, keys: Sequence[bytes]) -> list[WorkerId | None]:
        """See Elsewhere."""
        home = self._home
        if home == self._id:
            holders: Sequence[Sequence[str]] = self.catalog.locate(keys)
        elif home is None or home not in self._clients:
            return [None] * len(keys)
        else:
            try:
                holders = (await self._clients[home].call(Locate(list(keys)), Located, LOCATE_TIMEOUT_S)).workers
            except TensorcastError as error:
                logger.debug("locating %d pages failed: %s", len(keys), error)
                return [None] * len(keys)
            if len(holders) != len(keys):
                return [None] * len(keys)
        reachable = {worker_id for worker_id, client in self._clients.items() if client.connected}
        return [
            choose_source(key, [WorkerId(each) for each in who if each in reachable]) if who else None
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
        memory: dict[int, memoryview] = {}
        scratch: dict[int, memoryview] = {}

        def target(index: int, length: int) -> memoryview | None:
            found = self._pages.receive(owner, keys[index], length)
            if found is not None:
                memory[index] = found
                return found
            # Another way was faster, or there is no room: the bytes are on their way all the same.
            scratch[index] = memoryview(bytearray(length))
            return scratch[index]

        def done(index: int, digest: int) -> None:
            scratch.pop(index, None)
            if index in memory:
                self._pages.received(owner, keys[index], memory.pop(index), digest)

        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                await bulk.fetch(keys, target, done)
        except TimeoutError as error:
            raise Unavailable(f"{bulk.address} did not deliver within {FETCH_TIMEOUT_S:g} s") from error
        finally:
            self._pages.give_up(owner)

    # --- announcing ---

    def changed(self, added: Sequence[bytes]) -> None:
        """See Elsewhere."""
        self._added += added
        self._wake.set()

    async def _announce_for_ever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            removed = self._pages.take_evicted()
            added, self._added = self._added, []
            reset, self._reset = self._reset, False
            if reset:
                added = self._pages.inventory()
                removed = []
            elif not added and not removed:
                continue
            try:
                await self._announce(reset, added, removed)
            except TensorcastError as error:
                logger.debug("announcing to %s failed: %s", self._home, error)
                self._reset = True  # told in full when the home is connected again, or another is chosen

    async def _announce(self, reset: bool, added: list[bytes], removed: list[bytes]) -> None:
        gone = set(removed)
        # A page evicted and saved again within one batch is there: only the last state counts.
        still = set(self._pages.inventory()) & gone if gone & set(added) else set()
        removed = [key for key in removed if key not in still]
        added = [key for key in added if key not in gone or key in still]
        step = ANNOUNCE_KEYS_PER_MESSAGE
        parts = range(0, max(len(added), len(removed), 1), step)
        for at in parts:
            message = Announce(self._id, reset and at == 0, added[at : at + step], removed[at : at + step])
            if self._home == self._id:
                self.catalog.announce(self._id, message.reset, message.added, message.removed)
            elif self._home in self._clients:
                await self._clients[self._home].call(message, Ok, STORE_TIMEOUT_S)

    def statistics(self) -> dict[str, int | str]:
        """Counts for people and metrics."""
        return {**self.catalog.statistics(), "home": self._home or "", "workers": len(self._records)}
