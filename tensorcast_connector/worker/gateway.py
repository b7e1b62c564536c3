"""The entry for callers: one session per connection, what it may name, and what it asks for (TensorCast, section 4.1).

On the Unix socket a caller gets artifacts as shared memory, over TCP their bytes. What it puts is first an upload, which
belongs to its connection; `CommitUpload` makes an artifact of it, records it at the store and points a name to it.
"""

import contextlib
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from tensorcast_connector.config import TENANT, WATCH_WAIT_S
from tensorcast_connector.core.artifact import check_name, check_tenant, is_artifact_id
from tensorcast_connector.core.cluster import (
    ARTIFACTS,
    CALLERS,
    DISABLED,
    NAMES,
    artifact_key,
    decode_name,
    name_key,
)
from tensorcast_connector.errors import Conflict, NotFound, ProtocolError, Unauthorized
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.types import WorkerId
from tensorcast_connector.wire.caller_messages import (
    AbortUpload,
    ArtifactList,
    ArtifactListed,
    ArtifactOpened,
    CommitUpload,
    DeleteArtifact,
    Disable,
    DisabledList,
    EndLease,
    ForgetPages,
    LeaseOpened,
    ListArtifacts,
    ListDisabled,
    ListSignals,
    MakeResident,
    MapArtifact,
    OpenArtifact,
    OpenLease,
    OpenMappedUpload,
    OpenUpload,
    RenewLease,
    SetName,
    UploadOpened,
    WriteUpload,
)
from tensorcast_connector.wire.messages import Hello, Message, Ok
from tensorcast_connector.wire.plan_messages import CancelPlan, SubmitPlan, WaitPlan
from tensorcast_connector.wire.store_messages import ArtifactRecord, NameRecord
from tensorcast_connector.worker.artifacts import Artifacts
from tensorcast_connector.worker.census import Census, check_switch
from tensorcast_connector.worker.commits import Commits
from tensorcast_connector.worker.executor import Executor
from tensorcast_connector.worker.peers import Peers
from tensorcast_connector.worker.plans import Plans
from tensorcast_connector.worker.records import StoreRecords

logger = logging.getLogger(__name__)
_session_ids = itertools.count(1)
NOTE_CHARS_MAX = 1000
DELETES_PER_TXN = 100  # the store takes 128 operations


