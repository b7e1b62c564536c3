"""Backups: whole or not there, checked before anything is touched, restored into a new incarnation."""

import asyncio
import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorcast_connector.cli import main
from tensorcast_connector.core.cluster import INCARNATION, RESTORED, YOUNG
from tensorcast_connector.errors import ConfigError, Conflict, NotFound, Unavailable
from tensorcast_connector.store import backup as backup_module
from tensorcast_connector.store.backup import Backup, read_backup, restore_backup, take_backup, write_backup
from tensorcast_connector.store.etcd_kv import EtcdKv
from tensorcast_connector.store.incarnation import ensure_incarnation
from tensorcast_connector.store.kv import RESTORING_KEY, Compare, Delete, KvStore, Put
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.testing.clock import SettableClock
from tests.store.conftest import Backend, EtcdBackend

NOW = 1_800_000_000
on_one = pytest.mark.parametrize("servers", ["etcd-1"], indirect=True)
ENTRIES = [("a", b""), ("b/\u00e9\U0010ffff", bytes(range(256))), ("c\nd", b"\xff" * 300)]
BACKUP = Backup(40, 7, ENTRIES)


async def content(kv: KvStore) -> dict[str, bytes]:
    """Without what is there for a while after a restore or a first start."""
    return {each.key: each.value for each in (await kv.range(""))[1] if each.key not in (RESTORED, YOUNG)}


async def fill(kv: KvStore) -> int:
    """Writes the entries, and a key on a lease, whose id it returns."""
    lease = await kv.lease_grant(30)
    await kv.txn([], [Put("leased", b"v", lease), *(Put(key, value) for key, value in ENTRIES)])
    return lease


async def test_there_and_back(backend: Backend, tmp_path: Path) -> None:
    kv = backend.kv
    await ensure_incarnation(kv, NOW)
    lease = await fill(kv)
    taken = await take_backup(kv)
    assert taken == Backup((await kv.range(""))[0], NOW, ENTRIES)
    write_backup(tmp_path / "b", taken)
    assert read_backup(tmp_path / "b") == taken
    await kv.txn([], [Put("a", b"later"), Put("new", b""), Delete("c\nd")])
    assert await restore_backup(kv, taken, replace=True, now_unix_s=5) == NOW + 1
    expected = {**dict(ENTRIES), INCARNATION: b"%d" % (NOW + 1)}
    assert await content(kv) == expected
    with pytest.raises(NotFound):
        await kv.lease_keepalive(lease)
    await backend.reopen()
    assert await content(backend.kv) == expected and await ensure_incarnation(backend.kv, NOW + 100) == NOW + 1
    assert await backend.kv.revision() > taken.revision
    assert await backend.kv.lease_grant(10) != lease


