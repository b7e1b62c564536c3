"""A lookup has one deadline, however many homes are asked and wherever they redirect to."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from tensorcast_connector.config import FIND_TIMEOUT_S, LOOKUP_DEADLINE_S
from tensorcast_connector.core.segments import Segments
from tensorcast_connector.errors import DeadlineExceeded
from tensorcast_connector.types import Address, WorkerId
from tensorcast_connector.wire.codec import pack_indexes
from tensorcast_connector.wire.messages import PROTOCOL_VERSION, FindKeys, Message, PagesFound, ShardAt
from tensorcast_connector.worker.pages import Pages
from tensorcast_connector.worker.peers import Peers
from tests.core.made import A, B, C, D, everything, key, worker
from tests.core.test_metadata import Plane

ARENA_BYTES = 1 << 14
PATIENCE = 1.25  # net/rpc_client.py: the caller waits longer than it tells the other side
Answer = Callable[[FindKeys, float], Awaitable[PagesFound]]


class Asking:
    """A, which asks B, C and D, whose answers are the test's; and the time."""

    def __init__(self) -> None:
        self.now = 100.0
        pages = Pages(SimpleNamespace(bytes=ARENA_BYTES), Segments(ARENA_BYTES, ARENA_BYTES, 4096))  # type: ignore[arg-type]
        network: Any = None
        store = Address("tcp", host="127.0.0.1", port=1)
        self.peers = Peers(worker(A), pages, network, [store], random.Random(1), lambda: self.now)
        plane = Plane(A)
        plane.metadata = self.peers.metadata
        plane.sees(everything([A, B, C, D], {0: (B, 1), 1: (C, 2), 2: (D, 3)}))
        self.asked: list[tuple[str, float]] = []  # and how much time it was given

    def answers(self, name: str, answer: Answer) -> None:
        """What this worker answers from now on."""

        async def call(message: Message, _: type[Message], timeout_s: float) -> Message:
            assert isinstance(message, FindKeys)
            self.asked.append((name, timeout_s))
            return await answer(message, timeout_s)

        client: Any = SimpleNamespace(connected=True, version=PROTOCOL_VERSION, call=call)
        self.peers._clients[WorkerId(f"{name}/1")] = client

    def after(self, seconds: float, holder: str, *moved: ShardAt) -> Answer:
        """An answer after so long: `holder` has everything."""

        async def answer(message: FindKeys, _: float) -> PagesFound:
            await asyncio.sleep(0)
            self.now += seconds
            return PagesFound([[], [holder]], pack_indexes([1] * len(message.listed)), list(moved))

        return answer


async def silent(_: FindKeys, timeout_s: float) -> PagesFound:
    raise DeadlineExceeded(f"did not answer within {timeout_s:g} s")


async def test_who_is_redirected_to_gets_the_time_that_is_left() -> None:
    asking = Asking()
    asking.answers("b", asking.after(0.8 * FIND_TIMEOUT_S, "old", (0, 1, 20, C)))
    asking.answers("c", asking.after(0.001, "new"))
    assert await asking.peers.holders([key(0)]) == [["new"]]
    (first, whole), (second, rest) = asking.asked
    assert (first, second, whole) == ("b", "c", FIND_TIMEOUT_S)
    assert 0 < rest <= 0.2 * FIND_TIMEOUT_S + 1e-9
    assert PATIENCE * FIND_TIMEOUT_S < LOOKUP_DEADLINE_S, "an engine waits for the whole of it"


async def test_nobody_is_asked_when_no_time_is_left_and_what_was_said_counts() -> None:
    """A home may answer until its caller gives up, which is later than it was told."""
    asking = Asking()
    asking.answers("b", asking.after(PATIENCE * FIND_TIMEOUT_S - 0.001, "old", (0, 1, 20, C)))
    asking.answers("c", silent)
    assert await asking.peers.holders([key(0)]) == [["old"]]
    assert [name for name, _ in asking.asked] == ["b"]
    assert asking.peers.traffic.counters["finds_failed"] == 1
    assert await asking.peers.holders([key(0)]) == [()], "the next lookup knows where to ask"
    assert [name for name, _ in asking.asked] == ["b", "c"]


async def test_a_redirect_does_not_wait_for_a_home_that_is_silent() -> None:
    asking = Asking()
    answered = asyncio.Event()

    async def slow(message: FindKeys, timeout_s: float) -> PagesFound:
        await answered.wait()
        asking.now += PATIENCE * timeout_s
        return await silent(message, timeout_s)

    async def new(message: FindKeys, _: float) -> PagesFound:
        answered.set()
        return PagesFound([[], ["new"]], pack_indexes([1] * len(message.listed)), [])

    asking.answers("b", slow)
    asking.answers("c", asking.after(0.001, "old", (1, 1, 20, D)))
    asking.answers("d", new)
    async with asyncio.timeout(5):
        assert await asking.peers.holders([key(0), key(1)]) == [(), ["new"]]
    assert [name for name, _ in asking.asked] == ["b", "c", "d"]
