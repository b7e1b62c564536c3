"""The KV port on SQLite (write-ahead log), for one machine.

Keys, values and leases are durable; the deadlines of leases are not: as with etcd, every lease has its full time again
after a restart. All statements run on one thread of their own, so a slow disk never stops the event loop.
"""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tensorcast_connector.errors import ConfigError, Exhausted, NotFound, Unavailable
from tensorcast_connector.net.sockets import private_directory
from tensorcast_connector.store.kv import (
    TXN_BYTES_MAX,
    TXN_OPERATIONS_MAX,
    Compare,
    Delete,
    KeyValue,
    Put,
    TxnResult,
)

T = TypeVar("T")
SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS lease (id INTEGER PRIMARY KEY AUTOINCREMENT, ttl_s INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS kv (
  key TEXT PRIMARY KEY, value BLOB NOT NULL, create_revision INTEGER NOT NULL, mod_revision INTEGER NOT NULL,
  lease_id INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS kv_lease ON kv(lease_id) WHERE lease_id != 0;
INSERT OR IGNORE INTO meta VALUES ('revision', 1), ('schema', 1);
"""


def _open(path: Path) -> sqlite3.Connection:
    db = None
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        path.chmod(0o600)
        db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        # The leases in memory are those of one process: nobody else may use the file.
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.executescript(_SCHEMA)
        schema = db.execute("SELECT value FROM meta WHERE name='schema'").fetchone()[0]
        db.execute("SELECT key, value, create_revision, mod_revision, lease_id FROM kv LIMIT 1").fetchall()
        if schema != SCHEMA_VERSION:
            raise ConfigError(f"store database {path} has schema {schema}, this version reads {SCHEMA_VERSION}")
    except (OSError, sqlite3.Error, ConfigError) as error:
        if db is not None:
            db.close()
        if isinstance(error, ConfigError):
            raise
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            raise ConfigError(f"store database {path}: another store uses it; give this one its own folder") from error
        raise ConfigError(f"store database {path}: {error}; move it away to start with an empty one") from error
    return db


class SqliteKv:
    """See the module.

    Args:
        path: the database file; made private to the user (0600).
        now: a clock in seconds that goes on during suspend and never jumps.

    Raises:
        ConfigError: the file is no store database of this version, or another store uses it.
    """

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self._now = now
        private_directory(path.parent)
        self._db = _open(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-sqlite")
        self._ttl_s: dict[int, int] = dict(self._db.execute("SELECT id, ttl_s FROM lease"))
        self._deadline = {lease_id: now() + ttl_s for lease_id, ttl_s in self._ttl_s.items()}

    def __repr__(self) -> str:
        return f"<SqliteKv {len(self._deadline)} leases>"

    def _one(self, sql: str) -> int:
        return int(self._db.execute(sql).fetchone()[0])

    def _atomically(self, work: Callable[[], T]) -> T:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            result = work()
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        return result

    async def _run(self, work: Callable[[], T], then: Callable[[T], None] = lambda _: None) -> T:
        """`work` as one transaction, after what has expired was removed by another; `then` once it is durable."""

        def on_thread() -> T:
            self._end_leases([each for each, deadline in self._deadline.items() if deadline <= self._now()])
            result = self._atomically(work)
            then(result)
            return result

        return await self._on_thread(on_thread)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        """On the database thread, which therefore is the only one that touches the lease tables in memory."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise Unavailable(f"store database: {error}") from error

    def _revision(self) -> int:
        return self._one("SELECT value FROM meta WHERE name='revision'")

    def _bump(self) -> int:
        self._db.execute("UPDATE meta SET value = value + 1 WHERE name='revision'")
        return self._revision()

    def _end_leases(self, lease_ids: Sequence[int]) -> None:
        def work() -> None:
            for lease_id in lease_ids:
                if self._db.execute("DELETE FROM kv WHERE lease_id = ?", (lease_id,)).rowcount:
                    self._bump()
                self._db.execute("DELETE FROM lease WHERE id = ?", (lease_id,))

        if lease_ids:
            self._atomically(work)
        for lease_id in lease_ids:  # only now that it is durable
            self._deadline.pop(lease_id, None)
            self._ttl_s.pop(lease_id, None)

    async def revision(self) -> int:
        """See KvStore."""
        return await self._run(self._revision)

    async def range(self, prefix: str) -> tuple[int, list[KeyValue]]:
        """See KvStore."""

        def work() -> tuple[int, list[KeyValue]]:
            rows = self._db.execute(
                "SELECT key, value, create_revision, mod_revision, lease_id FROM kv WHERE substr(key, 1, ?) = ? ORDER BY key",
                (len(prefix), prefix),
            )
            return self._revision(), [KeyValue(*row) for row in rows]

        return await self._run(work)

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        """See KvStore."""
        size = sum(len(each.value) for each in operations if isinstance(each, Put))
        if len(operations) + len(compares) > TXN_OPERATIONS_MAX or size > TXN_BYTES_MAX:
            raise Exhausted(f"a transaction of {len(operations)} operations and {size} bytes exceeds the limit")

        def work() -> TxnResult:
            for compare in compares:
                row = self._db.execute("SELECT mod_revision FROM kv WHERE key = ?", (compare.key,)).fetchone()
                if (row[0] if row else 0) != compare.mod_revision:
                    return TxnResult(False, self._revision())
            revision = self._revision() + 1
            changes = [self._apply(operation, revision) for operation in operations]
            return TxnResult(True, self._bump() if any(changes) else revision - 1)

        return await self._run(work)

    def _apply(self, operation: Put | Delete, revision: int) -> bool:
        """Whether it changed anything."""
        if isinstance(operation, Delete):
            return self._db.execute("DELETE FROM kv WHERE key = ?", (operation.key,)).rowcount > 0
        if operation.lease_id and operation.lease_id not in self._deadline:
            raise NotFound(f"lease {operation.lease_id} does not exist")
        self._db.execute(
            "INSERT INTO kv VALUES (?1, ?2, ?3, ?3, ?4) "
            "ON CONFLICT(key) DO UPDATE SET value = ?2, mod_revision = ?3, lease_id = ?4",
            (operation.key, operation.value, revision, operation.lease_id),
        )
        return True

    async def lease_grant(self, ttl_s: int) -> int:
        """See KvStore."""

        def work() -> int:
            lease_id = self._db.execute("INSERT INTO lease (ttl_s) VALUES (?)", (ttl_s,)).lastrowid
            assert lease_id is not None
            return lease_id

        def then(lease_id: int) -> None:
            self._ttl_s[lease_id] = ttl_s
            self._deadline[lease_id] = self._now() + ttl_s

        return await self._run(work, then)

    async def lease_keepalive(self, lease_id: int) -> None:
        """See KvStore."""

        def work() -> None:
            if lease_id not in self._deadline:
                raise NotFound(f"lease {lease_id} has expired")
            self._deadline[lease_id] = self._now() + self._ttl_s[lease_id]

        await self._run(work)

    async def lease_revoke(self, lease_id: int) -> None:
        """See KvStore."""

        def on_thread() -> None:
            self._end_leases([lease_id] if lease_id in self._deadline else [])

        await self._on_thread(on_thread)

    async def close(self) -> None:
        """See KvStore."""
        await self._on_thread(self._db.close)
        self._thread.shutdown()
