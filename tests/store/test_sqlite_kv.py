"""The SQLite backend: its file, its clock, and what a crash leaves of it."""

import asyncio
import random
import resource
import shutil
import sqlite3
import stat
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tensorcast_connector.core.cluster import INCARNATION
from tensorcast_connector.errors import Compacted, ConfigError, NotFound, Unavailable
from tensorcast_connector.store import sqlite_file, sqlite_kv
from tensorcast_connector.store.incarnation import ensure_incarnation
from tensorcast_connector.store.kv import Compare, Delete, Event, KeyValue, Put
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.testing.clock import SettableClock


@pytest.fixture
def clock() -> SettableClock:
    """Of the store of the test."""
    return SettableClock(1000)


@pytest.fixture
async def kv(tmp_path: Path, clock: SettableClock) -> AsyncIterator[SqliteKv]:
    """A store that the test does not open again."""
    kv = SqliteKv(tmp_path / "store.db", clock)
    yield kv
    await kv.close()


async def put(kv: SqliteKv, key: str, value: bytes = b"v", lease_id: int = 0) -> int:
    return (await kv.txn([], [Put(key, value, lease_id)])).revision


async def keys(kv: SqliteKv) -> list[str]:
    return [each.key for each in (await kv.range(""))[1]]


async def test_files_and_folder_are_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "store.db"
    kv = SqliteKv(path, SettableClock())
    await kv.txn([], [Put("k", b"v")])
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}
    assert "store.db" in modes and set(modes.values()) == {0o600}
    await kv.close()
    path.chmod(0o644)
    kv = SqliteKv(path, SettableClock())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and repr(kv) == "<SqliteKv 0 leases>"
    await kv.close()


def no_database(path: Path) -> None:
    path.write_bytes(b"this is no database at all, and long enough to have a header\n" * 20)


def cut_short(path: Path) -> None:
    whole(path)
    path.write_bytes(path.read_bytes()[:1500])


def whole(path: Path, sql: str = "") -> None:
    with sqlite3.connect(path) as db:
        db.executescript("CREATE TABLE t (x); INSERT INTO t VALUES (1);" + sql)
    db.close()


def other_schema(path: Path) -> None:
    whole(path, "CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER); INSERT INTO meta VALUES ('schema', 99);")


def other_tables(path: Path) -> None:
    whole(path, "CREATE TABLE kv (key TEXT PRIMARY KEY, lease_id INTEGER) WITHOUT ROWID;")


def a_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    "make", [no_database, cut_short, other_schema, other_tables, a_folder], ids=lambda f: f.__name__
)
def test_a_file_that_is_no_store_database_is_one_line(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "store.db"
    make(path)
    with pytest.raises(ConfigError, match=r"^store database .*store\.db") as error:
        SqliteKv(path, SettableClock())
    assert "\n" not in str(error.value)


async def test_a_database_in_use_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    kv = SqliteKv(path, SettableClock())
    with pytest.raises(ConfigError, match="another store uses it; stop that one, or give this one its own folder"):
        SqliteKv(path, SettableClock())
    await kv.close()
    await SqliteKv(path, SettableClock()).close()


async def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="writable by others"):
        SqliteKv(tmp_path / "store.db", SettableClock())
    tmp_path.chmod(0o700)


async def test_a_disk_error_is_unavailable(tmp_path: Path) -> None:
    kv = SqliteKv(tmp_path / "store.db", SettableClock())
    kv._db.execute("DROP TABLE kv")
    with pytest.raises(Unavailable, match="store database: no such table"):
        await kv.txn([], [Put("k", b"v")])
    assert await kv.revision() > 0, "and the next request is served"
    await kv.close()


async def test_what_was_not_committed_takes_no_revision(kv: SqliteKv, monkeypatch: pytest.MonkeyPatch) -> None:
    """The revision is kept in memory, and goes back with the transaction."""
    before = await put(kv, "a")
    set_meta = kv._set_meta

    def fails(name: Any, value: int) -> None:
        set_meta(name, value)
        raise sqlite3.OperationalError("no")

    with monkeypatch.context() as patch:
        patch.setattr(kv, "_set_meta", fails)
        with pytest.raises(Unavailable):
            await put(kv, "b")
    assert await kv.revision() == before == kv._meta("revision")
    assert await put(kv, "c") == before + 1 == kv._meta("revision")


async def test_a_closed_store_says_so(tmp_path: Path) -> None:
    for executor in ("thread", None):
        kv = SqliteKv(tmp_path / "store.db", SettableClock(), executor)  # type: ignore[arg-type]
        await kv.close()
        await kv.close()
        with pytest.raises(Unavailable, match="store database: closed"):
            await kv.revision()


