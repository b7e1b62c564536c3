"""A caller's session with a gateway: artifacts are put, named, found and deleted here (TensorCast, section 3).

async with await connect("unix:/run/tensorcast/worker.sock") as session:
    weights = await session.put({"w": array}, name="policy:v1")
    tensors = await session.artifact("policy:v1").tensor_dict()
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import numpy as np

from tensorcast_connector.client.artifact import Artifact
from tensorcast_connector.client.files import Tensors, read_tensors
from tensorcast_connector.client.image import Image
from tensorcast_connector.client.link import GatewayLink
from tensorcast_connector.client.plan import CallContext, Plan, Referring
from tensorcast_connector.config import (
    ARTIFACT_TIMEOUT_S,
    LEASE_TTL_MAX_S,
    PUT_THREADS,
    SIGNALS_TIMEOUT_S,
    STORE_TIMEOUT_S,
    TENANT,
    UPLOAD_PART_BYTES,
    WATCH_WAIT_S,
    parse_address,
)
from tensorcast_connector.core.artifact import CHUNK_BYTES, Header, check_name, check_tenant, encode_header
from tensorcast_connector.core.plan import PlanRecord, decode_record
from tensorcast_connector.errors import Exhausted, InvalidArgument, TensorcastError, Unavailable
from tensorcast_connector.net.mapping import map_memory
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.net.tls import load_tls
from tensorcast_connector.net.transport import Network
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
    InstanceListed,
    LeaseOpened,
    ListArtifacts,
    ListDisabled,
    ListSignals,
    OpenLease,
    OpenMappedUpload,
    OpenUpload,
    RenewLease,
    SetName,
    SignalsListed,
    UploadOpened,
    WorkerListed,
    WriteUpload,
)
from tensorcast_connector.wire.messages import Ok, PagesForgotten
from tensorcast_connector.wire.plan_messages import CancelPlan, PlanState, WaitPlan
from tensorcast_connector.wire.tokens import Access

logger = logging.getLogger(__name__)
SYSTEM = None
"""The ownership of what the pool keeps until it is deleted."""


@dataclass(frozen=True, slots=True)
class Leased:
    """The ownership of what goes `ttl_s` seconds after its owner has stopped renewing it: closed its session, or died."""

    ttl_s: int


def leased(ttl_s: int) -> Leased:
    """Ownership by the caller (TensorCast, section 3.1: Caller-Leased); whole seconds.

    Raises:
        InvalidArgument: no such time.
    """
    if not 1 <= ttl_s <= LEASE_TTL_MAX_S or ttl_s != int(ttl_s):
        raise InvalidArgument(f"leased({ttl_s}): whole seconds from 1 to {LEASE_TTL_MAX_S}")
    return Leased(int(ttl_s))


async def connect(
    address: str, *, tenant: str = "", token: str = "", tls: tuple[str, str, str] | None = None, name: str = "",
    network: Network | None = None,
) -> "Session":  # fmt: skip
    """A session with the gateway at `address`, "unix:/path" on its host (then tensors are shared memory) or "host:port".

    Args:
        tenant: whose artifacts and plans these are; that of the token if it is a tenant's, else "default".
        token: over TCP, where the cluster has one: the tenant's (`tensorcast token`), or the cluster's.
        tls: over TCP, where the cluster uses it: the files of a certificate, its key and the authority's certificate.
        name: who calls, for people.
        network: how to connect, instead of by sockets.

    Raises:
        ConfigError: no such address, token or certificate.
        InvalidArgument: no such tenant.
        Unauthorized: another token is wanted.
        Unavailable: nobody answers there.
    """
    if network is None:
        access = Access(token.strip() if isinstance(token, str) else token) if token else None
        if access is not None and access.of_tenant:
            tenant = tenant or access.tenant
            access.acts_for(tenant)
        network = SocketNetwork(access, load_tls(*tls) if tls else None, tenant if access and access.of_tenant else "")
    tenant = tenant or TENANT
    who = name or f"caller-{os.getpid()}"
    link = GatewayLink(network, parse_address(address, "address"), check_tenant(tenant), who)
    try:
        await link.open()
    except BaseException:
        await link.close()
        raise
    return Session(link)


class Session:
    """See the module. Made by `connect`; used on the event loop that made it."""

    def __init__(self, link: GatewayLink) -> None:
        self._link = link
        self._leases: dict[int, int] = {}  # by ttl
        self._renewing: set[asyncio.Task[None]] = set()
        self._leasing = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Session {self._link.address} as {self._link.tenant}>"

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the session and its leases; tensors that were read stay valid."""
        if self._link.closed:
            return
        for task in self._renewing:
            task.cancel()
        await asyncio.gather(*self._renewing, return_exceptions=True)
        for lease_id in self._leases.values():
            with contextlib.suppress(TensorcastError):
                await self._link.call(EndLease(lease_id), Ok)
        await self._link.close()

    @property
    def worker_id(self) -> str:
        """The gateway."""
        return self._link.worker_id

    # --- artifacts ---

    async def put(
        self, tensors: Tensors, *, name: str = "", ownership: Leased | None = SYSTEM
    ) -> Artifact:  # fmt: skip
        """Stores tensors (numpy, or torch on any device) as one artifact. Safe to repeat: the same tensors are the same artifact.

        Args:
            tensors: by name; or the path of a safetensors file, or of a folder with such files.
            name: is made to point to it.
            ownership: SYSTEM, or `leased(ttl_s)`.

        Raises:
            InvalidArgument: something cannot be stored; names the tensor.
            Exhausted: the gateway has no room.
        """
        given = await asyncio.to_thread(read_tensors, tensors) if isinstance(tensors, str | os.PathLike) else tensors
        if name:
            check_name(name)
        image = Image(given)
        lease_id = await self._lease(ownership.ttl_s) if ownership is not None else 0
        upload_id, done = "", False
        channel = self._link.begin_put()
        try:
            if self._link.local and image.size:
                message = OpenMappedUpload(image.size)
                descriptor, opened = await channel.call(message, UploadOpened, ARTIFACT_TIMEOUT_S)
                upload_id = opened.upload_id
                digests = await _write(image, descriptor)
            else:
                upload_id = await self._open_upload(image.size)
                digests = await self._send(image, upload_id)
            header = encode_header(Header(image.specs, image.size, digests, tenant=self._link.tenant))
            commit = CommitUpload(upload_id, header, name, lease_id)
            before = self._link.revision
            made = await self._link.call(commit, ArtifactOpened, ARTIFACT_TIMEOUT_S)
            done = True
            gone_back = made.revision < before  # the store's database is another one
            self._link.revision = made.revision if gone_back else max(self._link.revision, made.revision)
            return Artifact(self._link, name, made)
        except BaseException:
            if upload_id:
                with contextlib.suppress(TensorcastError):
                    await self._link.call(AbortUpload(upload_id), Ok)
            raise
        finally:
            self._link.end_put(channel, done)

    async def _open_upload(self, size: int) -> str:
        """The id of an upload. Who is cancelled before it is known waits for it, to give the memory back."""
        opening = asyncio.ensure_future(self._link.call(OpenUpload(size), UploadOpened, ARTIFACT_TIMEOUT_S))
        try:
            return (await asyncio.shield(opening)).upload_id
        except asyncio.CancelledError:
            with contextlib.suppress(TensorcastError):
                await self._link.call(AbortUpload((await opening).upload_id), Ok)
            raise

    async def _send(self, image: Image, upload_id: str) -> bytes:
        digests: list[bytes] = []
        for chunk in range(image.chunks):
            target = np.empty(image.chunk_bytes(chunk), np.uint8)
            digest = await asyncio.to_thread(image.write, chunk, target)
            data = target.tobytes()
            for at in range(0, len(data), UPLOAD_PART_BYTES):
                part = WriteUpload(upload_id, chunk * CHUNK_BYTES + at, data[at : at + UPLOAD_PART_BYTES])
                await self._link.call(part, Ok, ARTIFACT_TIMEOUT_S)
            digests.append(digest)
        return b"".join(digests)

    def artifact(self, reference: str) -> Artifact:
        """The artifact with that name or id. Nothing is asked before something of it is."""
        return Artifact(self._link, reference)

    async def list_artifacts(self, prefix: str = "") -> list[ArtifactListed]:
        """The artifacts of the tenant whose name or id starts with `prefix`."""
        return (await self._link.call(ListArtifacts(prefix, self._link.revision), ArtifactList)).artifacts

    async def name(self, name: str, artifact: str | Referring) -> None:
        """Makes a name point to an artifact, which is given as a handle, by its id or by another name."""
        reference = artifact if isinstance(artifact, str) else artifact.reference
        await self._link.call(SetName(name, reference), Ok)

    async def unname(self, name: str) -> None:
        """Takes a name away; its artifact stays."""
        await self._link.call(SetName(name, ""), Ok)

    async def delete(self, reference: str) -> None:
        """Deletes an artifact and its names. Tensors that were read stay valid.

        Raises:
            NotFound: there is none.
        """
        await self._link.call(DeleteArtifact(reference), Ok)

    async def forget_pages(self) -> PagesForgotten:
        """Evicts the tenant's pages of KV cache at every worker. Pages in use stay; ask again when engines are done with them."""
        return await self._link.call(ForgetPages(), PagesForgotten, 2 * STORE_TIMEOUT_S)

    # --- the switch ---

    async def disable(self, what: str, note: str = "") -> None:
        """An engine, by its instance id, its model or its namespace, serves on without the pool, at once and without restart."""
        await self._link.call(Disable(what, note), Ok)

    async def enable(self, what: str) -> None:
        """It uses the pool again; fine if it does."""
        await self._link.call(Disable(what, None), Ok)

    async def list_disabled(self) -> dict[str, str]:
        """What is disabled, each with its note."""
        return (await self._link.call(ListDisabled(), DisabledList)).disabled

    # --- signals ---

    async def list_workers(self) -> list[WorkerListed]:
        """Every worker, with its pressures and their age; one that does not answer has `error` instead."""
        return (await self._signals(0, 0.0)).workers

    async def list_instances(self) -> list[InstanceListed]:
        """Every engine, with what it last said of itself and how long ago."""
        return (await self._signals(0, 0.0)).instances

    async def watch(self, interval_s: float = 1.0) -> AsyncIterator[SignalsListed]:
        """All of that again and again: when somebody comes or goes, and every `interval_s` seconds."""
        revision = -1
        while True:
            listed = await self._signals(revision, interval_s if revision >= 0 else 0.0)
            revision = listed.revision
            yield listed

    async def _signals(self, after_revision: int, wait_s: float) -> SignalsListed:
        message = ListSignals(after_revision, int(min(wait_s, WATCH_WAIT_S) * 1000))
        return await self._link.call(message, SignalsListed, wait_s + SIGNALS_TIMEOUT_S + STORE_TIMEOUT_S)

    # --- plans ---

    def plan(self, context: CallContext | None = None) -> Plan:
        """A new plan, without steps."""
        return Plan(self._link, context or CallContext())

    async def plan_record(self, key: str) -> PlanRecord:
        """How the plan with that idempotency key is doing, or has ended.

        Raises:
            NotFound: there is none, or it was forgotten.
        """
        return decode_record((await self._link.call(WaitPlan(key, 0), PlanState, 2 * STORE_TIMEOUT_S)).record)

    async def cancel_plan(self, key: str) -> PlanRecord:
        """Ends it, whoever began it; what is done stays done. Fine if it has ended.

        Raises:
            NotFound: as `plan_record`.
        """
        return decode_record((await self._link.call(CancelPlan(key), PlanState, 2 * STORE_TIMEOUT_S)).record)

    # --- leases ---

    async def _lease(self, ttl_s: int) -> int:
        """The session's lease of that time; renewed until the session ends."""
        async with self._leasing:  # puts at once share it
            lease_id = self._leases.get(ttl_s, 0)
            if not lease_id:
                lease_id = self._leases[ttl_s] = (await self._link.call(OpenLease(ttl_s), LeaseOpened)).lease_id
                task = asyncio.get_running_loop().create_task(self._renew(ttl_s, lease_id))
                self._renewing.add(task)
                task.add_done_callback(self._renewing.discard)
            return lease_id

    async def _renew(self, ttl_s: int, lease_id: int) -> None:
        while True:
            await asyncio.sleep(ttl_s / 3)
            try:
                await self._link.call(RenewLease(lease_id), Ok)
            except Unavailable as error:
                logger.debug("lease %d: %s", lease_id, error)
            except TensorcastError as error:
                logger.warning("what was put with leased(%d) is gone: %s", ttl_s, error)
                del self._leases[ttl_s]
                return


