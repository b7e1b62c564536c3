"""Short values for the tests of the metadata plane: keys of a shard, records, and what the store tells."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tensorcast_connector.core.cluster import (
    SHARD_COUNT,
    instance_key,
    replica_key,
    shard_key,
    worker_key,
)
from tensorcast_connector.types import Token, WorkerId
from tensorcast_connector.wire.keys import pack
from tensorcast_connector.wire.messages import FindKeys, ReportKeys, ShardGrant
from tensorcast_connector.wire.store_messages import (
    Changes,
    Entry,
    InstanceRecord,
    ReplicaRecord,
    ShardRecord,
    WorkerRecord,
)

A, B, C, D = (WorkerId(f"{name}/1") for name in "abcd")
LEASES = {A: 101, B: 102, C: 103, D: 104}
SHARDS = 4
HOME_ROLES = ("basic", "shard-home")


def key(shard: int, number: int = 0) -> bytes:
    """A page of this shard; all keys have one length."""
    return b"page-%04d" % number + bytes([shard])


def find(shards: Iterable[int], keys: Sequence[bytes]) -> FindKeys:
    """A question about keys of one length."""
    packed = pack(keys)
    return FindKeys(list(shards), packed.key_bytes, packed.packed)


def report(
    who: str, number: int, grants: Sequence[ShardGrant], reset: Sequence[int] = (), added: Sequence[bytes] = (),
    removed: Sequence[bytes] = (),
) -> ReportKeys:  # fmt: skip
    """What a worker says of keys of one length."""
    key_bytes = pack([*added, *removed]).key_bytes
    return ReportKeys(who, number, list(grants), list(reset), key_bytes, b"".join(added), b"".join(removed))


def token(revision: int, incarnation: int = 1) -> Token:
    """Of the first life of the store unless told."""
    return Token(incarnation, revision)


def worker(worker_id: str, roles: Sequence[str] = HOME_ROLES, address: str = "host:1") -> WorkerRecord:
    """As the store lists it."""
    return WorkerRecord(worker_id, worker_id.split("/")[0], address, 1 << 20, 2, tuple(roles))


def instance(name: str, worker_id: str = A) -> InstanceRecord:
    """As the store lists it."""
    return InstanceRecord(name, worker_id, "vllm", "m", "n")


def replica(artifact_id: str, worker_id: str = A) -> ReplicaRecord:
    """As the store lists it."""
    return ReplicaRecord(artifact_id, worker_id, "memory", 5)


def entry(record: object, revision: int = 1) -> Entry:
    """A record where it belongs."""
    if isinstance(record, WorkerRecord):
        where = worker_key(record.worker_id)
    elif isinstance(record, InstanceRecord):
        where = instance_key(record.instance_id)
    else:
        assert isinstance(record, ReplicaRecord)
        where = replica_key(record.artifact_id, record.worker_id)
    return Entry(where, msgspec.json.encode(record), revision)


def shard_count(count: int = SHARDS) -> Entry:
    """Into how many shards the pages are cut."""
    return Entry(SHARD_COUNT, b"%d" % count, 1)


def lease(shard: int, home: str, revision: int, lease_id: int | None = None) -> Entry:
    """The lease of a shard."""
    record = ShardRecord(home, LEASES.get(WorkerId(home), 999) if lease_id is None else lease_id)
    return Entry(shard_key(shard), msgspec.json.encode(record), revision)


def everything(
    workers: Sequence[WorkerRecord | WorkerId], homes: Mapping[int, tuple[WorkerId, int]], revision: int = 100,
    incarnation: int = 1, shards: int = SHARDS,
) -> Changes:  # fmt: skip
    """The whole cluster: who is there, and per shard its home and the revision of the grant."""
    records = [entry(each if isinstance(each, WorkerRecord) else worker(each)) for each in workers]
    leases = [lease(shard, home, granted) for shard, (home, granted) in homes.items()]
    return Changes(incarnation, revision, True, [shard_count(shards), *records, *leases], [])


def delta(*entries: Entry, deleted: Sequence[str] = (), revision: int = 200, incarnation: int = 1) -> Changes:
    """What has changed."""
    return Changes(incarnation, revision, False, list(entries), list(deleted))
