"""Messages to bytes and back: the requests each server takes, and every reply."""

import sys
from array import array
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.wire.messages import (
    Abort,
    Acquire,
    Acquired,
    ArenaInfo,
    AskInventory,
    AttachInstance,
    Commit,
    Failure,
    Fenced,
    Fetch,
    Fetched,
    FindKeys,
    FindPages,
    GetSignals,
    GetStatistics,
    GetStory,
    Hello,
    Lookup,
    LookupResult,
    MapArena,
    Ok,
    PagesFound,
    Ping,
    Release,
    Reported,
    ReportKeys,
    ReportPages,
    Reserve,
    Reserved,
    Signals,
    Statistics,
    Story,
    Welcome,
)
from tensorcast_connector.wire.store_messages import (
    Alive,
    Changes,
    ClaimShards,
    KeepAlive,
    LeaseGranted,
    PutReplica,
    RegisterInstance,
    RegisterWorker,
    ReleaseShards,
    RemoveInstance,
    RemoveReplica,
    RevokeLease,
    Watch,
)

T = TypeVar("T")

EngineRequest = (
    Hello
    | Ping
    | GetStatistics
    | GetSignals
    | GetStory
    | MapArena
    | AttachInstance
    | Lookup
    | Release
    | Acquire
    | Reserve
    | Commit
    | Abort
)
PeerRequest = (
    Hello | Ping | GetStatistics | FindKeys | ReportKeys | AskInventory | Fetch | GetSignals | GetStory
    | FindPages | ReportPages
)  # fmt: skip
StoreRequest = (
    Hello
    | Ping
    | GetStatistics
    | RegisterWorker
    | RegisterInstance
    | RemoveInstance
    | KeepAlive
    | RevokeLease
    | ClaimShards
    | ReleaseShards
    | PutReplica
    | RemoveReplica
    | Watch
)
Reply = (
    Welcome | Ok | Statistics | ArenaInfo | LookupResult | Acquired | Reserved | PagesFound | Reported | Fenced | Fetched
    | LeaseGranted | Alive | Changes | Signals | Story
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


def pack_indexes(indexes: Iterable[int]) -> bytes:
    """Little-endian uint32 each: hundreds of them are copied in one go."""
    packed = array("I", indexes)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_indexes(data: bytes) -> "array[int]":
    """See `pack_indexes`.

    Raises:
        ValueError: not a whole number of them.
    """
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed
