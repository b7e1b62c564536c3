"""The simulated worker says to others what the real one says: both go through the same small cluster.

A is what is tested, B and C are production planes. D is listed as a home, and no longer a member.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import xxhash

from tensorcast_connector.config import FIND_TIMEOUT_S
from tensorcast_connector.core.metadata import Call, Metadata, PeerCall
from tensorcast_connector.core.segments import Segments
from tensorcast_connector.errors import TensorcastError, Unavailable
from tensorcast_connector.types import Address, PageKey, WorkerId, page_key
from tensorcast_connector.wire.codec import encode
from tensorcast_connector.wire.messages import PROTOCOL_VERSION, Fetch, Fetched, Message, PagesFound
from tensorcast_connector.worker.pages import Pages
from tensorcast_connector.worker.peers import Peers
from tests.core.made import A, B, C, D, everything, worker
from tests.core.test_metadata import Plane
from tests.sim.store_process import STORE
from tests.sim.worker_process import SLAB_BYTES, SLOT_ALIGN_BYTES, Memory, WorkerProcess
from tests.sim.world import Clock, World

SPACE = b"k" * 16
NOW = 100.0
HOMES = {0: (A, 1), 1: (B, 2), 2: (C, 3), 3: (D, 4)}
LATER = {**HOMES, 1: (C, 9)}  # what B and C know already: B has handed shard 1 over to C
ARENA_BYTES = 1 << 14


def block_hash(shard: int, number: int) -> bytes:
    return number.to_bytes(31, "big") + bytes([shard])


HASHES = [block_hash(shard, number) for number in range(4) for shard in range(4)]
KEYS = [page_key(SPACE, each) for each in HASHES]


def content(key: bytes) -> bytes:
    return key * 2


class Others:
    """B and C, and what they were asked in which order.

    Args:
        cut: cannot be reached.
        moved: B has handed a shard over, and A does not know.
        nonsense: their answers do not fit the questions.
    """

    def __init__(self, cut: Sequence[str] = (), moved: bool = False, nonsense: bool = False) -> None:
        self.cut = cut
        self.nonsense = nonsense
        self.heard: list[tuple[str, bytes]] = []
        self.patience_s: list[float] = []  # how long each answer was waited for at most
        self.planes = {B: Plane(B), C: Plane(C)}
        homes = LATER if moved else HOMES
        for name, plane in self.planes.items():
            plane.sees(everything([A, B, C], homes))
            grants = {shard: granted for shard, (home, granted) in homes.items() if home == name}
            for holder, numbers in ((B, (0, 2, 3)), (C, (1, 2, 3))):
                pages = [key for at, key in enumerate(KEYS) if key[-1] in grants and at // 4 in numbers]
                plane.report(holder, 1, grants, *pages)

    def asked(self, to: str, message: Message, timeout_s: float = 0.0) -> tuple[Message | TensorcastError, bytes]:
        """What comes back, and the bytes behind it."""
        self.heard.append((to, encode(message)))
        self.patience_s.append(round(timeout_s, 3))
        if to in self.cut:
            return Unavailable("cut"), b""
        if isinstance(message, Fetch):
            pages = [content(key) for key in message.keys]
            return Fetched([(len(each), xxhash.xxh3_64_intdigest(each)) for each in pages]), b"".join(pages)
        reply = self.planes[WorkerId(to)].serve(message)
        if self.nonsense and isinstance(reply, PagesFound):
            reply = msgspec.structs.replace(reply, which=reply.which[:-1])
        return reply, b""


def taught(metadata: Metadata) -> list[PeerCall]:
    """A joins, and sees the cluster as it was; what it first has to say to others."""
    plane = Plane(A)
    plane.metadata = metadata
    return plane.sees(everything([A, B, C], HOMES))


def put(pages: Pages, keys: Sequence[bytes]) -> None:
    """They are here now."""
    for key in keys:
        memory = pages.receive("test", key, len(content(key)))
        assert memory is not None
        memory[:] = content(key)
        pages.received("test", key, memory, xxhash.xxh3_64_intdigest(memory))


class Real:
    """A as worker/peers.py and worker/pages.py drive it."""

    def __init__(self, others: Others, delay_s: float = 0.001) -> None:
        self.now = NOW
        self.delay_s = delay_s
        self.pages = Pages(Memory(ARENA_BYTES), Segments(ARENA_BYTES, SLAB_BYTES, SLOT_ALIGN_BYTES))  # type: ignore[arg-type]
        network: Any = None
        store = Address("tcp", host="127.0.0.1", port=1)
        self.peers = Peers(worker(A), self.pages, network, [store], random.Random(1), lambda: self.now)
        self.pages.elsewhere = self.peers
        self.first = taught(self.peers.metadata)
        for name in (B, C):
            self.peers._clients[name] = self._client(others, name)
            self.peers._bulk[name] = self._bulk(others, name)

    def _client(self, others: Others, name: str) -> Any:
        async def call(message: Message, kind: type[Message], timeout_s: float) -> Message:
            result, _ = others.asked(name, message, timeout_s)
            await asyncio.sleep(0)
            self.now += self.delay_s
            if isinstance(result, TensorcastError):
                raise result
            assert isinstance(result, kind) and timeout_s > 0
            return result

        return SimpleNamespace(connected=True, version=PROTOCOL_VERSION, call=call)

    def _bulk(self, others: Others, name: str) -> Any:
        async def fetch(
            keys: Sequence[bytes], target: Callable[..., Any], done: Callable[[int, int], None],
            aged: Callable[[int, float], None],
        ) -> None:  # fmt: skip
            reply, payload = others.asked(name, Fetch(list(keys)))
            if isinstance(reply, TensorcastError):
                raise reply
            assert isinstance(reply, Fetched)
            for index, (length, digest) in enumerate(reply.pages):
                target(index, length)[:] = payload[:length]
                payload = payload[length:]
                aged(index, 0.0)
                done(index, digest)

        return SimpleNamespace(fetch=fetch)

    def holders(self, keys: Sequence[bytes]) -> list[Sequence[str]]:
        return asyncio.run(self.peers.holders(keys))

    def load(self) -> list[PageKey]:
        async def load() -> list[PageKey]:
            held = self.pages.hold_local(1, "h", [SPACE], HASHES)
            await self.pages.fetch(held)
            return held.missing

        return asyncio.run(load())

    def report(self) -> None:
        async def report() -> None:
            put(self.pages, KEYS[:4])
            calls: Sequence[Call] = self.first
            while calls:
                for call in calls:
                    self.peers._send(call)
                await asyncio.gather(*self.peers._tasks)
                calls = [call for call in self.peers.metadata.poll(NOW) if isinstance(call, PeerCall)]

        asyncio.run(report())


class Simulated:
    """A as plane_process.py and worker_process.py drive it."""

    def __init__(self, others: Others, delay_s: float = 0.001) -> None:
        self.others = others
        self.delay_s = delay_s
        self.world = World(1, [])
        network: Any = self
        clock = Clock(self.world, 1.0, NOW)
        host, _, run = A.partition("/")
        roles = tuple(worker(A).roles)
        self.process = WorkerProcess(self.world, network, host, int(run), clock, roles, ARENA_BYTES)
        self.pages = self.process.pages
        self.first = taught(self.process.metadata)

    def call(self, caller: object, to: str, message: Message, timeout_s: float, done: Callable[..., object]) -> None:
        """As Network.call."""
        if to != STORE:
            self.process.after(self.delay_s, done, *self.others.asked(to, message, timeout_s))

    def holders(self, keys: Sequence[bytes]) -> list[Sequence[str]]:
        came: list[list[Sequence[str]]] = []
        self.process.holders(keys, came.append)
        self.world.run(1.0)
        [found] = came
        return found

    def load(self) -> list[PageKey]:
        self.process.open_session()
        held = self.pages.hold_local(1, "h", [SPACE], HASHES)
        came: list[bool] = []
        self.process.fetch(held, lambda: came.append(True))
        self.world.run(1.0)
        assert came == [True]
        return held.missing

    def report(self) -> None:
        put(self.pages, KEYS[:4])
        for call in self.first:
            self.process._send(call, NOW)
        self.world.run(0.1)


Side = Real | Simulated
SIDES: list[type[Side]] = [Real, Simulated]


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("cut", [(), (B,), (C,), (B, C)], ids=str)
def test_the_same_questions_and_the_same_holders(cut: tuple[str, ...], moved: bool) -> None:
    said = []
    for side in SIDES:
        others = Others(cut, moved)
        found = side(others).holders(KEYS)
        said.append((others.heard, [sorted(each) for each in found]))
    (heard, found), simulated = said
    assert (heard, found) == simulated
    asked = [to for to, _ in heard]
    assert asked == ([B, C, C] if moved and B not in cut else [B, C]), "D has left, and A asks itself without a message"
    reached = {A: False, B: B not in cut, C: C not in cut, D: False}
    known = {1: (B not in cut and C not in cut) if moved else reached[B], 2: reached[C]}
    assert [bool(each) for each in found] == [known.get(key[-1], False) for key in KEYS]


@pytest.mark.parametrize(("delay_s", "asked"), [(0.1, 2), (FIND_TIMEOUT_S, 1)])
def test_the_same_patience_with_a_home_and_the_one_it_redirects_to(delay_s: float, asked: int) -> None:
    said = []
    for side in SIDES:
        others = Others(moved=True)
        found = side(others, delay_s).holders([key for key in KEYS if key[-1] == 1])
        said.append((others.heard, others.patience_s, found))
    assert said[0] == said[1]
    assert said[0][1] == [FIND_TIMEOUT_S, round(FIND_TIMEOUT_S - delay_s, 3)][:asked]


def test_nonsense_is_a_miss_for_both() -> None:
    said = []
    for side in SIDES:
        others = Others(nonsense=True)
        found = side(others).holders(KEYS)
        said.append((others.heard, found))
    assert said[0] == said[1] and len(said[0][0]) == 2 and not any(said[0][1])


@pytest.mark.parametrize("moved", [False, True])
def test_the_same_fetches_and_the_same_pages(moved: bool) -> None:
    said = []
    for side in SIDES:
        others = Others(moved=moved)
        one = side(others)
        missing = one.load()
        said.append((others.heard, missing, sorted(one.pages.inventory())))
    (heard, missing, there), simulated = said
    assert (heard, missing, there) == simulated
    assert there == sorted(key for key in KEYS if key[-1] in (1, 2)) and len(missing) == 8
    assert sorted(to for to, _ in heard[-2:]) == [B, C] and len(heard) == (5 if moved else 4)


def test_the_same_reports() -> None:
    said = []
    for side in SIDES:
        others = Others()
        side(others).report()
        listed = [others.planes[home].find(KEYS[at])[0] for at, home in ((1, B), (2, C))]
        said.append((sorted(others.heard), listed))
    assert said[0] == said[1]
    heard, listed = said[0]
    assert {to for to, _ in heard} == {B, C} and all(A in holders for [holders] in listed)