class Gateway:
    """What the sessions of all callers share.

    Args:
        adopts: whether it goes on with the plans of gateways that have gone.
        wall: seconds since 1970, for people and deadlines in the store.
    """

    def __init__(
        self, me: WorkerId, artifacts: Artifacts, peers: Peers, census: Census, chance: random.Random, adopts: bool,
        now: Callable[[], float], wall: Callable[[], float],
    ) -> None:  # fmt: skip
        self.worker_id = me
        self.artifacts = artifacts
        self.records = StoreRecords(peers)
        self.commits = Commits(artifacts, self.records)
        self._named: dict[tuple[str, str], tuple[int, int]] = {}  # where in the store's history a name was put here
        self.executor = Executor(artifacts, self.resolve, now)
        self.plans = Plans(me, peers, self.executor, chance, adopts, now, wall)
        self.census = census
        self.wall = wall

    async def close(self) -> None:
        """Ends what is under way for callers."""
        await self.plans.close()
        await self.executor.close()
        await self.commits.close()

    def open_session(self, stream: Stream, hello: Hello) -> "CallerSession":
        """A new connection of a caller."""
        logger.debug("caller %s of tenant %s connected", hello.name, hello.tenant)
        return CallerSession(self, stream, check_tenant(hello.tenant))

    def named(self, tenant: str, name: str, revision: int) -> None:
        """A name was put through here: until this worker sees that, the store is asked what it stands for."""
        now = self.records.view.incarnation, self.records.view.revision
        self._named = {key: at for key, at in self._named.items() if at > now}
        self._named[tenant, name] = now[0], revision

    async def resolve(self, tenant: str, reference: str, fresh: bool = False) -> str:
        """The id that a name or an id of a tenant stands for; `fresh`: a name as the store has it now.

        Raises:
            NotFound: there is no such artifact.
        """
        view, known = self.records.view, is_artifact_id(reference)
        fresh = fresh or self._named.get((tenant, reference), (0, 0)) > (view.incarnation, view.revision)
        identity = reference if known else "" if fresh else view.names.get((tenant, reference), "")
        if (tenant, identity) in view.artifacts:
            return identity
        # This worker may not have heard of it yet.
        if not known:
            key = name_key(tenant, check_name(reference))
            found = [each for each in await self.records.read(key) if each.key == key]
            if not found:
                raise NotFound(f"no artifact has the name {reference!r}")
            identity = decode_name(found[0].value).artifact_id
            if (tenant, identity) in view.artifacts:
                return identity
        entries = await self.records.read(f"{ARTIFACTS}{tenant}/{identity}/")
        if not entries:
            raise NotFound(
                f"artifact {reference!r} does not exist" if known else f"what {reference!r} points to was deleted"
            )
        await self.records.seen(max(each.revision for each in entries))
        return identity

    def parts(self, hello: Hello, artifact_id: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """See net.bulk.PartSource."""
        if hello.tenant and (hello.tenant, artifact_id) not in self.records.view.artifacts:
            raise NotFound(f"artifact {artifact_id[:64]!r} does not exist")
        data = self.artifacts.copy(artifact_id).blob.view
        for offset, length in ranges:
            if offset < 0 or length < 0 or offset + length > data.nbytes:
                raise ProtocolError(f"bytes {offset} to {offset + length} are not within {data.nbytes}")
        return [data[offset : offset + length] for offset, length in ranges]


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
        return handler(self, message)

    def close(self) -> None:
        """Its uploads go with it. Its leases end by themselves: it may come back."""
        self._artifacts.end_session(self._id)

    # --- putting ---

    async def _open_upload(self, message: OpenUpload) -> Message:
        if message.bytes < 0:
            raise ProtocolError(f"an upload of {message.bytes} bytes")
        return UploadOpened(await self._artifacts.open_upload(self._id, message.bytes))

    async def _open_mapped(self, message: OpenMappedUpload) -> Message:
        if message.bytes < 0:
            raise ProtocolError(f"an upload of {message.bytes} bytes")
        upload_id = await self._artifacts.open_upload(self._id, message.bytes)
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
        if message.lease_id:
            await self._check_lease(message.lease_id)
        identity = self._artifacts.commit(message.upload_id, message.header, self._tenant)
        header, lease_id = self._artifacts.copy(identity).header, message.lease_id
        record = ArtifactRecord(identity, header.size, len(header.tensors), self._wall(), lease_id)
        puts = [(artifact_key(self._tenant, identity, lease_id), msgspec.json.encode(record), lease_id)]
        if name:
            puts.append((name_key(self._tenant, name), msgspec.json.encode(NameRecord(identity)), lease_id))
        revision = await self._gateway.commits.record(identity, puts)
        if name:
            self._gateway.named(self._tenant, name, revision)
        names = [name] if name else []
        return ArtifactOpened(
            identity, message.header, lease_id, record.created_unix_s, names, [self._gateway.worker_id], revision
        )  # fmt: skip

    # --- naming ---

    async def _open(self, message: OpenArtifact) -> Message:
        await self._records.seen(message.after_revision)
        return await self._opened(await self._identity(message.reference))

    async def _identity(self, reference: str, fresh: bool = False) -> str:
        return await self._gateway.resolve(self._tenant, reference, fresh)

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
            self._names(identity), sorted(view.replicas.get(identity, {})), view.revision,
        )  # fmt: skip

    def _names(self, identity: str) -> list[str]:
        return sorted(
            name for (tenant, name), target in self._records.view.names.items()
            if target == identity and tenant == self._tenant
        )  # fmt: skip

    async def _list(self, message: ListArtifacts) -> Message:
        await self._records.seen(message.after_revision)
        view = self._records.view
        names: dict[str, list[str]] = {}
        for (tenant, name), target in view.names.items():
            if tenant == self._tenant:
                names.setdefault(target, []).append(name)
        found = []
        for (tenant, identity), owners in view.artifacts.items():
            own = sorted(names.get(identity, []))
            if tenant == self._tenant and any(each.startswith(message.prefix) for each in [identity, *own]):
                record = min(owners.values(), key=lambda each: each.lease_id)
                workers = sorted(view.replicas.get(identity, {}))
                found.append(ArtifactListed(
                    identity, own, record.bytes, record.tensors, record.lease_id, record.created_unix_s, workers
                ))  # fmt: skip
        return ArtifactList(sorted(found, key=lambda each: (each.names, each.artifact_id)))

    async def _set_name(self, message: SetName) -> Message:
        key = name_key(self._tenant, check_name(message.name))
        if not message.artifact_id:
            await self._records.seen(await self._records.write([], [key]))
            return Ok()
        identity = await self._identity(message.artifact_id, fresh=True)
        lease_id = min(each.lease_id for each in self._owners(identity))
        await self._records.seen(
            await self._records.write([(key, msgspec.json.encode(NameRecord(identity)), lease_id)])
        )  # fmt: skip
        return Ok()

    async def _delete(self, message: DeleteArtifact) -> Message:
        """The artifact first: a name that is left over points to nothing, and one that has moved on meanwhile stays."""
        identity = await self._identity(message.artifact_id, fresh=True)
        owners = await self._records.read(f"{ARTIFACTS}{self._tenant}/{identity}/")
        revision = 0
        for at in range(0, len(owners), DELETES_PER_TXN):
            revision = await self._records.write([], [each.key for each in owners[at : at + DELETES_PER_TXN]])
        names = await self._records.read(f"{NAMES}{self._tenant}/")
        for each in names:
            if decode_name(each.value).artifact_id == identity:
                with contextlib.suppress(Conflict):
                    revision = await self._records.write([], [each.key], [(each.key, each.revision)])
        await self._records.seen(revision)
        return Ok()

    # --- reading ---

    async def _map(self, message: MapArtifact) -> Message:
        copy = await self._artifacts.resident(await self._identity(message.artifact_id))
        await self._stream.send_descriptor(copy.blob.descriptor)
        return Ok()

    async def _make_resident(self, message: MakeResident) -> Message:
        await self._artifacts.resident(await self._identity(message.artifact_id))
        return Ok()

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
            revision = await self._records.write([], [key])
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
        ListArtifacts: _list,
        SetName: _set_name,
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
