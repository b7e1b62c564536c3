"""The store process: metadata of the cluster over the KV port. Never in the data path.

All state is in the KV store (keys: core/cluster.py), so any number of these processes can serve one cluster over etcd.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from tensorcast_connector.config import (
    LEASE_TTL_MAX_S,
    MEMBER_TTL_S,
    NAME_CHARS_MAX,
    SHARDS,
    SHARDS_MAX,
    WATCH_NOTHING_S,
    WATCH_WAIT_S,
    parse_address,
)
from tensorcast_connector.core import cluster
from tensorcast_connector.core.cluster import CLUSTER, INCARNATION, RESTORED, SHARD_COUNT
from tensorcast_connector.core.placement import valid_shard_count
from tensorcast_connector.errors import (
    Compacted,
    ConfigError,
    Conflict,
    NotFound,
    ProtocolError,
    TensorcastError,
    Unavailable,
)
from tensorcast_connector.net.rpc import serve_stream
from tensorcast_connector.net.transport import Listener, Network, Stream
from tensorcast_connector.store import records
from tensorcast_connector.store.answers import everything, incarnation_of, news, next_page
from tensorcast_connector.store.incarnation import begin_life, begin_wait, seen_former_life
from tensorcast_connector.store.kv import RESTORING_KEY, Compare, Delete, KvStore, Put
from tensorcast_connector.types import Address
from tensorcast_connector.wire.codec import StoreRequest
from tensorcast_connector.wire.messages import GetStatistics, Hello, Message, Ok, Statistics
from tensorcast_connector.wire.store_messages import (
    Alive,
    Changes,
    ClaimShards,
    GrantLease,
    KeepAlive,
    LeaseGranted,
    PutReplica,
    ReadRecords,
    RegisterInstance,
    RegisterWorker,
    ReleaseShards,
    RemoveInstance,
    RemoveReplica,
    RevokeLease,
    ShardRecord,
    Watch,
    WriteRecords,
)

logger = logging.getLogger(__name__)
CLAIMS_PER_TXN = 32


def _check_id(text: str) -> None:
    """Ids are shown to people, one a line."""
    if not text.isprintable() or not 0 < len(text) <= 2 * NAME_CHARS_MAX:
        raise ProtocolError(f"{text[:40]!r} is no id: 1 to {2 * NAME_CHARS_MAX} printable characters")


async def prepare(kv: KvStore, shards: int = 0) -> int:
    """Sets the number of shards of a new cluster; an existing one keeps its own. Returns the number.

    Args:
        shards: 0 for SHARDS, or for whatever an existing cluster has.

    Raises:
        ConfigError: pages cannot be cut into so many shards, or the cluster has another number.
    """
    wanted = shards or SHARDS
    if not valid_shard_count(wanted):
        raise ConfigError(f"shards={shards}: a power of two from 1 to {SHARDS_MAX} is needed")
    if not (await kv.range(SHARD_COUNT))[1]:  # a store that only starts again writes nothing: its disk may be full
        await kv.txn([Compare(SHARD_COUNT, 0)], [Put(SHARD_COUNT, b"%d" % wanted)])
    count = await _shard_count(kv)
    if shards and count != shards:
        raise ConfigError(f"shards={shards}: this cluster has {count} since it was made, and keeps them")
    return count


class Store:
    """A `Service`. Give it a KV store with an incarnation and a number of shards (`prepare`)."""

    server = "store"
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(StoreRequest)

    def __init__(self, kv: KvStore, server_id: str, life: int = 0, shards: int = SHARDS) -> None:
        self._kv = kv
        self._shards = shards  # of a new life, if the database has lost the number
        self._life = life  # the highest incarnation seen
        self.server_id = server_id
        self.outcomes: Counter[tuple[str, str]] = Counter()  # of requests, by (message, "ok" or the code of the error)
        self.watchers = 0  # watches that wait for something to happen

    def open_session(self, stream: Stream, hello: Hello) -> "Store":
        """Connections hold nothing here: a member lives by its lease."""
        logger.debug("hello from %s %s (%s)", hello.role, hello.name, stream.peer)
        return self

    def close(self) -> None:
        """Nothing is held per connection."""

    def handle(self, message: Message) -> Awaitable[Message]:
        """See Session."""
        handler: Callable[[Any], Awaitable[Message]] | None = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"the store does not take {type(message).__name__}")
        return self._counted(handler, message)

    async def _counted(self, handler: Callable[..., Awaitable[Message]], message: Message) -> Message:
        outcome = "cancelled"
        try:
            reply = await handler(self, message)
            outcome = "ok"
        except Exception as error:
            outcome = error.code if isinstance(error, TensorcastError) else TensorcastError.code
            raise
        finally:
            self.outcomes[type(message).__name__, outcome] += 1
        return reply

    # --- members ---

    async def _register_worker(self, message: RegisterWorker) -> Message:
        record = message.record
        if not 1 <= message.ttl_s <= LEASE_TTL_MAX_S:
            raise ProtocolError(f"ttl_s={message.ttl_s} is not within 1..{LEASE_TTL_MAX_S}")
        _check_id(record.worker_id)
        try:
            address = parse_address(record.address, "address")
        except ConfigError as error:
            raise ProtocolError(str(error)) from None
        if address.scheme != "tcp":
            raise ProtocolError(f"address={record.address!r}: other workers can only reach a TCP address")
        lease_id = await self._kv.lease_grant(message.ttl_s)
        key = cluster.worker_key(record.worker_id)
        done = await self._kv.txn([Compare(key, 0)], [Put(key, msgspec.json.encode(record), lease_id)])
        if not done.succeeded:
            await self._kv.lease_revoke(lease_id)
            raise Conflict(f"worker {record.worker_id} is registered already")
        fields = {"event": "worker-joined", "worker_id": record.worker_id, "address": record.address}
        logger.info("worker %s joined at %s", record.worker_id, record.address, extra=fields)
        return LeaseGranted(lease_id, done.revision)

    async def _keep_alive(self, message: KeepAlive) -> Message:
        await self._kv.lease_keepalive(message.lease_id)
        return Alive(await self._kv.revision())

    async def _revoke(self, message: RevokeLease) -> Message:
        await self._kv.lease_revoke(message.lease_id)
        return Ok()

    async def _list(self, key: str, record: msgspec.Struct, lease_id: int) -> Message:
        if lease_id <= 0:
            raise NotFound(f"lease {lease_id} does not exist")
        await self._kv.txn([], [Put(key, msgspec.json.encode(record), lease_id)])
        return Ok()

    async def _register_instance(self, message: RegisterInstance) -> Message:
        _check_id(message.record.instance_id)
        record = message.record
        done = await self._list(cluster.instance_key(record.instance_id), record, message.lease_id)
        fields = {"event": "instance-joined", "instance_id": record.instance_id, "worker_id": record.worker_id}
        logger.info("instance %s joined at worker %s", record.instance_id, record.worker_id, extra=fields)
        return done

    async def _remove_instance(self, message: RemoveInstance) -> Message:
        await self._kv.txn([], [Delete(cluster.instance_key(message.instance_id))])
        fields = {"event": "instance-left", "instance_id": message.instance_id}
        logger.info("instance %r left", message.instance_id, extra=fields)
        return Ok()

    async def _put_replica(self, message: PutReplica) -> Message:
        _check_id(message.record.artifact_id)
        _check_id(message.record.worker_id)
        key = cluster.replica_key(message.record.artifact_id, message.record.worker_id)
        return await self._list(key, message.record, message.lease_id)

    async def _remove_replica(self, message: RemoveReplica) -> Message:
        await self._kv.txn([], [Delete(cluster.replica_key(message.artifact_id, message.worker_id))])
        return Ok()

    # --- shards ---

    async def _claim(self, message: ClaimShards) -> Message:
        """Grants what nobody holds. The fencing token is the revision of the grant."""
        shards = await self._known(message.shards)
        if message.lease_id <= 0:
            raise NotFound(f"lease {message.lease_id} does not exist")
        if (await self._kv.range(RESTORED))[1]:
            await begin_wait(self._kv)
            raise Unavailable(
                f"the database was lost or was restored a moment ago: shards are granted after {MEMBER_TTL_S} s, when "
                "nobody believes any more in what the former life has granted"
            )
        record = msgspec.json.encode(ShardRecord(message.worker_id, message.lease_id))
        for at in range(0, len(shards), CLAIMS_PER_TXN):
            part = shards[at : at + CLAIMS_PER_TXN]
            if not await self._grant(part, record, message.lease_id):
                for shard in part:  # some are taken: each on its own
                    await self._grant([shard], record, message.lease_id)
        return Ok()

    async def _grant(self, shards: Sequence[int], record: bytes, lease_id: int) -> bool:
        keys = [cluster.shard_key(shard) for shard in shards]
        free = [Compare(key, 0) for key in (RESTORED, *keys)]
        done = await self._kv.txn(free, [Put(key, record, lease_id) for key in keys])
        return done.succeeded

    async def _known(self, shards: Sequence[int]) -> list[int]:
        count = await _shard_count(self._kv)
        if not all(0 <= shard < count for shard in shards):
            raise ProtocolError(f"shards {list(shards)[:8]} are not all within 0..{count - 1}")
        return sorted(set(shards))

    async def _release(self, message: ReleaseShards) -> Message:
        """Deletes only the grants that are meant: a shard may be somebody else's by now, or granted anew."""
        if message.revisions and len(message.revisions) != len(message.shards):
            raise ProtocolError(f"{len(message.revisions)} revisions of {len(message.shards)} shards")
        meant = dict(zip(message.shards, message.revisions, strict=False))  # none: any grant to that lease
        held = {each.key: each for each in (await self._kv.range(cluster.SHARDS))[1]}
        for shard in await self._known(message.shards):
            found = held.get(cluster.shard_key(shard))
            if found is None or found.lease_id != message.lease_id:
                continue
            if meant.get(shard, found.mod_revision) == found.mod_revision:
                await self._kv.txn([Compare(found.key, found.mod_revision)], [Delete(found.key)])
        return Ok()

    # --- reading ---

    async def changes(self, message: Watch) -> Changes:
        """What has changed by now; empty if nothing has."""
        found = await self._changes(message)
        if any(entry.key == RESTORED for entry in found.entries):
            await begin_wait(self._kv)  # workers that see it ask for no shards, so that nothing else would do it
        return found

    async def _changes(self, message: Watch) -> Changes:
        life = await self._current_life()
        if 0 < message.incarnation < life:
            await seen_former_life(self._kv)
        if message.incarnation == life:
            found = await (next_page(self._kv, message) if message.after_key else self._news(message))
            if found is not None and found.revision >= message.after_revision:
                return found
        found = await everything(self._kv, message)
        if message.incarnation == found.incarnation and message.after_revision > found.revision:
            # An older copy of the database was put in its place: what is granted now must outrank what was granted since.
            logger.warning(
                "the database has gone back from revision %d to %d; a new life begins",
                message.after_revision,
                found.revision,
            )
            await self._begin_life(message.incarnation)
            found = await everything(self._kv, message)
        return found

    async def _news(self, message: Watch) -> Changes | None:
        """None: everything is to be told."""
        try:
            revision, events = await self._kv.changes(CLUSTER, message.after_revision)
        except Compacted:
            return None
        if any(event.key == INCARNATION for event in events):
            return None
        return news(message.incarnation, revision, events)

    async def _current_life(self) -> int:
        """The incarnation of the database, which has been emptied if it has none any more."""
        _, found = await self._kv.range(INCARNATION)
        if not found and self._life:
            _, restoring = await self._kv.range(RESTORING_KEY)
            if restoring:
                raise Unavailable("the database is being restored")
            logger.warning("the database has been emptied; a new life begins")
            await self._begin_life(self._life)
            _, found = await self._kv.range(INCARNATION)
        life, former = incarnation_of(found), self._life
        self._life = max(life, former)
        if 0 < former < life:
            await seen_former_life(self._kv)
        return life

    async def _begin_life(self, former: int) -> None:
        """With as many shards as the former had."""
        await begin_life(self._kv, former)
        await self._kv.txn([Compare(SHARD_COUNT, 0)], [Put(SHARD_COUNT, b"%d" % self._shards)])

    async def watch(self, message: Watch) -> Changes:
        """Answers as soon as something has changed, else after `wait_ms` with nothing; never later than WATCH_WAIT_S.

        What has changed may be nothing to watchers, such as the records of plans: they hear of the revision a little later.
        """
        now = asyncio.get_running_loop().time
        until = now() + (0.0 if message.after_key else min(message.wait_ms / 1000, WATCH_WAIT_S))
        changes = await self.changes(message)
        while not (changes.complete or changes.entries or changes.deleted) and (left_s := until - now()) > 0:
            seen = changes.revision
            self.watchers += 1
            try:
                await self._kv.wait(seen, left_s)
                await self._kv.wait(seen, max(0.0, min(until - now(), WATCH_NOTHING_S)), CLUSTER)
            finally:
                self.watchers -= 1
            changes = await self.changes(msgspec.structs.replace(message, after_revision=seen))
            if changes.revision > seen:
                break
        return changes

    async def _statistics(self, _: GetStatistics) -> Message:
        return Statistics({"requests": self.outcomes.total(), "revision": await self._kv.revision()})

    _handlers: dict[type, Callable[..., Awaitable[Message]]] = {  # noqa: RUF012 - a constant table
        RegisterWorker: _register_worker,
        RegisterInstance: _register_instance,
        RemoveInstance: _remove_instance,
        PutReplica: _put_replica,
        RemoveReplica: _remove_replica,
        KeepAlive: _keep_alive,
        RevokeLease: _revoke,
        ClaimShards: _claim,
        ReleaseShards: _release,
        Watch: watch,
        GetStatistics: _statistics,
        ReadRecords: lambda self, message: records.read(self._kv, message),
        WriteRecords: lambda self, message: records.write(self._kv, message),
        GrantLease: lambda self, message: records.grant(self._kv, message),
    }


async def _shard_count(kv: KvStore) -> int:
    _, found = await kv.range(SHARD_COUNT)
    if not found:
        raise Unavailable(
            f"the store's database has lost its key {SHARD_COUNT!r}; restart the store, or restore a backup"
        )
    return int(found[0].value)


async def listen(network: Network, address: Address, store: Store | asyncio.Future[Store]) -> Listener:
    """Serves `store` at `address` until the listener is closed; callers wait for one that is still to be opened."""

    async def on_stream(stream: Stream) -> None:
        await serve_stream(stream, store if isinstance(store, Store) else await asyncio.shield(store))

    return await network.listen(address, on_stream)


async def open_store(kv: KvStore, server_id: str, shards: int = 0) -> Store:
    """A store on `kv`. See `prepare` for `shards`."""
    count = await prepare(kv, shards)
    _, found = await kv.range(INCARNATION)
    return Store(kv, server_id, incarnation_of(found), count)


async def serve_store(network: Network, address: Address, kv: KvStore, server_id: str, shards: int = 0) -> Listener:
    """Opens a store and serves it at `address` until the listener is closed."""
    return await listen(network, address, await open_store(kv, server_id, shards))
