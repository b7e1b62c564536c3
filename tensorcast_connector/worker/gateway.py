"""The entry for callers: one session per connection, what it may name, and what it asks for (TensorCast, section 4.1).

On the Unix socket a caller gets artifacts as shared memory, over TCP their bytes. What it puts is first an upload, which
belongs to its connection; `CommitUpload` makes an artifact of it, records it at the store and points a name to it.
"""

import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from tensorcast_connector.config import SIGNALS_TIMEOUT_S, TENANT, WATCH_WAIT_S
from tensorcast_connector.core.artifact import check_name, check_tenant
from tensorcast_connector.core.cluster import (
    CALLERS,
    DISABLED,
    artifact_key,
    name_key,
)
from tensorcast_connector.core.plan_runs import worker_named
from tensorcast_connector.errors import NotFound, ProtocolError, Unauthorized, WrongRole
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.types import WorkerId
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
    OpenArtifact,
    OpenLease,
    OpenMappedUpload,
    OpenReplica,
    OpenUpload,
    RenewLease,
    ReplicaList,
    SetName,
    UploadOpened,
    WaitName,
    WriteUpload,
)
from tensorcast_connector.wire.messages import Hello, Message, Ok
from tensorcast_connector.wire.plan_messages import CancelPlan, SubmitPlan, WaitPlan
from tensorcast_connector.wire.store_messages import ArtifactRecord, NameRecord
from tensorcast_connector.worker.artifacts import Artifacts
from tensorcast_connector.worker.census import Census, check_switch
from tensorcast_connector.worker.commits import Commits
from tensorcast_connector.worker.devices import Devices
from tensorcast_connector.worker.executor import Executor
from tensorcast_connector.worker.names import Names
from tensorcast_connector.worker.peers import Peers
from tensorcast_connector.worker.plans import Plans
from tensorcast_connector.worker.records import StoreRecords, check_metadata, metadata_to_keep

logger = logging.getLogger(__name__)
_session_ids = itertools.count(1)
NOTE_CHARS_MAX = 1000
_OF_ANY_WORKER = (ListSignals, ForgetPages, Disable, ListDisabled)  # what looks after the cluster


