"""Messages to bytes and back: the requests each server takes, and every reply."""

import sys
from array import array
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.wire.caller_messages import (
    AbortUpload,
    Arrival,
    ArtifactList,
    ArtifactOpened,
    AskArrival,
    CloseReplica,
    CommitUpload,
    DeleteArtifact,
    Disable,
    DisabledList,
    EndLease,
    ForgetPages,
    LeaseOpened,
    ListArtifacts,
    ListDisabled,
    ListReplicas,
    ListSignals,
    MakeResident,
    MapArtifact,
    MoveNames,
    NamesMoved,
    NameState,
    OpenArtifact,
    OpenLease,
    OpenMappedUpload,
    OpenReplica,
    OpenUpload,
    RenewLease,
    ReplicaList,
    ReplicaOpened,
    SetName,
    SignalsListed,
    UploadOpened,
    WaitName,
    WriteUpload,
)
from tensorcast_connector.wire.messages import (
    Abort,
    Acquire,
    Acquired,
    ArenaInfo,
    AskInventory,
    AttachInstance,
    BytesFollow,
    Commit,
    CopyHeader,
    Failure,
    Fenced,
    Fetch,
    Fetched,
    FindKeys,
    FindPages,
    ForgetTenant,
    GetSignals,
    GetStatistics,
    GetStory,
    Hello,
    Lookup,
    LookupResult,
    MapArena,
    Ok,
    PagesForgotten,
    PagesFound,
    Ping,
    ReadHeader,
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
from tensorcast_connector.wire.plan_messages import (
    CancelOwnedPlan,
    CancelPlan,
    CancelSteps,
    PlanState,
    ReportInstance,
    RunStep,
    StepDone,
    StepEnded,
    StepTaken,
    SubmitPlan,
    TakeStep,
    WaitPlan,
)
from tensorcast_connector.wire.store_messages import (
    Alive,
    Changes,
    ClaimShards,
    GrantLease,
    KeepAlive,
    LeaseGranted,
    PutReplica,
    ReadRecords,
    Records,
    RecordsWritten,
    RegisterInstance,
    RegisterWorker,
    ReleaseShards,
    RemoveInstance,
    RemoveReplica,
    RevokeLease,
    Watch,
    WriteRecords,
)

T = TypeVar("T")
REASON_CHARS_MAX = 300

CallerRequest = (
    OpenUpload | OpenMappedUpload | WriteUpload | CommitUpload | AbortUpload | OpenArtifact | MapArtifact | MakeResident
    | ListArtifacts | SetName | DeleteArtifact | OpenLease | RenewLease | EndLease | SubmitPlan | WaitPlan | CancelPlan
    | ListSignals | Disable | ListDisabled | ForgetPages | MoveNames | WaitName | AskArrival
    | OpenReplica | CloseReplica | ListReplicas
)  # fmt: skip

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
    | TakeStep
    | StepEnded
    | ReportInstance
    | CallerRequest
)
PeerRequest = (
    Hello | Ping | GetStatistics | FindKeys | ReportKeys | AskInventory | Fetch | GetSignals | GetStory
    | FindPages | ReportPages | ReadHeader | ForgetTenant | RunStep | CancelSteps | CancelOwnedPlan | CallerRequest
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
    | ReadRecords
    | WriteRecords
    | GrantLease
)
Reply = (
    Welcome | Ok | Statistics | ArenaInfo | LookupResult | Acquired | Reserved | PagesFound | Reported | Fenced | Fetched
    | LeaseGranted | Alive | Changes | Signals | Story | Records | RecordsWritten
    | UploadOpened | ArtifactOpened | ArtifactList | LeaseOpened
    | BytesFollow | CopyHeader | PlanState | StepDone | StepTaken | SignalsListed | DisabledList | PagesForgotten
    | NamesMoved | NameState | Arrival | ReplicaOpened | ReplicaList
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
        why = str(error)[:REASON_CHARS_MAX]  # which repeats what was sent as the message's name
        raise ProtocolError(f"{what} not understood: {why if why.isprintable() else repr(why)[1:-1]}") from error


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
