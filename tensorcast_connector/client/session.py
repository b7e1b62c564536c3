"""A caller's session with a gateway: artifacts are put, named, found and deleted here (TensorCast, section 3).

async with await connect("unix:/run/tensorcast/worker.sock") as session:
    weights = await session.put({"w": array}, name="policy:v1")
    tensors = await session.artifact("policy:v1").tensor_dict()
"""

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec

from tensorcast_connector.client.artifact import Artifact
from tensorcast_connector.client.files import Tensors
from tensorcast_connector.client.image import FileImage, Image
from tensorcast_connector.client.leasing import Leases
from tensorcast_connector.client.link import GatewayLink, open_link
from tensorcast_connector.client.ownership import SYSTEM, Leased, leased
from tensorcast_connector.client.plan import CallContext, Plan, Referring
from tensorcast_connector.client.reading import Progress
from tensorcast_connector.client.threads import in_thread
from tensorcast_connector.client.upload import Upload, open_upload
from tensorcast_connector.client.weights import Weights, WeightVersion, follow, open_stored, open_weights
from tensorcast_connector.client.writing import write_image
from tensorcast_connector.config import (
    ARTIFACT_TIMEOUT_S,
    SIGNALS_TIMEOUT_S,
    STORE_TIMEOUT_S,
    TENANT,
    UPLOAD_PART_BYTES,
    WATCH_WAIT_S,
    parse_address,
)
from tensorcast_connector.core.artifact import CHUNK_BYTES, Header, check_name, check_tenant, encode_header
from tensorcast_connector.core.plan import PlanRecord, decode_record
from tensorcast_connector.errors import InvalidArgument, NotFound, TensorcastError
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
    ForgetPages,
    InstanceListed,
    ListArtifacts,
    ListDisabled,
    ListSignals,
    MoveNames,
    NameMove,
    NamesMoved,
    OpenMappedUpload,
    OpenUpload,
    SetName,
    SignalsListed,
    UploadOpened,
    WorkerListed,
    WriteUpload,
)
from tensorcast_connector.wire.messages import Ok, PagesForgotten
from tensorcast_connector.wire.plan_messages import CancelPlan, PlanState, WaitPlan
from tensorcast_connector.wire.tokens import Access


async def connect(
    address: str, *, tenant: str = "", token: str = "", tls: tuple[str, str, str] | None = None, name: str = "",
    network: Network | None = None,
) -> "Session":  # fmt: skip
    """A session with the gateway at `address`, "unix:/path" on its host (then tensors are shared memory) or "host:port".

    A worker without the role gateway names one, with which the session is then, over TCP.

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
        WrongRole: that worker is no gateway, and knows none that can be reached.
    """
    if network is None:
        access = Access(token.strip() if isinstance(token, str) else token) if token else None
        if access is not None and access.of_tenant:
            tenant = tenant or access.tenant
            access.acts_for(tenant)
        network = SocketNetwork(access, load_tls(*tls) if tls else None, tenant if access and access.of_tenant else "")
    tenant = tenant or TENANT
    who = name or f"caller-{os.getpid()}"
    return Session(await open_link(network, parse_address(address, "address"), check_tenant(tenant), who))


