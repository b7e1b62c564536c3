"""What one process knows of the cluster: a copy of the store's metadata, kept current by its watch.

cluster/incarnation                 the life of the store's database, the first half of every fencing token
cluster/restored                    there for a while after a restore or a loss: former homes may still believe that they are
cluster/young                       there for a while after an empty database has got its first life (store/incarnation.py)
cluster/shard-count                 into how many shards the pages are cut
cluster/workers/WORKER              WorkerRecord, under the lease of that worker
cluster/instances/INSTANCE          InstanceRecord, under the lease of its worker
cluster/shards/SHARD                ShardRecord, under the lease of its home; its revision is the fencing token's
cluster/replicas/ARTIFACT/WORKER    ReplicaRecord, under the lease of its worker
cluster/artifacts/TENANT/ARTIFACT/OWNER   ArtifactRecord; OWNER is a lease, under which it is, or "system"
cluster/names/TENANT/NAME           NameRecord, as the artifact it points to
cluster/disabled/WHAT               an instance, a model or a namespace that is to serve without the pool; the value is a note
"""

from collections import Counter
from dataclasses import dataclass

import msgspec

from tensorcast_connector.config import LISTING_CATCH_UP_S
from tensorcast_connector.core.placement import valid_shard_count
from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.types import InstanceId, Token, WorkerId
from tensorcast_connector.wire.store_messages import (
    ArtifactRecord,
    Changes,
    Entry,
    InstanceRecord,
    NameRecord,
    ReplicaRecord,
    ShardRecord,
    Watch,
    WorkerRecord,
)

CLUSTER = "cluster/"
INCARNATION = "cluster/incarnation"
RESTORED = "cluster/restored"
YOUNG = "cluster/young"
SHARD_COUNT = "cluster/shard-count"
WORKERS = "cluster/workers/"
INSTANCES = "cluster/instances/"
SHARDS = "cluster/shards/"
REPLICAS = "cluster/replicas/"
ARTIFACTS = "cluster/artifacts/"
NAMES = "cluster/names/"
DISABLED = "cluster/disabled/"
CALLERS = "callers/"  # TENANT/LEASE: the leases of callers; nobody watches them
FENCES = "callers/writes/"  # WORKER: comes with what that worker writes for callers (worker/fence.py)
PLANS = "plans/"  # TENANT/KEY/: PlanRecord (core/plan.py); nobody watches them
PLAN_MARKERS = "running/"  # DIGEST: who runs which plan, so that those of a gateway that has gone are found

decode_worker = msgspec.json.Decoder(WorkerRecord).decode
decode_instance = msgspec.json.Decoder(InstanceRecord).decode
decode_shard = msgspec.json.Decoder(ShardRecord).decode
decode_replica = msgspec.json.Decoder(ReplicaRecord).decode
decode_artifact = msgspec.json.Decoder(ArtifactRecord).decode
decode_name = msgspec.json.Decoder(NameRecord).decode


def worker_key(worker_id: str) -> str:
    """Where a worker is listed."""
    return WORKERS + worker_id


def instance_key(instance_id: str) -> str:
    """Where an engine is listed."""
    return INSTANCES + instance_id


def shard_key(shard: int) -> str:
    """Where the lease of a shard is."""
    return f"{SHARDS}{shard}"


def replica_key(artifact_id: str, worker_id: str) -> str:
    """Where a copy of an artifact is listed."""
    return f"{REPLICAS}{artifact_id}/{worker_id}"


def artifact_key(tenant: str, artifact_id: str, lease_id: int = 0) -> str:
    """Where an artifact of a tenant is listed, for one of its owners."""
    return f"{ARTIFACTS}{tenant}/{artifact_id}/{lease_id or 'system'}"


def name_key(tenant: str, name: str) -> str:
    """Where a name of a tenant is."""
    return f"{NAMES}{tenant}/{name}"


def fence_key(worker_id: str) -> str:
    """What a worker writes for callers comes with this key, under a lease that it can end."""
    return FENCES + worker_id


def _tenant_and(key: str, prefix: str) -> tuple[str, str]:
    """The tenant in a key, which has no slash, and what is behind it."""
    tenant, _, rest = key.removeprefix(prefix).partition("/")
    return tenant, rest


def _tenant_and_artifact(key: str) -> tuple[str, str]:
    tenant, rest = _tenant_and(key, ARTIFACTS)
    return tenant, rest.partition("/")[0]


def _shard_of(key: str) -> int:
    """The shard of a key under SHARDS; -1, which no shard is, if it names none."""
    number = key.removeprefix(SHARDS)
    return int(number) if number.isdecimal() else -1


