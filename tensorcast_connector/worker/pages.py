"""The pages of one worker: what its engines reserve, commit, look up and pin, and what is fetched from elsewhere.

Decisions are in core/segments; this module binds them to connections (holders and owners), to the arena's memory and
to the fetching of missing pages. All methods run on the event loop.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import xxhash

from tensorcast_connector.config import KEYS_PER_MESSAGE_MAX, SOURCE_HINTS_MAX
from tensorcast_connector.core.segments import Segments
from tensorcast_connector.errors import Exhausted, ProtocolError
from tensorcast_connector.net.bulk import PageBytes
from tensorcast_connector.types import KEYSPACE_BYTES, PageKey, WorkerId, page_key
from tensorcast_connector.worker.arena import Arena

logger = logging.getLogger(__name__)
Holder = tuple[int, str]
"""A connection and the name it gave the hold."""


class Elsewhere(Protocol):
    """The other workers."""

    async def locate(self, keys: Sequence[bytes]) -> list[WorkerId | None]:
        """A worker to read each key from; None: nobody has it, or the home did not answer in time."""

    async def fetch(self, keys: Sequence[bytes], source: WorkerId) -> None:
        """Brings pages into the local arena by `Pages.receive`; those that fail stay missing."""

    def changed(self, added: Sequence[bytes]) -> None:
        """Pages were added or evicted here; tells the home soon."""


def check_keys(keyspaces: Sequence[bytes], block_hashes: Sequence[bytes]) -> None:
    """Raises ProtocolError or Exhausted for keys that cannot be."""
    if any(len(each) != KEYSPACE_BYTES for each in keyspaces):
        raise ProtocolError(f"a keyspace has {KEYSPACE_BYTES} bytes")
    if any(not 8 <= len(each) <= 64 for each in block_hashes):
        raise ProtocolError("a block hash has 8 to 64 bytes")
    if len(keyspaces) * len(block_hashes) > KEYS_PER_MESSAGE_MAX:
        raise Exhausted(
            f"{len(keyspaces)} x {len(block_hashes)} keys in one request; the limit is {KEYS_PER_MESSAGE_MAX}"
        )


class Pages:
    """Owner of the arena's contents."""

    def __init__(self, arena: Arena, segments: Segments) -> None:
        self._arena = arena
        self._segments = segments
        self._hints: OrderedDict[bytes, WorkerId] = OrderedDict()  # where a lookup found a page; advice only
        self._fetching: dict[bytes, asyncio.Task[None]] = {}
        self._holds_of: dict[int, set[str]] = {}
        self._next_send = 0
        self.elsewhere: Elsewhere | None = None  # set once by the server that owns both
        self.counters = {
            "pages_saved": 0,
            "pages_loaded": 0,
            "pages_fetched": 0,
            "pages_sent": 0,
            "digest_mismatches": 0,
        }

    # --- reading, for engines ---

    async def lookup(
        self, session: int, lookup_id: str, keyspaces: Sequence[bytes], hashes: Sequence[bytes]
    ) -> tuple[int, int]:
        """(leading blocks that can be had in every keyspace, of which this many are local); holds the local ones."""
        check_keys(keyspaces, hashes)
        self.release(session, lookup_id)
        local = 0
        missing: list[PageKey] = []
        blocks: list[list[PageKey]] = [[page_key(space, each) for space in keyspaces] for each in hashes]
        for keys in blocks:
            absent = [key for key in keys if not self._hold(session, lookup_id, key)]
            if not absent and not missing:
                local += 1
            missing += absent
        if not missing or self.elsewhere is None:
            return local, local
        found = dict(zip(missing, await self.elsewhere.locate(missing), strict=True))
        usable = local
        for keys in blocks[local:]:
            if any(key in found and found[key] is None and not self._segments.resident(key) for key in keys):
                break
            usable += 1
        for key, source in found.items():
            if source is not None:
                self._hints[key] = source
                self._hints.move_to_end(key)
        while len(self._hints) > SOURCE_HINTS_MAX:
            self._hints.popitem(last=False)
        return usable, local

    async def acquire(
        self, session: int, hold_id: str, keyspace: bytes, hashes: Sequence[bytes]
    ) -> list[tuple[int, int]]:
        """(offset, length) of each leading page, resident and held under `hold_id`; stops at the first that cannot be had."""
        check_keys([keyspace], hashes)
        keys = [page_key(keyspace, each) for each in hashes]
        await self._make_resident(keys)
        ranges: list[tuple[int, int]] = []
        for key in keys:
            held = self._segments.hold((session, hold_id), key)
            if held is None:
                break
            self._holds_of.setdefault(session, set()).add(hold_id)
            ranges.append((held.offset, held.length))
        self.counters["pages_loaded"] += len(ranges)
        return ranges

    def release(self, session: int, hold_id: str) -> None:
        """Ends a hold."""
        self._segments.release((session, hold_id))
        self._holds_of.get(session, set()).discard(hold_id)

    def _hold(self, session: int, hold_id: str, key: bytes) -> bool:
        if self._segments.hold((session, hold_id), key) is None:
            return False
        self._holds_of.setdefault(session, set()).add(hold_id)
        return True

    async def _make_resident(self, keys: Sequence[PageKey]) -> None:
        if self.elsewhere is None:
            return
        missing = [key for key in keys if not self._segments.resident(key) and key not in self._fetching]
        unknown = [key for key in missing if key not in self._hints]
        if unknown:
            for key, source in zip(unknown, await self.elsewhere.locate(unknown), strict=True):
                if source is not None:
                    self._hints[key] = source
        groups: dict[WorkerId, list[PageKey]] = {}
        for key in missing:
            # Asked again after the wait: another request may have begun to fetch it meanwhile.
            if key in self._hints and key not in self._fetching and not self._segments.resident(key):
                groups.setdefault(self._hints.pop(key), []).append(key)
        for source, wanted in groups.items():
            task = asyncio.get_running_loop().create_task(self.elsewhere.fetch(wanted, source))
            for key in wanted:
                self._fetching[key] = task
            task.add_done_callback(partial(self._fetched, wanted))
        waiting = {self._fetching[key] for key in keys if key in self._fetching}
        if waiting:
            # A fetch serves every request that wants the page, so it outlives the one that began it.
            await asyncio.wait(waiting)

    def _fetched(self, keys: Sequence[bytes], _: asyncio.Task[None]) -> None:
        for key in keys:
            self._fetching.pop(key, None)

    # --- writing, for engines ---

    def reserve(self, session: int, keyspace: bytes, hashes: Sequence[bytes], page_bytes: int) -> list[int]:
        """An arena offset per page, -1 where nothing is to be written."""
        check_keys([keyspace], hashes)
        ranges = [self._segments.reserve(session, page_key(keyspace, each), page_bytes) for each in hashes]
        self._announce([])
        return [-1 if each is None else each.offset for each in ranges]

    def commit(self, session: int, keyspace: bytes, hashes: Sequence[bytes], digests: Sequence[int]) -> None:
        """Makes reserved pages readable."""
        if len(hashes) != len(digests):
            raise ProtocolError(f"{len(hashes)} pages but {len(digests)} digests")
        keys = [page_key(keyspace, each) for each in hashes]
        added = [key for key, digest in zip(keys, digests, strict=True) if self._segments.commit(session, key, digest)]
        self.counters["pages_saved"] += len(added)
        self._announce(added)

    def abort(self, session: int, keyspace: bytes, hashes: Sequence[bytes]) -> None:
        """Gives reserved pages back."""
        for each in hashes:
            self._segments.abort(session, page_key(keyspace, each))

    def end_session(self, session: int) -> None:
        """The connection is gone: so are its holds and reservations."""
        for hold_id in self._holds_of.pop(session, set()):
            self._segments.release((session, hold_id))
        self._segments.abort_all([session])

    # --- other workers ---

    @asynccontextmanager
    async def hold(self, keys: Sequence[bytes]) -> AsyncIterator[list[PageBytes | None]]:
        """See net.bulk.PageSource."""
        self._next_send += 1
        holder = ("send", self._next_send)
        pages: list[PageBytes | None] = []
        for key in keys:
            held = self._segments.hold(holder, key)
            data = self._arena.view[held.offset : held.end] if held else None
            pages.append(PageBytes(data, self._segments.digest(key)) if data is not None else None)
        try:
            yield pages
            self.counters["pages_sent"] += sum(1 for page in pages if page)
        finally:
            self._segments.release(holder)

    def receive(self, owner: str, key: bytes, length: int) -> memoryview | None:
        """Memory for a page that is being fetched; None: no room, or it came another way."""
        reserved = self._segments.reserve(owner, key, length)
        self._announce([])
        return None if reserved is None else self._arena.view[reserved.offset : reserved.end]

    def received(self, owner: str, key: bytes, memory: memoryview, digest: int) -> bool:
        """Checks the bytes that arrived; wrong ones are dropped and count as a miss."""
        if xxhash.xxh3_64_intdigest(memory) != digest:
            self.counters["digest_mismatches"] += 1
            logger.warning("page %s arrived with wrong bytes and was dropped", key[KEYSPACE_BYTES:].hex()[:16])
            self._segments.abort(owner, key)
            return False
        self._segments.commit(owner, key, digest)
        self.counters["pages_fetched"] += 1
        self._announce([key])
        return True

    def give_up(self, owner: str) -> None:
        """A fetch ended; what it reserved and did not complete is free again."""
        self._segments.abort_all([owner])

    def _announce(self, added: Sequence[bytes]) -> None:
        if self.elsewhere is not None:
            self.elsewhere.changed(added)

    def take_evicted(self) -> list[bytes]:
        """Pages evicted since the last call."""
        return self._segments.take_evicted()

    def inventory(self) -> list[bytes]:
        """All pages that can be read."""
        return self._segments.keys()

    def statistics(self) -> dict[str, int]:
        """Counts for people and metrics."""
        return {**self._segments.statistics(), **self.counters}

    def check(self) -> None:
        """See Segments.check."""
        self._segments.check()
