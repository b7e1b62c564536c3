"""What callers (the SDK, the command line) say to the worker that is their gateway. See messages.py for the rules.

A caller's tenant is in its hello; what it names is looked for in that tenant only.
"""

from collections.abc import Sequence

import msgspec

from tensorcast_connector.wire.messages import InstanceReport, Message, Signals

# --- putting ----------------------------------------------------------------------------------------------------------


class OpenUpload(Message):
    """Asks for memory for an artifact. It belongs to this connection until CommitUpload."""

    bytes: int


class OpenMappedUpload(Message):
    """The same on one host: before the reply comes one zero byte that carries the memory's descriptor as SCM_RIGHTS.

    Attributes:
        written: it is written to as a file and not mapped, so that memory may be allocated while it is written.
    """

    bytes: int
    written: bool = False


class UploadOpened(Message):
    """Answer to both; one that is not mapped is written by WriteUpload."""

    upload_id: str


class WriteUpload(Message):
    """Bytes of an upload."""

    upload_id: str
    offset: int
    data: bytes


class CommitUpload(Message):
    """All bytes are written: from now on they are the artifact that `header` describes, and never change."""

    upload_id: str
    header: bytes  # core/artifact.py
    name: str = ""  # is made to point to it
    lease_id: int = 0  # the artifact goes with it; 0: it belongs to the system
    metadata: dict[str, str] = msgspec.field(default_factory=dict)  # kept beside it; empty: what is there stays


class AbortUpload(Message):
    """The memory is not needed."""

    upload_id: str


# --- artifacts --------------------------------------------------------------------------------------------------------


class OpenArtifact(Message):
    """What a name or an id stands for, as of `after_revision` of the store or later: a caller sees what it wrote."""

    reference: str
    after_revision: int = 0


class ArtifactOpened(Message):
    """An artifact, and who has a copy of it."""

    artifact_id: str
    header: bytes
    lease_id: int
    created_unix_s: float
    names: list[str]
    workers: list[str]
    revision: int = 0  # of the store, at which this is so
    metadata: dict[str, str] = msgspec.field(default_factory=dict)  # of the file that it was put from


class MapArtifact(Message):
    """Makes an artifact resident at this worker and passes it: before the reply comes one zero byte with the descriptor."""

    artifact_id: str


class MakeResident(Message):
    """Makes an artifact resident at this worker, so that its bytes can be read on a bulk connection."""

    artifact_id: str


class AskArrival(Message):
    """How much of artifacts is at a worker, named or by id; the receiver itself if it is empty, as between workers."""

    artifacts: list[str]
    worker: str = ""


class Arrival(Message):
    """Answer to AskArrival: for each the bytes that are there, and of how many; 0, 0 if it neither is there nor comes."""

    bytes: list[tuple[int, int]]


class ListArtifacts(Message):
    """The artifacts of the tenant whose name or id starts with `prefix`."""

    prefix: str = ""
    after_revision: int = 0


class ArtifactListed(msgspec.Struct, frozen=True, array_like=True):
    """One of them."""

    artifact_id: str
    names: list[str]
    bytes: int
    tensors: int
    lease_id: int
    created_unix_s: float
    workers: Sequence[str]


class ArtifactList(Message):
    """Answer to ListArtifacts."""

    artifacts: list[ArtifactListed]


class SetName(Message):
    """Makes a name point to an artifact; to nothing if the id is empty."""

    name: str
    artifact_id: str


class NameMove(msgspec.Struct, frozen=True, array_like=True):
    """A name that is to point to `artifact_id` ("": to nothing) if it now points to `expected` ("": there is no such name)."""

    name: str
    artifact_id: str
    expected: str


class MoveNames(Message):
    """Moves names, all of them or none; artifacts in `adopt` belong to the system from then on, and not only to a lease.

    Conflict: a name points elsewhere. NotFound: an artifact does not exist, or its lease has ended.
    """

    moves: list[NameMove]
    adopt: list[str] = msgspec.field(default_factory=list)


class NamesMoved(Message):
    """Answer to MoveNames: the revision of the store at which it was done."""

    revision: int


class WaitName(Message):
    """What a name points to; answered once that is not any more as it was at a moment of the store, or after `wait_ms`."""

    name: str
    known: str = ""  # what it pointed to then; "": there was no such name
    incarnation: int = 0
    revision: int = 0
    wait_ms: int = 0


class NameState(Message):
    """Answer to WaitName: the artifact ("": there is no such name), and the moment at which that began or was seen."""

    artifact_id: str
    incarnation: int
    revision: int


class DeleteArtifact(Message):
    """Takes the artifact and its names off the lists; workers let go of their copies."""

    artifact_id: str


# --- copies in the memory of devices, for engines of the worker's host ------------------------------------------------------


class OpenReplica(Message):
    """Holds the copy of an artifact on a device, by the device's name or identity, for this connection until CloseReplica."""

    artifact_id: str
    device: str


class ReplicaOpened(Message):
    """Answer to OpenReplica: the tensors lie in the memory behind `handle` as `header` says."""

    artifact_id: str
    header: bytes
    number: int
    device: str
    handle: bytes


class CloseReplica(Message):
    """Ends it. NotFound: it has gone meanwhile, and what was read of it is nothing."""

    number: int


class ListReplicas(Message):
    """The copies of an artifact on devices of the worker that is asked."""

    artifact_id: str


class ReplicaListed(msgspec.Struct, frozen=True, array_like=True):
    """One of them: the memory that it takes, and how often it is open."""

    device: str
    bytes: int
    open: int


class ReplicaList(Message):
    """Answer to ListReplicas."""

    replicas: list[ReplicaListed]


# --- the lease of a caller --------------------------------------------------------------------------------------------


class OpenLease(Message):
    """A lease for artifacts that belong to the caller."""

    ttl_s: int


class LeaseOpened(Message):
    """Answer to OpenLease."""

    lease_id: int


class RenewLease(Message):
    """It counts from now on again. NotFound: it has ended, and with it its artifacts."""

    lease_id: int


class EndLease(Message):
    """Ends it now."""

    lease_id: int


class ForgetPages(Message):
    """Evicts the tenant's pages of KV cache at every worker; answered with PagesForgotten."""


# --- the switch -------------------------------------------------------------------------------------------------------


class Disable(Message):
    """An instance, a model or a namespace serves without the pool from now on; or with it again if `note` is None."""

    what: str
    note: str | None


class ListDisabled(Message):
    """What is disabled."""


class DisabledList(Message):
    """Answer to ListDisabled: what, and the note."""

    disabled: dict[str, str]


# --- signals ----------------------------------------------------------------------------------------------------------


class ListSignals(Message):
    """How workers and engines are doing; answered when the store's revision is above `after_revision`, or after `wait_ms`."""

    after_revision: int = 0
    wait_ms: int = 0


class WorkerListed(msgspec.Struct, frozen=True, array_like=True):
    """A worker, and what it says of itself: `signals` with its age when this was sent, or why there is nothing."""

    worker_id: str
    name: str
    address: str
    roles: Sequence[str]
    signals: Signals | None
    error: str


class InstanceListed(msgspec.Struct, frozen=True, array_like=True):
    """An engine, and what it last said of itself to its worker; None if it never did, or its worker does not answer."""

    instance_id: str
    worker_id: str
    engine: str
    model: str
    namespace: str
    report: InstanceReport | None


class SignalsListed(Message):
    """Answer to ListSignals."""

    revision: int
    workers: list[WorkerListed]
    instances: list[InstanceListed]