async def test_an_empty_store(backend: Backend, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no cluster in this database: nothing was written"):
        await take_backup(backend.kv)


@pytest.mark.slow
async def test_many_keys_and_large_values(backend: Backend) -> None:
    entries = sorted([(f"k{n}", b"%d" % n) for n in range(700)] + [(f"large{n}", bytes(900_000)) for n in range(3)])
    await restore_backup(backend.kv, Backup(1, 1, entries), replace=False, now_unix_s=NOW)
    assert (await take_backup(backend.kv)).entries == entries
    await restore_backup(backend.kv, BACKUP, replace=True, now_unix_s=NOW)
    assert (await take_backup(backend.kv)).entries == ENTRIES


@pytest.mark.parametrize(
    ("backups", "existing", "now", "expected"),
    [(7, 0, 100, 100), (200, 0, 100, 201), (7, 150, 100, 151), (150, 150, 100, 151), (0, 0, 0, 1)],
)
async def test_the_incarnation_is_above_all_before(
    tmp_path: Path, backups: int, existing: int, now: int, expected: int
) -> None:
    kv = SqliteKv(tmp_path / "store.db", SettableClock())
    if existing:
        await ensure_incarnation(kv, existing)
    assert await restore_backup(kv, Backup(90, backups, []), replace=True, now_unix_s=now) == expected
    assert await ensure_incarnation(kv, now + 1000) == expected and await kv.revision() > 90
    await kv.close()


async def test_what_is_there_is_not_given_up_unasked(backend: Backend) -> None:
    await fill(backend.kv)
    before = await backend.kv.range("")
    with pytest.raises(ConfigError, match=r"the database is not empty \(4 keys\); --replace gives up what is in it"):
        await restore_backup(backend.kv, BACKUP, replace=False, now_unix_s=NOW)
    assert await backend.kv.range("") == before


async def test_sqlite_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    kv = SqliteKv(tmp_path / "store.db", SettableClock())
    lease = await fill(kv)
    before = (await kv.range(""), await kv.changes("", 1))
    broken = Backup(1, 1, [*ENTRIES, ("a", b"the same key again")])
    with pytest.raises(Unavailable):
        await restore_backup(kv, broken, replace=True, now_unix_s=NOW)
    assert (await kv.range(""), await kv.changes("", 1)) == before
    await kv.lease_keepalive(lease)
    await kv.close()


class Interrupted(Exception):
    """The restoring process ends here."""


@on_one
@pytest.mark.parametrize("after", range(5))
async def test_a_restore_into_etcd_that_was_interrupted(
    backend: EtcdBackend, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup_module, "TXN_OPERATIONS_MAX", 3)
    kv = backend.kv
    await ensure_incarnation(kv, NOW)
    await fill(kv)
    entries = [(f"k{n}", b"v") for n in range(6)]
    txn, done = kv.txn, 0

    async def stops(*args: Any) -> Any:
        nonlocal done
        if done == after:
            raise Interrupted
        done += 1
        return await txn(*args)

    with monkeypatch.context() as patch:
        patch.setattr(kv, "txn", stops)
        with pytest.raises(Interrupted):
            await restore_backup(kv, Backup(1, 1, entries), replace=True, now_unix_s=0)
    if after == 0:
        assert set(await content(kv)) == {INCARNATION, "leased", *dict(ENTRIES)}, "nothing was changed"
        return
    assert RESTORING_KEY in await content(kv)
    for attempt in (ensure_incarnation(kv, NOW), take_backup(kv)):
        with pytest.raises(ConfigError, match="was interrupted; run `tensorcast store restore` again"):
            await attempt
    incarnation = await restore_backup(kv, Backup(1, 1, entries), replace=False, now_unix_s=0)
    assert incarnation > NOW and await content(kv) == {**dict(entries), INCARNATION: b"%d" % incarnation}
    assert await ensure_incarnation(kv, 1) == incarnation


@on_one
async def test_two_restores_at_once_do_not_mix(backend: EtcdBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup_module, "TXN_OPERATIONS_MAX", 3)
    other: EtcdKv = await backend.open()
    sets = [[(f"{name}{n}", b"v") for n in range(20)] for name in "ab"]
    done = await asyncio.gather(
        *(
            restore_backup(kv, Backup(1, 1, entries), replace=False, now_unix_s=NOW)
            for kv, entries in zip((backend.kv, other), sets, strict=True)
        ),
        return_exceptions=True,
    )
    assert all(isinstance(each, Conflict | int) for each in done) and any(isinstance(each, int) for each in done), done
    if RESTORING_KEY not in (found := await content(backend.kv)):
        found.pop(INCARNATION)
        assert found in (dict(sets[0]), dict(sets[1]))
    await other.close()


@on_one
async def test_a_write_to_the_marker_from_before_does_nothing(backend: EtcdBackend) -> None:
    await restore_backup(backend.kv, BACKUP, replace=False, now_unix_s=NOW)
    late = await backend.kv.txn([Compare(RESTORING_KEY, 1)], [Put("late", b"")])
    assert not late.succeeded


# --- the file -----------------------------------------------------------------------------------------------------------
def test_the_file_is_private_and_replaces_another_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "b"
    old = os.umask(0)
    try:
        write_backup(path, BACKUP)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_backup(path, Backup(41, 7, []))
    assert read_backup(path) == Backup(41, 7, []) and [each.name for each in tmp_path.iterdir()] == ["b"]


def test_a_backup_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^backup .*: No such file or directory$"):
        write_backup(tmp_path / "none" / "b", BACKUP)
    write_backup(tmp_path / "b", BACKUP)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"^backup .*: No space left on device$"):
        write_backup(tmp_path / "b", Backup(1, 1, []))
    assert read_backup(tmp_path / "b") == BACKUP and [each.name for each in tmp_path.iterdir()] == ["b"]