async def test_a_key_goes_with_its_lease(kv: SqliteKv, clock: SettableClock) -> None:
    lease = await kv.lease_grant(10)
    await put(kv, "leased", b"v", lease)
    await put(kv, "free")
    before = await kv.revision()
    clock.advance(9.9)
    assert await keys(kv) == ["free", "leased"]
    clock.advance(0.1)
    assert await keys(kv) == ["free"]
    assert await kv.revision() == before + 1, "an expiry is a change"


async def test_keepalive_renews_for_the_full_time(kv: SqliteKv, clock: SettableClock) -> None:
    lease = await kv.lease_grant(10)
    await put(kv, "k", b"", lease)
    for _ in range(5):
        clock.advance(9)
        await kv.lease_keepalive(lease)
    clock.advance(9)
    assert await keys(kv) == ["k"]


async def test_leases_end_at_their_own_times(kv: SqliteKv, clock: SettableClock) -> None:
    for ttl_s in (30, 10, 20):
        await put(kv, f"k{ttl_s}", b"", await kv.lease_grant(ttl_s))
    for now, left in ((10, ["k20", "k30"]), (20, ["k30"]), (30, [])):
        clock.set(1000 + now - 0.1)
        assert len(await keys(kv)) == len(left) + 1
        clock.set(1000 + now)
        assert await keys(kv) == left


async def test_an_expired_lease_is_never_revived(kv: SqliteKv, clock: SettableClock) -> None:
    lease = await kv.lease_grant(10)
    await put(kv, "k", b"", lease)
    clock.advance(10)
    for _ in range(2):
        with pytest.raises(NotFound, match=f"lease {lease} has expired"):
            await kv.lease_keepalive(lease)
    with pytest.raises(NotFound, match="does not exist"):
        await put(kv, "k", b"", lease)
    assert await keys(kv) == [] and await kv.lease_grant(10) > lease, "and its id is not given out again"


async def test_a_restart_grants_every_lease_its_full_time_anew(tmp_path: Path, clock: SettableClock) -> None:
    kv = SqliteKv(tmp_path / "store.db", clock)
    lease = await kv.lease_grant(10)
    revision = await put(kv, "k", b"v", lease)
    for earlier_boot in (False, True):
        clock.advance(9)
        await kv.close()
        if earlier_boot:
            clock.set(3)
        kv = SqliteKv(tmp_path / "store.db", clock)
        assert (await kv.range(""))[1] == [KeyValue("k", b"v", revision, revision, lease)]
    clock.advance(9)
    await kv.lease_keepalive(lease)
    clock.advance(10)
    assert await keys(kv) == []
    assert await kv.changes("", revision) == (revision + 1, [Event("k", None, revision + 1, 0)])
    await kv.close()


async def test_leases_of_another_life_have_other_ids(tmp_path: Path) -> None:
    seen: set[int] = set()
    for life in (1, 2, 1_800_000_000):
        kv = SqliteKv(tmp_path / str(life) / "store.db", SettableClock())
        await ensure_incarnation(kv, life)
        granted = [await kv.lease_grant(10) for _ in range(5)]
        assert granted == sorted(granted) and not seen.intersection(granted)
        seen.update(granted)
        await kv.close()
    assert max(seen) < 1 << 53, "any JSON can carry them"


async def test_an_incarnation_that_is_none(kv: SqliteKv) -> None:
    for value in (b"", b"x", b"-1", b"0", b"1" * 50, b"9" * 13):
        await put(kv, INCARNATION, value)
        with pytest.raises(ConfigError, match="which is no incarnation"):
            await ensure_incarnation(kv, 1000)


@pytest.mark.slow
async def test_waiting_ends_when_a_lease_runs_out_though_nobody_asks(tmp_path: Path) -> None:
    kv = SqliteKv(tmp_path / "store.db", time.monotonic)
    lease = await kv.lease_grant(1)
    revision = await put(kv, "k", b"", lease)
    started = time.monotonic()
    await kv.wait(revision, 30)
    assert 0.5 < time.monotonic() - started < 10
    assert (await kv.changes("", revision))[1] == [Event("k", None, revision + 1, 0)]
    await kv.close()


