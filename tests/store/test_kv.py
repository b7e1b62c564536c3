"""The contract of the KV port, for every backend."""

import asyncio
import random
import time

import pytest

from tensorcast_connector.errors import Compacted, Exhausted, NotFound
from tensorcast_connector.store import etcd_kv, etcd_watch, sqlite_kv
from tensorcast_connector.store.incarnation import ensure_incarnation
from tensorcast_connector.store.kv import (
    TXN_BYTES_MAX,
    TXN_OPERATIONS_MAX,
    Compare,
    Delete,
    Event,
    KeyValue,
    KvStore,
    Put,
    prefix_end,
    weight,
)
from tests.store.conftest import Backend


async def put(kv: KvStore, key: str, value: bytes = b"v", lease_id: int = 0) -> int:
    done = await kv.txn([], [Put(key, value, lease_id)])
    assert done.succeeded
    return done.revision


async def keys(kv: KvStore, prefix: str = "") -> list[str]:
    return [each.key for each in (await kv.range(prefix))[1]]


async def changes(kv: KvStore, prefix: str, after: int, upto: int) -> list[Event]:
    """Those after `after`, once they are complete up to `upto`: a backend may lag behind what was written.

    With `upto` above `after` it is also sure that changes are followed, and that what a test waits for ends by nothing else.
    """
    async with asyncio.timeout(10):
        while True:
            revision, events = await kv.changes(prefix, after)
            assert revision >= after and all(after < each.mod_revision <= revision for each in events)
            if revision >= upto:
                return events
            await kv.wait(revision, 1)


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


@pytest.mark.slow
async def test_a_lease_runs_out_unless_it_is_renewed(backend: Backend) -> None:
    kv = backend.kv
    lease, renewed = await kv.lease_grant(backend.ttl_s), await kv.lease_grant(backend.ttl_s)
    await put(kv, "leased", b"v", lease)
    await put(kv, "renewed", b"v", renewed)
    assert [each.lease_id for each in (await kv.range(""))[1]] == [lease, renewed]
    before = await kv.revision()
    followed = asyncio.create_task(changes(kv, "", before, before + 1))
    async with asyncio.timeout(10):
        while await keys(kv, "leased"):
            await backend.pass_time(backend.ttl_s / 4)
            await kv.lease_keepalive(renewed)
    assert await followed == [Event("leased", None, before + 1, 0)], "an expiry is a change"
    for _ in range(2):
        with pytest.raises(NotFound, match=f"lease {lease} has expired"):
            await kv.lease_keepalive(lease)
    with pytest.raises(NotFound, match="does not exist"):
        await put(kv, "leased", b"", lease)
    assert await keys(kv) == ["renewed"] and await kv.revision() == before + 1
    await kv.lease_revoke(lease)


async def test_changes_in_order_with_deletes(kv: KvStore) -> None:
    start = await kv.revision()
    lease = await kv.lease_grant(10)
    first = await put(kv, "a/1", b"\x00\xff", lease)
    second = (await kv.txn([], [Put("a/2", b""), Put("b/1", b"other"), Delete("a/1"), Delete("a/none")])).revision
    third = await put(kv, "a/2", b"again")
    await kv.lease_revoke(lease)
    assert [
        (each.key, each.value, each.mod_revision, each.lease_id) for each in await changes(kv, "a/", start, third)
    ] in (
        [("a/1", b"\x00\xff", first, lease), *pair, ("a/2", b"again", third, 0)]
        for pair in (
            [("a/1", None, second, 0), ("a/2", b"", second, 0)],
            [("a/2", b"", second, 0), ("a/1", None, second, 0)],
        )
    ), "within a revision in any order"
    assert [each.key for each in await changes(kv, "b/", start, third)] == ["b/1"]
    assert await changes(kv, "a/", second, third) == [Event("a/2", b"again", third, 0)]
    assert await changes(kv, "a/", third, third) == [] and await changes(kv, "c/", start, third) == []


async def test_what_the_range_showed_is_not_told_again(kv: KvStore) -> None:
    await put(kv, "a")
    revision, _ = await kv.range("")
    for _ in range(20):
        assert await changes(kv, "", revision, revision) == []
        await asyncio.sleep(0.001)
    later = await put(kv, "a", b"2")
    assert await changes(kv, "", revision, later) == [Event("a", b"2", later, 0)]


async def test_a_revoked_lease_is_seen(kv: KvStore) -> None:
    lease = await kv.lease_grant(10)
    await put(kv, "a/1", b"", lease)
    last = await put(kv, "a/2", b"", lease)
    await kv.lease_revoke(lease)
    gone = await changes(kv, "a/", last, last + 1)
    assert {(each.key, each.value) for each in gone} == {("a/1", None), ("a/2", None)}
    assert {each.mod_revision for each in gone} == {await kv.revision()}


