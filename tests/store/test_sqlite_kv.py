"""The SQLite backend's file: private, its own, and one line when it cannot be used."""

import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from tensorcast_connector.errors import ConfigError, Unavailable
from tensorcast_connector.store.kv import Put
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.testing.clock import SettableClock


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
    with pytest.raises(ConfigError, match="another store uses it; give this one its own folder"):
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
