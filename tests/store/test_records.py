"""Records that workers keep at the store for callers: where they may be, how large, and that compares hold."""

import pytest

from tensorcast_connector.config import LEASE_TTL_MAX_S, PLAN_BYTES_MAX, RECORDS_BYTES_MAX
from tensorcast_connector.errors import Exhausted, NotFound, ProtocolError
from tensorcast_connector.store import records
from tensorcast_connector.store.kv import KvStore
from tensorcast_connector.wire.store_messages import GrantLease, ReadRecords, Records, RecordsWritten, WriteRecords

KEYS = [
    "cluster/artifacts/t/a/system", "cluster/names/t/n", "cluster/replicas/a/w/1", "callers/t/5", "plans/t/k/",
]  # fmt: skip


async def write(
    kv: KvStore, *puts: tuple[str, bytes, int], compares: list[tuple[str, int]] | None = None, deletes: list[str] | None = None
) -> RecordsWritten:  # fmt: skip
    return await records.write(kv, WriteRecords(compares or [], list(puts), deletes or []))


async def read(kv: KvStore, prefix: str) -> Records:
    return await records.read(kv, ReadRecords(prefix))


async def test_records_are_written_read_and_deleted(kv: KvStore) -> None:
    done = await write(kv, *((key, key.encode(), 0) for key in KEYS))
    assert done.succeeded
    for key in KEYS:
        [entry] = (await read(kv, key)).entries
        assert (entry.key, entry.value, entry.revision) == (key, key.encode(), done.revision)
    assert (await write(kv, deletes=KEYS[:2])).succeeded
    assert not (await read(kv, "cluster/artifacts/")).entries and len((await read(kv, "callers/")).entries) == 1


async def test_compares_hold_or_nothing_is_done(kv: KvStore) -> None:
    first = await write(kv, ("plans/t/k/", b"1", 0), compares=[("plans/t/k/", 0)])
    assert first.succeeded
    for wrong in (0, first.revision + 1, 1 << 40):
        assert not (await write(kv, ("plans/t/k/", b"2", 0), compares=[("plans/t/k/", wrong)])).succeeded
    assert (await write(kv, ("plans/t/k/", b"2", 0), compares=[("plans/t/k/", first.revision)])).succeeded
    assert not (await write(kv, deletes=["plans/t/k/"], compares=[("callers/t/5", 3)])).succeeded
    [entry] = (await read(kv, "plans/")).entries
    assert entry.value == b"2"


async def test_records_go_with_their_lease(kv: KvStore) -> None:
    lease_id = (await records.grant(kv, GrantLease(30))).lease_id
    await write(kv, ("callers/t/5", b"", lease_id), ("cluster/names/t/n", b"x", lease_id), ("plans/t/k/", b"y", 0))
    await kv.lease_revoke(lease_id)
    assert not (await read(kv, "callers/")).entries and not (await read(kv, "cluster/names/")).entries
    assert (await read(kv, "plans/")).entries
    for gone in (lease_id, 1 << 50, -1):
        with pytest.raises(NotFound):
            await write(kv, ("callers/t/5", b"", gone))


@pytest.mark.parametrize(
    "key",
    [
        "", "x", "cluster/", "cluster/workers/a", "cluster/shards/1", "cluster/instances/i", "cluster/incarnation",
        "cluster/shard-count", "restoring", "plans", "plans/", "callers/", "cluster/names/", "cluster/names/t/a\nb",
        "cluster/names/t/\0", "plans/" + "x" * 2000,
    ],
)  # fmt: skip
async def test_other_keys_are_nobodys_to_write(kv: KvStore, key: str) -> None:
    """Leases of shards, workers and the life of the database are not records of callers."""
    before = await kv.revision()
    for attempt in (
        WriteRecords([], [(key, b"", 0)], []), WriteRecords([], [], [key]), WriteRecords([(key, 0)], [], []),
    ):  # fmt: skip
        with pytest.raises(ProtocolError, match="is no key of a record") as error:
            await records.write(kv, attempt)
        assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert await kv.revision() == before


@pytest.mark.parametrize("prefix", ["", "cluster", "cluster/", "cluster/workers/", "plan", "restoring", "\0"])
async def test_other_keys_are_nobodys_to_read(kv: KvStore, prefix: str) -> None:
    with pytest.raises(ProtocolError, match="is not under"):
        await read(kv, prefix)


async def test_how_large_a_record_may_be(kv: KvStore) -> None:
    for key, most in (("cluster/names/t/n", RECORDS_BYTES_MAX), ("plans/t/k/", PLAN_BYTES_MAX)):
        assert (await write(kv, (key, bytes(most), 0))).succeeded
        with pytest.raises(ProtocolError, match=f"{most + 1} bytes; such a record has at most {most}"):
            await write(kv, (key, bytes(most + 1), 0))
    with pytest.raises(Exhausted):
        await write(kv, *((f"plans/t/{number}/", bytes(PLAN_BYTES_MAX), 0) for number in range(3)))
    with pytest.raises(ProtocolError, match="changes a key once"):
        await write(kv, ("plans/t/k/", b"", 0), ("plans/t/k/", b"", 0))


@pytest.mark.parametrize("ttl_s", [0, -1, LEASE_TTL_MAX_S + 1, 1 << 60])
async def test_leases_that_cannot_be(kv: KvStore, ttl_s: int) -> None:
    with pytest.raises(ProtocolError, match=f"ttl_s={ttl_s} is not within 1..{LEASE_TTL_MAX_S}"):
        await records.grant(kv, GrantLease(ttl_s))
