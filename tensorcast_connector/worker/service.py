"""What a worker answers: engines on its Unix socket, other workers on its TCP port."""

import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from tensorcast_connector.config import KEY_BYTES_MAX, KEYS_PER_MESSAGE_MAX
from tensorcast_connector.errors import Exhausted, ProtocolError
from tensorcast_connector.net.bulk import serve_bulk
from tensorcast_connector.net.rpc import Connection, Session, accept, open_session
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.types import InstanceId
from tensorcast_connector.wire.caller_messages import Arrival, AskArrival
from tensorcast_connector.wire.codec import (
    EngineRequest,
    PeerRequest,
)
from tensorcast_connector.wire.keys import Keys
from tensorcast_connector.wire.messages import (
    BULK_ROLE,
    CALLER_ROLE,
    Abort,
    Acquire,
    Acquired,
    ArenaInfo,
    AskInventory,
    AttachInstance,
    Commit,
    CopyHeader,
    Find,
    ForgetTenant,
    GetSignals,
    GetStatistics,
    GetStory,
    Hello,
    Lookup,
    LookupResult,
    MapArena,
    Message,
    Ok,
    PagesFound,
    ReadHeader,
    Release,
    Report,
    Reserve,
    Reserved,
)
from tensorcast_connector.wire.plan_messages import (
    CancelOwnedPlan,
    CancelSteps,
    ReportInstance,
    RunStep,
    StepDone,
    StepEnded,
    TakeStep,
)
from tensorcast_connector.wire.store_messages import (
    InstanceRecord,
)
from tensorcast_connector.worker.arena import Arena
from tensorcast_connector.worker.census import Reports
from tensorcast_connector.worker.gateway import Gateway
from tensorcast_connector.worker.observer import Observer, Question
from tensorcast_connector.worker.pages import Held, Pages
from tensorcast_connector.worker.peers import Peers
from tensorcast_connector.worker.probe import Requests
from tensorcast_connector.worker.retention import Retention

logger = logging.getLogger(__name__)
_session_ids = itertools.count(1)


