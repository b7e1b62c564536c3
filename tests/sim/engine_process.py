"""An engine process attached to the worker of its host: it writes and reads the worker's memory by itself.

A save reserves slots, copies into them in two halves with time between, and commits. A load acquires pages, copies them
out in two halves, and releases. A process may be paused anywhere in between, for longer than any lease. The rule that keeps
this safe: the engine closes its connection only when no copy is under way any more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from tensorcast_connector.wire.store_messages import InstanceRecord
from tests.sim.worker_process import WorkerProcess
from tests.sim.world import Clock, Process, World

SPACES = {b"A" * 16: 64, b"B" * 16: 32}  # keyspace -> bytes of its pages
RECONNECT_DELAY_MAX_S = 1.0


def block_hash(number: int) -> bytes:
    """Of block `number` of the one long prompt that everybody shares."""
    return number.to_bytes(8, "big")


class Connection:
    """Between an engine and its worker: in order and without loss, until it is closed or one side dies."""

    def __init__(self, engine: "EngineProcess", worker: WorkerProcess) -> None:
        self.worker = worker
        self.engine = engine
        self.breaking = False  # the engine will close it as soon as it may
        self.closed = False
        self.session = worker.open_session()
        self._last = {"to": 0.0, "from": 0.0}
        worker.sessions[self.session].on_death = lambda: self._carry("from", engine, engine.lost, self)

    def _carry(self, way: str, process: Process, action: Callable[..., Any], *args: Any) -> None:
        world = self.engine.world
        when = max(self._last[way] + 1e-6, world.now + 0.0001 + 0.002 * world.random.random() ** 2)
        self._last[way] = when
        world.schedule(when, process, action, *args)

    def tell(self, action: Callable[..., Any], *args: Any) -> None:
        """`action(session, *args)` in the worker."""
        self._carry("to", self.worker, self._in_worker, action, args)

    def _in_worker(self, action: Callable[..., Any], args: tuple[Any, ...]) -> object:
        if self.session not in self.worker.sessions:
            return False
        return action(self.session, *args)

    def reply(self, action: Callable[..., Any], *args: Any) -> None:
        """`action(*args)` in the engine, unless the connection is being given up."""
        self._carry("from", self.engine, self._in_engine, action, args)

    def _in_engine(self, action: Callable[..., Any], args: tuple[Any, ...]) -> object:
        if self.closed or self.breaking:
            return False
        return action(*args)

    def close(self) -> None:
        """By the engine, or by the kernel when the engine has died."""
        if not self.closed:
            self.closed = True
            self.tell(self.worker.close_session)


class EngineProcess(Process):
    """See the module. Its name is the instance's id.

    Args:
        find_worker: the worker that runs on this host now, if any.
        blocks: of how many blocks there are pages.
        interval_s: about how long it waits between two things it does.
        copy_max_s: how long half a copy takes at most, while it is not paused.
    """

    closes_after_copies = True

    def __init__(
        self, world: World, host: str, number: int, clock: Clock, find_worker: Callable[[], WorkerProcess | None],
        blocks: int, interval_s: float, copy_max_s: float,
    ) -> None:  # fmt: skip
        super().__init__(world, f"{host}/engine{number}", host, clock)
        self._copy_max_s = copy_max_s
        self._find_worker = find_worker
        self._blocks = blocks
        self._interval_s = interval_s
        self._operations = 0
        self.copies = 0  # under way
        self.stall_s = 0.0  # in the middle of its next copy it stalls for so long, and gives its connection up
        self._stalled_until = 0.0
        self.idle = False  # starts nothing new
        self._results: dict[str, dict[str, str]] = {}  # of steps of plans, by their keys: its adaptor does each once
        self.connection: Connection | None = None
        self.after(0.0, self._connect)
        self.after(0.1, self._step)

    # --- the connection ---

    def _connect(self) -> object:
        worker = self._find_worker()
        if self.connection is not None:
            return False
        if worker is None or worker.paused:
            self.after(self.world.random.random() * RECONNECT_DELAY_MAX_S, self._connect)
            return False
        self.connection = Connection(self, worker)
        record = InstanceRecord(self.name, worker.name, "vllm", "m", "n")
        self.connection.tell(self._attach, worker, record)
        return True

    @staticmethod
    def _attach(session: int, worker: WorkerProcess, record: InstanceRecord) -> None:
        worker.attach(session, record)

    def lost(self, connection: Connection) -> None:
        """The worker has died. What is still copied goes to memory that nobody else looks at any more."""
        connection.closed = True
        if self.connection is connection:
            self.connection = None
            self.after(self.world.random.random() * RECONNECT_DELAY_MAX_S, self._connect)

    def give_up(self) -> None:
        """The worker seems to be silent: this connection is given up, and another one opened later."""
        connection = self.connection
        if connection is not None and not connection.breaking:
            self.world.note(self.name, "gives its connection up", str(self.copies))
            self.world.counts["connection given up while copying"] += bool(self.copies)
            connection.breaking = True
            self._close_if_possible()

    def _close_if_possible(self) -> None:
        connection = self.connection
        if connection is not None and connection.breaking and not (self.copies and self.closes_after_copies):
            self.connection = None
            connection.close()
            self.after(self.world.random.random() * RECONNECT_DELAY_MAX_S, self._connect)

    def die(self) -> None:
        """The kernel closes its connections, and it copies nothing more."""
        super().die()
        if self.connection is not None:
            self.connection.close()

    # --- what it does ---

    def _step(self) -> object:
        chance = self.world.random
        self.after(self._interval_s * (0.2 + 1.6 * chance.random()), self._step)
        connection = self.connection
        if connection is None or connection.breaking or self.idle:
            return False
        self._operations += 1
        keyspace = chance.choice(list(SPACES))
        first = chance.randrange(self._blocks)
        hashes = [block_hash(number) for number in range(first, min(first + chance.randint(1, 5), self._blocks))]
        kind = chance.random()
        if kind < 0.5:
            self._save(connection, keyspace, hashes)
        elif kind < 0.9:
            self._load(connection, keyspace, hashes, f"hold{self._operations}")
        else:
            self._look_up(connection, keyspace, hashes, f"lookup{self._operations}")
        return True

    def do_step(self, key: str, duration_s: float, done: Callable[[Any], None]) -> None:
        """A step of a plan; `done` gets what it results in."""

        def end() -> None:
            again = key in self._results
            self.world.counts["engine step again"] += again
            done(self._results.setdefault(key, {"artifact": f"{key} by {self.name}"}))

        self.after(duration_s, end)

    def _copying(self, first: Callable[[], None], second: Callable[[], None], then: Callable[[], None]) -> None:
        """A copy in two halves. The connection stays while it is under way."""
        self.copies += 1

        def begin() -> None:
            first()
            if self.stall_s:
                self._stalled_until, self.stall_s = self.world.now + self.stall_s, 0.0
                self.give_up()
            self.after(self.world.random.random() * self._copy_max_s, end)

        def end() -> object:
            if self.world.now < self._stalled_until:
                self.world.schedule(self._stalled_until, self, end)
                return False
            second()
            self.copies -= 1
            then()
            self._close_if_possible()
            return True

        self.after(self.world.random.random() * self._copy_max_s, begin)

    def _save(self, connection: Connection, keyspace: bytes, hashes: Sequence[bytes]) -> None:
        worker, size = connection.worker, SPACES[keyspace]
        seal = f"{self.name} {self._operations}".encode()
        content = {each: xxhash.xxh3_64_digest(seal + keyspace + each) * (size // 8) for each in hashes}

        def reserve(session: int) -> None:
            connection.reply(reserved, worker.reserve(session, keyspace, hashes, size))

        def reserved(offsets: Sequence[int]) -> None:
            view = worker.arena.view
            targets = {each: view[at : at + size] for each, at in zip(hashes, offsets, strict=True) if at >= 0}
            if targets:
                self._copying(lambda: write(targets, 0), lambda: write(targets, 1), lambda: written(list(targets)))

        def write(targets: dict[bytes, memoryview], half: int) -> None:
            part = slice(half * size // 2, (half + 1) * size // 2)
            for each, memory in targets.items():
                memory[part] = content[each][part]
                self.world.tell("wrote", connection, keyspace + each)

        def written(saved: Sequence[bytes]) -> None:
            if connection.closed or connection.breaking:
                return
            if self.world.random.random() < 0.1:
                connection.tell(worker.abort, keyspace, saved)
                return
            for each in saved:
                self.world.committed.setdefault(keyspace + each, set()).add(content[each])
            digests = [xxhash.xxh3_64_intdigest(content[each]) for each in saved]
            connection.tell(worker.commit, keyspace, saved, digests)

        connection.tell(reserve)

    def _load(self, connection: Connection, keyspace: bytes, hashes: Sequence[bytes], hold_id: str) -> None:
        worker, size = connection.worker, SPACES[keyspace]
        halves: list[list[bytes]] = [[], []]

        def acquire(session: int) -> None:
            worker.acquire(session, hold_id, keyspace, hashes, lambda ranges: connection.reply(acquired, ranges))

        def acquired(ranges: Sequence[tuple[int, int]]) -> None:
            view = worker.arena.view
            pages = [view[offset : offset + length] for offset, length in ranges]
            self._copying(lambda: read(pages, 0), lambda: read(pages, 1), loaded)

        def read(pages: Sequence[memoryview], half: int) -> None:
            halves[half] = [bytes(page[half * size // 2 : (half + 1) * size // 2]) for page in pages]

        def loaded() -> None:
            for each, first, second in zip(hashes, *halves, strict=False):
                self.world.counts["page read"] += 1
                self.world.tell("read", self, keyspace + each, first + second)
            if not connection.closed:
                connection.tell(worker.release, hold_id)

        connection.tell(acquire)

    def _look_up(self, connection: Connection, keyspace: bytes, hashes: Sequence[bytes], lookup_id: str) -> None:
        worker = connection.worker

        def look_up(session: int) -> None:
            worker.lookup(session, lookup_id, keyspace, hashes, lambda blocks: connection.reply(found, blocks))

        def found(blocks: int) -> None:
            connection.tell(worker.release, lookup_id)

        connection.tell(look_up)
