"""The artifacts that are resident at this worker: their memory, their headers, and how they come here.

What may stay and what goes is decided in core/residence; who has a copy is in the store (low-cardinality replicas, TensorCast,
section 4.2), of which every worker has a view.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from tensorcast_connector.config import ARTIFACT_BYTES_MIN, ARTIFACT_SPARE_DELAY_S, SESSION_UPLOADS_MAX
from tensorcast_connector.core.artifact import Header, artifact_id, decode_header
from tensorcast_connector.core.cluster import ClusterView
from tensorcast_connector.core.placement import hrw_rank
from tensorcast_connector.core.residence import Residence
from tensorcast_connector.errors import Exhausted, NotFound, ProtocolError, TensorcastError
from tensorcast_connector.types import ByteRange, WorkerId
from tensorcast_connector.wire.store_messages import ReplicaRecord
from tensorcast_connector.worker.blob import Blob, Spare
from tensorcast_connector.worker.chunks import Elsewhere, fetch_chunks

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Copy:
    """A whole artifact that is here."""

    encoded: bytes
    header: Header
    blob: Blob
    # Where in the store's history its record is known to be (life, revision): a later view without it means that it was
    # deleted. None: it is not recorded yet.
    recorded: tuple[int, int] | None = None
    recording: int = 0  # by how many callers just now; it stays until they know
    lost: bool = False  # the store's database is another one, and knows nothing of it


@dataclass(slots=True)
class Upload:
    """Memory that a caller is filling."""

    session: Hashable
    blob: Blob


class Artifacts:
    """See the module.

    Args:
        me: this worker.
        view: of the cluster; kept current by somebody else, who calls `reconcile`.
        now: this worker's clock in seconds.
    """

    def __init__(
        self, me: WorkerId, residence: Residence, view: ClusterView, elsewhere: Elsewhere, now: Callable[[], float],
        spare_bytes: int,
    ) -> None:  # fmt: skip
        self._me = me
        self._view = view
        self._elsewhere = elsewhere
        self._now = now
        self._spare = Spare(spare_bytes)
        self._refilling: asyncio.TimerHandle | None = None
        self._copies: dict[str, Copy] = {}
        self._uploads: dict[str, Upload] = {}
        self._opening: list[Hashable] = []  # the sessions of uploads whose memory is being allocated
        self._arriving: dict[str, asyncio.Task[Copy]] = {}
        self._arrivals: dict[str, list[int]] = {}  # how many bytes of those have come, and of how many
        self.residence = residence
        self.counters = {
            "artifacts_put": 0,
            "artifact_bytes_put": 0,
            "artifact_bytes_sent": 0,
            "artifacts_fetched": 0,
            "artifact_bytes_fetched": 0,
            "artifacts_evicted": 0,
        }

    def __repr__(self) -> str:
        return f"<Artifacts {self.residence}, {len(self._uploads)} uploads>"

    # --- putting ---

    async def open_upload(self, session: Hashable, size: int, tenant: str = "", written: bool = False) -> str:
        """Memory for an artifact that `session` is going to fill; its id. See OpenMappedUpload for `written`.

        Raises:
            Exhausted: there is no room, or it has too many already.
        """
        open_now = self._opening.count(session) + sum(each.session == session for each in self._uploads.values())
        if open_now >= SESSION_UPLOADS_MAX:
            raise Exhausted(f"{open_now} uploads of one connection are open; commit or abort some of them first")
        upload_id = secrets.token_hex(8)
        self._opening.append(session)
        try:
            blob = await self._allocate(upload_id, size, tenant, written)
        finally:
            self._opening.remove(session)
        self._uploads[upload_id] = Upload(session, blob)
        return upload_id

    async def _allocate(self, owner: Hashable, size: int, tenant: str, written: bool = False) -> Blob:
        """Much memory is allocated on a thread: that takes long, and everything else goes on meanwhile."""
        self._evict(self.residence.reserve(owner, max(size, ARTIFACT_BYTES_MIN), self._now(), tenant))
        try:
            if size <= self._spare.bytes:
                return self._spare.take(size)
            making = asyncio.ensure_future(asyncio.to_thread(Blob, size, allocated=not written))
        except BaseException:
            self.residence.release(owner)
            raise
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(lambda done: self._unwanted(owner, done))
            raise
        except BaseException:
            self.residence.release(owner)
            raise

    def _unwanted(self, owner: Hashable, made: "asyncio.Future[Blob]") -> None:
        self.residence.release(owner)
        if not made.cancelled() and made.exception() is None:
            made.result().close()

    def _evict(self, gone: Sequence[str]) -> None:
        for each in gone:
            self._drop(each)
        self.counters["artifacts_evicted"] += len(gone)

    def _refill_soon(self) -> None:
        """Not at once: whoever has filled the last one needs the memory's bandwidth."""
        if self._refilling is None:
            self._refilling = asyncio.get_running_loop().call_later(ARTIFACT_SPARE_DELAY_S, self._refill)

    def _refill(self) -> None:
        self._refilling = None
        self._spare.refill()

    def upload(self, upload_id: str) -> Blob:
        """The memory of an upload.

        Raises:
            NotFound: there is none.
        """
        if upload_id not in self._uploads:
            raise NotFound(f"upload {upload_id[:32]!r} does not exist; its connection may have ended")
        return self._uploads[upload_id].blob

    def commit(self, upload_id: str, encoded: bytes, tenant: str) -> str:
        """Seals an upload; it is an artifact from now on. Its id, which the caller has recorded, or not: then it says so.

        Raises:
            NotFound: no such upload.
            ProtocolError: the header does not describe it.
        """
        blob = self.upload(upload_id)
        header = decode_header(encoded)
        if header.tenant != tenant:
            raise ProtocolError(f"a header of tenant {header.tenant[:40]!r} from tenant {tenant!r}")
        if header.size != blob.bytes:
            raise ProtocolError(f"a header of {header.size} bytes for an upload of {blob.bytes}")
        if not blob.filled:
            raise ProtocolError(f"an upload of {blob.bytes} bytes that were not all written")
        blob.seal()
        del self._uploads[upload_id]
        self._refill_soon()
        identity = artifact_id(encoded)
        self._here(upload_id, identity, Copy(encoded, header, blob), keeper=True)
        self._copies[identity].recording += 1
        self.counters["artifacts_put"] += 1
        self.counters["artifact_bytes_put"] += header.size
        return identity

    def _here(self, owner: Hashable, identity: str, copy: Copy, keeper: bool) -> None:
        if self.residence.commit(owner, identity, keeper):
            self._copies[identity] = copy
        else:
            copy.blob.close()  # it was here already

    def listing(self, identity: str) -> ReplicaRecord:
        """How the copy that is here is listed."""
        size, keeper = self._copies[identity].header.size, self.residence.keeps(identity)
        return ReplicaRecord(identity, self._me, "memory", size, keeper)

    def abort(self, upload_id: str) -> None:
        """Gives the memory back; fine if there is no such upload."""
        upload = self._uploads.pop(upload_id, None)
        if upload is not None:
            upload.blob.close()
            self.residence.release(upload_id)
            self._refill_soon()

    def end_session(self, session: Hashable) -> None:
        """The connection has ended, and with it its uploads."""
        for upload_id in [each for each, upload in self._uploads.items() if upload.session == session]:
            self.abort(upload_id)

    # --- reading ---

    def copy(self, identity: str) -> Copy:
        """The copy that is here.

        Raises:
            NotFound: it is not.
        """
        self.residence.use(identity)
        return self._copies[identity]

    async def header(self, identity: str) -> bytes:
        """The encoded header, from here or from a worker that has a copy.

        Raises:
            NotFound: nobody has the artifact.
        """
        if identity in self._copies:
            return self._copies[identity].encoded
        for source in self._sources(identity):
            try:
                encoded = await self._elsewhere.header(identity, source)
            except TensorcastError as error:
                logger.info("the header of %s from %s: %s", identity, source, error)
                continue
            if artifact_id(encoded) == identity:
                return encoded
            logger.warning("%s sent another header than that of %s", source, identity)
        raise self._lost(identity)

    def _sources(self, identity: str) -> list[WorkerId]:
        copies = self._view.replicas.get(identity, {})
        return hrw_rank(f"{identity}/{self._me}".encode(), (each for each in copies if each != self._me))

    def _lost(self, identity: str) -> NotFound:
        return NotFound(
            f"the bytes of artifact {identity} are gone: no worker that can be reached has a copy; put it again"
        )

    async def resident(self, identity: str) -> Copy:
        """The artifact, after it was fetched if it was not here.

        Raises:
            NotFound: nobody has it.
            Exhausted: there is no room for it here.
        """
        while identity not in self._copies:
            task = self._arriving.get(identity)
            if task is None:
                task = self._arriving[identity] = asyncio.get_running_loop().create_task(self._fetch(identity))
                task.add_done_callback(lambda done: self._arrived(identity, done))
            # A fetch serves everybody who wants the artifact, so it outlives the one that began it.
            await asyncio.shield(task)
        return self.copy(identity)

    def _arrived(self, identity: str, task: "asyncio.Task[Copy]") -> None:
        del self._arriving[identity]
        if not task.cancelled():
            task.exception()  # whoever waits for it gets it; if nobody does, nobody needs it

    async def _fetch(self, identity: str) -> Copy:
        life = self._view.incarnation
        encoded = await self.header(identity)
        header = decode_header(encoded)
        blob = await self._allocate(("fetch", identity), header.size, header.tenant)
        try:
            memory = blob.writable()
            self._arrivals[identity] = [0, header.size]
            try:
                await self._fetch_chunks(identity, header, memory)
            finally:
                del self._arrivals[identity]
                memory.release()
            blob.seal()
        except BaseException:
            blob.close()
            self.residence.release(("fetch", identity))
            raise
        copy = Copy(encoded, header, blob, recorded=(life, 0))
        self._here(("fetch", identity), identity, copy, keeper=False)
        self._elsewhere.add(self.listing(identity))
        self._refill_soon()
        self.reconcile()  # it may have been deleted meanwhile
        self.counters["artifacts_fetched"] += 1
        self.counters["artifact_bytes_fetched"] += header.size
        return copy

    async def _fetch_chunks(self, identity: str, header: Header, memory: memoryview) -> None:
        def fetch(source: WorkerId, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> Awaitable[None]:
            return self._elsewhere.fetch_bytes(identity, source, ranges, into)

        def arrived(size: int) -> None:
            self._arrivals[identity][0] += size

        try:
            await fetch_chunks(header, memory, lambda: self._sources(identity), fetch, arrived)
        except NotFound as error:
            raise NotFound(f"{self._lost(identity)} ({error})") from None

    def arrival(self, identity: str) -> tuple[int, int]:
        """How many bytes of an artifact are here, and of how many; (0, 0) if it is not even coming."""
        if identity in self._copies:
            return self._copies[identity].header.size, self._copies[identity].header.size
        done, size = self._arrivals.get(identity, (0, 0))
        return done, size

    # --- the cluster ---

    def recorded(self, identity: str, life: int, revision: int) -> None:
        """The store has the record of what was committed since that revision in that life of its database."""
        if (copy := self._copies.get(identity)) is not None:
            copy.recording -= 1
            copy.recorded = max(copy.recorded or (0, 0), (life, revision))
            copy.lost = False

    def unsure(self, identity: str) -> None:
        """Nobody knows yet whether it is recorded; until then it stays, and stays listed."""
        if identity in self._copies:
            self._elsewhere.add(self.listing(identity))

    def unrecorded(self, identity: str) -> None:
        """What was committed could not be recorded. It goes, unless it is somebody else's as well."""
        if (copy := self._copies.get(identity)) is None:
            return
        copy.recording -= 1
        if copy.recorded is None and not copy.recording and identity not in self._view.artifact_ids:
            self.forget(identity)
        elif not copy.recording:
            copy.recorded = copy.recorded or (self._view.incarnation, self._view.revision)
            self.reconcile()

    def reconcile(self) -> None:
        """The view has changed: forgets what was deleted, and keeps what nobody else keeps any more.

        What a new life of the store does not know was lost there, and not deleted. It stays until somebody puts it again or
        restores a later backup; but nobody can name or delete it, so it may go when room is needed.
        """
        view = self._view
        now = view.incarnation, view.revision
        self.residence.prune(self._now())
        for identity, copy in list(self._copies.items()):
            if identity in view.artifact_ids:
                copy.recorded, copy.lost = max(copy.recorded or now, now), False
                self._keep(identity, view.replicas.get(identity, {}))
            elif copy.recording or copy.recorded is None or copy.recorded > now or copy.lost:
                pass
            elif copy.recorded[0] == view.incarnation:
                self.forget(identity)
            else:
                copy.lost = True
                self.residence.keep(identity, False)
                self._elsewhere.add(self.listing(identity))
                logger.warning("the store has lost artifact %s; its bytes stay until room is needed", identity)

    def _keep(self, identity: str, copies: Mapping[WorkerId, ReplicaRecord]) -> None:
        """Of the copies one is kept: the one that ranks first, if the one that was has gone, or there are several."""
        keepers = [each for each, record in copies.items() if record.keeper]
        mine = self.residence.keeps(identity)
        if not keepers and not mine and copies:
            keep = hrw_rank(identity.encode(), copies)[0] == self._me
        else:  # of several, which put the same at once, one is enough
            keep = mine and (self._me not in keepers or hrw_rank(identity.encode(), keepers)[0] == self._me)
        if keep != mine:
            self.residence.keep(identity, keep)
            self._elsewhere.add(self.listing(identity))

    def forget(self, identity: str) -> None:
        """Lets go of a copy; readers that have mapped it keep it."""
        self.residence.forget(identity)
        self._drop(identity)

    def _drop(self, identity: str) -> None:
        copy = self._copies.pop(identity, None)
        if copy is not None:
            copy.blob.close()
            self._elsewhere.remove(ReplicaRecord(identity, self._me, "memory", copy.header.size))

    async def close(self) -> None:
        """Ends fetches, frees everything."""
        tasks = list(self._arriving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for upload_id in list(self._uploads):
            self.abort(upload_id)
        for copy in self._copies.values():
            copy.blob.close()
        self._copies.clear()
        if self._refilling is not None:
            self._refilling.cancel()
        self._spare.close()

    def statistics(self) -> dict[str, int]:
        """Counts for people and metrics."""
        lost = sum(each.lost for each in self._copies.values())
        return {**self.residence.statistics(), **self.counters, "uploads": len(self._uploads), "artifacts_lost": lost}
