"""The file of a SQLite store: opened for this process alone, private to the user, brought to the present schema.

And what an error of it means, and how its keys are read.
"""

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Any

from tensorcast_connector.errors import ConfigError
from tensorcast_connector.net.private import private_directory
from tensorcast_connector.store.kv import prefix_end

SCHEMA_VERSION = 2
LOG_PAGES = 1000  # of the write-ahead log, after which SQLite begins it anew
LOG_BYTES = 4200 << 10  # that these take
PAGE_BYTES = 4096
DISK_SHARE_OF_LOG = 8  # the log takes no more than one part in so many of what is free
_SCHEMA_1 = """
BEGIN IMMEDIATE;
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE lease (id INTEGER PRIMARY KEY AUTOINCREMENT, ttl_s INTEGER NOT NULL);
CREATE TABLE kv (
  key TEXT PRIMARY KEY, value BLOB NOT NULL, create_revision INTEGER NOT NULL, mod_revision INTEGER NOT NULL,
  lease_id INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX kv_lease ON kv(lease_id) WHERE lease_id != 0;
INSERT INTO meta VALUES ('revision', 1), ('schema', 1);
COMMIT;
"""
# 2: the last changes. What happened before the file was brought to it is not known: `compacted` is the first revision
# from which on the history is complete.
_SCHEMA_2 = """
BEGIN IMMEDIATE;
CREATE TABLE history (
  revision INTEGER NOT NULL, key TEXT NOT NULL, value BLOB, lease_id INTEGER NOT NULL, PRIMARY KEY (revision, key)
) WITHOUT ROWID;
INSERT INTO meta SELECT 'compacted', value FROM meta WHERE name = 'revision';
UPDATE meta SET value = 2 WHERE name = 'schema';
COMMIT;
"""


_UNWRITABLE = (
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_READONLY,
)  # fmt: skip


def cannot_write(error: object) -> bool:
    """No room on the disk, a quota, a limit of the process, a disk gone read-only: reading is another matter."""
    return getattr(error, "sqlite_errorcode", 0) in _UNWRITABLE


def said(path: Path, error: object) -> str:
    """What an error of SQLite is to people."""
    return f"store database {path} cannot be written ({error})" if cannot_write(error) else f"store database: {error}"


def open_database(path: Path, reserve: bool) -> sqlite3.Connection:
    """A connection in autocommit mode that may be used from any one thread at a time.

    Args:
        reserve: makes commits faster by 4 MiB of disk, if there is room for them.

    Raises:
        ConfigError: the file is no store database of this version or an earlier one, or another process uses it.
    """
    private_directory(path.parent)
    db = None
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        path.chmod(0o600)
        db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        # The leases in memory are those of one process: nobody else may use the file.
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        free = _free_bytes(path.parent)
        pages = max(16, min(LOG_PAGES, free // DISK_SHARE_OF_LOG // PAGE_BYTES))
        db.execute(f"PRAGMA wal_autocheckpoint={pages}")
        _bring_to_schema(db)
        db.execute("SELECT key, value, create_revision, mod_revision, lease_id FROM kv LIMIT 1").fetchall()
        if reserve and pages == LOG_PAGES:
            _reserve_log(path)
    except (OSError, sqlite3.Error, ConfigError) as error:
        if db is not None:
            db.close()
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            raise ConfigError(
                f"store database {path}: another store uses it; stop that one, or give this one its own folder"
            ) from error
        remedy = "" if cannot_write(error) else "; move it away to start with an empty one"
        raise ConfigError(f"store database {path}: {error}{remedy}") from error
    return db


def _free_bytes(folder: Path) -> int:
    """On its disk. A log that had taken all of a small one could not even be copied back into the database."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _reserve_log(path: Path) -> None:
    """Makes the write-ahead log of an open database as long as it gets, with zeros behind what is in it.

    A commit waits for the disk, and less for bytes that overwrite others than for a file that grows. SQLite reads a log up to the
    first thing that is no part of it. Where there is no room for that it grows as it is needed.
    """
    with contextlib.suppress(OSError), path.with_name(f"{path.name}-wal").open("r+b", buffering=0) as log:
        size = log.seek(0, os.SEEK_END)
        missing = max(0, LOG_BYTES - size)
        try:
            if log.write(bytes(missing)) < missing:  # the disk is full
                log.truncate(size)
            os.fsync(log.fileno())
        except OSError:
            log.truncate(size)


def _bring_to_schema(db: sqlite3.Connection) -> None:
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        db.executescript(_SCHEMA_1)
    elif not {"meta", "kv", "lease"} <= tables:
        raise ConfigError("this is a database of something else")
    (schema,) = db.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone() or (0,)
    if schema == 1:
        db.executescript(_SCHEMA_2)
    elif schema != SCHEMA_VERSION:
        raise ConfigError(f"it has schema {schema}, and this version reads 1 to {SCHEMA_VERSION}")
    # An exclusive lock is taken by the first write, and from then on nobody else can even read.
    db.executescript("BEGIN EXCLUSIVE; COMMIT;")


SELECT_KEYS = "SELECT key, value, create_revision, mod_revision, lease_id FROM kv"


def under(prefix: str) -> tuple[str, dict[str, Any]]:
    """The condition on `key`, written so that the index answers it, and its values."""
    end = prefix_end(prefix)
    return "key >= :prefix" + (" AND key < :end" if end else ""), {"prefix": prefix, "end": end}
