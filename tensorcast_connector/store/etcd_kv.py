"""The KV port on an etcd cluster, for any number of store processes.

Reads are linearizable. `changes` and `wait` are answered from one watch per process, so they may lag behind a write by a
moment. All keys lie under one prefix, so that several clusters can share an etcd; revisions are those of the whole etcd.
"""

from collections.abc import Sequence

import msgspec

from tensorcast_connector.config import HISTORY_REVISIONS_MAX, LISTING_KEYS_MAX, STORE_TIMEOUT_S
from tensorcast_connector.errors import Compacted, NotFound
from tensorcast_connector.store.etcd_gateway import Answer, EtcdKey, Gateway, Header
from tensorcast_connector.store.etcd_watch import EtcdWatch
from tensorcast_connector.store.kv import (
    Compare,
    Delete,
    Event,
    KeyValue,
    Put,
    TxnResult,
    check_txn,
    prefix_end,
    weight,
)
from tensorcast_connector.types import Address

_RANGE, _TXN = "/v3/kv/range", "/v3/kv/txn"
_GRANT, _KEEPALIVE, _REVOKE = "/v3/lease/grant", "/v3/lease/keepalive", "/v3/lease/revoke"


class _Ranged(Answer):
    kvs: list[EtcdKey] = msgspec.field(default_factory=list)
    more: bool = False


class _Done(Answer):
    succeeded: bool = False


class _Granted(Answer):
    ID: int = 0


class _Alive(Answer):
    TTL: int = 0


class _Kept(Answer):
    result: _Alive = msgspec.field(default_factory=_Alive)

    def whose(self) -> Header:
        return self.result.header


class EtcdKv:
    """See the module; `open_etcd` makes one. Raises as `KvStore` says."""

    def __init__(self, gateway: Gateway, prefix: str, revision: int) -> None:
        self._gateway = gateway
        self._prefix = prefix
        floor = max(0, revision - HISTORY_REVISIONS_MAX)
        self._watch = EtcdWatch(gateway, *self._span(""), floor, self._ours)

    def __repr__(self) -> str:
        return f"<EtcdKv {self._prefix!r} at {self._gateway.endpoint}>"

    def _span(self, prefix: str) -> tuple[bytes, bytes]:
        start = self._prefix + prefix
        return start.encode(), (prefix_end(start) or "\0").encode()  # \0: to the end of all keys

    def _ours(self, key: bytes) -> str:
        return key.decode(errors="replace")[len(self._prefix) :]

    async def revision(self) -> int:
        """See KvStore."""
        return await current_revision(self._gateway, self._prefix)

    async def range(self, prefix: str) -> tuple[int, list[KeyValue]]:
        """See KvStore."""
        start, end = self._span(prefix)
        revision, found, _ = await self._read({"key": start, "range_end": end})
        return revision, found

    async def page(self, prefix: str, after_key: str, bytes_max: int) -> tuple[int, list[KeyValue], bool]:
        """See KvStore."""
        start, end = self._span(prefix)
        behind = (self._prefix + after_key).encode() + b"\0" if after_key else b""
        request = {"key": max(start, behind), "range_end": end, "limit": LISTING_KEYS_MAX}
        revision, found, more = await self._read(request)
        size = 0
        for at, each in enumerate(found):
            size += weight(each.key, each.value)
            if at and size > bytes_max:
                return revision, found[:at], True
        return revision, found, more

    async def _read(self, request: dict[str, object]) -> tuple[int, list[KeyValue], bool]:
        before = self._gateway.revision
        got = await self._gateway.call(_RANGE, request, _Ranged, repeatable=True)
        if (
            got.header.revision < before
        ):  # this read was sent after that revision was seen: etcd has lost its data since
            self._gateway.revision = got.header.revision
            self._watch.begin_anew(got.header.revision)
        found = [
            KeyValue(self._ours(each.key), each.value, each.create_revision, each.mod_revision, each.lease)
            for each in got.kvs
        ]
        return got.header.revision, found, got.more

    async def changes(self, prefix: str, after_revision: int) -> tuple[int, list[Event]]:
        """See KvStore."""
        if after_revision > self._gateway.revision and after_revision > (revision := await self.revision()):
            raise Compacted(f"etcd is at revision {revision} and has never been at {after_revision}")
        return self._watch.history.after(prefix, after_revision)

    async def wait(self, after_revision: int, timeout_s: float, prefix: str = "") -> None:
        """See KvStore."""
        await self._watch.wait(after_revision, timeout_s, prefix)

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        """See KvStore."""
        check_txn(compares, operations)
        done = await self._gateway.call(
            _TXN,
            {
                "compare": [
                    {"key": self._key(each.key), "target": "MOD", "mod_revision": each.mod_revision}
                    for each in compares
                ],
                "success": [self._operation(each) for each in operations],
            },
            _Done,
            repeatable=not operations,
        )
        return TxnResult(done.succeeded, done.header.revision)

    def _key(self, key: str) -> bytes:
        return (self._prefix + key).encode()

    def _operation(self, operation: Put | Delete) -> dict[str, dict[str, object]]:
        if isinstance(operation, Delete):
            return {"request_delete_range": {"key": self._key(operation.key)}}
        key = self._key(operation.key)
        return {"request_put": {"key": key, "value": operation.value, "lease": operation.lease_id}}

    async def lease_grant(self, ttl_s: int) -> int:
        """See KvStore."""
        # A grant that nobody heard of runs out by itself.
        return (await self._gateway.call(_GRANT, {"TTL": ttl_s}, _Granted, repeatable=True)).ID

    async def lease_keepalive(self, lease_id: int) -> None:
        """See KvStore."""
        kept = await self._gateway.call(_KEEPALIVE, {"ID": lease_id}, _Kept, repeatable=True)
        if kept.result.TTL <= 0:
            raise NotFound(f"lease {lease_id} has expired")

    async def lease_revoke(self, lease_id: int) -> None:
        """See KvStore."""
        try:
            await self._gateway.call(_REVOKE, {"ID": lease_id}, Answer, repeatable=True)
        except NotFound:
            return

    async def close(self) -> None:
        """See KvStore."""
        await self._watch.close()
        await self._gateway.close()


async def current_revision(gateway: Gateway, prefix: str) -> int:
    """etcd's revision, read through its quorum."""
    request = {"key": prefix.encode(), "count_only": True}
    return (await gateway.call(_RANGE, request, Answer, repeatable=True)).header.revision


async def open_etcd(endpoints: Sequence[Address], prefix: str, timeout_s: float = STORE_TIMEOUT_S) -> EtcdKv:
    """A store on the etcd cluster at `endpoints`, once it has answered; every key of ours begins with `prefix` there.

    Raises:
        ConfigError: something else listens there, or an etcd that cannot be used.
        Unavailable: nobody answers within `timeout_s` seconds, which is also the limit of every operation later.
    """
    gateway = Gateway(endpoints, timeout_s)
    try:
        await gateway.check()
        return EtcdKv(gateway, prefix, await current_revision(gateway, prefix))
    except BaseException:
        await gateway.close()
        raise
