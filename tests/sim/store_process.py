"""The store process: the production Store over the real SQLite backend, run inline, with a file that can be torn.

A crash keeps what the file held. A crash inside a transaction lets it be committed, tells nobody, and cuts the write-ahead
log somewhere behind what had been there before: as if the power had failed while it was being written.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorcast_connector.config import WATCH_WAIT_S
from tensorcast_connector.core import cluster
from tensorcast_connector.errors import TensorcastError
from tensorcast_connector.store.backup import read_backup, restore_backup, take_backup, write_backup
from tensorcast_connector.store.incarnation import ensure_incarnation
from tensorcast_connector.store.server import Store, prepare
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.types import Token
from tensorcast_connector.wire.codec import decode
from tensorcast_connector.wire.messages import Failure, Message
from tensorcast_connector.wire.store_messages import Watch
from tests.sim.inline import inline
from tests.sim.network import Answer
from tests.sim.world import Clock, Process, World

STORE = "store"
EPOCH_UNIX_S = 1_700_000_000  # what the wall clock of the store's host shows when the world begins


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is in the database."""

    revision: int = 0
    leases: frozenset[int] = frozenset()
    rows: dict[str, tuple[bytes, int, int]] = field(default_factory=dict)  # key -> value, mod_revision, lease_id

    @property
    def incarnation(self) -> int:
        """The life of the database."""
        return int(self.rows[cluster.INCARNATION][0])

    def shards(self) -> dict[int, tuple[Token, str]]:
        """Who holds which shard, under which token."""
        return {
            int(key.removeprefix(cluster.SHARDS)): (
                Token(self.incarnation, revision), cluster.decode_shard(value).worker_id,
            )
            for key, (value, revision, _) in self.rows.items()
            if key.startswith(cluster.SHARDS)
        }  # fmt: skip


