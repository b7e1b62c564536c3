"""What engines, workers and clients say to a worker: every message a tagged struct, msgpack arrays on the wire.

What is said to the store is in store_messages.py, and codec.py turns all of it into bytes and back.

Compatibility: a message only ever grows at its end, by fields with defaults; an older receiver skips what it does not
know and a newer one fills what is missing. A change that this cannot express raises PROTOCOL_VERSION, which the
hello negotiates.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from tensorcast_connector.wire.keys import Keys

PROTOCOL_VERSION = 3  # 2: shard homes, watch, signals; 3: packed keys
PROTOCOL_VERSION_MIN = 2
PACKED_KEYS_VERSION = 3  # the first with FindKeys and ReportKeys
SERVICE_VERSION = 3  # the first whose workers have artifacts, do steps of plans and forget a tenant's pages

# Roles in a hello that are more than a word for people.
CALLER_ROLE = "caller"
BULK_ROLE = "bulk"


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages; the tag on the wire is the class name."""


# --- every connection -------------------------------------------------------------------------------------------------


class Hello(Message):
    """First message on every connection."""

    version_min: int
    version: int
    role: str  # "engine", "worker", "client", "caller": who is calling, for people and for limits
    name: str
    tenant: str = ""  # of a caller: what it names is looked for there


class Welcome(Message):
    """Answer to Hello: the version both speak, and who answered."""

    version: int
    server: str  # "store" or "worker"
    server_id: str


class Failure(Message):
    """Body of an error frame."""

    code: str
    message: str


class Ok(Message):
    """Done, nothing to add."""


class Ping(Message):
    """Are you there? Answered with Ok by every server, before anything else it may be busy with."""


class GetStatistics(Message):
    """What the process counts."""


class Statistics(Message):
    """Answer to GetStatistics."""

    values: dict[str, Any]


# --- engine -> worker on the same host --------------------------------------------------------------------------------


class MapArena(Message):
    """Asks for the arena: before the reply comes one zero byte that carries the file descriptor as SCM_RIGHTS."""


class ArenaInfo(Message):
    """Size of the arena, and the worker's run it belongs to."""

    arena_bytes: int
    worker_id: str


class AttachInstance(Message):
    """The engine behind this connection; listed in the store while the connection lives."""

    instance_id: str
    engine: str
    model: str
    namespace: str
    tenant: str = ""  # whose; only that tenant's plans reach it. "": everybody's


class Lookup(Message):
    """How many leading blocks can be had in every keyspace (one per rank and KV group); holds the local ones.

    The hold ends with Release, with the connection, or when the same id is looked up again.
    """

    lookup_id: str
    keyspaces: list[bytes]
    block_hashes: list[bytes]


class LookupResult(Message):
    """Leading blocks that can be had, and how many of them are in the local arena already."""

    blocks: int
    local_blocks: int


class Release(Message):
    """Ends holds and pins by id; unknown ids are ignored."""

    hold_ids: list[str]


class Acquire(Message):
    """Makes pages resident and pinned under `hold_id`; fetches what is elsewhere."""

    hold_id: str
    keyspace: bytes
    block_hashes: list[bytes]


class Acquired(Message):
    """One (offset, length) of the arena per leading page that could be had; shorter than asked = the rest is missing."""

    ranges: list[tuple[int, int]]


class Reserve(Message):
    """Asks for slots to write pages into; put-if-absent."""

    keyspace: bytes
    block_hashes: list[bytes]
    page_bytes: int


class Reserved(Message):
    """An arena offset per page; -1: nothing to write, the page exists, is being written, or there is no room."""

    offsets: list[int]


class Commit(Message):
    """The reserved pages are completely written; xxh3-64 digest of each. Pages not reserved by this connection are ignored."""

    keyspace: bytes
    block_hashes: list[bytes]
    digests: list[int]


class Abort(Message):
    """The reserved pages will not be written."""

    keyspace: bytes
    block_hashes: list[bytes]


# --- worker -> worker -------------------------------------------------------------------------------------------------


ShardGrant = tuple[int, int, int]
"""A shard and the fencing token of its lease: (shard, incarnation, revision)."""

ShardAt = tuple[int, int, int, str]
"""The same and the id of its home, as far as the sender knows."""


class FindKeys(Message):
    """Asks a home which workers hold pages. Reads are never refused, only redirected."""

    shards: list[int]  # every shard that `keys` fall into
    key_bytes: int  # keys of other lengths are asked for by other messages
    keys: bytes

    @property
    def listed(self) -> Keys:
        """The keys.

        Raises:
            ProtocolError: they are not whole.
        """
        return Keys(self.keys, self.key_bytes)


class PagesFound(Message):
    """Answer to FindKeys. `which` is one little-endian uint32 per key, an index into `holders`; 0 is always nobody."""

    holders: list[list[str]]  # ids of workers
    which: bytes
    moved: list[ShardAt]  # shards of `shards` that this worker is not the home of; what it says of them is a guess


