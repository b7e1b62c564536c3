"""What a worker reads and writes at the store for its callers, and the other workers' copies of artifacts."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tensorcast_connector.config import CONFLICTS_MAX, METADATA_BYTES_MAX, SEEN_ASK_S, STORE_TIMEOUT_S
from tensorcast_connector.core.cluster import ARTIFACTS, CALLERS, NAMES, ClusterView, decode_name, name_key, replica_key
from tensorcast_connector.errors import (
    Conflict,
    Exhausted,
    InvalidArgument,
    NotFound,
    ProtocolError,
    TensorcastError,
    Unavailable,
)
from tensorcast_connector.types import ByteRange, WorkerId
from tensorcast_connector.wire.messages import CopyHeader, Ok, ReadHeader
from tensorcast_connector.wire.store_messages import (
    Alive,
    Entry,
    GrantLease,
    KeepAlive,
    LeaseGranted,
    ReadRecords,
    Records,
    RecordsWritten,
    ReplicaRecord,
    RevokeLease,
    WriteRecords,
)
from tensorcast_connector.worker.fence import Fence
from tensorcast_connector.worker.peers import Peers

DELETES_PER_TXN = 60  # the store takes 128 operations, compares included


def metadata_to_keep(view: ClusterView, tenant: str, identity: str, given: dict[str, str]) -> dict[str, str]:
    """What is recorded beside an artifact that is put: what comes with it, else what is there already."""
    known = view.artifacts.get((tenant, identity), {}).values()
    return given or next((each.metadata for each in known if each.metadata), {})


def check_metadata(metadata: dict[str, str]) -> None:
    """Raises InvalidArgument for more than is kept."""
    size = len(msgspec.json.encode(metadata))
    if size > METADATA_BYTES_MAX:
        raise InvalidArgument(f"{size} bytes of metadata; at most {METADATA_BYTES_MAX} are kept")


class NotWritten(Unavailable):
    """Nothing was done, for sure."""


class StoreRecords:
    """See the module. Every method may raise Unavailable; then nobody knows whether a write was done, until `settled`.

    Args:
        me: this worker.
    """

    def __init__(self, me: WorkerId, peers: Peers) -> None:
        self._peers = peers
        self._fence = Fence(me, self.grant, self.revoke, peers.now)
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._members: tuple[object, object] = {}, {}
        self._members_seen = 0, 0  # at which view they were looked at
        self._members_revision = 0  # at which they were seen to have changed
        peers.on_view.append(self._view_changed)

    @property
    def view(self) -> ClusterView:
        """What this worker knows of the cluster."""
        return self._peers.metadata.view

    async def read(self, prefix: str) -> list[Entry]:
        """All records under a prefix."""
        return (await self._peers.store.call(ReadRecords(prefix), Records, STORE_TIMEOUT_S)).entries

    async def write(
        self, puts: Iterable[tuple[str, bytes, int]], deletes: Iterable[str] = (), compares: Iterable[tuple[str, int]] = (),
        listing: ReplicaRecord | None = None,
    ) -> int:  # fmt: skip
        """One transaction; the revision it was done at. `listing` is of a copy that is here, under this worker's lease.

        What is put is not done late: see `settled`. What is deleted should be compared: a late one does not hold then.

        Raises:
            Conflict: a compare does not hold; nothing was done.
            NotFound: a lease has ended.
            NotWritten: nothing was done, for sure.
        """
        message = WriteRecords(list(compares), list(puts), list(deletes))
        if not message.puts and listing is None:
            return self._revision(await self._peers.store.call(message, RecordsWritten, STORE_TIMEOUT_S))
        for last in (False, True):
            try:
                fence = await self._fence.put()
            except Unavailable as error:
                raise NotWritten(str(error)) from error
            try:
                return await self._put(message, fence, listing)
            except NotFound as error:
                self._fence.ended(fence[2])  # which of the leases, it does not say: the database may be another one
                if last and listing is not None and not any(lease_id for _, _, lease_id in message.puts):
                    raise NotWritten(f"this worker is not registered at the store just now: {error}") from error
                if last:
                    raise
        raise AssertionError("not reached")

    @staticmethod
    def _revision(done: RecordsWritten) -> int:
        if not done.succeeded:
            raise Conflict("a record has changed meanwhile")
        return done.revision

    async def _put(self, wanted: WriteRecords, fence: tuple[str, bytes, int], listing: ReplicaRecord | None) -> int:
        message = msgspec.structs.replace(wanted, puts=[*wanted.puts, fence])
        member = self._peers.metadata.member
        if listing is not None:
            if not member.lease_id:
                raise NotWritten("this worker is not registered at the store just now")
            key = replica_key(listing.artifact_id, listing.worker_id)
            message.puts.append((key, msgspec.json.encode(listing), member.lease_id))
        try:
            done = await self._peers.store.call(message, RecordsWritten, STORE_TIMEOUT_S)
        except (NotFound, ProtocolError, Exhausted):  # an answer
            raise
        except BaseException:
            self._fence.unsure(fence[2])
            raise
        revision = self._revision(done)
        if listing is not None:
            member.told(listing)
        return revision

    async def write_name(
        self, puts: Sequence[tuple[str, bytes, int]], tenant: str, name: str, listing: ReplicaRecord | None = None
    ) -> int:
        """As `write`, with a name among `puts`: whatever was meant for it before this was asked for is not done any more.

        Raises:
            Conflict: others put the same name, again and again.
        """
        key = name_key(tenant, name)
        revision = self.view.name_revisions.get((tenant, name), 0)
        for _ in range(CONFLICTS_MAX):
            try:
                return await self.write(puts, (), [(key, revision)], listing)
            except Conflict:
                revision = await self.revision(key)
        raise Conflict(f"the name {name!r} was put by others {CONFLICTS_MAX} times meanwhile; put it again")

    async def delete(self, key: str) -> int:
        """At which revision it is gone. What somebody writes meanwhile stays, and so it does if this is done late."""
        revision = await self.revision(key)
        if revision:
            with contextlib.suppress(Conflict):
                return await self.write([], [key], [(key, revision)])
        return self.view.revision

    async def delete_artifact(self, tenant: str, identity: str) -> int:
        """With all that it is called; the revision it was done at.

        The artifact first: a name that is left over points to nothing, and one that has moved on meanwhile stays.

        Raises:
            Conflict: it is put again and again meanwhile.
        """
        prefix, revision = f"{ARTIFACTS}{tenant}/{identity}/", 0
        for _ in range(CONFLICTS_MAX):
            owners = await self.read(prefix)
            try:
                for at in range(0, len(owners), DELETES_PER_TXN):
                    part = [(each.key, each.revision) for each in owners[at : at + DELETES_PER_TXN]]
                    revision = await self.write([], [key for key, _ in part], part)
                break
            except Conflict:
                continue
        else:
            raise Conflict(f"artifact {identity} is put again all the time; delete it later")
        entries = await self.read(f"{NAMES}{tenant}/")
        names = [(each.key, each.revision) for each in entries if decode_name(each.value).artifact_id == identity]
        for at in range(0, len(names), DELETES_PER_TXN):
            part = names[at : at + DELETES_PER_TXN]
            try:
                revision = await self.write([], [key for key, _ in part], part)
            except Conflict:  # some have moved on: each on its own
                for each in part:
                    with contextlib.suppress(Conflict):
                        revision = await self.write([], [each[0]], [each])
        return revision

    async def revision(self, key: str) -> int:
        """At which a record was last written; 0: there is none."""
        return next((each.revision for each in await self.read(key) if each.key == key), 0)

    def prepare(self) -> None:
        """A write is going to come."""
        self._fence.prepare()

    async def settled(self) -> None:
        """Until every write of this worker was done or never will be."""
        await self._fence.settled()

    async def close(self) -> None:
        """Settles nothing any more."""
        await self._fence.close()

    async def grant(self, ttl_s: int) -> int:
        """A new lease."""
        return (await self._peers.store.call(GrantLease(ttl_s), LeaseGranted, STORE_TIMEOUT_S)).lease_id

    async def renew(self, lease_id: int) -> None:
        """Raises NotFound if it has ended."""
        await self._peers.store.call(KeepAlive(lease_id), Alive, STORE_TIMEOUT_S)

    async def revoke(self, lease_id: int) -> None:
        """Ends a lease."""
        await self._peers.store.call(RevokeLease(lease_id), Ok, STORE_TIMEOUT_S)

    async def seen(self, revision: int, timeout_s: float = STORE_TIMEOUT_S) -> None:
        """Until this worker's view has come to that revision, so that it shows what was written.

        A revision that the store does not have itself, since its database was lost or went back, is not waited for.
        """

        def here() -> bool:
            return self.view.revision >= revision

        if await self._until(here, min(SEEN_ASK_S, timeout_s)):
            return
        try:
            asked = ReadRecords(f"{CALLERS}none/")
            if (await self._peers.store.call(asked, Records, timeout_s)).revision < revision:
                return
        except TensorcastError:
            pass  # it cannot be reached, and may be soon
        if not await self._until(here, timeout_s):
            raise Unavailable("this worker does not hear just now of what is written to the store; it will later")

    async def caught_up(self) -> None:
        """Until this worker's view shows what is in the store now."""
        asked = ReadRecords(f"{CALLERS}none/")
        await self.seen((await self._peers.store.call(asked, Records, STORE_TIMEOUT_S)).revision)

    async def name_moved(self, tenant: str, name: str, known: str, after: tuple[int, int], timeout_s: float) -> None:
        """Until a name is not any more as it was seen at a moment (life, revision) of the store, at most so long.

        Args:
            known: what it pointed to then; "": there was none.
        """

        def moved() -> bool:
            view, key = self.view, (tenant, name)
            # A view that has not come to that moment itself has nothing to say.
            if key in view.names:
                return (view.incarnation, view.name_revisions[key]) > after
            return bool(known) and (view.incarnation, view.revision) > after

        await self._until(moved, timeout_s)

    async def members_changed(self, after_revision: int, timeout_s: float) -> None:
        """Until workers or engines have come or gone since that revision, at most so long."""
        await self._until(lambda: self._members_revision > after_revision, timeout_s)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        if condition():
            return True
        waiting = condition, asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(timeout_s):
                await waiting[1]
        except TimeoutError:
            return condition()
        finally:
            self._waiting.remove(waiting)
        return True

    def _view_changed(self) -> None:
        view = self.view
        if self._members_seen != (view.incarnation, view.revision):
            self._members_seen = view.incarnation, view.revision
            if self._members != (view.workers, view.instances):
                self._members = dict(view.workers), dict(view.instances)
                self._members_revision = view.revision
        for condition, future in self._waiting:
            if not future.done() and condition():
                future.set_result(None)


class ArtifactPeers:
    """The other workers' copies: an `Elsewhere` of worker/artifacts.py."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def add(self, record: ReplicaRecord) -> None:
        """See Elsewhere."""
        self._peers.add(record)

    def remove(self, record: ReplicaRecord) -> None:
        """See Elsewhere."""
        self._peers.remove(record)

    async def header(self, artifact: str, source: WorkerId) -> bytes:
        """See Elsewhere."""
        client, _ = self._peers.client(source)
        if (why := self._peers.without_service(source)) is not None:
            raise Unavailable(why)
        return (await client.call(ReadHeader(artifact), CopyHeader, STORE_TIMEOUT_S)).header

    async def fetch_bytes(
        self, artifact: str, source: WorkerId, ranges: Sequence[ByteRange], into: Sequence[memoryview]
    ) -> None:
        """See Elsewhere."""
        _, bulk = self._peers.client(source)
        await bulk.fetch_bytes(artifact, [(each.offset, memory) for each, memory in zip(ranges, into, strict=True)])
