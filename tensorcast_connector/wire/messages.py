"""Every message as a tagged struct, msgpack arrays on the wire.

Compatibility: a message only ever grows at its end, by fields with defaults; an older receiver skips what it does not
know and a newer one fills what is missing. A change that this cannot express raises PROTOCOL_VERSION, which the
hello negotiates.
"""

from typing import Any, TypeVar

import msgspec

from tensorcast_connector.errors import ProtocolError

PROTOCOL_VERSION = 1
PROTOCOL_VERSION_MIN = 1
T = TypeVar("T")


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages; the tag on the wire is the class name."""


# --- every connection -------------------------------------------------------------------------------------------------


class Hello(Message):
    """First message on every connection."""

    version_min: int
    version: int
    role: str  # "engine", "worker", "client": who is calling, for people and for limits
    name: str


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


class Locate(Message):
    """Asks the home for workers that hold pages."""

    keys: list[bytes]


class Located(Message):
    """Per key the ids of workers that hold it."""

    workers: list[list[str]]


class Announce(Message):
    """What the sender holds now; `reset` first forgets all it announced before."""

    worker_id: str
    reset: bool
    added: list[bytes]
    removed: list[bytes]


class Fetch(Message):
    """Asks for the bytes of pages (bulk connections only)."""

    keys: list[bytes]


class Fetched(Message):
    """Per key (length, digest), (0, 0) if gone. The payload of the frame is the bytes of the present pages in order."""

    pages: list[tuple[int, int]]


# --- worker and client -> store ---------------------------------------------------------------------------------------


class WorkerRecord(msgspec.Struct, frozen=True):
    """A worker as the store lists it."""

    worker_id: str
    name: str
    address: str
    arena_bytes: int
    version: int = PROTOCOL_VERSION


class InstanceRecord(msgspec.Struct, frozen=True):
    """An engine as the store lists it."""

    instance_id: str
    worker_id: str
    engine: str
    model: str
    namespace: str


class RegisterWorker(Message):
    """Lists a worker under a lease of `ttl_s` seconds."""

    record: WorkerRecord
    ttl_s: int


class RegisterInstance(Message):
    """Lists an instance under the lease of its worker."""

    record: InstanceRecord
    lease_id: int


class RemoveInstance(Message):
    """The instance has gone."""

    instance_id: str


class LeaseGranted(Message):
    """The lease to keep alive."""

    lease_id: int
    revision: int


class KeepAlive(Message):
    """Renews a lease; NotFound once it has expired (register again)."""

    lease_id: int


class Alive(Message):
    """Renewed; `revision` moves on whenever the list of members changes."""

    revision: int


class RevokeLease(Message):
    """Ends a lease and all it lists."""

    lease_id: int


class ListMembers(Message):
    """All live workers and instances."""


class Members(Message):
    """Answer to ListMembers."""

    revision: int
    workers: list[WorkerRecord]
    instances: list[InstanceRecord]


EngineRequest = (
    Hello | Ping | GetStatistics | MapArena | AttachInstance | Lookup | Release | Acquire | Reserve | Commit | Abort
)
PeerRequest = Hello | Ping | GetStatistics | Locate | Announce | Fetch
StoreRequest = (
    Hello
    | Ping
    | GetStatistics
    | RegisterWorker
    | RegisterInstance
    | RemoveInstance
    | KeepAlive
    | RevokeLease
    | ListMembers
)
Reply = (
    Welcome | Ok | Statistics | ArenaInfo | LookupResult | Acquired | Reserved | Located | Fetched | LeaseGranted | Alive
    | Members
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
failure_decoder = msgspec.msgpack.Decoder(Failure)
hello_decoder = msgspec.msgpack.Decoder(Hello)


def decode(decoder: msgspec.msgpack.Decoder[T], body: bytes, what: str = "message") -> T:
    """The message in `body`.

    Raises:
        ProtocolError: it holds none that `decoder` knows.
    """
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:  # the latter for lists in lists in lists
        raise ProtocolError(f"{what} not understood: {error}") from error
