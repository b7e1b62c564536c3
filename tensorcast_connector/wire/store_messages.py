"""What workers and clients say to the store, and the records it keeps. See messages.py for the rules."""

import msgspec

from tensorcast_connector.wire.messages import Message


class WorkerRecord(msgspec.Struct, frozen=True):
    """A worker as the store lists it."""

    worker_id: str
    name: str
    address: str
    arena_bytes: int
    version: int = 1
    roles: tuple[str, ...] = ("basic",)  # basic, gateway, shard-home (TensorCast, section 4.1)


class InstanceRecord(msgspec.Struct, frozen=True):
    """An engine as the store lists it."""

    instance_id: str
    worker_id: str
    engine: str
    model: str
    namespace: str
    tenant: str = ""  # whose plans reach it; "": everybody's


class ShardRecord(msgspec.Struct, frozen=True):
    """Who is the home of a shard. The revision of its key is the second half of the fencing token."""

    worker_id: str
    lease_id: int


class ReplicaRecord(msgspec.Struct, frozen=True):
    """One copy of an artifact as the store lists it (weights and other tensors of which there are few)."""

    artifact_id: str
    worker_id: str
    tier: str  # "memory" or "disk"
    bytes: int
    keeper: bool = False  # the cluster relies on this copy; the others may be evicted


class ArtifactRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An artifact as the store lists it for one tenant."""

    artifact_id: str
    bytes: int
    tensors: int
    created_unix_s: float
    lease_id: int = 0  # it goes with the lease of a caller; 0: it belongs to the system
    metadata: dict[str, str] = {}  # of the file that it was put from; says nothing about its tensors


class NameRecord(msgspec.Struct, frozen=True):
    """What a name points to."""

    artifact_id: str


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


class ClaimShards(Message):
    """Asks for the leases of shards; those that nobody holds are granted, and the watch tells."""

    worker_id: str
    lease_id: int
    shards: list[int]


class ReleaseShards(Message):
    """Gives shard leases back, so that a better placed worker can take them."""

    lease_id: int
    shards: list[int]
    # Of the grants that end, one per shard: a later grant to the same lease stays.
    revisions: list[int] = msgspec.field(default_factory=list)


class PutReplica(Message):
    """Lists a copy of an artifact under the lease of its worker."""

    record: ReplicaRecord
    lease_id: int


class RemoveReplica(Message):
    """The copy is gone."""

    artifact_id: str
    worker_id: str


class Watch(Message):
    """What has changed in the cluster since a revision; answered at once if something has, else within `wait_ms`."""

    incarnation: int  # of the store that the revision is of; 0: nothing is known, send everything
    after_revision: int
    wait_ms: int
    # None: the caller knows no pages. "": it takes what is much in pages. Else a listing goes on behind this key, and
    # `after_revision` is that of its first page.
    after_key: str | None = None


class Entry(Message):
    """A key of the cluster as it is now."""

    key: str
    value: bytes
    revision: int


class Changes(Message):
    """Answer to Watch: the cluster at `revision`."""

    incarnation: int
    revision: int
    complete: bool  # everything there is; what is not in it does not exist, unless there is `more`
    entries: list[Entry]
    deleted: list[str]
    after_key: str = ""  # this is the page of a listing behind that key
    more: bool = False  # it goes on: a listing behind the last entry, changes after `revision`


# --- records of callers -----------------------------------------------------------------------------------------------


class ReadRecords(Message):
    """All keys under one of the prefixes that callers' records have (store/records.py)."""

    prefix: str


class Records(Message):
    """Answer to ReadRecords, as of `revision`."""

    revision: int
    entries: list[Entry]


class WriteRecords(Message):
    """One transaction over such keys, done if every compare holds: (key, its revision; 0 = it does not exist)."""

    compares: list[tuple[str, int]]
    puts: list[tuple[str, bytes, int]]  # key, value, lease (0 = none)
    deletes: list[str]


class RecordsWritten(Message):
    """Answer to WriteRecords: whether it was done, and the revision afterwards."""

    succeeded: bool
    revision: int


class GrantLease(Message):
    """A lease without anything on it; answered with LeaseGranted."""

    ttl_s: int
