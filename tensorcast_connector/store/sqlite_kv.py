"""The KV port on SQLite (write-ahead log), for one machine.

Keys, values, leases and the last changes are durable; the deadlines of leases are not: as with etcd, every lease has its
full time again after a restart. All statements run on one thread of their own, so a slow disk never stops the event loop.
"""

import asyncio
import math
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

from tensorcast_connector.config import HISTORY_BYTES_MAX, HISTORY_REVISIONS_MAX
from tensorcast_connector.core.cluster import INCARNATION
from tensorcast_connector.errors import Compacted, ConfigError, NotFound, Unavailable
from tensorcast_connector.store.kv import (
    Compare,
    Delete,
    Event,
    KeyValue,
    Put,
    TxnResult,
    check_txn,
    prefix_end,
)
from tensorcast_connector.store.sqlite_file import open_database

T = TypeVar("T")
LEASES_PER_INCARNATION_BITS = 20
# One more than every id that was given out, and than the least that is told.
_INSERT_LEASE = """
INSERT INTO lease (id, ttl_s)
SELECT max(:least, coalesce(max(seq), 0)) + 1, :ttl_s FROM sqlite_sequence WHERE name = 'lease'
"""


def _under(prefix: str) -> tuple[str, dict[str, Any]]:
    """The condition on `key`, written so that the index answers it, and its values."""
    end = prefix_end(prefix)
    return "key >= :prefix" + (" AND key < :end" if end else ""), {"prefix": prefix, "end": end}


