"""Backups of a store: one file with every key that hangs on no lease, and how such a file becomes a database again.

Leased keys belong to the living, who put them back by themselves. The file is text: a header line, one line per key, and
the BLAKE3 of all that as the last line.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import blake3
import msgspec

from tensorcast_connector.config import MEMBER_TTL_S
from tensorcast_connector.core.cluster import INCARNATION, RESTORED
from tensorcast_connector.errors import ConfigError, Conflict, Unavailable
from tensorcast_connector.store.incarnation import INCARNATION_MAX, parse_incarnation, read_incarnation
from tensorcast_connector.store.kv import (
    ALIVE,
    RESTORING_KEY,
    TXN_BYTES_MAX,
    TXN_OPERATIONS_MAX,
    Compare,
    Delete,
    KeyValue,
    KvStore,
    Put,
)
from tensorcast_connector.store.sqlite_kv import SqliteKv

FORMAT = "tensorcast-store-backup"
VERSION = 1


class Backup(msgspec.Struct, frozen=True):
    """What was in a store at one revision: keys with their values, without the incarnation's own key."""

    revision: int
    incarnation: int  # 0: it had none yet
    entries: list[tuple[str, bytes]]


class _Header(msgspec.Struct):
    format: str
    version: int
    count: int
    revision: int
    incarnation: int


class _Version(msgspec.Struct):
    format: str
    version: int


async def take_backup(kv: KvStore) -> Backup:
    """A backup of `kv` as it is at one revision; the store may be in use.

    Raises:
        ConfigError: it is half a restore.
    """
    incarnation = await read_incarnation(kv)
    revision, found = await kv.range("")
    entries = [(each.key, each.value) for each in found if not each.lease_id and each.key != INCARNATION]
    if not incarnation or not entries:
        raise ConfigError(
            "there is no cluster in this database: nothing was written (is the folder, or etcd_prefix, the right one?)"
        )
    return Backup(revision, incarnation, entries)


