"""The scheduler side when the weights of its ranks change: who shares what with whom, and when."""

from typing import Any

import pytest

from tensorcast_connector.engines.vllm.weights_state import CHANGING, STARTED_WITH, WeightsReport
from tensorcast_connector.wire.messages import LookupResult
from tests.engines.vllm.test_scheduler_side import BLOCK, World

OLD, NEW = b"k" * 16, b"n" * 16
B = WeightsReport(1, "b")


@pytest.fixture
def world() -> Any:
    world = World(ranks=2)
    yield world
    world.side.check()


def saves(world: World, name: str) -> list[Any]:
    return world.side.step({name: 4 * BLOCK}, lambda _: [1, 2, 3, 4]).saves


def adopt(world: World) -> None:
    assert world.side.weights_heard({B: 2}) == "b"
    world.side.use_keyspaces([NEW] * 2)


def test_new_weights_count_once_all_ranks_have_the_same(world: World) -> None:
    assert world.side.weights_heard({B: 1}) is None
    world.new(64)
    assert world.worker.lookups == [] and saves(world, "r") == [], "some rank has others: nothing is shared"
    assert world.side.asks_weights
    assert world.side.weights_heard({B: 1, WeightsReport(): 1}) is None
    assert world.side.weights_heard({WeightsReport(1, CHANGING): 2}) is None
    adopt(world)
    assert not world.side.asks_weights
    world.new(64, "later")
    assert world.worker.lookups[-1][1] == [NEW] * 2
    assert world.side.weights_heard({B: 2}) is None, "nothing new"


def test_jobs_say_under_which_weights_they_were_planned(world: World) -> None:
    request = world.new(64)
    world.worker.futures[0].set_result(LookupResult(4, 4))
    world.side.matched_tokens(request, 0)
    world.side.allocated(request, [1, 2, 3, 4], 64)
    (load,) = world.side.step({}, lambda _: []).loads
    assert load.changes == 0
    adopt(world)
    assert saves(world, "r") == [], "alive across the change"
    world.new(64, "later")
    (save,) = saves(world, "later")
    assert (save.changes, save.keyspaces) == (1, [NEW] * 2)
    third = world.new(64, "third")
    world.worker.futures[-1].set_result(LookupResult(4, 4))
    world.side.matched_tokens(third, 0)
    world.side.allocated(third, [5, 6, 7, 8], 64)
    (load,) = world.side.step({}, lambda _: []).loads
    assert (load.changes, load.keyspaces) == (1, [NEW] * 2)


def test_after_a_reset_a_request_waits_for_the_ranks_and_shares_under_what_they_have(world: World) -> None:
    world.side.use_keyspaces([b"private" * 2] * 2)
    world.side.reset()
    request = world.new(64)
    assert world.worker.lookups == [] and world.side.asks_weights
    assert world.side.matched_tokens(request, 0) == (None, False)
    adopt(world)
    assert world.side.matched_tokens(request, 0) == (None, False), "looked up now"
    assert world.worker.lookups[0][1] == [NEW] * 2
    world.worker.futures[0].set_result(LookupResult(0, 0))
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert saves(world, "r")[0].keyspaces == [NEW] * 2


def test_ranks_that_have_the_same_weights_after_a_reset_leave_the_private_epoch(world: World) -> None:
    world.side.use_keyspaces([b"private" * 2] * 2)
    world.side.reset()
    assert world.side.weights_heard({WeightsReport(0, STARTED_WITH): 2}) is None
    assert not world.side.asks_weights
    world.new(64)
    assert world.worker.lookups[0][1] == [b"private" * 2] * 2


def test_ranks_that_do_not_answer_hold_nobody_up_for_longer_than_a_lookup(world: World) -> None:
    world.side.use_keyspaces([OLD] * 2)
    world.side.reset()
    request = world.new(64)
    world.now += 100
    assert world.side.matched_tokens(request, 0) == (None, False), "counted from when it is first asked about"
    world.now += 0.6
    assert world.side.matched_tokens(request, 0) == (None, False), "looked up under what is known"
    assert len(world.worker.lookups) == 1
    world.new(64, "later")
    assert len(world.worker.lookups) == 2, "only once"


def test_an_engine_cache_that_was_not_emptied_keeps_requests_that_hit_it_from_saving(world: World) -> None:
    world.pins.cached = True
    adopt(world)
    hit, missed = world.new(64, "hit"), world.new(64, "missed")
    for future in world.worker.futures:
        future.set_result(LookupResult(0, 0))
    world.side.matched_tokens(hit, 2 * BLOCK)
    world.side.matched_tokens(missed, 0)
    assert saves(world, "hit") == [] and len(saves(world, "missed")) == 1
    world.side.reset()
    world.side.weights_heard({B: 2})
    again = world.new(64, "again")
    world.side.matched_tokens(again, 2 * BLOCK)
    assert saves(world, "again") == [], "a reset that did not empty it changes nothing"
    world.pins.cached = False
    world.side.reset()
    world.side.weights_heard({B: 2})
    last = world.new(64, "last")
    world.side.matched_tokens(last, 2 * BLOCK)
    assert len(saves(world, "last")) == 1


def test_an_empty_cache_at_the_change_holds_nothing_stale(world: World) -> None:
    adopt(world)
    request = world.new(64)
    world.worker.futures[0].set_result(LookupResult(0, 0))
    world.side.matched_tokens(request, 2 * BLOCK)
    assert len(saves(world, "r")) == 1