@pytest.mark.slow
def test_a_backup_cut_anywhere_or_with_any_byte_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b"
    write_backup(path, BACKUP)
    whole = path.read_bytes()
    chance = random.Random(1)
    damaged = [whole[:cut] for cut in range(0, len(whole), 7)] + [whole + b"x", whole + b"\n", whole[1:], whole * 2]
    for _ in range(300):
        at, bit = chance.randrange(len(whole)), 1 << chance.randrange(8)
        damaged.append(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=r"^backup .*(no backup|cut short or damaged|has version)") as error:
            read_backup(path)
        assert "\n" not in str(error.value)


def sealed(*lines: bytes) -> bytes:
    text = b"".join(line + b"\n" for line in lines)
    return text + backup_module._checksum(text)


HEADER = b'{"format":"tensorcast-store-backup","version":1,"count":%d,"revision":1,"incarnation":1}'


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "this is no backup of a store"),
        (b"\x7fELF\x00\xff", "this is no backup of a store"),
        (b'{"format":"other","version":1}\n', "this is no backup of a store"),
        (b"[1]\n", "this is no backup of a store"),
        ((HEADER % 0).replace(b'"version":1', b'"version":2') + b"\n", "it has version 2, and this program reads 1"),
        (HEADER % 0, "cut short or damaged"),
        (HEADER % 0 + b"\n", "cut short or damaged"),
        (sealed(HEADER % 1), "contradict each other"),
        (sealed(HEADER % 0, b'["a",""]'), "contradict each other"),
        (sealed(HEADER % 2, b'["a",""]', b'["a",""]'), "contradict each other"),
        (sealed(HEADER % 1, b'["cluster/incarnation","OQ=="]'), "contradict each other"),
        (sealed(HEADER % 1, b'["",""]'), "contradict each other"),
        (sealed((HEADER % 0).replace(b'"incarnation":1', b'"incarnation":99999999999999')), "contradict each other"),
        (sealed(HEADER % 1, b'["a"]'), "nothing was restored"),
        (sealed(HEADER % 1, b'["a","%%%"]'), "nothing was restored"),
        (sealed(b'{"format":"tensorcast-store-backup","version":1}'), "nothing was restored"),
    ],
)
def test_files_that_are_no_backup(tmp_path: Path, data: bytes, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = tmp_path / "b", tmp_path / "data"
    path.write_bytes(data)
    assert main(["store", "restore", str(path), "--data", str(target)]) == 2
    line = capsys.readouterr().err
    assert line.startswith("tensorcast store: backup ") and line.count("\n") == 1 and why in line, line
    assert not target.exists(), "nothing was touched"


# --- the command --------------------------------------------------------------------------------------------------------
def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    """(status, its one line)."""
    status = main(["store", *args])
    out, err = capsys.readouterr()
    assert (out + err).count("\n") == 1, out + err
    return status, out + err


def test_a_folder_backed_up_and_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def write() -> None:
        kv = SqliteKv(tmp_path / "one" / "store.db", time.monotonic)
        await ensure_incarnation(kv, NOW)
        await fill(kv)
        await kv.close()

    asyncio.run(write())
    one, two, file = (str(tmp_path / name) for name in ("one", "two", "b"))
    assert run(capsys, "backup", "--data", str(tmp_path / "none"), "--to", file) == (
        2,
        f"tensorcast store: there is no store database in {tmp_path / 'none'}\n",
    )
    assert not (tmp_path / "none").exists()
    assert run(capsys, "backup", "--data", one, "--to", file)[0] == 0
    assert run(capsys, "--data", two, "restore", file)[0] == 0
    status, line = run(capsys, "restore", file, "--data", two)
    assert status == 2 and "--replace gives up what is in it" in line
    assert run(capsys, "restore", file, "--replace", "--data", two)[0] == 0
    assert run(capsys, "backup", "--data", two, "--to", file + "2")[0] == 0
    first, second = read_backup(Path(file)), read_backup(Path(file + "2"))
    assert first.entries == second.entries == ENTRIES
    assert second.incarnation == NOW + 2 and second.revision > first.revision


def test_a_folder_that_a_store_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "b"
    write_backup(path, BACKUP)
    served = SqliteKv(tmp_path / "store.db", time.monotonic, executor=None)
    for args in (["backup", "--to", str(tmp_path / "c")], ["restore", str(path), "--replace"]):
        status, line = run(capsys, *args, "--data", str(tmp_path))
        assert status == 2 and "another store uses it; stop that one" in line
    served._db.close()
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
@on_one
def test_etcd_backed_up_while_it_serves_and_restored(
    backend: EtcdBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    etcd = ["--etcd", backend.servers.flag, "--etcd-prefix", backend.prefix]
    path = tmp_path / "b"
    write_backup(path, BACKUP)
    assert run(capsys, "restore", str(path), *etcd)[0] == 0
    with running_store(tmp_path, etcd) as store:
        assert run(capsys, "backup", "--to", str(path), *etcd)[0] == 0
        store.terminate()
        assert store.wait(10) == 0
    assert [each for each in read_backup(path).entries if not each[0].startswith("cluster/")] == ENTRIES
    assert run(capsys, "restore", str(path), *etcd, "--data", str(tmp_path / "x"))[0] == 2


def running_store(tmp_path: Path, flags: list[str]) -> "subprocess.Popen[bytes]":
    """A store that serves."""
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "tensorcast_connector.cli", "store", "--listen", "127.0.0.1:0", *flags]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--ready-file", str(ready)], stderr=log)
    deadline = time.monotonic() + 30
    while not ready.exists():
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.01)
    return process


