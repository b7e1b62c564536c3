"""Requests that callers cause: on connections of their own, so many at once, the others in turn."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tensorcast_connector.errors import DeadlineExceeded, ProtocolError, Unavailable
from tensorcast_connector.wire.messages import Ok, Ping
from tensorcast_connector.wire.plan_messages import CancelOwnedPlan
from tensorcast_connector.wire.store_messages import ReadRecords, WriteRecords
from tensorcast_connector.worker import links
from tensorcast_connector.worker.links import Lane, StepLanes
from tests.cluster import Cluster
from tests.waiting import until


class Client:
    """A connection whose answers wait until they may come."""

    address = "there"
    error = Unavailable("it is not there")

    def __init__(self, connected: bool = True) -> None:
        self.connected = connected
        self.under_way = 0
        self.times: list[float] = []
        self.left: list[Unavailable] = []
        self.failure: Unavailable | None = None
        self.go = asyncio.Event()
        self.sent: list[Callable[[Any], None]] = []

    async def call(self, _: Any, expected: type[Ok], timeout_s: float) -> Ok:
        self.under_way += 1
        self.times.append(timeout_s)
        try:
            if self.failure is not None:
                raise self.failure
            await self.go.wait()
        finally:
            self.under_way -= 1
        return expected()

    def send(self, _: Any, __: type[Ok], ___: float, done: Callable[[Any], None]) -> Callable[[], bool]:
        if self.failure is not None:
            raise self.failure
        self.sent.append(done)

        def take_back() -> bool:
            if done not in self.sent:
                return False
            self.sent.remove(done)
            return True

        return take_back

    async def wait_connected(self, _: float) -> None:
        self.connected = True

    def try_another(self, error: Unavailable) -> None:
        self.left.append(error)


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LANE_REQUESTS_MAX", 2)


def lanes(client: Any, main: Any) -> StepLanes:
    return StepLanes(client, main)


async def test_more_wait_for_their_turn_and_no_cancel_does() -> None:
    client = Client()
    made = lanes(client, Client())
    steps = [asyncio.ensure_future(made.steps.call(Ping(), Ok, 60)) for _ in range(5)]
    await until(lambda: client.under_way == 2)
    cancel = asyncio.ensure_future(made.cancels.call(Ping(), Ok, 60))
    await until(lambda: client.under_way == 3)
    steps[4].cancel()
    client.go.set()
    await asyncio.gather(cancel, *steps[:4])
    assert len(client.times) == 5


async def test_the_time_is_also_for_the_waiting() -> None:
    client = Client()
    lane = lanes(client, Client()).steps
    first = [asyncio.ensure_future(lane.call(Ping(), Ok, 60)) for _ in range(2)]
    await until(lambda: client.under_way == 2)
    with pytest.raises(DeadlineExceeded, match="too much is asked"):
        await lane.call(Ping(), Ok, 0.01)
    last = asyncio.ensure_future(lane.call(Ping(), Ok, 60))
    await asyncio.sleep(0.01)
    client.go.set()
    await asyncio.gather(last, *first)
    assert len(client.times) == 3 and client.times[-1] < 59.995


async def test_it_is_waited_for_only_if_the_server_is_there() -> None:
    client: Any = Client(connected=False)
    client.go.set()
    main: Any = Client(connected=False)
    with pytest.raises(Unavailable, match="not there"):
        await Lane(client, main).call(Ping(), Ok, 1)
    assert not client.times
    main.connected = True
    await Lane(client, main).call(Ping(), Ok, 1)
    assert client.times


@pytest.mark.parametrize("another", [False, True])
async def test_a_store_that_cannot_serve_is_left(another: bool) -> None:
    client: Any = Client()
    client.failure = Unavailable("its database is not there")
    with pytest.raises(Unavailable, match="database"):
        await Lane(client, client, another).call(Ping(), Ok, 1)
    assert client.left == [client.failure] * another


async def test_what_callers_ask_of_the_store_is_not_in_the_way_of_the_membership(cluster: Cluster) -> None:
    (a, b), _ = await cluster.pair()
    await a.peers.store.call(Ping(), Ok, 5)
    assert a.peers._store_for_callers.connected and a.peers._store_for_callers is not a.peers._store
    there = a.peers.lanes(b.worker_id)
    await there.steps.call(Ping(), Ok, 5)
    assert there is a.peers.lanes(b.worker_id) and there.client is not a.peers.client(b.worker_id)[0]
    await cluster.leave(b)
    await until(lambda: not a.peers._lanes and not there.client.connected)


async def test_one_tenant_does_not_hold_up_another() -> None:
    """However many requests of one wait, the other's next is served after one of them."""
    lane = Lane(Client(), Client())  # type: ignore[arg-type]
    order: list[str] = []

    async def asks(tenant: str) -> None:
        async with lane.turn(60, tenant):
            order.append(tenant)
            await asyncio.sleep(0)

    await asyncio.gather(*(asks("much") for _ in range(20)), *(asks("little") for _ in range(3)))
    assert order.index("little") <= 4 and [each for each in order[:10] if each == "little"] == ["little"] * 3
    assert lane._room._free == 2 and not lane._room._waiting


