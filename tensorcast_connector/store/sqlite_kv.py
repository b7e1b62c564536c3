"""The KV port on SQLite (write-ahead log), for one machine.

Keys, values, leases and the last changes are durable; the deadlines of leases are not: as with etcd, every lease has its
full time again after a restart. All statements run on one thread of their own, so a slow disk never stops the event loop.
"""

import asyncio
import logging
import math
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal, TypeVar

from tensorcast_connector.config import EXPIRY_RETRY_S, HISTORY_BYTES_MAX, HISTORY_REVISIONS_MAX
from tensorcast_connector.core.cluster import INCARNATION
from tensorcast_connector.errors import Compacted, ConfigError, Exhausted, NotFound, Unavailable
from tensorcast_connector.store.kv import (
    Compare,
    Delete,
    Event,
    KeyValue,
    Put,
    TxnResult,
    check_txn,
    weight,
)
from tensorcast_connector.store.sqlite_file import SELECT_KEYS, cannot_write, open_database, said, under
from tensorcast_connector.store.sqlite_thread import SqliteThread
from tensorcast_connector.store.waiting import Waiting

logger = logging.getLogger(__name__)
T = TypeVar("T")
LEASES_PER_INCARNATION_BITS = 20
# One more than every id that was given out, and than the least that is told.
_INSERT_LEASE = """
INSERT INTO lease (id, ttl_s)
SELECT max(:least, coalesce(max(seq), 0)) + 1, :ttl_s FROM sqlite_sequence WHERE name = 'lease'
"""


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
        self._path = path
        self._db = open_database(path, reserve=executor is not None)
        try:
            self._load()
        except sqlite3.Error as error:
            self._db.close()
            raise ConfigError(f"store database {path}: {error}; move it away to start with an empty one") from error
        self._waiting = Waiting(self._last_revision)
        self._closed = False
        self._thread = SqliteThread() if executor else None

    def _load(self) -> None:
        """What is kept in memory. Touched by the thread only, except for reading the two numbers in `wait`."""
        now = self._now
        self._ttl_s: dict[int, int] = dict(self._db.execute("SELECT id, ttl_s FROM lease"))
        self._deadline = {lease_id: now() + ttl_s for lease_id, ttl_s in self._ttl_s.items()}
        self._next_deadline = min(self._deadline.values(), default=math.inf)  # none is earlier
        self._tidy_at = -math.inf  # not before, unless something is to be written: the disk was full
        self._unwritable = False
        # Of the database, which is nobody else's; and as it was when those who wait were last told.
        self._revision = self._last_revision = self._meta("revision")
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
        if name == "revision":
            self._revision = value

    def _atomically(self, work: Callable[[], T], begin: str = "BEGIN IMMEDIATE") -> T:
        before, history_bytes, revision = self._db.total_changes, self._history_bytes, self._revision
        try:
            self._db.execute(begin)
            result = work()
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._history_bytes, self._revision = history_bytes, revision
            if cannot_write(error) and not self._unwritable:
                self._unwritable = True
                logger.warning("%s: what is known is still told, nothing new is written", said(self._path, error))
            raise
        if self._unwritable and self._db.total_changes > before:
            self._unwritable = False
            logger.info("store database %s is written again", self._path)
        return result

    async def _run(self, work: Callable[[], T], then: Callable[[T], None] = lambda _: None, reads: bool = False) -> T:
        """`work` as one transaction, after what has expired was removed by another; `then` once it is durable.

        Who only `reads` is answered also while the disk is full: what has expired is there until it can be removed.
        """

        def on_thread() -> T:
            self._tidy(reads)
            result = self._atomically(work, "BEGIN" if reads else "BEGIN IMMEDIATE")
            then(result)
            return result

        return await self._on_thread(on_thread)

    def _tidy(self, reads: bool) -> None:
        if reads and self._now() < self._tidy_at:
            return
        try:
            self._end_expired()
            self._trim_history()
        except sqlite3.Error:
            if not reads:
                raise
            self._tidy_at = self._now() + EXPIRY_RETRY_S
        else:
            self._tidy_at = -math.inf

    async def _on_thread(self, work: Callable[[], T]) -> T:
        """On the database thread, which therefore is the only one that changes the tables in memory."""
        if self._closed:
            raise Unavailable("store database: closed")
        try:
            if self._thread is not None:
                return await self._thread.run(lambda: self._noting(work), self._wake)
            try:
                return self._noting(work)
            finally:
                self._wake()
        except sqlite3.Error as error:
            kind = Exhausted if cannot_write(error) else Unavailable
            raise kind(said(self._path, error)) from error

    def _noting(self, work: Callable[[], T]) -> T:
        """Notes what has changed also if `work` fails: leases may have ended before."""
        try:
            return work()
        finally:
            if not self._closed and self._revision != self._last_revision:
                self._last_revision = self._revision
                self._waiting.reached(self._revision)

    def _wake(self) -> None:
        self._waiting.wake(self._closed)

    def _end_expired(self) -> None:
        now = self._now()
        if now >= self._next_deadline:
            self._end_leases([each for each, deadline in self._deadline.items() if deadline <= now])
            self._next_deadline = min(self._deadline.values(), default=math.inf)

    def _end_leases(self, lease_ids: Sequence[int]) -> None:
        def work() -> None:
            for lease_id in lease_ids:
                revision = self._revision + 1
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
        return await self._run(lambda: self._revision, reads=True)

    async def range(self, prefix: str) -> tuple[int, list[KeyValue]]:
        """See KvStore."""
        where, values = under(prefix)
        sql = f"{SELECT_KEYS} WHERE {where} ORDER BY key"
        return await self._run(
            lambda: (self._revision, [KeyValue(*row) for row in self._db.execute(sql, values)]), reads=True
        )

    async def page(self, prefix: str, after_key: str, bytes_max: int) -> tuple[int, list[KeyValue], bool]:
        """See KvStore."""
        where, values = under(prefix)
        sql = f"{SELECT_KEYS} WHERE {where} AND key > :after ORDER BY key"

        def work() -> tuple[int, list[KeyValue], bool]:
            revision, size = self._revision, 0
            found: list[KeyValue] = []
            with closing(self._db.execute(sql, {**values, "after": after_key})) as rows:
                for row in rows:
                    each = KeyValue(*row)
                    size += weight(each.key, each.value)
                    if found and size > bytes_max:
                        return revision, found, True
                    found.append(each)
            return revision, found, False

        return await self._run(work, reads=True)

    async def changes(self, prefix: str, after_revision: int) -> tuple[int, list[Event]]:
        """See KvStore."""
        where, values = under(prefix)
        sql = (
            f"SELECT key, value, revision, lease_id FROM history WHERE revision > :after AND {where} ORDER BY revision"
        )

        def work() -> tuple[int, list[Event]]:
            revision = self._revision
            if not self._compacted <= after_revision <= revision:
                raise Compacted(f"the history has revisions {self._compacted} to {revision}, not {after_revision}")
            return revision, [Event(*row) for row in self._db.execute(sql, {**values, "after": after_revision})]

        return await self._run(work, reads=True)

    async def wait(self, after_revision: int, timeout_s: float, prefix: str = "") -> None:
        """See KvStore."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while not self._waiting.changed(prefix, after_revision) and not self._closed:
            left = end - loop.time()
            if left <= 0:
                return
            expiry = max(self._next_deadline, self._tidy_at) - self._now()
            if expiry <= 0:
                await self.revision()  # which ends the leases that have run out
            else:
                await self._waiting.wait(prefix, after_revision, min(left, expiry))

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        """See KvStore."""
        check_txn(compares, operations)

        def work() -> TxnResult:
            revision = self._revision
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
        self._waiting.touch(operation.key)
        if isinstance(operation, Delete):
            if not self._db.execute("DELETE FROM kv WHERE key = ?", (operation.key,)).rowcount:
                return False
            self._db.execute("INSERT INTO history VALUES (?, ?, NULL, 0)", (revision, operation.key))
            return True
        if operation.lease_id and not self._lives(operation.lease_id):
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

        def then(lease_id: int) -> None:
            self._ttl_s[lease_id] = ttl_s
            self._set_deadline(lease_id)

        return await self._run(lambda: self._new_lease(ttl_s), then)

    def _new_lease(self, ttl_s: int) -> int:
        incarnation = self._db.execute("SELECT CAST(value AS INTEGER) FROM kv WHERE key = ?", (INCARNATION,))
        # Never an id of an earlier life of the database either: somebody may still try to renew that one.
        least = (incarnation.fetchone() or (0,))[0] << LEASES_PER_INCARNATION_BITS
        lease_id = self._db.execute(_INSERT_LEASE, {"least": least, "ttl_s": ttl_s}).lastrowid
        assert lease_id is not None
        return lease_id

    def _lives(self, lease_id: int) -> bool:
        """Not if it is over and could not be removed yet."""
        return self._deadline.get(lease_id, -math.inf) > self._now()

    def _set_deadline(self, lease_id: int) -> None:
        self._deadline[lease_id] = self._now() + self._ttl_s[lease_id]
        self._next_deadline = min(self._next_deadline, self._deadline[lease_id])

    async def lease_keepalive(self, lease_id: int) -> None:
        """See KvStore."""

        def work() -> None:
            if not self._lives(lease_id):
                raise NotFound(f"lease {lease_id} has expired")
            self._set_deadline(lease_id)

        await self._run(work, reads=True)  # deadlines are not in the file

    async def lease_revoke(self, lease_id: int) -> None:
        """See KvStore."""

        def on_thread() -> None:
            self._end_leases([lease_id] if lease_id in self._deadline else [])

        await self._on_thread(on_thread)

    async def replace_all(
        self, entries: Sequence[tuple[str, bytes]], least_revision: int, for_a_while: tuple[str, int]
    ) -> None:
        """Everything is these keys from now on, in one transaction with a revision above all before and `least_revision`.

        No lease and no past is left, and one new lease.

        Args:
            for_a_while: a key without a value, and the seconds of the lease it hangs on.
        """
        key, ttl_s = for_a_while

        def work() -> tuple[int, int]:
            revision = max(self._revision, least_revision) + 1
            for table in ("kv", "lease", "history"):
                self._db.execute(f"DELETE FROM {table}")
            for each in entries:
                self._db.execute("INSERT INTO kv VALUES (?1, ?2, ?3, ?3, 0)", (*each, revision))
            lease_id = self._new_lease(ttl_s)
            self._db.execute("INSERT INTO kv VALUES (?1, x'', ?3, ?3, ?2)", (key, lease_id, revision))
            self._set_meta("revision", revision)
            self._set_meta("compacted", revision)
            return revision, lease_id

        def then(done: tuple[int, int]) -> None:
            self._compacted, lease_id = done
            self._waiting.everything(self._compacted)
            self._history_bytes = 0
            self._ttl_s, self._deadline, self._next_deadline = {lease_id: ttl_s}, {}, math.inf
            self._set_deadline(lease_id)

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