class SqliteKv:
    """See the module.

    Args:
        path: the database file; made private to the user (0600).
        now: a clock in seconds that goes on during suspend and never jumps.
        executor: "thread": statements run on a thread of their own. None: they run inline, and no coroutine but `wait`
            ever suspends, which is for simulations.

    Raises:
        ConfigError: the file is no store database of this version, or another store uses it.
    """

    def __init__(self, path: Path, now: Callable[[], float], executor: Literal["thread"] | None = "thread") -> None:
        self._now = now
        self._db = open_database(path)
        try:
            self._load()
        except sqlite3.Error as error:
            self._db.close()
            raise ConfigError(f"store database {path}: {error}; move it away to start with an empty one") from error
        self._waiters: set[asyncio.Future[None]] = set()
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-sqlite") if executor else None

    def _load(self) -> None:
        """What is kept in memory. Touched by the thread only, except for reading the two numbers in `wait`."""
        now = self._now
        self._ttl_s: dict[int, int] = dict(self._db.execute("SELECT id, ttl_s FROM lease"))
        self._deadline = {lease_id: now() + ttl_s for lease_id, ttl_s in self._ttl_s.items()}
        self._next_deadline = min(self._deadline.values(), default=math.inf)  # none is earlier
        self._last_revision = self._meta("revision")
        self._compacted = self._meta("compacted")
        self._history_bytes = self._one("SELECT coalesce(sum(length(value)), 0) FROM history")

    def __repr__(self) -> str:
        return f"<SqliteKv {len(self._deadline)} leases>"

    def _one(self, sql: str, *values: int) -> int:
        return int(self._db.execute(sql, values).fetchone()[0])

    def _meta(self, name: Literal["revision", "compacted"]) -> int:
        return self._one(f"SELECT value FROM meta WHERE name = '{name}'")

    def _set_meta(self, name: Literal["revision", "compacted"], value: int) -> None:
        self._db.execute("UPDATE meta SET value = ? WHERE name = ?", (value, name))

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
            self._end_expired()
            self._trim_history()
            result = self._atomically(work)
            then(result)
            return result

        return await self._on_thread(on_thread)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        """On the database thread, which therefore is the only one that changes the tables in memory."""
        if self._closed:
            raise Unavailable("store database: closed")
        try:
            if self._thread is None:
                return self._and_notify(work, self._wake)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._thread, self._and_notify, work, lambda: loop.call_soon_threadsafe(self._wake)
            )
        except sqlite3.Error as error:
            raise Unavailable(f"store database: {error}") from error

    def _and_notify(self, work: Callable[[], T], notify: Callable[[], object]) -> T:
        """Waiters are woken by the thread itself: whoever asked for a change may have been cancelled meanwhile."""
        before = self._last_revision
        try:
            return work()
        finally:
            if not self._closed:
                self._last_revision = self._meta("revision")
            if self._last_revision != before or self._closed:
                notify()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _end_expired(self) -> None:
        now = self._now()
        if now >= self._next_deadline:
            self._end_leases([each for each, deadline in self._deadline.items() if deadline <= now])
            self._next_deadline = min(self._deadline.values(), default=math.inf)

    def _end_leases(self, lease_ids: Sequence[int]) -> None:
        def work() -> None:
            for lease_id in lease_ids:
                revision = self._meta("revision") + 1
                gone = self._db.execute("SELECT key FROM kv WHERE lease_id = ?", (lease_id,)).fetchall()
                for (key,) in gone:
                    self._apply(Delete(key), revision)
                if gone:
                    self._set_meta("revision", revision)
                self._db.execute("DELETE FROM lease WHERE id = ?", (lease_id,))

        if lease_ids:
            self._atomically(work)
        for lease_id in lease_ids:  # only now that it is durable
            self._deadline.pop(lease_id, None)
            self._ttl_s.pop(lease_id, None)

    def _trim_history(self) -> None:
        """The oldest quarter goes at a time."""
        revisions = self._last_revision - self._compacted
        if revisions <= HISTORY_REVISIONS_MAX and self._history_bytes <= HISTORY_BYTES_MAX:
            return
        by_size = self._one(
            "SELECT coalesce(max(revision), 0) FROM (SELECT revision, sum(length(value)) OVER (ORDER BY revision DESC) AS "
            "size FROM history) WHERE size > ?",
            HISTORY_BYTES_MAX * 3 // 4,
        )
        compacted = max(by_size, self._last_revision - HISTORY_REVISIONS_MAX * 3 // 4)

        def work() -> None:
            self._db.execute("DELETE FROM history WHERE revision <= ?", (compacted,))
            self._set_meta("compacted", compacted)

        self._atomically(work)
        self._compacted = compacted
        self._history_bytes = self._one("SELECT coalesce(sum(length(value)), 0) FROM history")

    async def revision(self) -> int:
        """See KvStore."""
        return await self._run(lambda: self._meta("revision"))

    async def range(self, prefix: str) -> tuple[int, list[KeyValue]]:
        """See KvStore."""
        where, values = _under(prefix)
        sql = f"SELECT key, value, create_revision, mod_revision, lease_id FROM kv WHERE {where} ORDER BY key"
        return await self._run(
            lambda: (self._meta("revision"), [KeyValue(*row) for row in self._db.execute(sql, values)])
        )

    async def changes(self, prefix: str, after_revision: int) -> tuple[int, list[Event]]:
        """See KvStore."""
        where, values = _under(prefix)
        sql = (
            f"SELECT key, value, revision, lease_id FROM history WHERE revision > :after AND {where} ORDER BY revision"
        )

        def work() -> tuple[int, list[Event]]:
            revision = self._meta("revision")
            if not self._compacted <= after_revision <= revision:
                raise Compacted(f"the history has revisions {self._compacted} to {revision}, not {after_revision}")
            return revision, [Event(*row) for row in self._db.execute(sql, {**values, "after": after_revision})]

        return await self._run(work)

    async def wait(self, after_revision: int, timeout_s: float) -> None:
        """See KvStore."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while self._last_revision <= after_revision and not self._closed:
            left = end - loop.time()
            if left <= 0:
                return
            expiry = self._next_deadline - self._now()
            if expiry <= 0:
                await self.revision()  # which ends the leases that have run out
                continue
            waiter = loop.create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=min(left, expiry))
            finally:
                self._waiters.discard(waiter)

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        """See KvStore."""
        check_txn(compares, operations)

        def work() -> TxnResult:
            revision = self._meta("revision")
            for compare in compares:
                row = self._db.execute("SELECT mod_revision FROM kv WHERE key = ?", (compare.key,)).fetchone()
                if (row[0] if row else 0) != compare.mod_revision:
                    return TxnResult(False, revision)
            changes = [self._apply(operation, revision + 1) for operation in operations]
            if not any(changes):
                return TxnResult(True, revision)
            self._set_meta("revision", revision + 1)
            return TxnResult(True, revision + 1)

        return await self._run(work)

    def _apply(self, operation: Put | Delete, revision: int) -> bool:
        """Whether it changed anything."""
        if isinstance(operation, Delete):
            if not self._db.execute("DELETE FROM kv WHERE key = ?", (operation.key,)).rowcount:
                return False
            self._db.execute("INSERT INTO history VALUES (?, ?, NULL, 0)", (revision, operation.key))
            return True
        if operation.lease_id and operation.lease_id not in self._deadline:
            raise NotFound(f"lease {operation.lease_id} does not exist")
        row = (operation.key, operation.value, revision, operation.lease_id)
        self._db.execute(
            "INSERT INTO kv VALUES (?1, ?2, ?3, ?3, ?4) "
            "ON CONFLICT(key) DO UPDATE SET value = ?2, mod_revision = ?3, lease_id = ?4",
            row,
        )
        self._db.execute("INSERT INTO history VALUES (?3, ?1, ?2, ?4)", row)
        self._history_bytes += len(operation.value)
        return True

    async def lease_grant(self, ttl_s: int) -> int:
        """See KvStore."""

        def work() -> int:
            incarnation = self._db.execute("SELECT CAST(value AS INTEGER) FROM kv WHERE key = ?", (INCARNATION,))
            # Never an id of an earlier life of the database either: somebody may still try to renew that one.
            least = (incarnation.fetchone() or (0,))[0] << LEASES_PER_INCARNATION_BITS
            lease_id = self._db.execute(_INSERT_LEASE, {"least": least, "ttl_s": ttl_s}).lastrowid
            assert lease_id is not None
            return lease_id

        def then(lease_id: int) -> None:
            self._ttl_s[lease_id] = ttl_s
            self._set_deadline(lease_id)

        return await self._run(work, then)

    def _set_deadline(self, lease_id: int) -> None:
        self._deadline[lease_id] = self._now() + self._ttl_s[lease_id]
        self._next_deadline = min(self._next_deadline, self._deadline[lease_id])

    async def lease_keepalive(self, lease_id: int) -> None:
        """See KvStore."""

        def work() -> None:
            if lease_id not in self._deadline:
                raise NotFound(f"lease {lease_id} has expired")
            self._set_deadline(lease_id)

        await self._run(work)

    async def lease_revoke(self, lease_id: int) -> None:
        """See KvStore."""

        def on_thread() -> None:
            self._end_leases([lease_id] if lease_id in self._deadline else [])

        await self._on_thread(on_thread)

    async def replace_all(self, entries: Sequence[tuple[str, bytes]], least_revision: int) -> None:
        """Everything is these keys from now on, in one transaction with a revision above all before and `least_revision`.

        No lease and no past is left.
        """

        def work() -> int:
            revision = max(self._meta("revision"), least_revision) + 1
            for table in ("kv", "lease", "history"):
                self._db.execute(f"DELETE FROM {table}")
            for key, value in entries:
                self._db.execute("INSERT INTO kv VALUES (?1, ?2, ?3, ?3, 0)", (key, value, revision))
            self._set_meta("revision", revision)
            self._set_meta("compacted", revision)
            return revision

        def then(revision: int) -> None:
            self._ttl_s.clear()
            self._deadline.clear()
            self._next_deadline = math.inf
            self._compacted, self._history_bytes = revision, 0

        await self._run(work, then)

    async def close(self) -> None:
        """See KvStore."""

        def on_thread() -> None:
            self._closed = True
            self._db.close()

        if not self._closed:
            await self._on_thread(on_thread)
        if self._thread is not None:
            self._thread.shutdown()