async def test_a_change_whose_author_was_cancelled_wakes_too(kv: SqliteKv) -> None:
    waiting = asyncio.create_task(kv.wait(await kv.revision(), 30))
    writing = asyncio.create_task(put(kv, "k"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    if await keys(kv):  # else it was cancelled before it began
        await asyncio.wait_for(waiting, 5)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


def inline(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise AssertionError("it suspended")


def test_without_an_executor_nothing_ever_suspends(tmp_path: Path, clock: SettableClock) -> None:
    kv = SqliteKv(tmp_path / "store.db", clock, executor=None)
    start = inline(kv.revision())
    lease = inline(kv.lease_grant(10))
    assert inline(kv.txn([Compare("a", 0)], [Put("a", b"1", lease), Put("b", b"")])).succeeded
    inline(kv.lease_keepalive(lease))
    clock.advance(10)
    assert [each.key for each in inline(kv.range(""))[1]] == ["b"]
    assert [each.key for each in inline(kv.changes("", start))[1]] == ["a", "b", "a"]
    inline(kv.lease_revoke(lease))
    with pytest.raises(NotFound):
        inline(kv.lease_keepalive(lease))
    with pytest.raises(Compacted):
        inline(kv.changes("", start + 100))
    assert inline(ensure_incarnation(kv, 7)) == 7
    inline(kv.close())


async def test_a_file_of_schema_1_is_brought_up_to_date(tmp_path: Path, clock: SettableClock) -> None:
    path = tmp_path / "store.db"
    with sqlite3.connect(path) as db:
        db.executescript("""
            CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
            CREATE TABLE lease (id INTEGER PRIMARY KEY AUTOINCREMENT, ttl_s INTEGER NOT NULL);
            CREATE TABLE kv (key TEXT PRIMARY KEY, value BLOB NOT NULL, create_revision INTEGER NOT NULL,
                mod_revision INTEGER NOT NULL, lease_id INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
            CREATE INDEX kv_lease ON kv(lease_id) WHERE lease_id != 0;
            INSERT INTO meta VALUES ('revision', 9), ('schema', 1);
            INSERT INTO lease VALUES (4, 10);
            INSERT INTO kv VALUES ('a', x'00ff', 3, 9, 4), ('b', x'', 5, 5, 0);
        """)
    db.close()
    for _ in range(2):
        kv = SqliteKv(path, clock)
        assert await kv.range("") == (9, [KeyValue("a", b"\0\xff", 3, 9, 4), KeyValue("b", b"", 5, 5, 0)])
        assert await kv.changes("", 9) == (9, [])
        with pytest.raises(Compacted):
            await kv.changes("", 8)
        await kv.close()
    kv = SqliteKv(path, clock)
    clock.advance(10)
    assert await kv.changes("", 9) == (10, [Event("a", None, 10, 0)]) and await kv.lease_grant(1) == 5
    await kv.close()


async def test_a_range_reads_only_what_it_returns(kv: SqliteKv) -> None:
    for table, order in (("kv", "key"), ("history", "revision")):
        where, values = sqlite_file.under("a/")
        plan = kv._db.execute(f"EXPLAIN QUERY PLAN SELECT * FROM {table} WHERE {where} ORDER BY {order}", values)
        if table == "kv":
            assert "SEARCH kv USING PRIMARY KEY (key>? AND key<?)" in str(plan.fetchall())


async def test_the_history_is_trimmed_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_kv, "HISTORY_REVISIONS_MAX", 40)
    kv = SqliteKv(tmp_path / "store.db", SettableClock())
    first, lengths = await put(kv, "k"), set()
    for _ in range(100):
        await put(kv, "k")
        lengths.add(kv._one("SELECT count(*) FROM history"))
        assert kv._one("SELECT min(revision) FROM history") == kv._compacted + 1 or kv._compacted < first
    assert max(lengths) == 41 and kv._one("SELECT count(*) FROM history") >= 30
    assert kv._history_bytes == kv._one("SELECT sum(length(value)) FROM history")
    compacted = kv._compacted
    await kv.close()
    kv = SqliteKv(tmp_path / "store.db", SettableClock())
    assert kv._compacted == compacted
    await kv.close()


# --- crashes ------------------------------------------------------------------------------------------------------------
State = tuple[Any, Any, Any]


async def state(path: Path) -> State:
    """Everything that a store reads from its file, as it is found after a crash."""
    kv = SqliteKv(path, SettableClock())
    found = (await kv.range(""), await kv.changes("", kv._compacted), sorted(kv._ttl_s.items()))
    assert kv._db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    await kv.close()
    return found


async def after_crash(folder: Path, database: bytes, log: bytes) -> State:
    """The state that is found with these files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    (folder / "store.db").write_bytes(database)
    (folder / "store.db-wal").write_bytes(log)
    return await state(folder / "store.db")


def files(path: Path) -> tuple[bytes, bytes]:
    """The database and its log as they are on the disk."""
    return path.read_bytes(), Path(f"{path}-wal").read_bytes()


def log_end(log: bytes) -> int:
    """Where the last committed frame of the log ends: after a checkpoint it is written from its beginning again."""
    page = int.from_bytes(log[8:12], "big")
    salt, position, end = log[16:24], 32, 32
    while position + 24 + page <= len(log) and log[position + 8 : position + 16] == salt:
        commit = int.from_bytes(log[position + 4 : position + 8], "big")
        position += 24 + page
        end = position if commit else end
    return end


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_a_torn_log_loses_nothing_that_was_acknowledged(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = tmp_path / "store.db"
    kv = SqliteKv(path, SettableClock())
    kv._db.execute(f"PRAGMA wal_autocheckpoint={chance.choice([0, 8, 1000])}")
    checked = 0
    for _ in range(8):
        for _ in range(chance.randrange(1, 6)):
            await put(kv, f"k{chance.randrange(20)}", chance.randbytes(chance.randrange(3000)), await kv.lease_grant(5))
        # The database itself is written to only once the log is on the disk, so a torn log has the database of before.
        database, log = files(path)
        before = await after_crash(tmp_path / "copy", database, log)
        await kv.txn([], [Put(f"k{n}", chance.randbytes(chance.randrange(4000))) for n in range(6)] + [Delete("k9")])
        new = files(path)[1]
        after = await after_crash(tmp_path / "copy", database, new)
        assert before != after and after[0] == await kv.range("")
        acknowledged, end = log_end(log), log_end(new)
        begun_anew = new[:32] != log[:32]
        first = 0 if begun_anew else acknowledged
        for cut in {first, first + 1, end - 1, end, *(chance.randrange(first, end) for _ in range(6))}:
            for torn in (new[:cut], new[:cut] + log[cut:]):  # what was there before may still follow
                found = await after_crash(tmp_path / "copy", database, torn)
                assert found == (after if torn[:end] == new[:end] else before), f"cut at {cut} of {first}..{end}"
                checked += 1
    assert checked > 50
    await kv.close()


@pytest.mark.slow
async def test_a_log_torn_at_every_byte_of_the_last_transaction(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    kv = SqliteKv(path, SettableClock())
    await put(kv, "a", b"1")
    database, log = files(path)
    before = await after_crash(tmp_path / "copy", database, log)
    await kv.txn([], [Put("a", b"2"), Put("b", b"")])
    new = files(path)[1]
    after = await after_crash(tmp_path / "copy", database, new)
    acknowledged, end = log_end(log), log_end(new)
    assert acknowledged < end and before != after
    # Every byte of the frames' headers and edges, and every 128th of the pages between them.
    for cut in range(acknowledged, end + 1):
        into = (cut - 32) % (24 + 4096)
        if 26 < into < 4118 and cut % 128:
            continue
        assert await after_crash(tmp_path / "copy", database, new[:cut]) == (after if cut == end else before), cut
    await kv.close()


async def test_the_log_does_not_grow_while_somebody_waits(tmp_path: Path) -> None:
    """A commit that makes the file longer waits for the disk twice as long."""
    path, log = tmp_path / "store.db", tmp_path / "store.db-wal"
    for life in range(3):
        kv = SqliteKv(path, SettableClock())
        size = log.stat().st_size
        assert size >= sqlite_file.LOG_BYTES
        for number in range(150):  # more than one log takes
            await put(kv, f"k/{number}", b"%d" % life)
        assert log.stat().st_size <= size + (100 << 10), "it begins anew before it is longer"
        shutil.copytree(tmp_path, tmp_path.parent / f"copy-{life}")  # as a crash leaves it
        await kv.close()
        after = SqliteKv(tmp_path.parent / f"copy-{life}" / "store.db", SettableClock())
        assert [each.value for each in (await after.range("k/"))[1]] == [b"%d" % life] * 150
        await after.close()


async def test_a_log_for_which_there_is_no_room_is_as_long_as_it_has_to_be(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sqlite_file.LOG_BYTES // 2, limits[1]))
    try:
        kv = SqliteKv(tmp_path / "store.db", SettableClock())
        assert (tmp_path / "store.db-wal").stat().st_size < sqlite_file.LOG_BYTES // 8
        await put(kv, "k")
        assert await keys(kv) == ["k"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    await kv.close()


def test_a_simulation_has_no_log_ahead(tmp_path: Path) -> None:
    """It tears what was written last, which is where the log ends."""
    SqliteKv(tmp_path / "store.db", SettableClock(), executor=None)
    assert (tmp_path / "store.db-wal").stat().st_size < sqlite_file.LOG_BYTES // 8
