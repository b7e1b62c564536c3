"""The contract of the KV port, for every backend."""

import asyncio

import pytest

from tensorcast_connector.errors import Exhausted, NotFound
from tensorcast_connector.store.kv import TXN_BYTES_MAX, TXN_OPERATIONS_MAX, Compare, Delete, KeyValue, KvStore, Put
from tensorcast_connector.testing.clock import SettableClock
from tests.store.conftest import Backend


async def put(kv: KvStore, key: str, value: bytes = b"v", lease_id: int = 0) -> int:
    done = await kv.txn([], [Put(key, value, lease_id)])
    assert done.succeeded
    return done.revision


async def keys(kv: KvStore, prefix: str = "") -> list[str]:
    return [each.key for each in (await kv.range(prefix))[1]]


async def test_put_range_delete(kv: KvStore) -> None:
    first = await put(kv, "a/1", b"one")
    second = await put(kv, "a/2", b"two")
    await put(kv, "b/1")
    assert second == first + 1
    assert await kv.range("a/") == (
        second + 1,
        [KeyValue("a/1", b"one", first, first, 0), KeyValue("a/2", b"two", second, second, 0)],
    )
    changed = await put(kv, "a/1", b"uno")
    assert (await kv.range("a/1"))[1] == [KeyValue("a/1", b"uno", first, changed, 0)]
    assert (await kv.txn([], [Delete("a/1"), Delete("nothing")])).revision == changed + 1
    assert await keys(kv, "a/") == ["a/2"]
    again = await put(kv, "a/1")
    assert (await kv.range("a/1"))[1][0].create_revision == again, "created anew"


async def test_a_prefix_is_taken_literally(kv: KvStore) -> None:
    for key in ("a%b", "aXb", "a_b", "A%b", "é/1", "é"):
        await put(kv, key)
    assert await keys(kv, "a%") == ["a%b"] and await keys(kv, "a_") == ["a_b"]
    assert await keys(kv, "é/") == ["é/1"] and await keys(kv, "zzz") == []
    assert await keys(kv) == sorted(["a%b", "aXb", "a_b", "A%b", "é/1", "é"], key=str.encode)


async def test_compare_and_swap(kv: KvStore) -> None:
    first = await kv.txn([Compare("k", 0)], [Put("k", b"1")])
    assert first.succeeded
    lost = await kv.txn([Compare("k", 0)], [Put("k", b"2"), Put("other", b"x")])
    assert not lost.succeeded and lost.revision == first.revision
    assert await keys(kv) == ["k"], "nothing was done"
    assert (await kv.txn([Compare("k", first.revision)], [Put("k", b"3")])).succeeded
    assert not (await kv.txn([Compare("k", first.revision)], [Delete("k")])).succeeded
    assert not (await kv.txn([Compare("missing", 7)], [])).succeeded
    assert (await kv.txn([Compare("missing", 0)], [])).succeeded


async def test_one_revision_per_transaction_and_none_for_nothing(kv: KvStore) -> None:
    before = await kv.revision()
    done = await kv.txn([], [Put("a", b""), Put("b", b""), Delete("c")])
    assert done.revision == before + 1 == await kv.revision()
    assert {each.mod_revision for each in (await kv.range(""))[1]} == {done.revision}
    assert (await kv.txn([], [Delete("c")])).revision == done.revision
    assert (await kv.txn([Compare("a", done.revision)], [])).revision == done.revision == await kv.revision()


async def test_only_one_of_many_wins(kv: KvStore) -> None:
    results = await asyncio.gather(*(kv.txn([Compare("k", 0)], [Put("k", bytes([n]))]) for n in range(20)))
    assert sum(each.succeeded for each in results) == 1