class Gateway:
    """What the sessions of all callers share.

    Args:
        serves: whether this worker has the role: then it does what callers ask, and goes on with the plans of gateways
            that have gone. Others tell callers who has it.
        wall: seconds since 1970, for people and deadlines in the store.
    """

    def __init__(
        self, me: WorkerId, artifacts: Artifacts, devices: Devices, peers: Peers, census: Census, chance: random.Random,
        serves: bool, now: Callable[[], float], wall: Callable[[], float],
    ) -> None:  # fmt: skip
        self.worker_id = me
        self._serves = serves
        self.artifacts = artifacts
        self.devices = devices
        self._peers = peers
        self.records = StoreRecords(me, peers)
        self.names = Names(self.records)
        self.commits = Commits(artifacts, self.records)
        self.executor = Executor(artifacts, devices, self.names, now, peers.record)
        self.plans = Plans(me, peers, self.executor, chance, serves, now, wall)
        self.census = census
        self.wall = wall

    async def close(self) -> None:
        """Ends what is under way for callers."""
        await self.plans.close()
        await self.executor.close()
        await self.commits.close()
        await self.records.close()

    def open_session(self, stream: Stream, hello: Hello) -> "CallerSession":
        """A new connection of a caller."""
        logger.debug("caller %s of tenant %s connected", hello.name, hello.tenant)
        return CallerSession(self, stream, check_tenant(hello.tenant))

    def check_role(self) -> None:
        """Raises WrongRole if this worker is no gateway; names one that is."""
        if self._serves:
            return
        gateways = [each for _, each in sorted(self.records.view.workers.items()) if "gateway" in each.roles]
        ask = f"ask {gateways[0].name} at {gateways[0].address}" if gateways else "and none is listed just now"
        raise WrongRole(f"worker {self.worker_id} is no gateway (--roles): {ask}")

    def parts(self, hello: Hello, artifact_id: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """See net.bulk.PartSource."""
        if hello.tenant and (hello.tenant, artifact_id) not in self.records.view.artifacts:
            raise NotFound(f"artifact {artifact_id[:64]!r} does not exist")
        data = self.artifacts.copy(artifact_id).blob.view
        for offset, length in ranges:
            if offset < 0 or length < 0 or offset + length > data.nbytes:
                raise ProtocolError(f"bytes {offset} to {offset + length} are not within {data.nbytes}")
        self.artifacts.counters["artifact_bytes_sent"] += sum(length for _, length in ranges)
        return [data[offset : offset + length] for offset, length in ranges]

    async def arrival(self, message: AskArrival, tenant: str) -> Arrival:
        """See AskArrival; of a tenant's artifacts only."""
        view = self.records.view
        mine = [each if (tenant, each) in view.artifacts else "" for each in message.artifacts]
        worker_id = worker_named(view, message.worker) if message.worker else self.worker_id
        if worker_id == self.worker_id:
            return Arrival([self.artifacts.arrival(each) for each in mine])
        client, _ = self._peers.client(worker_id)
        return await client.call(AskArrival(mine), Arrival, SIGNALS_TIMEOUT_S)


class CallerSession:
    """One connection of a caller: a Session of net/rpc."""

    def __init__(self, gateway: Gateway, stream: Stream, tenant: str) -> None:
        self._gateway = gateway
        self._artifacts = gateway.artifacts
        self._records = gateway.records
        self._wall = gateway.wall
        self._stream = stream
        self._tenant = tenant
        self._id = ("caller", next(_session_ids))

    def handle(self, message: Any) -> Message | Awaitable[Message]:
        """See Session."""
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"a gateway does not take {type(message).__name__} of a caller")
        if not isinstance(message, _OF_ANY_WORKER):
            self._gateway.check_role()
        return handler(self, message)

    def close(self) -> None:
        """Its uploads go with it. Its leases end by themselves: it may come back."""
        self._artifacts.end_session(self._id)
        self._gateway.devices.end_session(self._id)

    # --- putting ---

    async def _open_upload(self, message: OpenUpload) -> Message:
        if message.bytes < 0:
            raise ProtocolError(f"an upload of {message.bytes} bytes")
        self._records.prepare()
        return UploadOpened(await self._artifacts.open_upload(self._id, message.bytes, self._tenant))

    async def _open_mapped(self, message: OpenMappedUpload) -> Message:
        if message.bytes < 0:
            raise ProtocolError(f"an upload of {message.bytes} bytes")
        self._records.prepare()
        upload_id = await self._artifacts.open_upload(self._id, message.bytes, self._tenant, message.written)
        await self._stream.send_descriptor(self._artifacts.upload(upload_id).descriptor)
        return UploadOpened(upload_id)

    def _write(self, message: WriteUpload) -> Message:
        blob = self._artifacts.upload(message.upload_id)
        if not 0 <= message.offset <= blob.bytes - len(message.data):
            raise ProtocolError(
                f"{len(message.data)} bytes at {message.offset} are not within an upload of {blob.bytes}"
            )
        if message.data:
            blob.writable()[message.offset : message.offset + len(message.data)] = message.data
        return Ok()

    def _abort(self, message: AbortUpload) -> Message:
        self._artifacts.abort(message.upload_id)
        return Ok()

    async def _commit(self, message: CommitUpload) -> Message:
        name = check_name(message.name) if message.name else ""
        check_metadata(message.metadata)
        if message.lease_id:
            await self._check_lease(message.lease_id)
        identity = self._artifacts.commit(message.upload_id, message.header, self._tenant)
        header, lease_id = self._artifacts.copy(identity).header, message.lease_id
        metadata = metadata_to_keep(self._records.view, self._tenant, identity, message.metadata)
        record = ArtifactRecord(identity, header.size, len(header.tensors), self._wall(), lease_id, metadata)
        puts = [(artifact_key(self._tenant, identity, lease_id), msgspec.json.encode(record), lease_id)]
        if name:
            puts.append((name_key(self._tenant, name), msgspec.json.encode(NameRecord(identity)), lease_id))
        named = (self._tenant, name) if name else None
        revision = await self._gateway.commits.record(identity, puts, named)
        if name:
            self._gateway.names.put_here(self._tenant, name, revision)
        return ArtifactOpened(
            identity, message.header, lease_id, record.created_unix_s, [name] if name else [], [self._gateway.worker_id],
            revision, metadata,
        )  # fmt: skip

    # --- naming ---

    async def _open(self, message: OpenArtifact) -> Message:
        await self._records.seen(message.after_revision)
        return await self._opened(await self._identity(message.reference))

    async def _identity(self, reference: str, fresh: bool = False) -> str:
        return await self._gateway.names.resolve(self._tenant, reference, fresh)

    def _owners(self, identity: str) -> list[ArtifactRecord]:
        """As this worker sees it; raises NotFound if it was deleted just now."""
        owners = self._records.view.artifacts.get((self._tenant, identity))
        if not owners:
            raise NotFound(f"artifact {identity} does not exist")
        return list(owners.values())

    async def _opened(self, identity: str) -> Message:
        view = self._records.view
        owner = min(self._owners(identity), key=lambda each: each.lease_id)
        return ArtifactOpened(
            identity, await self._artifacts.header(identity), owner.lease_id, owner.created_unix_s,
            self._gateway.names.of(self._tenant, identity), sorted(view.replicas.get(identity, {})), view.revision,
            owner.metadata,
        )  # fmt: skip

    async def _list(self, message: ListArtifacts) -> Message:
        await self._records.seen(message.after_revision)
        return ArtifactList(self._gateway.names.listed(self._tenant, message.prefix))

    async def _set_name(self, message: SetName) -> Message:
        if not message.artifact_id:
            await self._gateway.names.take_away(self._tenant, message.name)
            return Ok()
        check_name(message.name)
        identity = await self._identity(message.artifact_id, fresh=True)
        await self._gateway.names.point(self._tenant, message.name, identity, self._owners(identity))
        return Ok()

    async def _move_names(self, message: MoveNames) -> Message:
        return await self._gateway.names.move(self._tenant, message)

    async def _arrival(self, message: AskArrival) -> Message:
        return await self._gateway.arrival(message, self._tenant)

    async def _wait_name(self, message: WaitName) -> Message:
        return await self._gateway.names.wait(self._tenant, message)

    async def _delete(self, message: DeleteArtifact) -> Message:
        identity = await self._identity(message.artifact_id, fresh=True)
        await self._records.seen(await self._records.delete_artifact(self._tenant, identity))
        return Ok()

    # --- reading ---

    async def _map(self, message: MapArtifact) -> Message:
        copy = await self._artifacts.resident(await self._identity(message.artifact_id))
        await self._stream.send_descriptor(copy.blob.descriptor)
        return Ok()

    async def _make_resident(self, message: MakeResident) -> Message:
        await self._artifacts.resident(await self._identity(message.artifact_id))
        return Ok()

    # --- copies on devices ---

    async def _open_replica(self, message: OpenReplica) -> Message:
        identity = await self._identity(message.artifact_id)
        return self._gateway.devices.open(self._id, identity, message.device)

    def _close_replica(self, message: CloseReplica) -> Message:
        self._gateway.devices.close_replica(self._id, message.number)
        return Ok()

    async def _list_replicas(self, message: ListReplicas) -> Message:
        return ReplicaList(self._gateway.devices.listed(await self._identity(message.artifact_id)))

    # --- plans ---

    async def _submit(self, message: SubmitPlan) -> Message:
        return await self._gateway.plans.submit(self._tenant, message)

    async def _wait_plan(self, message: WaitPlan) -> Message:
        return await self._gateway.plans.wait(self._tenant, message.key, message.wait_ms / 1000)

    async def _cancel_plan(self, message: CancelPlan) -> Message:
        return await self._gateway.plans.cancel(f"{self._tenant}/{message.key}")

    # --- signals ---

    async def _signals(self, message: ListSignals) -> Message:
        if message.wait_ms:
            await self._records.members_changed(message.after_revision, min(message.wait_ms / 1000, WATCH_WAIT_S))
        # Who has no tenant's token and names no tenant looks after them all.
        everybody = self._stream.tenant is None and self._tenant == TENANT
        return await self._gateway.census.take("" if everybody else self._tenant)

    async def _forget_pages(self, _: ForgetPages) -> Message:
        return await self._gateway.census.forget_pages(self._tenant)

    # --- the switch ---

    async def _disable(self, message: Disable) -> Message:
        """For operators: it is of engines, which are nobody's in particular."""
        self._check_operator()
        key = DISABLED + check_switch(message.what)
        if message.note is None:
            revision = await self._records.delete(key)
        else:
            revision = await self._records.write([(key, message.note[:NOTE_CHARS_MAX].encode(), 0)])
        await self._records.seen(revision)
        return Ok()

    def _check_operator(self) -> None:
        if self._stream.tenant is not None:
            raise Unauthorized(f"the token of tenant {self._stream.tenant!r} does not switch engines off")

    def _list_disabled(self, _: ListDisabled) -> Message:
        self._check_operator()
        return DisabledList(dict(self._records.view.disabled))

    # --- leases ---

    async def _open_lease(self, message: OpenLease) -> Message:
        lease_id = await self._records.grant(message.ttl_s)
        await self._records.write([(self._lease_key(lease_id), b"", lease_id)])
        return LeaseOpened(lease_id)

    def _lease_key(self, lease_id: int) -> str:
        """Says whose lease it is: workers have leases too."""
        return f"{CALLERS}{self._tenant}/{lease_id}"

    async def _check_lease(self, lease_id: int) -> None:
        key = self._lease_key(lease_id)
        if not any(each.key == key for each in await self._records.read(key)):
            raise NotFound(f"lease {lease_id} has ended")

    async def _renew_lease(self, message: RenewLease) -> Message:
        await self._check_lease(message.lease_id)
        await self._records.renew(message.lease_id)
        return Ok()

    async def _end_lease(self, message: EndLease) -> Message:
        await self._check_lease(message.lease_id)
        await self._records.revoke(message.lease_id)
        return Ok()

    _handlers: dict[type, Callable[..., Message | Awaitable[Message]]] = {  # noqa: RUF012 - a constant table
        OpenUpload: _open_upload,
        OpenMappedUpload: _open_mapped,
        WriteUpload: _write,
        CommitUpload: _commit,
        AbortUpload: _abort,
        OpenArtifact: _open,
        MapArtifact: _map,
        MakeResident: _make_resident,
        OpenReplica: _open_replica,
        CloseReplica: _close_replica,
        ListReplicas: _list_replicas,
        ListArtifacts: _list,
        SetName: _set_name,
        MoveNames: _move_names,
        WaitName: _wait_name,
        AskArrival: _arrival,
        DeleteArtifact: _delete,
        OpenLease: _open_lease,
        RenewLease: _renew_lease,
        EndLease: _end_lease,
        SubmitPlan: _submit,
        WaitPlan: _wait_plan,
        CancelPlan: _cancel_plan,
        ListSignals: _signals,
        ForgetPages: _forget_pages,
        Disable: _disable,
        ListDisabled: _list_disabled,
    }
