"""Which life of the database this is. A restored backup is another life: its number is higher, its revisions may repeat.

Fencing tokens and watches name the incarnation beside the revision, so that nothing of one life is taken for the other's.

A home that does not hear of a new life believes in what the former one has granted until its lease has run out by its own
clock. So that two homes of a shard cannot overlap, no shards are granted for MEMBER_TTL_S once it is known that there was a
former life. A restore knows it, and so does a store that has served one. A database that is empty when its store starts is a
new cluster's or one that was lost, and looks the same: it is taken for new, since a first start should not wait, until
somebody asks for what has changed since a former life. Every worker of one says so with the first that it asks, and could be a
home only for MEMBER_TTL_S from then; so what was granted before that in this life is taken back, and the wait begins. Later
than MEMBER_TTL_S after the first start nobody can believe in a former life any more, and nothing is waited for.

Grants are taken back by ending the leases of all workers, which register anew, and not by deleting the grants alone: a home whose
watch brings nothing learns it from its next renewal, and one that hears nothing at all has stopped when the wait is over,
since that begins when the last lease has ended.
"""

from tensorcast_connector.config import MEMBER_TTL_S
from tensorcast_connector.core.cluster import INCARNATION, RESTORED, SHARDS, WORKERS, YOUNG
from tensorcast_connector.errors import ConfigError
from tensorcast_connector.store.kv import RESTORING_KEY, Compare, Delete, KvStore, Put

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
            await end_later(kv, YOUNG)  # if the store that has put it did not come to that
            return found
        life = Put(INCARNATION, str(now_unix_s).encode())
        if (await kv.txn([Compare(INCARNATION, 0)], [Put(YOUNG, b""), life])).succeeded:
            await end_later(kv, YOUNG)
            return now_unix_s


async def end_later(kv: KvStore, key: str) -> None:
    """`key` goes in MEMBER_TTL_S. It gets its lease afterwards: ids of leases come from the life that it was put with."""
    _, found = await kv.range(key)
    if not found or found[0].lease_id:
        return
    lease_id = await kv.lease_grant(MEMBER_TTL_S)
    if not (await kv.txn([Compare(key, found[0].mod_revision)], [Put(key, b"", lease_id)])).succeeded:
        await kv.lease_revoke(lease_id)  # another store has done it


async def begin_life(kv: KvStore, former: int) -> None:
    """A life above `former`, unless another process has begun one; nothing that hung on the former's leases counts."""
    _, found = await kv.range(INCARNATION)
    if found and parse_incarnation(found[0].value) > former:
        return
    compare = Compare(INCARNATION, found[0].mod_revision if found else 0)
    life = Put(INCARNATION, b"%d" % (former + 1))
    if (await kv.txn([compare], [Put(RESTORED, b""), life])).succeeded:
        await begin_wait(kv)


async def seen_former_life(kv: KvStore) -> None:
    """Somebody knows an earlier life than the present one: see the module."""
    _, young = await kv.range(YOUNG)
    if young:
        compare = Compare(YOUNG, young[0].mod_revision)
        if (await kv.txn([compare], [Put(RESTORED, b""), Delete(YOUNG)])).succeeded:
            await begin_wait(kv)


async def begin_wait(kv: KvStore) -> None:
    """RESTORED is there, so no shards are granted (store/server.py compares it); its time is still to begin: see the module.

    Any store that finds it without a lease does it, since the one that has put it may have died.
    """
    _, restored = await kv.range(RESTORED)
    if not restored or restored[0].lease_id:
        return
    _, workers = await kv.range(WORKERS)
    _, shards = await kv.range(SHARDS)
    if (await kv.range(RESTORED))[1] != restored:
        return  # another store has done it meanwhile, and what was read may be of after the wait
    for lease_id in sorted({each.lease_id for each in (*workers, *shards) if each.lease_id}):
        await kv.lease_revoke(lease_id)
    await end_later(kv, RESTORED)


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