class StoreProcess(Process):
    """See the module.

    Args:
        folder: of the database file; made if it does not exist.
        shards: of a new cluster.
        earlier_incarnation: of the database that this host had before: the wall clock has moved on since.
    """

    def __init__(
        self, world: World, clock: Clock, folder: Path, shards: int, earlier_incarnation: int = 0
    ) -> None:  # fmt: skip
        super().__init__(world, STORE, STORE, clock)
        self.path = folder / "store.db"
        self.started_at = clock()  # from then on every lease has its full time
        self.died_at = 0.0
        self.crash_inside = False  # the next transaction is the last one
        self.on_crash: Callable[[StoreProcess], None] = lambda _: None
        self.served: dict[str, int] = {}
        self._parked: list[tuple[Watch, float, Answer, int]] = []  # and the revision at which there was nothing to tell
        self._expiry_alarm = float("inf")
        self.kv = SqliteKv(self.path, clock, executor=None)
        inline(ensure_incarnation(self.kv, max(EPOCH_UNIX_S + int(world.now), earlier_incarnation + 1)))
        self.shards = inline(prepare(self.kv, shards))
        self.store = Store(self.kv, STORE)
        self.snapshot = self.read()
        world.note(self.name, "started", self.snapshot.incarnation, self.snapshot.revision)

    def read(self) -> Snapshot:
        """What is in the database now, read beside the production code."""
        db = self.kv._db
        rows = {key: tuple(row) for key, *row in db.execute("SELECT key, value, mod_revision, lease_id FROM kv")}
        leases = frozenset(lease_id for (lease_id,) in db.execute("SELECT id FROM lease"))
        return Snapshot(self.kv._last_revision, leases, rows)

    # --- requests ---

    def receive(self, body: bytes, answer: Answer) -> None:
        """A request has arrived."""
        message = decode(Store.decoder, body)
        name = type(message).__name__
        self.served[name] = self.served.get(name, 0) + 1
        if isinstance(message, Watch):
            self._watch(message, answer)
            return
        before = self._files() if self.crash_inside else None
        leases = len(self.kv._deadline)
        reply: Message
        try:
            reply = inline(self.store.handle(message))  # type: ignore[arg-type]
        except TensorcastError as error:
            reply = Failure(error.code, str(error))
            self.world.counts[f"store says {error.code}"] += 1
        self.world.counts["lease expired"] += len(self.kv._deadline) < leases
        if before is not None and self._files() != before:
            self.world.note(self.name, "crashes inside", message)
            self.crash(before)
            return
        self.world.note(self.name, "answers", message, reply)
        self._vouch(message, reply)
        answer(reply)
        self._wake_parked()

    def _vouch(self, message: Message, reply: Any) -> None:
        """From now on somebody relies on what is in the database."""
        now = self.snapshot
        if now.revision != self.kv._last_revision or now.leases != self.kv._deadline.keys():
            self.snapshot = self.read()
        self.world.tell("acknowledged", self, message, reply)

    def _watch(self, message: Watch, answer: Answer) -> None:
        """As Store._watch, which cannot run without an event loop."""
        wait_s = min(message.wait_ms / 1000, WATCH_WAIT_S)
        if not self._answer_watch(message, answer, even_if_empty=wait_s <= 0):
            until = self.world.now + wait_s / self.clock.rate
            self._parked.append((message, until, answer, self.kv._last_revision))
            self.after(wait_s, self._wake_parked)
            self._watch_expiry()
        else:
            self._wake_parked()

    def _answer_watch(self, message: Watch, answer: Answer, even_if_empty: bool) -> bool:
        changes = inline(self.store.changes(message))
        if not (even_if_empty or changes.complete or changes.entries or changes.deleted):
            return False
        self.world.note(self.name, "answers", message, changes)
        self.world.counts["watch from before the history"] += changes.complete and message.after_revision > 0
        self.world.counts["listing in pages"] += bool(changes.after_key)
        self._vouch(message, changes)
        answer(changes)
        return True

    def _wake_parked(self) -> object:
        """Answers the watches whose time is over, or which have something to tell."""
        parked, self._parked = self._parked, []
        self._parked = [
            (message, until, answer, self.kv._last_revision)
            for message, until, answer, seen in parked
            if not (self.kv._last_revision > seen or until <= self.world.now)
            or not self._answer_watch(message, answer, even_if_empty=until <= self.world.now)
        ]
        self._watch_expiry()
        return len(parked) != len(self._parked)

    def _watch_expiry(self) -> None:
        """While somebody watches, leases end when they are over; otherwise with the next request."""
        at = self.clock.when(self.kv._next_deadline)
        if self._parked and at < self._expiry_alarm:
            self._expiry_alarm = max(at, self.world.now)
            self.world.schedule(self._expiry_alarm + 1e-6, self, self._expire)

    def _expire(self) -> object:
        self._expiry_alarm = float("inf")
        if self._parked:
            inline(self.kv.revision())  # which ends the leases that have run out
        return self._wake_parked()

    def clock_jumped(self) -> None:
        """Leases may be over earlier than the alarm is set for."""
        self._expiry_alarm = float("inf")
        self._watch_expiry()

    # --- crashes ---

    def _files(self) -> tuple[bytes, bytes]:
        """The database file and its write-ahead log."""
        log = self.path.with_name(self.path.name + "-wal")
        return self.path.read_bytes(), log.read_bytes() if log.exists() else b""

    def crash(self, before: tuple[bytes, bytes] | None = None) -> None:
        """Dies now. `before`: the files before the transaction that nobody was told of; what came behind is torn."""
        chance = self.world.random
        done = self.read()
        database, log = self._files()
        if before is not None and before[0] == database and len(log) > len(before[1]):
            cut = chance.randint(len(before[1]), len(log))
            self.world.counts["log torn"] += cut < len(log)
            torn = log[cut : cut + chance.choice((0, 0, 7, 512))]
            log = log[:cut] + bytes(byte ^ 0x55 for byte in torn)  # a sector that was being written
            self.world.note(self.name, f"log cut at {cut} of {len(log)}, {len(before[1])} before")
        self._close()
        self.path.write_bytes(database)
        self.path.with_name(self.path.name + "-wal").write_bytes(log)
        self.die()
        self.done = done
        self.on_crash(self)

    def die(self) -> None:
        """Whoever starts it again has to know when that was."""
        self.died_at = self.world.now
        super().die()

    def _close(self) -> None:
        self.kv._db.close()
        self._parked = []

    def restarted(self) -> "StoreProcess":
        """A new process on the file of this one, which has crashed."""
        again = StoreProcess(self.world, self.clock, self.path.parent, self.shards)
        again.on_crash, again.served = self.on_crash, self.served
        self.world.tell("recovered", again, self.snapshot, self.done, again.snapshot)
        return again

    def replaced(self, folder: Path, backup: Path | None) -> "StoreProcess":
        """A new process, which is restored from `backup`, or on an empty database: its life is a later one either way.

        Args:
            folder: of its file; there may be a database already.
        """
        assert not self.alive
        incarnation = self.snapshot.incarnation
        if backup is not None:
            kv = SqliteKv(folder / self.path.name, self.clock, executor=None)
            now_unix_s = max(EPOCH_UNIX_S + int(self.world.now), incarnation + 1)
            inline(restore_backup(kv, read_backup(backup), replace=True, now_unix_s=now_unix_s))
            inline(kv.close())
        again = StoreProcess(self.world, self.clock, folder, self.shards, incarnation)
        again.on_crash, again.served = self.on_crash, self.served
        self.world.counts["database restored" if backup else "database made anew"] += 1
        return again

    def back_up(self, path: Path) -> None:
        """As `tensorcast store backup`."""
        write_backup(path, inline(take_backup(self.kv)))

    def stop(self) -> None:
        """The world is over."""
        if self.alive:
            self._close()