def write_backup(path: Path, backup: Backup) -> None:
    """Writes the file, private to the user; under its name there is the whole of it or what was there before.

    Raises:
        ConfigError: it cannot be written.
    """
    if (
        not path.name
        or path.is_dir()
        or ((path.exists() or path.is_symlink()) and not stat.S_ISREG(path.lstat().st_mode))
    ):
        raise ConfigError(f"backup {str(path)!r}: not the name of a file that can be written")
    header = _Header(FORMAT, VERSION, len(backup.entries), backup.revision, backup.incarnation)
    text = b"".join(msgspec.json.encode(each) + b"\n" for each in (header, *backup.entries))
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with os.fdopen(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(text + _checksum(text))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(f"backup {path}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def _checksum(text: bytes) -> bytes:
    return b'"blake3:%s"\n' % blake3.blake3(text).hexdigest().encode()


def read_backup(path: Path) -> Backup:
    """The backup in a file, all of it checked.

    Raises:
        ConfigError: it cannot be read, is no backup, of another version, cut short or damaged.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"backup {path}: not a file")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"backup {path}: {error.strerror}") from error
    first, *lines = data.split(b"\n")
    try:
        found = msgspec.json.decode(first, type=_Version)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = _Version("", 0)
    if found.format != FORMAT:
        raise ConfigError(f"backup {path}: this is no backup of a store")
    if found.version != VERSION:
        raise ConfigError(f"backup {path}: it has version {found.version}, and this program reads {VERSION}")
    end = data.rfind(b"\n", 0, len(data) - 1) + 1
    if data[end:] != _checksum(data[:end]):
        raise ConfigError(f"backup {path}: cut short or damaged, its checksum does not match; nothing was restored")
    try:
        header = msgspec.json.decode(first, type=_Header)
        entries = [msgspec.json.decode(line, type=tuple[str, bytes]) for line in lines[:-2]]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"backup {path}: {error}; nothing was restored") from error
    named = {key for key, _ in entries} - {"", INCARNATION, RESTORING_KEY}
    if not (header.count == len(entries) == len(named) and 0 <= header.incarnation < INCARNATION_MAX - 1):
        raise ConfigError(f"backup {path}: its header and its keys contradict each other; nothing was restored")
    return Backup(header.revision, header.incarnation, entries)


async def restore_backup(
    kv: KvStore, backup: Backup, *, replace: bool, now_unix_s: int, even_if_served: bool = False
) -> int:
    """Makes `kv` what the backup was, in a new incarnation, which is returned. No store may serve `kv` meanwhile.

    In SQLite it happens in one transaction. Elsewhere a marker tells of a restore that was interrupted: no store starts on
    that database until it is restored again, which needs no `replace` then. Stores on it grant no shards for MEMBER_TTL_S.

    Raises:
        ConfigError: there is something in `kv` already, and not `replace`; or a store process serves it, and not
            `even_if_served`.
        Conflict: another restore is under way.
    """
    _, found = await kv.range("")
    if not even_if_served:
        _check_unserved(found)
    found = [each for each in found if not each.key.startswith(ALIVE)]
    marker = next((each for each in found if each.key == RESTORING_KEY), None)
    if found and not replace and marker is None:
        raise ConfigError(f"the database is not empty ({len(found)} keys); --replace gives up what is in it")
    earlier = [parse_incarnation(each.value) for each in found if each.key in (INCARNATION, RESTORING_KEY)]
    incarnation = max(now_unix_s, backup.incarnation + 1, *(each + 1 for each in earlier), 1)
    if isinstance(kv, SqliteKv):
        entries = [*backup.entries, (INCARNATION, str(incarnation).encode())]
        await kv.replace_all(entries, backup.revision, (RESTORED, MEMBER_TTL_S))
    else:
        try:
            marked = marker.mod_revision if marker else 0
            await _replace_in_steps(kv, backup, str(incarnation).encode(), marked, even_if_served)
        except Unavailable as error:
            raise Unavailable(f"{error}; the restore may be incomplete, run it again") from error
    return incarnation


def _check_unserved(found: Sequence[KeyValue]) -> None:
    if served := [each.value.decode(errors="replace") for each in found if each.key.startswith(ALIVE)]:
        raise ConfigError(
            f"store processes serve this database ({', '.join(served)}): stop them first; one that was killed is forgotten "
            f"after {MEMBER_TTL_S} s (--force restores all the same)"
        )


async def _replace_in_steps(kv: KvStore, backup: Backup, incarnation: bytes, marked: int, even_if_served: bool) -> None:
    """The former incarnation stays until the new one takes its place in the last step, so it never decreases."""
    before = marked

    async def step(operations: Sequence[Put | Delete]) -> int:
        done = await kv.txn([Compare(RESTORING_KEY, marked)], operations)
        if not done.succeeded:
            raise Conflict("another restore into this database is under way")
        return done.revision

    marked = await step([Put(RESTORING_KEY, incarnation)])
    _, found = await kv.range("")
    if not even_if_served:
        try:
            _check_unserved(found)  # a store says that it is there before it looks for the marker
        except ConfigError:
            if not before:
                await step([Delete(RESTORING_KEY)])
            raise
    for lease_id in {each.lease_id for each in found if each.lease_id}:
        await kv.lease_revoke(lease_id)  # with its keys: whoever lives registers anew
    kept = (INCARNATION, RESTORING_KEY)
    for part in _parts([Delete(each.key) for each in found if not each.lease_id and each.key not in kept]):
        await step(part)
    for part in _parts([Put(key, value) for key, value in backup.entries]):
        await step(part)
    lease_id = await kv.lease_grant(MEMBER_TTL_S)
    await step([Put(INCARNATION, incarnation), Put(RESTORED, b"", lease_id), Delete(RESTORING_KEY)])


def _parts(operations: Sequence[Put | Delete]) -> Iterator[list[Put | Delete]]:
    """Lists of operations that each fit in a transaction with one compare."""
    part: list[Put | Delete] = []
    size = 0
    for each in operations:
        more = len(each.value) if isinstance(each, Put) else 0
        if part and (len(part) == TXN_OPERATIONS_MAX - 1 or size + more > TXN_BYTES_MAX):
            yield part
            part, size = [], 0
        part.append(each)
        size += more
    if part:
        yield part