class _EngineSession:
    """One connection of an engine: a Session. Its holds, reservations and listing end with it."""

    def __init__(self, service: "EngineService", stream: Stream, name: str) -> None:
        self._service = service
        self._engine = name.rpartition("/")[0] or name  # every process of an engine connects as INSTANCE/PART
        self._stream = stream
        self._id = next(_session_ids)
        self._busy = service.requests.opened()
        self._instance: InstanceId | None = None

    def handle(self, message: Any) -> Message | Awaitable[Message]:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"a worker does not take {type(message).__name__} here")
        return handler(self, message)

    def close(self) -> None:
        self._service.pages.end_session(self._id)
        self._service.requests.closed(self._busy)
        self._detach()

    def _detach(self) -> None:
        # An engine that has connected again is listed by its new connection, whatever becomes of the old one.
        listed = self._instance and self._service.listed.get(self._instance)
        if self._instance is not None and listed and listed[0] == self._id:
            del self._service.listed[self._instance]
            self._service.peers.remove(listed[1])
            self._service.gateway.executor.detach(self._instance)
            self._service.reports.forget(self._instance)

    async def _map_arena(self, _: MapArena) -> Message:
        arena = self._service.arena
        with self._busy:
            await self._stream.send_descriptor(arena.descriptor)
        return ArenaInfo(arena.bytes, self._service.server_id)

    def _attach(self, message: AttachInstance) -> Message:
        if self._instance != message.instance_id:
            self._detach()
            # What its former connection was told to do is not done any more, even if that has not been noticed here.
            self._service.gateway.executor.detach(InstanceId(message.instance_id))
        self._instance = InstanceId(message.instance_id)
        record = InstanceRecord(
            message.instance_id,
            self._service.server_id,
            message.engine,
            message.model,
            message.namespace,
            message.tenant,
        )
        self._service.listed[self._instance] = self._id, record
        self._service.peers.add(record)
        return Ok()

    def _lookup(self, message: Lookup) -> Message | Awaitable[Message]:
        self._service.pages.release(self._id, message.lookup_id)
        if self._service.disabled(self._engine):
            return LookupResult(0, 0)
        if listed := self._service.listed.get(InstanceId(self._engine)):
            self._service.retention.names(listed[1].tenant, message.keyspaces)
        held = self._service.pages.hold_local(self._id, message.lookup_id, message.keyspaces, message.block_hashes)
        known = self._service.pages.known(held)
        return self._locate(held) if known is None else self._looked_up(held, known)

    async def _locate(self, held: Held) -> Message:
        with self._busy:
            return self._looked_up(held, await self._service.pages.locate(held))

    def _looked_up(self, held: Held, blocks: int) -> Message:
        self._service.pages.looked_up(held, blocks)
        return LookupResult(blocks, held.leading_blocks)

    def _acquire(self, message: Acquire) -> Message | Awaitable[Message]:
        held = self._service.pages.hold_local(self._id, message.hold_id, [message.keyspace], message.block_hashes)
        return self._fetch(held) if held.missing else Acquired(self._service.pages.ranges(held))

    async def _fetch(self, held: Held) -> Message:
        with self._busy:
            await self._service.pages.fetch(held)
            return Acquired(self._service.pages.ranges(held))

    def _release(self, message: Release) -> Message:
        for hold_id in message.hold_ids:
            self._service.pages.release(self._id, hold_id)
        return Ok()

    def _reserve(self, message: Reserve) -> Message:
        if self._service.disabled(self._engine):
            return Reserved([-1] * len(message.block_hashes))
        return Reserved(
            self._service.pages.reserve(self._id, message.keyspace, message.block_hashes, message.page_bytes)
        )

    def _commit(self, message: Commit) -> Message:
        self._service.pages.commit(self._id, message.keyspace, message.block_hashes, message.digests)
        return Ok()

    def _abort(self, message: Abort) -> Message:
        self._service.pages.abort(self._id, message.keyspace, message.block_hashes)
        return Ok()

    async def _take_step(self, message: TakeStep) -> Message:
        return await self._service.gateway.executor.take(self._attached(), message.wait_ms / 1000)

    def _step_ended(self, message: StepEnded) -> Message:
        self._service.gateway.executor.ended(self._attached(), message)
        return Ok()

    def _report(self, message: ReportInstance) -> Message:
        if self._instance is None:
            raise ProtocolError("only an attached instance has something to report")
        self._service.reports.take(self._instance, message)
        return Ok()

    def _attached(self) -> InstanceId:
        if self._instance is None:
            raise ProtocolError("only an attached instance does steps")
        self._service.gateway.executor.attach(self._instance)
        return self._instance

    def _observe(self, question: Question) -> Message:
        return self._service.observer.answer(question)

    _handlers: dict[type, Callable[..., Message | Awaitable[Message]]] = {  # noqa: RUF012 - a constant table
        MapArena: _map_arena,
        AttachInstance: _attach,
        Lookup: _lookup,
        Acquire: _acquire,
        Release: _release,
        Reserve: _reserve,
        Commit: _commit,
        Abort: _abort,
        TakeStep: _take_step,
        StepEnded: _step_ended,
        ReportInstance: _report,
        GetStatistics: _observe,
        GetSignals: _observe,
        GetStory: _observe,
    }


class EngineService:
    """A `Service` for the engines of this host, and for people on it.

    Args:
        requests: counts those in flight here.
    """

    server = "worker"
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(EngineRequest)

    def __init__(
        self, server_id: str, arena: Arena, pages: Pages, peers: Peers, observer: Observer, requests: Requests,
        gateway: Gateway, reports: Reports, retention: Retention,
    ) -> None:  # fmt: skip
        self.server_id = server_id
        self.arena = arena
        self.pages = pages
        self.peers = peers
        self.observer = observer
        self.requests = requests
        self.gateway = gateway
        self.reports = reports
        self.retention = retention
        self.listed: dict[InstanceId, tuple[int, InstanceRecord]] = {}  # and the connection that lists it

    def open_session(self, stream: Stream, hello: Hello) -> Session:
        """A new connection."""
        logger.debug("%s %s connected", hello.role, hello.name)
        return (
            self.gateway.open_session(stream, hello)
            if hello.role == CALLER_ROLE
            else _EngineSession(self, stream, hello.name)
        )

    def disabled(self, engine: str) -> bool:
        """Whether somebody has switched the pool off for this engine, for its model or for its namespace."""
        view = self.peers.metadata.view
        if not view.disabled:
            return False
        listed = self.listed.get(InstanceId(engine))
        names = {engine, listed[1].model, listed[1].namespace} if listed else {engine}
        return not names.isdisjoint(view.disabled)

    async def on_stream(self, stream: Stream) -> None:
        """An OnStream."""
        hello = await accept(stream, self.server, self.server_id)
        # A stopped engine may go on writing into what it has reserved here: its connection is never ended for being silent.
        kept = hello.role != CALLER_ROLE
        await Connection(stream, self, open_session(stream, self, hello), kept).serve()