async def test_changes_of_a_past_that_is_not_kept(kv: KvStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sqlite_kv, etcd_watch):
        monkeypatch.setattr(module, "HISTORY_REVISIONS_MAX", 8)
    start = await kv.revision()
    written = [await put(kv, f"k{n % 3}", b"%d" % n) for n in range(30)]
    recent = await changes(kv, "", written[-5], written[-1])
    assert [each.value for each in recent] == [b"26", b"27", b"28", b"29"]
    for past in (start, written[0], written[-15], 1):
        with pytest.raises(Compacted):
            await kv.changes("", past)
    assert [each.value for each in (await kv.range(""))[1]] == [b"27", b"28", b"29"], "listing again helps"


async def test_large_values_are_not_kept_for_long(kv: KvStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sqlite_kv, etcd_watch):
        monkeypatch.setattr(module, "HISTORY_BYTES_MAX", 10_000)
    start = await kv.revision()
    written = [await put(kv, "k", bytes(1000)) for _ in range(30)]
    assert len(await changes(kv, "", written[-4], written[-1])) == 3
    with pytest.raises(Compacted):
        await kv.changes("", start)


async def test_changes_of_a_future_that_is_not_ours(kv: KvStore) -> None:
    with pytest.raises(Compacted):
        await kv.changes("", await kv.revision() + 1)


async def test_waiting_ends_with_a_change(kv: KvStore) -> None:
    start = await put(kv, "a")
    await changes(kv, "", start - 1, start)
    waiting = [asyncio.create_task(kv.wait(start, 30)) for _ in range(3)]
    await asyncio.sleep(0.02)
    assert not any(each.done() for each in waiting)
    await put(kv, "b")
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    await asyncio.wait_for(kv.wait(start, 30), 5)
    assert [each.key for each in (await kv.changes("", start))[1]] == ["b"], "what it waited for is there"


async def test_waiting_for_keys_under_a_prefix_does_not_end_with_others(kv: KvStore) -> None:
    start = await put(kv, "ours/a")
    await changes(kv, "", start - 1, start)
    waiting = asyncio.create_task(kv.wait(start, 30, "ours/"))
    anything = asyncio.create_task(kv.wait(start, 30))
    for number in range(3):
        last = await put(kv, f"other/{number}")
        await asyncio.wait_for(kv.wait(last - 1, 30), 5)
    await asyncio.wait_for(anything, 5)
    assert not waiting.done()
    await put(kv, "ours/b")
    await asyncio.wait_for(waiting, 5)
    await asyncio.wait_for(kv.wait(start, 30, "ours/"), 5)
    assert (await kv.changes("ours/", last))[1][0].key == "ours/b", "what it waited for is there"


async def test_waiting_for_keys_under_a_prefix_ends_with_a_lease(backend: Backend) -> None:
    lease = await backend.kv.lease_grant(backend.ttl_s)
    revision = await put(backend.kv, "ours/a", b"", lease)
    await changes(backend.kv, "", revision - 1, revision)
    waiting = asyncio.create_task(backend.kv.wait(revision, 30, "ours/"))
    await backend.kv.lease_revoke(lease)
    await asyncio.wait_for(waiting, 5)
    assert [each.value for each in (await backend.kv.changes("ours/", revision))[1]] == [None]


async def test_waiting_ends_with_the_time(kv: KvStore) -> None:
    revision = await put(kv, "a")
    await changes(kv, "", revision - 1, revision)
    started = time.monotonic()
    await kv.wait(revision, 0.02)
    assert time.monotonic() - started >= 0.015
    for over in (0, -1):
        await asyncio.wait_for(kv.wait(revision, over), 5)


async def test_a_waiter_may_be_cancelled_and_closing_ends_the_others(backend: Backend) -> None:
    revision = await put(backend.kv, "a")
    await changes(backend.kv, "", revision - 1, revision)
    one, other = (asyncio.create_task(backend.kv.wait(revision, 30)) for _ in range(2))
    await asyncio.sleep(0.01)
    one.cancel()
    await asyncio.gather(one, return_exceptions=True)
    await backend.reopen()
    await asyncio.wait_for(other, 5)
    assert one.cancelled()


async def test_the_edges_of_a_prefix(kv: KvStore) -> None:
    last = chr(0x10FFFF)
    names = ["a", "a/", "a/1", "a/\uffff", f"a/{last}", f"a/{last}{last}x", "a0", "b", "\ud7ff1", "\ue000", last]
    for name in names:
        await put(kv, name)
    for prefix in ["", "a", "a/", f"a/{last}", f"a/{last}{last}", "\ud7ff", last, f"{last}{last}", "0"]:
        expected = sorted((each for each in names if each.startswith(prefix)), key=str.encode)
        assert await keys(kv, prefix) == expected, prefix