async def test_limits(kv: KvStore) -> None:
    before = await kv.revision()
    most = [Put(str(n), b"") for n in range(TXN_OPERATIONS_MAX)]
    with pytest.raises(Exhausted, match=r"129 operations|exceeds the limit"):
        await kv.txn([], [*most, Put("one more", b"")])
    with pytest.raises(Exhausted):
        await kv.txn([Compare("x", 0)], most)
    with pytest.raises(Exhausted, match="exceeds the limit"):
        await kv.txn([], [Put("a", bytes(TXN_BYTES_MAX // 2)), Put("b", bytes(TXN_BYTES_MAX // 2 + 1))])
    assert await kv.revision() == before and await keys(kv) == []
    assert (await kv.txn([], most)).succeeded
    assert (await kv.txn([], [Put("big", bytes(TXN_BYTES_MAX))])).succeeded


async def test_a_key_goes_with_its_lease(kv: KvStore, clock: SettableClock) -> None:
    lease = await kv.lease_grant(10)
    await put(kv, "leased", b"v", lease)
    await put(kv, "free")
    assert (await kv.range("leased"))[1][0].lease_id == lease
    before = await kv.revision()
    clock.advance(9.9)
    assert await keys(kv) == ["free", "leased"]
    clock.advance(0.1)
    assert await keys(kv) == ["free"]
    assert await kv.revision() == before + 1, "an expiry is a change"


async def test_keepalive_renews_for_the_full_time(kv: KvStore, clock: SettableClock) -> None:
    lease = await kv.lease_grant(10)
    await put(kv, "k", b"", lease)
    for _ in range(5):
        clock.advance(9)
        await kv.lease_keepalive(lease)
    clock.advance(9)
    assert await keys(kv) == ["k"]


async def test_an_expired_lease_is_never_revived(kv: KvStore, clock: SettableClock) -> None:
    lease = await kv.lease_grant(10)
    await put(kv, "k", b"", lease)
    clock.advance(10)
    for _ in range(2):
        with pytest.raises(NotFound, match=f"lease {lease} has expired"):
            await kv.lease_keepalive(lease)
    with pytest.raises(NotFound, match="does not exist"):
        await put(kv, "k", b"", lease)
    assert await keys(kv) == [] and await kv.lease_grant(10) > lease, "and its id is not given out again"


async def test_a_put_on_a_missing_lease_undoes_the_whole_transaction(kv: KvStore) -> None:
    before = await kv.revision()
    with pytest.raises(NotFound):
        await kv.txn([], [Put("a", b""), Put("b", b"", 12345)])
    assert await keys(kv) == [] and await kv.revision() == before


async def test_revoking(kv: KvStore) -> None:
    one, two = await kv.lease_grant(10), await kv.lease_grant(10)
    await put(kv, "a", b"", one)
    await put(kv, "b", b"", two)
    await kv.lease_revoke(one)
    await kv.lease_revoke(one)
    await kv.lease_revoke(999)
    assert await keys(kv) == ["b"]
    with pytest.raises(NotFound):
        await kv.lease_keepalive(one)


async def test_a_key_hangs_on_the_lease_it_was_last_put_with(kv: KvStore) -> None:
    one, two = await kv.lease_grant(10), await kv.lease_grant(10)
    await put(kv, "k", b"", one)
    await put(kv, "k", b"", two)
    await kv.lease_revoke(one)
    assert await keys(kv) == ["k"]
    await put(kv, "k")
    await kv.lease_revoke(two)
    assert await keys(kv) == ["k"]


async def test_a_restart_keeps_keys_and_grants_every_lease_its_full_time_anew(backend: Backend) -> None:
    lease = await backend.kv.lease_grant(10)
    revision = await put(backend.kv, "k", b"v", lease)
    backend.clock.advance(9)
    await backend.restart()
    assert await backend.kv.revision() == revision
    assert (await backend.kv.range(""))[1] == [KeyValue("k", b"v", revision, revision, lease)]
    backend.clock.advance(9)
    await backend.kv.lease_keepalive(lease)
    backend.clock.advance(10)
    assert await keys(backend.kv) == []


async def test_the_clock_of_another_boot(backend: Backend) -> None:
    lease = await backend.kv.lease_grant(10)
    await put(backend.kv, "k", b"v", lease)
    backend.clock.set(3)
    await backend.restart()
    backend.clock.advance(9)
    assert await keys(backend.kv) == ["k"]
    backend.clock.advance(1)
    assert await keys(backend.kv) == []


async def test_revisions_and_leases_go_on_after_a_restart(backend: Backend) -> None:
    lease = await backend.kv.lease_grant(1)
    seen = [await put(backend.kv, "k")]
    for _ in range(3):
        await backend.restart()
        seen.append(await put(backend.kv, "k"))
    assert seen == sorted(set(seen))
    backend.clock.advance(5)
    assert await backend.kv.revision() == seen[-1], "the lease had no keys"
    assert await backend.kv.lease_grant(1) > lease
