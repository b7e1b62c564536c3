"""The worker process: the production Metadata and Pages over a small arena.

Engines of the same host are on connections (engine_process.py): in order, never lost while they live. Everything else
comes over the network (plane_process.py).
"""

from collections.abc import Callable, Sequence

from tensorcast_connector.config import FETCH_TIMEOUT_S
from tensorcast_connector.core.placement import choose_source
from tensorcast_connector.core.segments import Segments
from tensorcast_connector.errors import TensorcastError
from tensorcast_connector.types import WorkerId
from tensorcast_connector.wire.messages import Fetch, Fetched, Message
from tensorcast_connector.wire.store_messages import InstanceRecord
from tensorcast_connector.worker.pages import Held, Pages
from tests.sim.inline import inline
from tests.sim.network import Answer, Network
from tests.sim.plane_process import PlaneProcess
from tests.sim.world import Clock, World

SLOT_ALIGN_BYTES = 16
SLAB_BYTES = 256


class Memory:
    """What Pages needs of an arena."""

    def __init__(self, size_bytes: int) -> None:
        self.view = memoryview(bytearray(size_bytes))


class Session:
    """One connection of an engine as the worker sees it: what it was told it may rely on."""

    def __init__(self) -> None:
        self.reserved: dict[bytes, tuple[int, int]] = {}  # key -> offset, length
        self.held: dict[str, dict[bytes, int]] = {}  # hold id -> key -> offset
        self.listed: InstanceRecord | None = None
        self.on_death: Callable[[], None] = lambda: None


