"""Messages to bytes and back: the requests each server takes, and every reply."""

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.wire.messages import (
    Abort,
    Acquire,
    Acquired,
    Announce,
    ArenaInfo,
    AskInventory,
    AttachInstance,
    Commit,
    Failure,
    Fenced,
    Fetch,
    Fetched,
    FindPages,
    GetSignals,
    GetStatistics,
    GetStory,
    Hello,
    Locate,
    Located,
    Lookup,
    LookupResult,
    MapArena,
    Ok,
    PagesFound,
    Ping,
    Release,
    Reported,
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
    ListMembers,
    Members,
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
    Hello | Ping | GetStatistics | FindPages | ReportPages | AskInventory | Fetch | GetSignals | GetStory
    | Locate | Announce
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
    | ListMembers
    | ClaimShards
    | ReleaseShards
    | PutReplica
    | RemoveReplica
    | Watch
)
Reply = (
    Welcome | Ok | Statistics | ArenaInfo | LookupResult | Acquired | Reserved | PagesFound | Reported | Fenced | Fetched
    | LeaseGranted | Alive | Members | Changes | Signals | Story | Located
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


def pack_numbered(values: Sequence[int], numbers: Mapping[int, int]) -> bytes:
    """`pack_indexes` of the number of each value; `numbers` counts from 0."""
    if max(numbers) > 255:
        return pack_indexes(map(numbers.__getitem__, values))
    table = bytearray(256)
    for value, number in numbers.items():
        table[value] = number
    packed = bytearray(4 * len(values))
    packed[::4] = bytes(values).translate(table)  # the lowest byte of each, for all of them at once
    return bytes(packed)


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