async def test_pages_together_are_the_range(kv: KvStore) -> None:
    last = chr(0x10FFFF)
    names = ["a/", "a/1", "a/\uffff", f"a/{last}", f"a/{last}{last}x", *(f"a/k{n:02}" for n in range(20)), "a0", "b"]
    for name in names:
        await put(kv, name, bytes(len(name) % 7))
    revision, whole = await kv.range("a/")
    one = weight(whole[0].key, whole[0].value)
    for bytes_max in (0, one, 3 * one, 1 << 20):
        pages, after, more = [], "", True
        while more:
            at, page, more = await kv.page("a/", after, bytes_max)
            assert at == revision and (
                len(page) == 1 or sum(weight(each.key, each.value) for each in page) <= bytes_max
            )
            pages.append(page)
            after = page[-1].key
        assert [each for page in pages for each in page] == whole and (len(pages) == 1) is (bytes_max == 1 << 20)
    assert await kv.page("a/", whole[-1].key, 1 << 20) == (revision, [], False), "nothing behind the last one"
    assert await kv.page("c/", "", 1 << 20) == (revision, [], False)
    assert (await kv.page("", "a/z", 1 << 20))[1][0].key == "a/\uffff", "behind a key that does not exist"


async def test_a_page_has_a_bounded_number_of_keys_or_bytes(kv: KvStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_kv, "LISTING_KEYS_MAX", 5)
    await kv.txn([], [Put(f"k{n:02}", b"v") for n in range(12)])
    _, page, more = await kv.page("", "", 1 << 20)
    assert len(page) in (5, 12) and more is (len(page) == 5)
    _, page, more = await kv.page("", "k04", 3 * weight("k00", b"v"))
    assert [each.key for each in page] == ["k05", "k06", "k07"] and more


async def test_pages_and_the_changes_since_the_first_are_the_present_state(kv: KvStore) -> None:
    chance = random.Random(5)
    for n in range(30):
        await put(kv, f"k{n:02}", b"0")
    first, page, more = await kv.page("", "", 200)
    state = {each.key: each.value for each in page}
    last = first
    while more:
        for _ in range(3):
            key = f"k{chance.randrange(40):02}"
            last = (await kv.txn([], [Delete(key) if chance.random() < 0.5 else Put(key, b"%d" % last)])).revision
        _, page, more = await kv.page("", page[-1].key, 200)
        state |= {each.key: each.value for each in page}
    for event in await changes(kv, "", first, last):
        if event.value is None:
            state.pop(event.key, None)
        else:
            state[event.key] = event.value
    assert state == {each.key: each.value for each in (await kv.range(""))[1]}


def test_the_end_of_a_prefix() -> None:
    last = chr(0x10FFFF)
    assert prefix_end("a/") == "a0" and prefix_end("a" + last) == "b" and prefix_end("x\ud7ff") == "x\ue000"
    assert prefix_end("") is None and prefix_end(last) is None


async def test_names_that_are_refused(kv: KvStore) -> None:
    before = await kv.revision()
    for operations in ([Put("", b"")], [Delete("")], [Put("a", b""), Delete("a")], [Put("a", b"1"), Put("a", b"2")]):
        with pytest.raises(ValueError, match="a transaction changes a key once"):
            await kv.txn([], operations)
    with pytest.raises(ValueError, match="surrogates"):
        await kv.txn([], [Put("\udc80", b"")])
    assert await kv.revision() == before


async def test_opened_again_everything_is_there(backend: Backend) -> None:
    lease = await backend.kv.lease_grant(10)
    start = await backend.kv.revision()
    revision = await put(backend.kv, "k", b"v", lease)
    await backend.reopen()
    assert await backend.kv.revision() == revision
    assert (await backend.kv.range(""))[1] == [KeyValue("k", b"v", revision, revision, lease)]
    assert await changes(backend.kv, "", start, revision) == [Event("k", b"v", revision, lease)]
    await backend.kv.lease_keepalive(lease)
    await backend.kv.lease_revoke(lease)
    assert await keys(backend.kv) == [] and await put(backend.kv, "k") > revision


async def test_the_incarnation_is_the_first_time_it_was_asked_for(backend: Backend) -> None:
    assert await ensure_incarnation(backend.kv, 1000) == 1000
    await backend.reopen()
    assert await ensure_incarnation(backend.kv, 2000) == 1000
    lease = await backend.kv.lease_grant(10)
    await backend.kv.lease_keepalive(lease)


async def test_many_ask_for_the_incarnation_at_once(kv: KvStore) -> None:
    assert len(set(await asyncio.gather(*(ensure_incarnation(kv, now) for now in range(100, 120))))) == 1
