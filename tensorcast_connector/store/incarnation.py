"""Which life of the database this is. A restored backup is another life: its number is higher, its revisions may repeat.

Fencing tokens and watches name the incarnation beside the revision, so that nothing of one life is taken for the other's.
"""

from tensorcast_connector.core.cluster import INCARNATION
from tensorcast_connector.errors import ConfigError
from tensorcast_connector.store.kv import RESTORING_KEY, Compare, KvStore, Put

INCARNATION_MAX = 1 << 40  # seconds; beyond every clock, and leaves room for lease ids of each incarnation


async def ensure_incarnation(kv: KvStore, now_unix_s: int) -> int:
    """The incarnation of the database, which is `now_unix_s` (seconds since 1970) if it has none yet. It never decreases.

    Every store process calls it once before it serves.

    Raises:
        ConfigError: a restore into this database was interrupted, or the key holds no incarnation.
    """
    while True:
        found = await read_incarnation(kv)
        if found:
            return found
        done = await kv.txn([Compare(INCARNATION, 0)], [Put(INCARNATION, str(now_unix_s).encode())])
        if done.succeeded:
            return now_unix_s


async def read_incarnation(kv: KvStore) -> int:
    """The incarnation; 0: the database has none yet. Raises as `ensure_incarnation`."""
    for key in (RESTORING_KEY, INCARNATION):
        for each in (await kv.range(key))[1]:
            if each.key == RESTORING_KEY:
                raise ConfigError("a restore into this database was interrupted; run `tensorcast store restore` again")
            if each.key == INCARNATION:
                return parse_incarnation(each.value)
    return 0


def parse_incarnation(value: bytes) -> int:
    """The number in the value of INCARNATION.

    Raises:
        ConfigError: it is none.
    """
    if value.isdigit() and len(value) <= 13 and 0 < int(value) < INCARNATION_MAX:
        return int(value)
    raise ConfigError(f"the key {INCARNATION!r} of the database holds {value[:40]!r}, which is no incarnation")