class _PeerSession:
    """One connection of another worker, or of somebody who looks: a Session. It holds nothing."""

    def __init__(self, service: "PeerService", name: str) -> None:
        self._service = service
        self._name = name
        self._busy = service.requests.opened()

    def handle(self, message: Any) -> Message | Awaitable[Message]:
        peers = self._service.peers
        if isinstance(message, Find):
            _check_keys(message.listed)
            reply = peers.metadata.serve(message, peers.now())
            if isinstance(reply, PagesFound) and reply.moved:
                peers.traffic.redirected(self._name, message, reply)
            return reply
        if isinstance(message, Report):
            self._check_sender(message.worker_id)
            _check_keys(message.listed_added, message.listed_removed)
        elif isinstance(message, AskInventory):
            self._check_sender(message.home)
        elif isinstance(message, Question):
            return self._service.observer.answer(message)
        elif isinstance(message, RunStep):
            return self._run_step(message)
        elif isinstance(message, CancelSteps):
            self._service.gateway.executor.cancel(message)
            return Ok()
        elif isinstance(message, CancelOwnedPlan):
            return self._service.gateway.plans.cancel(message.key, forward=False)
        elif isinstance(message, ForgetTenant):
            return self._service.gateway.census.forget_here(message.tenant)
        elif isinstance(message, ReadHeader):
            return CopyHeader(self._service.gateway.artifacts.copy(message.artifact_id).encoded)
        elif isinstance(message, AskArrival):
            return Arrival([self._service.gateway.artifacts.arrival(each) for each in message.artifacts])
        reply = peers.metadata.serve(message, peers.now())
        peers.traffic.told(message)
        peers.wake()
        return reply

    def _check_sender(self, claimed: str) -> None:
        """Nobody speaks for another worker."""
        if claimed != self._name:
            raise ProtocolError(f"{self._name!r} speaks for {claimed[:64]!r}")

    async def _run_step(self, message: RunStep) -> Message:
        with self._busy:
            return StepDone(await self._service.gateway.executor.run(message))

    def close(self) -> None:
        """Nothing is held per connection."""
        self._service.requests.closed(self._busy)


def _check_keys(*parts: Sequence[bytes]) -> None:
    count = sum(map(len, parts))
    if count > KEYS_PER_MESSAGE_MAX:
        raise Exhausted(f"{count} keys in one request; the limit is {KEYS_PER_MESSAGE_MAX}")
    for keys in parts:
        lengths = {keys.key_bytes} if isinstance(keys, Keys) else set(map(len, keys))
        if keys and not 1 <= min(lengths) <= max(lengths) <= KEY_BYTES_MAX:
            raise ProtocolError(f"a page key has 1 to {KEY_BYTES_MAX} bytes")


class PeerService:
    """A `Service` for other workers and for those who look; bulk connections come to the same port.

    Args:
        requests: counts those in flight here.
    """

    server = "worker"
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(PeerRequest)

    def __init__(
        self, server_id: str, pages: Pages, peers: Peers, observer: Observer, requests: Requests, gateway: Gateway
    ) -> None:  # fmt: skip
        self.server_id = server_id
        self.peers = peers
        self.observer = observer
        self.requests = requests
        self.gateway = gateway
        self._pages = pages

    def open_session(self, stream: Stream, hello: Hello) -> Session:
        """A new connection."""
        logger.debug("%s %s connected from %s", hello.role, hello.name, stream.peer)
        return self.gateway.open_session(stream, hello) if hello.role == CALLER_ROLE else _PeerSession(self, hello.name)

    async def on_stream(self, stream: Stream) -> None:
        """An OnStream."""
        hello = await accept(stream, self.server, self.server_id)
        if hello.role == BULK_ROLE:
            await serve_bulk(stream, hello, self._pages, self.gateway)
        else:
            await Connection(stream, self, open_session(stream, self, hello)).serve()