class WorkerProcess(PlaneProcess):
    """See the module.

    Args:
        run: which run of the worker on this host.
        arena_bytes: of page memory.
    """

    def __init__(
        self, world: World, network: Network, host: str, run: int, clock: Clock, roles: tuple[str, ...],
        arena_bytes: int,
    ) -> None:  # fmt: skip
        self.arena = Memory(arena_bytes)
        self.segments = Segments(arena_bytes, SLAB_BYTES, SLOT_ALIGN_BYTES)
        self.sessions: dict[int, Session] = {}
        self._next_session = 1
        self._next_fetch = 1
        pages = Pages(self.arena, self.segments)  # type: ignore[arg-type]
        super().__init__(world, network, host, run, clock, roles, pages)

    # --- fetching ---

    def fetch(self, held: Held, done: Callable[[], None]) -> None:
        """As Pages.fetch, in one attempt: brings what is missing, holds what came, then calls `done`."""
        wanted = [key for key in held.missing if self.segments.owner(key) is None]
        waiting = 1

        def one_done() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                self.pages._hold(held)
                self.touched = True
                done()

        def located(who: list[Sequence[str]]) -> None:
            nonlocal waiting
            groups: dict[WorkerId, list[bytes]] = {}
            for key, workers in zip(wanted, who, strict=True):
                source = choose_source(key, [WorkerId(each) for each in workers if each != self.name])
                if source is not None:
                    groups.setdefault(source, []).append(key)
            for source, keys in groups.items():
                waiting += 1
                self._fetch_from(source, keys, held, one_done)
            one_done()

        self.holders(wanted, located)

    def _fetch_from(self, source: WorkerId, keys: list[bytes], held: Held, done: Callable[[], None]) -> None:
        owner = f"fetch/{self._next_fetch}"
        self._next_fetch += 1

        def came(reply: Message | TensorcastError, payload: bytes) -> None:
            if not isinstance(reply, Fetched):
                done()
                return
            parts: list[tuple[bytes, memoryview, bytes, int]] = []
            for key, (length, digest) in zip(keys, reply.pages, strict=True):
                data, payload = payload[:length], payload[length:]
                memory = self.pages.receive(owner, key, length) if length else None
                if memory is not None:
                    memory[: length // 2] = data[: length // 2]
                    parts.append((key, memory, data, digest))
            self.pump_if_woken()
            self.after(self.world.random.random() * 0.02, arrived, parts)

        def arrived(parts: list[tuple[bytes, memoryview, bytes, int]]) -> None:
            for key, memory, data, digest in parts:
                memory[len(data) // 2 :] = data[len(data) // 2 :]
                arrived_well = self.pages.received(owner, key, memory, digest)
                self.world.counts["page fetched" if arrived_well else "page with wrong bytes"] += 1
                if arrived_well:
                    self.world.tell("read", self, key, data)
                    self.pages._hold(held)
            self.pages.give_up(owner)
            self.touched = True
            done()
            self.pump_if_woken()

        self.network.call(self, source, Fetch(keys), FETCH_TIMEOUT_S, came)

    def serve_fetch(self, message: Fetch, answer: Answer) -> None:
        """The pages are held until they are sent, which takes a while."""
        sending = self.pages.hold(message.keys)
        self.touched = True
        found = inline(sending.__aenter__())

        def sent() -> None:
            reply = Fetched([(page.data.nbytes, page.digest) if page else (0, 0) for page in found])
            payload = b"".join(bytes(page.data) for page in found if page)
            inline(sending.__aexit__(None, None, None))
            self.touched = True
            answer(reply, payload)

        self.after(self.world.random.random() * 0.01, sent)

    # --- engines ---

    def open_session(self) -> int:
        """An engine has connected."""
        number, self._next_session = self._next_session, self._next_session + 1
        self.sessions[number] = Session()
        return number

    def attach(self, number: int, record: InstanceRecord) -> None:
        """It says who it is, and is listed while its connection lives."""
        self.sessions[number].listed = record
        self.metadata.member.add(record)
        self.pump()

    def close_session(self, number: int) -> None:
        """Its connection has ended."""
        record = self.sessions.pop(number).listed
        self.pages.end_session(number)
        if self.plans is not None:
            self.plans.connection_ended(number)
        self.touched = True
        if record is not None and all(each.listed != record for each in self.sessions.values()):
            self.metadata.member.remove(record)
        self.pump()

    def instances(self) -> set[str]:
        """The engines that are connected now."""
        return {each.listed.instance_id for each in self.sessions.values() if each.listed}

    def reserve(self, session: int, keyspace: bytes, hashes: Sequence[bytes], page_bytes: int) -> list[int]:
        """As EngineSession."""
        offsets = self.pages.reserve(session, keyspace, hashes, page_bytes)
        for each, offset in zip(hashes, offsets, strict=True):
            if offset >= 0:
                self.sessions[session].reserved[keyspace + each] = offset, page_bytes
        self.pump_if_woken()
        return offsets

    def commit(self, session: int, keyspace: bytes, hashes: Sequence[bytes], digests: Sequence[int]) -> None:
        """As EngineSession."""
        self.pages.commit(session, keyspace, hashes, digests)
        for each in hashes:
            self.sessions[session].reserved.pop(keyspace + each, None)
        self.pump_if_woken()

    def abort(self, session: int, keyspace: bytes, hashes: Sequence[bytes]) -> None:
        """As EngineSession."""
        self.pages.abort(session, keyspace, hashes)
        for each in hashes:
            self.sessions[session].reserved.pop(keyspace + each, None)
        self.pump_if_woken()

    def acquire(
        self, session: int, hold_id: str, keyspace: bytes, hashes: Sequence[bytes],
        reply: Callable[[list[tuple[int, int]]], None],
    ) -> None:  # fmt: skip
        """As EngineSession: holds the pages, fetches those that are elsewhere; `reply` gets (offset, length) of each."""
        held = self.pages.hold_local(session, hold_id, [keyspace], hashes)
        self.sessions[session].held[hold_id] = self._offsets(held)

        def finish() -> None:
            ranges = self.pages.ranges(held)
            open_session = self.sessions.get(session)
            if open_session is not None:
                if hold_id in open_session.held:
                    open_session.held[hold_id] = self._offsets(held)
                reply(ranges)

        if held.missing:
            self.fetch(held, finish)
        else:
            finish()

    def lookup(
        self, session: int, hold_id: str, keyspace: bytes, hashes: Sequence[bytes], reply: Callable[[int], None]
    ) -> None:
        """As EngineSession: holds what is here; `reply` gets how many leading pages can be had."""
        self.release(session, hold_id)
        held = self.pages.hold_local(session, hold_id, [keyspace], hashes)
        self.sessions[session].held[hold_id] = self._offsets(held)

        def located(who: list[Sequence[str]]) -> None:
            nowhere = [key for key, workers in zip(held.missing, who, strict=True) if not workers]
            reply(held.blocks_before(nowhere))

        self.holders(held.missing, located)

    def _offsets(self, held: Held) -> dict[bytes, int]:
        self.touched = True
        missing = set(held.missing)
        return {key: self.segments.range(key).offset for key in held.keys if key not in missing}

    def release(self, session: int, hold_id: str) -> None:
        """As EngineSession."""
        self.touched = True
        self.pages.release(session, hold_id)
        self.sessions[session].held.pop(hold_id, None)

    def die(self) -> None:
        """Its connections break."""
        super().die()
        for session in self.sessions.values():
            session.on_death()