@dataclass(frozen=True, slots=True)
class ShardHolder:
    """Who is the home of a shard, by which lease, under which token."""

    worker_id: WorkerId
    lease_id: int
    token: Token


class _Listing:
    """Everything there is, while it comes in pages that were read one after the other, and changes meanwhile.

    What the pages say together is the state at no moment; with all changes since the first of them it is.
    """

    def __init__(self, first: Changes) -> None:
        self.incarnation = first.incarnation
        self.revision = first.revision  # of the first page; once all are here, up to which changes are known
        self.after_key = first.entries[-1].key  # the last key that was listed; "": all pages are here
        self._at_once = True  # all pages were read at one revision
        self._entries = {entry.key: entry for entry in first.entries}

    @property
    def wait_ms(self) -> int:
        """How long the next answer may take: changes that a page has shown already are certain to come."""
        return int(LISTING_CATCH_UP_S * 1000) if not self.after_key and self._is_behind() else 0

    def _is_behind(self) -> bool:
        return any(entry.revision > self.revision for entry in self._entries.values())

    def takes(self, changes: Changes) -> bool:
        """Whether `changes` are what was asked for."""
        same = (changes.incarnation, changes.after_key) == (self.incarnation, self.after_key)
        return same and bool(changes.entries or not (self.after_key and changes.more))

    def add(self, changes: Changes) -> Changes | None:
        """The next answer; the whole, once it is complete."""
        self._entries |= {entry.key: entry for entry in changes.entries}
        for key in changes.deleted:
            self._entries.pop(key, None)
        if self.after_key:
            self._at_once = self._at_once and changes.revision == self.revision
            self.after_key = changes.entries[-1].key if changes.more else ""
            done = not changes.more and self._at_once
        else:
            self.revision = changes.revision
            done = not changes.more and not self._is_behind()
        return Changes(self.incarnation, self.revision, True, list(self._entries.values()), []) if done else None


