"""The store process: members of the cluster over the KV port. Never in the data path."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tensorcast_connector.config import NAME_CHARS_MAX, parse_address
from tensorcast_connector.errors import ConfigError, Conflict, NotFound, ProtocolError
from tensorcast_connector.net.rpc import serve_stream
from tensorcast_connector.net.transport import Listener, Network, Stream
from tensorcast_connector.store.kv import Compare, Delete, KvStore, Put
from tensorcast_connector.types import Address
from tensorcast_connector.wire.messages import (
    Alive,
    GetStatistics,
    Hello,
    InstanceRecord,
    KeepAlive,
    LeaseGranted,
    ListMembers,
    Members,
    Message,
    Ok,
    RegisterInstance,
    RegisterWorker,
    RemoveInstance,
    RevokeLease,
    Statistics,
    StoreRequest,
    WorkerRecord,
)

logger = logging.getLogger(__name__)
WORKERS = "workers/"
INSTANCES = "instances/"
TTL_MAX_S = 3600
_decode_worker = msgspec.json.Decoder(WorkerRecord).decode
_decode_instance = msgspec.json.Decoder(InstanceRecord).decode


def _check_id(text: str) -> None:
    """Ids are shown to people, one a line."""
    if not text.isprintable() or not 0 < len(text) <= 2 * NAME_CHARS_MAX:
        raise ProtocolError(f"{text[:40]!r} is no id: 1 to {2 * NAME_CHARS_MAX} printable characters")


class Store:
    """A `Service`: all state is in the KV store, so any number of these can run over one."""

    server = "store"
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(StoreRequest)

    def __init__(self, kv: KvStore, server_id: str) -> None:
        self._kv = kv
        self.server_id = server_id
        self.requests = 0

    def open_session(self, stream: Stream, hello: Hello) -> "Store":
        """Connections hold nothing here: a member lives by its lease."""
        logger.debug("hello from %s %s (%s)", hello.role, hello.name, stream.peer)
        return self

    def close(self) -> None:
        """Nothing is held per connection."""

    def handle(self, message: Message) -> Awaitable[Message]:
        """See Session."""
        self.requests += 1
        handler: Callable[[Any], Awaitable[Message]] | None = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"the store does not take {type(message).__name__}")
        return handler(self, message)  # type: ignore[call-arg]

    async def _register_worker(self, message: RegisterWorker) -> Message:
        if not 1 <= message.ttl_s <= TTL_MAX_S:
            raise ProtocolError(f"ttl_s={message.ttl_s} is not within 1..{TTL_MAX_S}")
        _check_id(message.record.worker_id)
        try:
            parse_address(message.record.address, "address")
        except ConfigError as error:
            raise ProtocolError(str(error)) from None
        lease_id = await self._kv.lease_grant(message.ttl_s)
        key = WORKERS + message.record.worker_id
        done = await self._kv.txn([Compare(key, 0)], [Put(key, msgspec.json.encode(message.record), lease_id)])
        if not done.succeeded:
            await self._kv.lease_revoke(lease_id)
            raise Conflict(f"worker {message.record.worker_id} is registered already")
        logger.info("worker %s joined at %s", message.record.worker_id, message.record.address)
        return LeaseGranted(lease_id, done.revision)

    async def _register_instance(self, message: RegisterInstance) -> Message:
        _check_id(message.record.instance_id)
        if message.lease_id <= 0:
            raise NotFound(f"lease {message.lease_id} does not exist")
        key = INSTANCES + message.record.instance_id
        await self._kv.txn([], [Put(key, msgspec.json.encode(message.record), message.lease_id)])
        logger.info("instance %s joined at worker %s", message.record.instance_id, message.record.worker_id)
        return Ok()

    async def _remove_instance(self, message: RemoveInstance) -> Message:
        await self._kv.txn([], [Delete(INSTANCES + message.instance_id)])
        logger.info("instance %r left", message.instance_id)
        return Ok()

    async def _keep_alive(self, message: KeepAlive) -> Message:
        await self._kv.lease_keepalive(message.lease_id)
        return Alive(await self._kv.revision())

    async def _revoke(self, message: RevokeLease) -> Message:
        await self._kv.lease_revoke(message.lease_id)
        return Ok()

    async def _members(self, _request: ListMembers) -> Message:
        revision, workers = await self._kv.range(WORKERS)
        _rev, instances = await self._kv.range(INSTANCES)
        return Members(
            revision,
            [_decode_worker(each.value) for each in workers],
            [_decode_instance(each.value) for each in instances],
        )

    async def _statistics(self, _: GetStatistics) -> Message:
        return Statistics({"requests": self.requests, "revision": await self._kv.revision()})

    _handlers: dict[type, Callable[..., Awaitable[Message]]] = {  # noqa: RUF012 - a constant table
        RegisterWorker: _register_worker,
        RegisterInstance: _register_instance,
        RemoveInstance: _remove_instance,
        KeepAlive: _keep_alive,
        RevokeLease: _revoke,
        ListMembers: _members,
        GetStatistics: _statistics,
    }


async def serve_store(network: Network, address: Address, kv: KvStore, server_id: str) -> Listener:
    """Listens at `address` until the listener is closed."""
    store = Store(kv, server_id)

    async def on_stream(stream: Stream) -> None:
        await serve_stream(stream, store)

    return await network.listen(address, on_stream)