async def _write(image: Image, descriptor: int) -> bytes:
    """Straight into the gateway's memory; closes the descriptor, and returns the digests."""
    try:
        mapped = map_memory(descriptor, image.size)
    except OSError as error:
        raise Exhausted(f"cannot map {image.size} bytes for an artifact: {error.strerror}") from error
    finally:
        os.close(descriptor)
    target = np.frombuffer(mapped.buffer, np.uint8)

    def write(chunk: int) -> bytes:
        return image.write(chunk, target[chunk * CHUNK_BYTES :])

    try:
        return b"".join(await _in_threads(write, image.chunks))
    finally:
        mapped.close()  # the gateway seals it, which needs that nobody can write to it


async def _in_threads(work: Callable[[int], bytes], count: int) -> list[bytes]:
    """`work` of 0 to count - 1, by several threads; when it returns or raises, none of them works any more."""
    results: list[bytes] = [b""] * count
    left = iter(range(count))
    stop = threading.Event()

    def some() -> None:
        try:
            for number in left:
                if stop.is_set():
                    return
                results[number] = work(number)
        except BaseException:
            stop.set()
            raise

    loop = asyncio.get_running_loop()
    working = [loop.run_in_executor(None, some) for _ in range(min(PUT_THREADS, count))]
    threads = asyncio.gather(*working, return_exceptions=True)  # done when all are, also if one of them has failed
    try:
        if failed := [each for each in await asyncio.shield(threads) if each is not None]:
            raise failed[0]
    finally:
        stop.set()
        while not threads.done():  # a thread is not cancelled; what it writes to must be there until it has ended
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([threads])
    return results
