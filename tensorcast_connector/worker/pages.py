"""The pages of one worker: what its engines reserve, commit, look up and pin, and what is fetched from elsewhere.

Decisions are in core/segments; this module binds them to connections (holders and owners), to the arena's memory and
to the fetching of missing pages. All methods run on the event loop.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, cast

import xxhash

from tensorcast_connector.config import KEYS_PER_MESSAGE_MAX, SOURCE_HINTS_MAX
from tensorcast_connector.core.segments import Segments
from tensorcast_connector.errors import Exhausted, ProtocolError
from tensorcast_connector.net.bulk import PageBytes
from tensorcast_connector.types import KEYSPACE_BYTES, PageKey, WorkerId, page_key
from tensorcast_connector.worker.arena import Arena
from tensorcast_connector.worker.recorder import Record, unrecorded

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Held:
    """What a connection asked to hold under one name: pages, block by block, and which of them are not here."""

    session: int
    hold_id: str
    keys: list[PageKey]
    keyspaces: int
    missing: list[PageKey] = field(default_factory=list)

    @property
    def leading_blocks(self) -> int:
        """Leading blocks that are here in every keyspace."""
        return self.blocks_before(self.missing)

    def blocks_before(self, gaps: Sequence[PageKey]) -> int:
        """Leading blocks without any of `gaps`, which are in the order of `keys`."""
        if not self.keyspaces:
            return 0
        return (self.keys.index(gaps[0]) if gaps else len(self.keys)) // self.keyspaces


class Elsewhere(Protocol):
    """The other workers."""

    @property
    def alone(self) -> bool:
        """Whether none of them can be read from just now."""

    async def locate(self, keys: Sequence[bytes], avoid: Mapping[bytes, WorkerId]) -> list[WorkerId | None]:
        """A worker to read each key from, not the one to avoid; None: nobody has it, or the home did not answer in time."""

    async def fetch(self, keys: Sequence[bytes], source: WorkerId) -> None:
        """Brings pages into the local arena by `Pages.receive`; those that fail stay missing."""

    def changed(self, keys: Sequence[bytes]) -> None:
        """Pages were added or evicted here; tells their homes soon."""


def check_keys(keyspaces: Sequence[bytes], block_hashes: Sequence[bytes]) -> None:
    """Raises ProtocolError or Exhausted for keys that cannot be."""
    if set(map(len, keyspaces)) - {KEYSPACE_BYTES}:
        raise ProtocolError(f"a keyspace has {KEYSPACE_BYTES} bytes")
    lengths = set(map(len, block_hashes))
    if lengths and not 8 <= min(lengths) <= max(lengths) <= 64:
        raise ProtocolError("a block hash has 8 to 64 bytes")
    if len(keyspaces) * len(block_hashes) > KEYS_PER_MESSAGE_MAX:
        raise Exhausted(
            f"{len(keyspaces)} x {len(block_hashes)} keys in one request; the limit is {KEYS_PER_MESSAGE_MAX}"
        )


class Ages(Protocol):
    """How old pages are, whichever worker they were saved at (worker/retention.py)."""

    def age_of(self, key: bytes) -> float:
        """Of a page that is here: how many seconds ago it was first saved, at most."""

    def arrived(self, key: bytes, age_s: float) -> None:
        """A page has come from another worker, where it was so old."""


class Pages:
    """Owner of the arena's contents."""

    def __init__(self, arena: Arena, segments: Segments, record: Record = unrecorded) -> None:
        self._arena = arena
        self._segments = segments
        self._record = record
        self._hints: OrderedDict[bytes, WorkerId] = OrderedDict()  # where a lookup found a page; advice only
        self._wanted: dict[bytes, list[Held]] = {}  # who waits for a page to arrive
        self._fetching: dict[bytes, asyncio.Task[None]] = {}
        self._holds_of: dict[int, set[str]] = {}
        self._next_send = 0
        self.ages: Ages | None = None  # set once by who keeps them
        self.elsewhere: Elsewhere | None = None  # set once by the server that owns both
        self.counters = {
            "pages_saved": 0,
            "pages_loaded": 0,
            "pages_fetched": 0,
            "pages_sent": 0,
            "bytes_fetched": 0,
            "bytes_sent": 0,
            "digest_mismatches": 0,
            "lookups_full": 0,
            "lookups_partial": 0,
            "lookups_missed": 0,
            "lookup_blocks_local": 0,
            "lookup_blocks_elsewhere": 0,
            "lookup_blocks_missed": 0,
        }
        self.sends = 0  # requests of other workers that are being answered

    # --- reading, for engines ---

    def hold_local(self, session: int, hold_id: str, keyspaces: Sequence[bytes], hashes: Sequence[bytes]) -> Held:
        """Holds the pages that are here; at once, so that what the connection asks for next finds it done."""
        check_keys(keyspaces, hashes)
        keys = cast(
            list[PageKey], [space + each for each in hashes for space in keyspaces]
        )  # as page_key, for hundreds
        held = Held(session, hold_id, keys, len(keyspaces))
        self._holds_of.setdefault(session, set()).add(hold_id)
        self._hold(held)
        missing = len(held.missing)
        self._record("hold", hold_id, held.keys, cause=f"{missing} of them are not here" if missing else "")
        return held

    def looked_up(self, held: Held, blocks: int) -> None:
        """A lookup has ended with so many blocks that can be had; for the counts."""
        asked = len(held.keys) // held.keyspaces if held.keyspaces else 0
        counters = self.counters
        counters["lookups_full" if blocks == asked else "lookups_partial" if blocks else "lookups_missed"] += 1
        counters["lookup_blocks_local"] += held.leading_blocks
        counters["lookup_blocks_elsewhere"] += blocks - held.leading_blocks
        counters["lookup_blocks_missed"] += asked - blocks

    def known(self, held: Held) -> int | None:
        """How many leading blocks can be had, if nobody has to be asked for that; None: see `locate`."""
        alone = self.elsewhere is None or self.elsewhere.alone
        return held.leading_blocks if alone or not held.missing else None

    async def locate(self, held: Held) -> int:
        """How many leading blocks can be had, here or elsewhere."""
        assert self.elsewhere is not None
        missing = held.missing
        located = await self.elsewhere.locate(missing, {})
        self._record("located", held.hold_id, missing, located)
        nowhere: list[PageKey] = []
        for key, source in zip(missing, located, strict=True):
            if source is not None:
                self._hints[key] = source
                self._hints.move_to_end(key)
            elif not self._segments.resident(key):
                nowhere.append(key)
        while len(self._hints) > SOURCE_HINTS_MAX:
            self._hints.popitem(last=False)
        return held.blocks_before(nowhere)

    async def fetch(self, held: Held) -> None:
        """Fetches what is missing, and holds it as it arrives: fetching one page must not evict another."""
        for key in held.missing:
            self._wanted.setdefault(key, []).append(held)
        try:
            await self._make_resident(held.missing)
        finally:
            for key in held.missing:
                self._wanted[key].remove(held)
                if not self._wanted[key]:
                    del self._wanted[key]
        self._hold(held)

    def ranges(self, held: Held) -> list[tuple[int, int]]:
        """(offset, length) of each leading page."""
        leading = held.keys[: held.leading_blocks * held.keyspaces]
        self.counters["pages_loaded"] += len(leading)
        ranges = [self._segments.range(key) for key in leading]
        return [(each.offset, each.length) for each in ranges]

    def release(self, session: int, hold_id: str) -> None:
        """Ends a hold, also one that still waits for pages."""
        self._segments.release((session, hold_id))
        holds = self._holds_of.get(session, set())
        if hold_id in holds:
            holds.discard(hold_id)
            self._record("release", hold_id)

    def _hold(self, held: Held) -> None:
        if held.hold_id in self._holds_of.get(held.session, ()):  # else it was released meanwhile
            missing = self._segments.hold((held.session, held.hold_id), held.keys)
            held.missing = [PageKey(key) for key in missing]
        else:
            held.missing = held.keys

    async def _make_resident(self, keys: Sequence[PageKey]) -> None:
        """Makes two attempts: a page that was no longer where it had been found is located once more."""
        tried: dict[bytes, WorkerId] = {}
        for _ in range(2):
            # What an engine here is writing is left to it.
            keys = [
                key for key in keys
                if key in self._fetching or (self._segments.owner(key) is None and not self._segments.resident(key))
            ]  # fmt: skip
            keys = await self._fetch(keys, tried)

    async def _fetch(self, missing: Sequence[PageKey], tried: dict[bytes, WorkerId]) -> list[PageKey]:
        """One attempt; returns the pages that somebody was asked for. Notes in `tried` who that was."""
        if self.elsewhere is None or not missing:
            return []
        sources = {key: self._hints.pop(key) for key in missing if key in self._hints}
        unknown = [key for key in missing if key not in sources and key not in self._fetching]
        if unknown:
            located = await self.elsewhere.locate(unknown, tried)
            self._record("located", "", unknown, located, cause=f"{len(tried)} tried before" if tried else "")
            sources |= {key: source for key, source in zip(unknown, located, strict=True) if source is not None}
        groups: dict[WorkerId, list[PageKey]] = {}
        for key, source in sources.items():
            # Asked again after the wait: another request may have begun to fetch it meanwhile.
            if key not in self._fetching and not self._segments.resident(key):
                groups.setdefault(source, []).append(key)
                tried[key] = source
        for source, wanted in groups.items():
            task = asyncio.get_running_loop().create_task(self.elsewhere.fetch(wanted, source))
            self._fetching.update(dict.fromkeys(wanted, task))
            task.add_done_callback(partial(self._fetched, wanted))
        asked = [key for key in missing if key in self._fetching]
        if asked:
            # A fetch serves every request that wants the page, so it outlives the one that began it.
            await asyncio.wait({self._fetching[key] for key in asked})
        return asked

    def _fetched(self, keys: Sequence[bytes], task: asyncio.Task[None]) -> None:
        for key in keys:
            self._fetching.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("fetching %d pages failed", len(keys), exc_info=error)

    # --- writing, for engines ---

    def reserve(self, session: int, keyspace: bytes, hashes: Sequence[bytes], page_bytes: int) -> list[int]:
        """An arena offset per page, -1 where nothing is to be written."""
        check_keys([keyspace], hashes)
        keys = [page_key(keyspace, each) for each in hashes]
        ranges = [self._segments.reserve(session, key, page_bytes) for key in keys]
        self._record("reserve", "", keys, ranges, cause=f"by session {session}")
        self._announce([])
        return [-1 if each is None else each.offset for each in ranges]

    def commit(self, session: int, keyspace: bytes, hashes: Sequence[bytes], digests: Sequence[int]) -> None:
        """Makes reserved pages readable."""
        if len(hashes) != len(digests):
            raise ProtocolError(f"{len(hashes)} pages but {len(digests)} digests")
        keys = [page_key(keyspace, each) for each in hashes]
        # Last page first, as in Segments.release: the start of a chain is evicted after its end.
        pages = reversed(list(zip(keys, digests, strict=True)))
        added = [key for key, digest in pages if self._segments.commit(session, key, digest)]
        self.counters["pages_saved"] += len(added)
        self._record("commit", "", added, cause=f"by session {session}")
        self._announce(added)

    def abort(self, session: int, keyspace: bytes, hashes: Sequence[bytes]) -> None:
        """Gives reserved pages back."""
        keys = [page_key(keyspace, each) for each in hashes]
        for key in keys:
            self._segments.abort(session, key)
        self._record("abort", "", keys, cause=f"by session {session}")

    def end_session(self, session: int) -> None:
        """The connection is gone: so are its holds and reservations."""
        for hold_id in self._holds_of.pop(session, set()):
            self._segments.release((session, hold_id))
            self._record("release", hold_id, cause=f"session {session} has ended")
        self._segments.abort_all(session)
        self._record("end", "", cause=f"session {session}: its reservations are given back")

    # --- other workers ---

    @asynccontextmanager
    async def hold(self, keys: Sequence[bytes]) -> AsyncIterator[list[PageBytes | None]]:
        """See net.bulk.PageSource."""
        self._next_send += 1
        holder = ("send", self._next_send)
        gone = set(self._segments.hold(holder, keys))
        self.sends += 1
        result = "not taken"
        try:
            pages = [None if key in gone else self._page(key) for key in keys]
            yield pages
            sent = [page.data.nbytes for page in pages if page]
            self.counters["pages_sent"] += len(sent)
            self.counters["bytes_sent"] += sum(sent)
            result = f"{len(gone)} were gone" if gone else ""
        finally:
            self.sends -= 1
            self._segments.release(holder)
            self._record("sent", "", keys, cause=result)

    def _page(self, key: bytes) -> PageBytes:
        where = self._segments.range(key)
        age_s = self.ages.age_of(key) if self.ages is not None else 0.0
        return PageBytes(self._arena.view[where.offset : where.end], self._segments.digest(key), age_s)

    def receive(self, owner: str, key: bytes, length: int) -> memoryview | None:
        """Memory for a page that is being fetched; None: no room, or it came another way."""
        reserved = self._segments.reserve(owner, key, length)
        self._announce([])
        return None if reserved is None else self._arena.view[reserved.offset : reserved.end]

    def received(self, owner: str, key: bytes, memory: memoryview, digest: int, age_s: float = 0.0) -> bool:
        """Checks the bytes that arrived of a page that is so old; wrong ones are dropped and count as a miss."""
        if xxhash.xxh3_64_intdigest(memory) != digest:
            self.counters["digest_mismatches"] += 1
            logger.warning("page %s arrived with wrong bytes and was dropped", key[KEYSPACE_BYTES:].hex()[:16])
            self._segments.abort(owner, key)
            return False
        self._segments.commit(owner, key, digest)
        if self.ages is not None:
            self.ages.arrived(key, age_s)
        for held in self._wanted.get(key, ()):
            if held.hold_id in self._holds_of.get(held.session, ()):
                self._segments.hold((held.session, held.hold_id), [key])
        self.counters["pages_fetched"] += 1
        self.counters["bytes_fetched"] += len(memory)
        self._announce([key])
        return True

    def give_up(self, owner: str) -> None:
        """A fetch ended; what it reserved and did not complete is free again."""
        self._segments.abort_all(owner)

    def _announce(self, added: Sequence[bytes], cause: str = "room was needed") -> None:
        evicted = self._segments.take_evicted()
        if evicted:
            self._record("evict", "", evicted, cause=cause)
        changed = [*added, *evicted]
        if changed and self.elsewhere is not None:
            self.elsewhere.changed(changed)

    def evict_older(self, born: int) -> None:
        """See Segments.evict_older; their homes are told."""
        self._segments.evict_older(born)
        self._announce([], "too old")

    def evict_page(self, key: bytes) -> bool:
        """See Segments.evict_page; its home is told."""
        done = self._segments.evict_page(key)
        self._announce([], "too old")
        return done

    def evict_of(self, keyspaces: Container[bytes]) -> tuple[int, int]:
        """See Segments.evict_of; their homes are told."""
        counts = self._segments.evict_of(keyspaces)
        self._announce([], "its tenant's pages are removed")
        return counts

    def outside(self, keyspaces: Container[bytes]) -> int:
        """How many pages are of no keyspace of these."""
        return sum(key[:KEYSPACE_BYTES] not in keyspaces for key in self.inventory())

    @property
    def segments(self) -> Segments:
        """What lies in the arena, to read."""
        return self._segments

    async def close(self) -> None:
        """Ends the fetches under way."""
        fetches = set(self._fetching.values())
        for task in fetches:
            task.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)

    @property
    def fetches(self) -> int:
        """How many pages are being fetched."""
        return len(self._fetching)

    def resident(self, key: bytes) -> bool:
        """Whether the page can be read here."""
        return self._segments.resident(key)

    def inventory(self) -> list[bytes]:
        """All pages that can be read."""
        return self._segments.keys()

    def statistics(self) -> dict[str, int]:
        """Counts for people and metrics."""
        return {**self._segments.statistics(), **self.counters}

    def check(self) -> None:
        """See Segments.check."""
        self._segments.check()