async def test_who_gives_up_while_it_waits_leaves_its_room_to_others() -> None:
    room = links.FairRoom(1)
    await room.acquire("a")
    waiting = [asyncio.ensure_future(room.acquire(tenant)) for tenant in "aab"]
    await asyncio.sleep(0)
    waiting[0].cancel()  # before it is let in
    await asyncio.sleep(0)
    room.release()
    waiting[1].cancel()  # after it was
    await asyncio.gather(*waiting[:2], return_exceptions=True)
    await asyncio.wait_for(waiting[2], 5)
    room.release()
    assert room._free == 1 and not room._waiting


@pytest.mark.parametrize(
    ("message", "tenant"),
    [
        (ReadRecords("cluster/artifacts/t/x/"), "t"),
        (WriteRecords([("plans/t/k/", 0)], [], []), "t"),
        (WriteRecords([], [("cluster/names/t/n", b"", 0)], []), "t"),
        (CancelOwnedPlan("t/k"), "t"),
        (ReadRecords("running/"), ""),
        (Ping(), ""),
    ],
)
def test_whose_a_request_is(message: Any, tenant: str) -> None:
    assert links.whose(message) == tenant


async def test_what_is_sent_takes_room_until_it_is_answered_or_taken_back() -> None:
    client, told = Client(), list[Any]()
    lane = lanes(client, client).steps
    first, second = (lane.send(Ping(), Ok, 1, told.append) for _ in range(2))
    assert first is not None and second is not None and lane.send(Ping(), Ok, 1, told.append) is None, "no room"
    client.sent.pop(0)(Ok())
    assert told == [Ok()] and first() is False, "which gives no room back a second time"
    third = lane.send(Ping(), Ok, 1, told.append)
    assert third is not None and lane.send(Ping(), Ok, 1, told.append) is None
    assert second() is True and second() is False
    assert lane.send(Ping(), Ok, 1, told.append) is not None and lane.send(Ping(), Ok, 1, told.append) is None


async def test_what_cannot_be_sent_at_once_takes_no_room() -> None:
    client, told = Client(connected=False), list[Any]()
    lane = Lane(client, client, another=True, explain=lambda error: Unavailable(f"explained: {error}"))  # type: ignore[arg-type]
    assert lane.send(Ping(), Ok, 1, told.append) is None
    client.connected, client.failure = True, Unavailable("it has just gone")
    assert lane.send(Ping(), Ok, 1, told.append) is None
    client.failure = ProtocolError("too large")  # type: ignore[assignment]
    with pytest.raises(ProtocolError):
        lane.send(Ping(), Ok, 1, told.append)
    client.failure = None
    assert lane.send(Ping(), Ok, 1, told.append) and lane.send(Ping(), Ok, 1, told.append), (
        "there is room for two still"
    )
    client.sent.pop()(Unavailable("lost"))
    assert str(told[0]) == "explained: lost" and [str(each) for each in client.left] == ["lost"]