class Session:
    """See the module. Made by `connect`; used on the event loop that made it."""

    def __init__(self, link: GatewayLink) -> None:
        self._link = link
        self._leases = Leases(link)

    def __repr__(self) -> str:
        return f"<Session {self._link.address} as {self._link.tenant}>"

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the session and its leases; tensors that were read stay valid. Raises InvalidArgument on another event loop."""
        if self._link.closed:
            return
        self._link.check_here()
        await self._leases.close()
        await self._link.close()

    @property
    def worker_id(self) -> str:
        """The gateway."""
        return self._link.worker_id

    # --- artifacts ---

    async def put(
        self, tensors: Tensors, *, name: str = "", ownership: Leased | None = SYSTEM, progress: Progress | None = None
    ) -> Artifact:  # fmt: skip
        """Stores tensors (numpy, or torch on any device) as one artifact. Safe to repeat: the same tensors are the same artifact.

        Args:
            tensors: by name; or the path of a safetensors file, or of a folder with such files, whose metadata is kept.
            name: is made to point to it.
            ownership: SYSTEM, or `leased(ttl_s)`.
            progress: told the bytes that are read and those that are to be; by one thread at a time, not that of the loop.

        Raises:
            InvalidArgument: something cannot be stored; names the file and the tensor.
            Exhausted: the gateway has no room.
        """
        if name:
            check_name(name)
        if isinstance(tensors, str | os.PathLike):
            image: Image = await in_thread(
                functools.partial(FileImage, tensors, progress), drop=lambda late: late.close()
            )
        else:
            image = Image(tensors, progress)
        try:
            return await self.put_image(image, name, ownership)
        finally:
            image.close()

    async def put_image(self, image: Image, name: str = "", ownership: Leased | None = SYSTEM) -> Artifact:
        """The same of what is laid out already; its owner closes it."""
        lease_id = await self._leases.of(ownership)
        upload_id, done = "", False
        channel = self._link.begin_put()
        try:
            if self._link.local and image.size:
                message = OpenMappedUpload(image.size, image.fresh)
                descriptor, opened = await channel.call(message, UploadOpened, ARTIFACT_TIMEOUT_S)
                upload_id = opened.upload_id
                digests = await write_image(image, descriptor)
            else:
                upload_id = await self._open_upload(image.size)
                digests = await self._send(image, upload_id)
            image.check()
            header = encode_header(Header(image.specs, image.size, digests, tenant=self._link.tenant))
            commit = CommitUpload(upload_id, header, name, lease_id, dict(image.metadata))
            before = self._link.revision
            try:
                made = await self._link.call(commit, ArtifactOpened, ARTIFACT_TIMEOUT_S)
            except NotFound:
                instead = await self._leases.instead(ownership, lease_id)
                if instead == lease_id:
                    raise
                commit = msgspec.structs.replace(commit, lease_id=instead)
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
            data, digest = await in_thread(functools.partial(image.read, chunk))
            for at in range(0, len(data), UPLOAD_PART_BYTES):
                part = WriteUpload(upload_id, chunk * CHUNK_BYTES + at, data[at : at + UPLOAD_PART_BYTES])
                await self._link.call(part, Ok, ARTIFACT_TIMEOUT_S)
            digests.append(digest)
        return b"".join(digests)

    async def upload(self, tensors: Iterable[tuple[str, str, Sequence[int]]]) -> Upload:
        """See open_upload: an artifact of tensors (name, dtype, shape) that the caller fills in place."""
        return await open_upload(self._link, tensors)

    def artifact(self, reference: str) -> Artifact:
        """The artifact with that name or id. Nothing is asked before something of it is."""
        return Artifact(self._link, reference)

    async def list_artifacts(self, prefix: str = "") -> list[ArtifactListed]:
        """The artifacts of the tenant whose name or id starts with `prefix`."""
        return (await self._link.call(ListArtifacts(prefix, self._link.revision), ArtifactList)).artifacts

    async def name(self, name: str, artifact: str | Referring) -> None:
        """Makes a name point to an artifact, which is given as a handle, by its id or by another name."""
        reference = artifact if isinstance(artifact, str) else getattr(artifact, "reference", "")
        if not reference:  # which is how a name is taken away
            raise InvalidArgument(f"name {name!r} is to point to nothing; `unname` takes it away")
        await self._link.call(SetName(name, reference), Ok)

    async def unname(self, name: str) -> None:
        """Takes a name away; its artifact stays."""
        await self._link.call(SetName(name, ""), Ok)

    async def move_names(self, moves: Sequence[NameMove], adopt: Sequence[str] = ()) -> None:
        """Moves names, all or none, each only if it points where it is expected to ("" is nothing), by the ids of artifacts.

        Args:
            adopt: ids of artifacts that belong to the system from then on, and not only to a lease.

        Raises:
            Conflict: a name points elsewhere.
            NotFound: an artifact does not exist, or its lease has ended.
        """
        moved = await self._link.call_lately(MoveNames(list(moves), list(adopt)), NamesMoved, 3 * STORE_TIMEOUT_S)
        self._link.revision = max(self._link.revision, moved.revision)

    async def delete(self, reference: str) -> None:
        """Deletes an artifact and its names. Tensors that were read stay valid.

        Raises:
            NotFound: there is none.
        """
        await self._link.call(DeleteArtifact(reference), Ok)

    async def forget_pages(self) -> PagesForgotten:
        """Evicts the tenant's pages of KV cache at every worker. Pages in use stay; ask again when engines are done with them."""
        return await self._link.call(ForgetPages(), PagesForgotten, 2 * STORE_TIMEOUT_S)

    # --- weights ---

    async def weights(self, model: str, version: int | str | None = None) -> Weights:
        """A published version of a model's weights, the newest unless told; `model` may be the id of its manifest.

        Raises:
            NotFound: there is no such version, or its bytes are gone.
            InvalidArgument: what has that name is no published version.
        """
        return await open_weights(self._link, model, version)

    async def stored(self, reference: str) -> Artifact | Weights:
        """What a name or an id is: an artifact, or a published version, which can be read and cut in the same way."""
        return await open_stored(self._link, reference)

    def subscribe(self, model: str, *, rollback: bool = False) -> AsyncIterator[WeightVersion]:
        """The newest version, as soon as there is one, and then each newer one; a slow reader skips to the newest.

        It never ends by itself: while the gateway or the version's bytes are away it waits. Raises InvalidArgument when the name
        is given to what is no published version.

        Args:
            rollback: an older version to which the publisher has gone back comes too.
        """
        return follow(self._link, model, rollback)

    def lease(self, ttl_s: int) -> "contextlib.AbstractAsyncContextManager[Leased]":
        """Ownership that ends with the block, or `ttl_s` seconds after this process has died."""
        return self._leases.own(leased(ttl_s).ttl_s)

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
