"""The file of a SQLite store: opened for this process alone, private to the user, brought to the present schema."""

import os
import sqlite3
from pathlib import Path

from tensorcast_connector.errors import ConfigError
from tensorcast_connector.net.private import private_directory

SCHEMA_VERSION = 2
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


def open_database(path: Path) -> sqlite3.Connection:
    """A connection in autocommit mode that may be used from any one thread at a time.

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
        _bring_to_schema(db)
        db.execute("SELECT key, value, create_revision, mod_revision, lease_id FROM kv LIMIT 1").fetchall()
    except (OSError, sqlite3.Error, ConfigError) as error:
        if db is not None:
            db.close()
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            raise ConfigError(
                f"store database {path}: another store uses it; stop that one, or give this one its own folder"
            ) from error
        raise ConfigError(f"store database {path}: {error}; move it away to start with an empty one") from error
    return db


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
