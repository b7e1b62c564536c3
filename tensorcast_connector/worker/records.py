"""What a worker reads and writes at the store for its callers, and the other workers' copies of artifacts."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tensorcast_connector.config import SEEN_ASK_S, STORE_TIMEOUT_S
from tensorcast_connector.core.cluster import CALLERS, ClusterView, replica_key
from tensorcast_connector.errors import Conflict, NotFound, TensorcastError, Unavailable
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
from tensorcast_connector.worker.peers import Peers


class NotWritten(Unavailable):
    """Nothing was done, for sure."""


class StoreRecords:
    """See the module. Every method may raise Unavailable; after DeadlineExceeded nobody knows whether a write was done."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
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

        Raises:
            Conflict: a compare does not hold; nothing was done.
            NotFound: a lease has ended.
        """
        message = WriteRecords(list(compares), list(puts), list(deletes))
        member = self._peers.metadata.member
        if listing is not None:
            if not member.lease_id:
                raise NotWritten("this worker is not registered at the store just now")
            key = replica_key(listing.artifact_id, listing.worker_id)
            message.puts.append((key, msgspec.json.encode(listing), member.lease_id))
        try:
            done = await self._peers.store.call(message, RecordsWritten, STORE_TIMEOUT_S)
        except NotFound as error:
            if listing is not None and all(lease_id in (0, member.lease_id) for _, _, lease_id in message.puts):
                raise NotWritten(f"this worker is not registered at the store just now: {error}") from error
            raise
        if not done.succeeded:
            raise Conflict("a record has changed meanwhile")
        if listing is not None:
            member.told(listing)
        return done.revision

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
        return (await client.call(ReadHeader(artifact), CopyHeader, STORE_TIMEOUT_S)).header

    async def fetch_bytes(
        self, artifact: str, source: WorkerId, ranges: Sequence[ByteRange], into: Sequence[memoryview]
    ) -> None:
        """See Elsewhere."""
        _, bulk = self._peers.client(source)
        await bulk.fetch_bytes(artifact, [(each.offset, memory) for each, memory in zip(ranges, into, strict=True)])
