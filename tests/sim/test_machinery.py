"""The simulated world itself: clocks, pauses, crashes, and what happens to messages on their way."""

from typing import Any

import pytest

from tensorcast_connector.errors import DeadlineExceeded, TensorcastError, Unavailable
from tensorcast_connector.store.server import Store
from tensorcast_connector.wire.codec import decode
from tensorcast_connector.wire.messages import Failure, Message, Ok
from tensorcast_connector.wire.store_messages import Alive, KeepAlive
from tests.sim.inline import inline
from tests.sim.invariants.base import Invariant, Violation
from tests.sim.network import CALLER_PATIENCE, Network
from tests.sim.world import Clock, Process, World

A, B = "a/1", "b/1"


class Echo(Process):
    """Answers everything, and remembers when and what it was asked."""

    def __init__(self, world: World, name: str, rate: float = 1.0) -> None:
        super().__init__(world, name, name.split("/")[0], Clock(world, rate, 0.0))
        self.asked: list[tuple[float, int]] = []

    def receive(self, body: bytes, answer: Any) -> None:
        message = decode(Store.decoder, body)
        assert isinstance(message, KeepAlive)
        self.asked.append((self.world.now, message.lease_id))
        answer(Alive(message.lease_id) if message.lease_id else Failure("not-found", "no"))


class Pair:
    """Two processes and what the first was answered."""

    def __init__(self, seed: int = 1, rate: float = 1.0) -> None:
        self.world = World(seed, [])
        self.network = Network(self.world)
        self.a, self.b = Echo(self.world, A, rate), Echo(self.world, B)
        self.results: list[tuple[float, Message | TensorcastError]] = []

    def ask(self, number: int = 1, timeout_s: float = 2.0) -> None:
        def done(result: Message | TensorcastError, _: bytes) -> None:
            self.results.append((self.world.now, result))

        self.network.call(self.a, B, KeepAlive(number), timeout_s, done)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_an_answer_arrives_and_an_error_too(pair: Pair) -> None:
    pair.ask(7)
    pair.ask(0)
    pair.world.run(10.0)
    (_, first), (_, second) = sorted(pair.results, key=lambda each: isinstance(each[1], TensorcastError))
    assert first == Alive(7)
    assert isinstance(second, TensorcastError) and second.code == "not-found"
    assert pair.world.counts["reply too late, or the second one"] == 0


@pytest.mark.parametrize(("way", "served"), [(("a", "b"), 0), (("b", "a"), 1)])
def test_a_direction_that_is_cut_loses_what_goes_there(pair: Pair, way: tuple[str, str], served: int) -> None:
    pair.network.cuts[way] = 1
    pair.ask()
    pair.world.run(10.0)
    assert len(pair.b.asked) == served
    [(when, result)] = pair.results
    assert isinstance(result, DeadlineExceeded) and when == pytest.approx(2.0 * CALLER_PATIENCE, abs=0.001)
    pair.network.cuts[way] = 0
    pair.ask()
    pair.world.run(20.0)
    assert pair.results[1][1] == Alive(1)


def test_a_caller_waits_by_its_own_clock() -> None:
    slow = Pair(rate=0.99)
    slow.network.cuts["a", "b"] = 1
    slow.ask()
    slow.world.run(10.0)
    assert slow.results[0][0] == pytest.approx(2.0 * CALLER_PATIENCE / 0.99, abs=0.001)


def test_a_request_can_be_served_twice_and_late(pair: Pair) -> None:
    pair.network.duplication = 1.0
    for number in range(1, 30):
        pair.ask(number)
    pair.world.run(60.0)
    assert len(pair.b.asked) == 58 and len(pair.results) == 29
    assert max(when for when, _ in pair.b.asked) > 2.0 * CALLER_PATIENCE, "after its caller had given up"
    assert pair.world.counts["reply too late, or the second one"] == 29


def test_messages_are_lost_and_overtake_each_other(pair: Pair) -> None:
    pair.network.loss = 0.5
    for number in range(1, 101):
        pair.ask(number)
    pair.world.run(10.0)
    order = [number for _, number in pair.b.asked]
    assert 25 < len(order) < 75 and order != sorted(order)


def test_who_is_not_there_refuses_or_is_silent(pair: Pair) -> None:
    pair.b.die()
    for _ in range(40):
        pair.ask()
    pair.world.run(10.0)
    kinds = {type(result) for _, result in pair.results}
    assert kinds == {Unavailable, DeadlineExceeded} and not pair.b.asked


def test_a_paused_process_gets_everything_later_and_in_order(pair: Pair) -> None:
    pair.b.pause()
    for number in range(1, 6):
        pair.ask(number)
        pair.world.run(pair.world.now + 0.1)
    assert not pair.b.asked
    pair.world.run(5.0)
    pair.b.resume()
    pair.world.run(6.0)
    assert [number for _, number in pair.b.asked] == [1, 2, 3, 4, 5]
    assert {when for when, _ in pair.b.asked} == {5.0}


def test_nothing_happens_in_a_dead_process(pair: Pair) -> None:
    rung: list[str] = []
    pair.a.after(1.0, rung.append, "alive")
    pair.b.after(1.0, rung.append, "dead")
    pair.b.die()
    pair.world.run(2.0)
    assert rung == ["alive"]


def test_a_clock_drifts_and_jumps(pair: Pair) -> None:
    clock = Clock(pair.world, 1.01, 100.0)
    pair.world.run(50.0)
    assert clock() == pytest.approx(150.5)
    assert clock.when(160.6) == pytest.approx(60.0)
    clock.jump(7.0)
    assert clock() == pytest.approx(157.5)


def test_an_invariant_is_asked_after_every_event_and_stops_the_world() -> None:
    class Three(Invariant):
        seen = 0

        def after_event(self, world: World, process: Process) -> None:
            self.seen += 1
            world.require(self.seen < 3, f"{process.name} once more")

    world = World(1, [Three()])
    echo = Echo(world, A)
    for _ in range(5):
        echo.after(1.0, lambda: None)
    echo.after(0.5, lambda: False)  # nothing happened
    with pytest.raises(Violation, match="a/1 once more"):
        world.run(2.0)
    assert world.events == 3


def test_a_coroutine_that_waits_is_not_run_inline() -> None:
    async def quick() -> Message:
        return Ok()

    class Waiting:
        def __await__(self) -> Any:
            yield

    async def slow() -> None:
        await Waiting()

    assert inline(quick()) == Ok()
    with pytest.raises(AssertionError, match="waits for something"):
        inline(slow())
