"""Records that workers keep at the store for their callers: artifacts, names, plans. The store does not look into them.

Only keys under these prefixes can be read and written this way; what is under `cluster/` reaches every worker by its watch.
"""

from tensorcast_connector.config import LEASE_TTL_MAX_S, PLAN_BYTES_MAX, RECORDS_BYTES_MAX
from tensorcast_connector.core.cluster import ARTIFACTS, CALLERS, DISABLED, NAMES, PLAN_MARKERS, PLANS, REPLICAS
from tensorcast_connector.errors import NotFound, ProtocolError
from tensorcast_connector.store.kv import Compare, Delete, KvStore, Put
from tensorcast_connector.wire.store_messages import (
    Entry,
    GrantLease,
    LeaseGranted,
    ReadRecords,
    Records,
    RecordsWritten,
    WriteRecords,
)

PREFIXES = (ARTIFACTS, NAMES, REPLICAS, DISABLED, CALLERS, PLANS, PLAN_MARKERS)
KEY_CHARS_MAX = 1024


def _check_key(key: str) -> None:
    if not key.startswith(PREFIXES) or not key.isprintable() or len(key) > KEY_CHARS_MAX or key in PREFIXES:
        raise ProtocolError(
            f"{key[:64]!r} is no key of a record: under {PREFIXES}, at most {KEY_CHARS_MAX} printable characters"
        )


async def read(kv: KvStore, message: ReadRecords) -> Records:
    """All records under a prefix."""
    if not message.prefix.startswith(PREFIXES):
        raise ProtocolError(f"{message.prefix[:64]!r} is not under {PREFIXES}")
    revision, found = await kv.range(message.prefix)
    return Records(revision, [Entry(each.key, each.value, each.mod_revision) for each in found])


async def write(kv: KvStore, message: WriteRecords) -> RecordsWritten:
    """One transaction."""
    for key in [key for key, _ in message.compares] + [key for key, _, _ in message.puts] + message.deletes:
        _check_key(key)
    for key, value, lease_id in message.puts:
        most = PLAN_BYTES_MAX if key.startswith(PLANS) else RECORDS_BYTES_MAX
        if len(value) > most:
            raise ProtocolError(f"{key[:64]!r}: {len(value)} bytes; such a record has at most {most}")
        if lease_id < 0:
            raise NotFound(f"lease {lease_id} does not exist")
    changes: list[Put | Delete] = [Put(*each) for each in message.puts]
    changes += map(Delete, message.deletes)
    try:
        done = await kv.txn([Compare(*each) for each in message.compares], changes)
    except ValueError as error:
        raise ProtocolError(str(error)) from None
    return RecordsWritten(done.succeeded, done.revision)


async def grant(kv: KvStore, message: GrantLease) -> LeaseGranted:
    """A new lease."""
    if not 1 <= message.ttl_s <= LEASE_TTL_MAX_S:
        raise ProtocolError(f"ttl_s={message.ttl_s} is not within 1..{LEASE_TTL_MAX_S}")
    return LeaseGranted(await kv.lease_grant(message.ttl_s), await kv.revision())