@pytest.mark.parametrize(
    ("flags", "status", "why"),
    [
        (["--etcd", "nowhere"], 2, "etcd='nowhere' is not an address"),
        (["--etcd", "http://h:2379"], 2, "should be host:port of different servers, with commas and without http://"),
        (["--etcd", "h:0"], 2, "should be host:port"),
        (["--etcd", "h:1,h:1"], 2, "should be host:port of different servers"),
        (["--etcd", "unix:/x"], 2, "should be host:port"),
        (["--etcd", "h:1", "--etcd-prefix", "x"], 2, "etcd_prefix='x' should be a name with a slash behind it"),
        (["--etcd", "h:1", "--etcd-prefix", "/"], 2, "should be a name with a slash"),
        (["--etcd", "h:1", "--data", "/d"], 2, "a store has one database, give one of them"),
        (["--etcd", "127.0.0.1:1"], 1, "no etcd answers: etcd at 127.0.0.1:1: cannot connect: Connection refused"),
    ],
)
@pytest.mark.parametrize(
    "action", [["--listen", "127.0.0.1:0"], ["backup", "--to", "/tmp/never-written"]], ids=["serve", "backup"]
)
def test_a_wrong_etcd_is_one_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], status: int, why: str, action: list[str]
) -> None:
    got, line = run(capsys, *action, *flags)
    assert got == status and why in line and line.startswith("tensorcast store: "), line


@pytest.mark.faults
@pytest.mark.slow
def test_killed_at_any_moment_a_restore_is_done_or_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SQLite: one transaction, killed at random moments."""
    path, data = tmp_path / "b", tmp_path / "data"
    new = [(f"n{n:05}", bytes(500)) for n in range(5000)]
    write_backup(path, Backup(1, 1, new))
    chance, ends = random.Random(3), set()
    for _ in range(3):
        write_backup(tmp_path / "old", Backup(1, 1, ENTRIES))
        assert run(capsys, "restore", str(tmp_path / "old"), "--data", str(data), "--replace")[0] == 0
        command = [sys.executable, "-m", "tensorcast_connector.cli", "store", "restore", str(path), "--replace"]
        process = subprocess.Popen([*command, "--data", str(data)], stdout=subprocess.DEVNULL)
        at((data / "store.db-wal").exists)
        time.sleep(chance.random() * 0.06)
        process.kill()
        process.wait()
        assert run(capsys, "backup", "--data", str(data), "--to", str(tmp_path / "after"))[0] == 0
        found = read_backup(tmp_path / "after").entries
        assert found in (ENTRIES, new)
        ends.add(len(found))
    print(f"restores killed: {len(ends)} of 2 possible ends seen")


def at(condition: Callable[[], object]) -> None:
    """Waits for it without a pause."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        pass


@pytest.mark.parametrize("target", ["", ".", "folder", "link"])
def test_a_backup_replaces_nothing_but_files(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not the name of a file that can be written"):
        write_backup(Path(target), BACKUP)
    assert (tmp_path / "link").is_symlink() and sorted(each.name for each in tmp_path.iterdir()) == ["folder", "link"]


@pytest.mark.parametrize("source", ["/dev/zero", "."])
def test_only_files_are_restored(source: str) -> None:
    with pytest.raises(ConfigError, match=rf"^backup {source}: not a file$"):
        read_backup(Path(source))