class ClusterView:
    """See the module. Changed only by `apply`, and a listing that comes in pages changes it with its last one."""

    def __init__(self) -> None:
        self._listing: _Listing | None = None
        self.incarnation = 0
        self.revision = 0
        self.shard_count = 0
        self.restored = False  # a moment ago: no shards are granted
        self.workers: dict[WorkerId, WorkerRecord] = {}
        self.instances: dict[InstanceId, InstanceRecord] = {}
        self.shards: dict[int, ShardHolder] = {}
        self.replicas: dict[str, dict[WorkerId, ReplicaRecord]] = {}
        self.artifacts: dict[tuple[str, str], dict[str, ArtifactRecord]] = {}  # by tenant and id, and then by key
        self.artifact_ids: Counter[str] = Counter()  # how many tenants have each
        self.disabled: dict[str, str] = {}  # what is to serve without the pool, and a note
        self.names: dict[tuple[str, str], str] = {}  # tenant and name -> id of the artifact
        self.name_revisions: dict[tuple[str, str], int] = {}  # at which each was put
        self._of_key: dict[str, tuple[str, WorkerId]] = {}  # of a replica's key, since ids may hold slashes

    def __repr__(self) -> str:
        return f"<ClusterView at {self.incarnation}/{self.revision}: {len(self.workers)} workers, {len(self.shards)} shards>"

    @property
    def listing(self) -> bool:
        """Whether a part of everything there is has come, and the rest is still to be asked for."""
        return self._listing is not None

    def ask(self, wait_ms: int) -> Watch:
        """What to ask the store next; it may take `wait_ms` to answer if there is nothing to tell."""
        if self._listing is None:
            return Watch(self.incarnation, self.revision, wait_ms, "")
        listing = self._listing
        return Watch(listing.incarnation, listing.revision, listing.wait_ms, listing.after_key)

    def apply(self, changes: Changes) -> None:
        """Brings the view up to date with the answer to `ask`.

        Raises:
            ProtocolError: it is of an earlier life of the store than what is known (its clock went back, or an old
                database was put in place without `tensorcast store restore`), and nothing of it is taken; or a record
                makes no sense, and counts as absent.
        """
        listing, self._listing = self._listing, None
        if changes.incarnation < self.incarnation:
            raise ProtocolError(
                f"the store's database is of an earlier life ({changes.incarnation}) than the one known here "
                f"({self.incarnation}); restore it with `tensorcast store restore`, or restart the workers"
            )
        if changes.complete and changes.more and changes.entries:
            self._listing = _Listing(changes)
            return
        if listing is not None and not changes.complete:
            if not listing.takes(changes):
                return  # a store that knows no pages, or another life: all over again
            whole = listing.add(changes)
            if whole is None:
                self._listing = listing
                return
            changes = whole
        if changes.complete:
            self.workers.clear()
            self.instances.clear()
            self.shards.clear()
            self.replicas.clear()
            self.artifacts.clear()
            self.artifact_ids.clear()
            self.names.clear()
            self.name_revisions.clear()
            self.disabled.clear()
            self._of_key.clear()
            self.restored = False
        self.incarnation, self.revision = changes.incarnation, changes.revision
        for key in changes.deleted:
            self._forget(key)
        nonsense: ProtocolError | None = None
        for entry in changes.entries:
            try:
                self._learn(entry)
            except (msgspec.DecodeError, ValueError) as error:
                self._forget(entry.key)
                nonsense = ProtocolError(f"{entry.key!r} in the store makes no sense: {error}")
        if nonsense is not None:
            raise nonsense

    def _learn(self, entry: Entry) -> None:
        key = entry.key
        if key.startswith(WORKERS):
            self.workers[WorkerId(key.removeprefix(WORKERS))] = decode_worker(entry.value)
        elif key.startswith(INSTANCES):
            self.instances[InstanceId(key.removeprefix(INSTANCES))] = decode_instance(entry.value)
        elif key.startswith(SHARDS):
            shard, lease = _shard_of(key), decode_shard(entry.value)
            if shard < 0:
                raise ValueError("no shard has that name")
            token = Token(self.incarnation, entry.revision)
            self.shards[shard] = ShardHolder(WorkerId(lease.worker_id), lease.lease_id, token)
        elif key.startswith(REPLICAS):
            replica = decode_replica(entry.value)
            worker_id = WorkerId(replica.worker_id)
            if key != replica_key(replica.artifact_id, worker_id):
                raise ValueError(f"it is of {replica.artifact_id!r} at {worker_id!r}")
            self.replicas.setdefault(replica.artifact_id, {})[worker_id] = replica
            self._of_key[key] = replica.artifact_id, worker_id
        elif key.startswith(ARTIFACTS):
            record, where = decode_artifact(entry.value), _tenant_and_artifact(key)
            if where[1] != record.artifact_id:
                raise ValueError(f"it is of {record.artifact_id!r}")
            if where not in self.artifacts:
                self.artifact_ids[record.artifact_id] += 1
            self.artifacts.setdefault(where, {})[key] = record
        elif key.startswith(DISABLED):
            self.disabled[key.removeprefix(DISABLED)] = entry.value.decode()
        elif key.startswith(NAMES):
            self.names[_tenant_and(key, NAMES)] = decode_name(entry.value).artifact_id
            self.name_revisions[_tenant_and(key, NAMES)] = entry.revision
        elif key == RESTORED:
            self.restored = True
        elif key == SHARD_COUNT:
            count = int(entry.value)
            if not valid_shard_count(count):
                raise ValueError(f"{count} shards")
            self.shard_count = count

    def _forget(self, key: str) -> None:
        if key.startswith(WORKERS):
            self.workers.pop(WorkerId(key.removeprefix(WORKERS)), None)
        elif key.startswith(INSTANCES):
            self.instances.pop(InstanceId(key.removeprefix(INSTANCES)), None)
        elif key.startswith(SHARDS):
            self.shards.pop(_shard_of(key), None)
        elif key.startswith(ARTIFACTS):
            self._forget_artifact(key)
        elif key.startswith(DISABLED):
            self.disabled.pop(key.removeprefix(DISABLED), None)
        elif key.startswith(NAMES):
            self.names.pop(_tenant_and(key, NAMES), None)
            self.name_revisions.pop(_tenant_and(key, NAMES), None)
        elif key == RESTORED:
            self.restored = False
        elif key in self._of_key:
            artifact_id, worker_id = self._of_key.pop(key)
            copies = self.replicas[artifact_id]
            del copies[worker_id]
            if not copies:
                del self.replicas[artifact_id]

    def _forget_artifact(self, key: str) -> None:
        where = _tenant_and_artifact(key)
        owners = self.artifacts.get(where, {})
        if owners.pop(key, None) is not None and not owners:
            del self.artifacts[where]
            self.artifact_ids[where[1]] -= 1
            if not self.artifact_ids[where[1]]:
                del self.artifact_ids[where[1]]

    def check(self) -> None:
        """Raises AssertionError unless the indexes agree."""
        assert sum(map(len, self.replicas.values())) == len(self._of_key)
        assert all(self.replicas.values())
        assert all(self.artifacts.values())
        assert self.name_revisions.keys() == self.names.keys()
        assert self.artifact_ids == Counter(artifact for _, artifact in self.artifacts)
        assert all(holder.token.revision <= self.revision for holder in self.shards.values())