class ReportKeys(Message):
    """What the sender holds in shards of one home: a batch of registrations and removals, fenced by the shards' tokens.

    Reports of one worker to one home are numbered; one that is not newer than the last is ignored.
    """

    worker_id: str
    number: int
    shards: list[ShardGrant]  # every shard that the sender has told this home about, under which token
    reset: list[int]  # shards of which all that was reported before is void: their inventory begins with `added`
    key_bytes: int  # keys of other lengths are in other reports
    added: bytes
    removed: bytes

    @property
    def listed_added(self) -> Keys:
        """The keys of `added`.

        Raises:
            ProtocolError: they are not whole.
        """
        return Keys(self.added, self.key_bytes)

    @property
    def listed_removed(self) -> Keys:
        """The same of `removed`."""
        return Keys(self.removed, self.key_bytes)


class Reported(Message):
    """Answer to ReportKeys. What concerns the shards named here was not applied; the rest was."""

    moved: list[ShardAt]  # not held by this home under that token, and who holds them
    unknown: list[int]  # nothing is known of the sender here: send the whole inventory


class AskInventory(Message):
    """A new home asks for the inventory of shards; the answer comes as ReportKeys. Fenced like everything of a home."""

    home: str
    shards: list[ShardGrant]


class Fenced(Message):
    """Answer to AskInventory: shards for which a higher token has been seen already."""

    shards: list[ShardAt]


class GetSignals(Message):
    """How a worker is doing now."""


class InstanceReport(msgspec.Struct, array_like=True, frozen=True):
    """What an engine last said of itself to its worker (TensorCast, section 3.4)."""

    instance_id: str
    state: str  # "serving", "loading", "paused", "draining", ...: the engine's own word
    running: int  # requests that are computed
    waiting: int  # requests that are not yet
    kv_usage: float | None  # of its KV cache, from 0 to 1
    as_of_unix_s: float  # by the worker's wall clock: for people
    age_s: float  # how long before this answer, by the worker's own clock


class Signals(Message):
    """Answer to GetSignals. Pressures are from 0 (idle) to 1 (full); None where it cannot be known."""

    worker_id: str
    roles: list[str]
    shards: list[int]  # of which this worker is the home
    as_of_unix_s: float  # when it was measured, by the worker's wall clock: for people
    age_s: float  # how long before this answer it was measured, by the worker's own clock
    memory: float | None  # of the arena, by pages that cannot be evicted
    disk: float | None
    network: float | None
    queue: float | None  # of the requests in flight
    values: dict[str, Any]  # what stands behind them, with units in the names
    instances: list[InstanceReport] = msgspec.field(default_factory=list)  # attached engines that have said something


class GetStory(Message):
    """The recorded path of a page or request through this process, for people."""

    text: str  # hex of (the beginning of) a block hash, a hold id, or the name of an event


class Story(Message):
    """Answer to GetStory: lines in the order they happened."""

    lines: list[str]


class Fetch(Message):
    """Asks for the bytes of pages (bulk connections only)."""

    keys: list[bytes]


class Fetched(Message):
    """Per key (length, digest), (0, 0) if gone. The payload of the frame is the bytes of the present pages in order."""

    pages: list[tuple[int, int]]
    ages_s: list[float] = msgspec.field(default_factory=list)  # how long ago each was first saved, at any worker


class ForgetTenant(Message):
    """Asks a worker to evict the pages of a tenant; answered with PagesForgotten."""

    tenant: str


class PagesForgotten(Message):
    """Pages that were evicted, and that stay because they are in use; workers that could not be asked."""

    evicted: int
    in_use: int
    unreachable: list[str] = msgspec.field(default_factory=list)
    nobodys: int = 0  # pages that stay since the engines they are of have not said to their worker whose they are


class ReadHeader(Message):
    """Asks for the header of an artifact of which the receiver has a copy."""

    artifact_id: str


class CopyHeader(Message):
    """Answer to ReadHeader."""

    header: bytes


class FetchBytes(Message):
    """Asks for parts (offset, length) of an artifact (bulk connections only)."""

    artifact_id: str
    ranges: list[tuple[int, int]]


class BytesFollow(Message):
    """Answer to FetchBytes: the payload of the frame is these parts, one after the other."""


# --- protocol version 2, still spoken with who knows no later one ---------------------------------------------------------


class FindPages(Message):
    """Version 2: FindKeys with a list of keys of any lengths; answered the same."""

    shards: list[int]
    keys: list[bytes]

    @property
    def listed(self) -> Sequence[bytes]:
        """The keys."""
        return self.keys


class ReportPages(Message):
    """Version 2: ReportKeys with lists of keys of any lengths; answered the same."""

    worker_id: str
    number: int
    shards: list[ShardGrant]
    reset: list[int]
    added: list[bytes]
    removed: list[bytes]

    @property
    def listed_added(self) -> Sequence[bytes]:
        """The keys of `added`."""
        return self.added

    @property
    def listed_removed(self) -> Sequence[bytes]:
        """The same of `removed`."""
        return self.removed


Find = FindKeys | FindPages
Report = ReportKeys | ReportPages


def in_version(version: int, message: Message) -> Message:
    """`message` as it is said to somebody who speaks that version of the protocol."""
    if version >= PACKED_KEYS_VERSION:
        return message
    if isinstance(message, FindKeys):
        return FindPages(message.shards, list(message.listed))
    if isinstance(message, ReportKeys):
        added, removed = list(message.listed_added), list(message.listed_removed)
        return ReportPages(message.worker_id, message.number, message.shards, message.reset, added, removed)
    return message
