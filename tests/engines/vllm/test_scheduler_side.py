"""The scheduler side without an engine: what it answers, asks for and pins."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from tensorcast_connector.config import INSTANCE_REPORT_INTERVAL_S, SAVE_BACKLOG_BLOCKS_MAX
from tensorcast_connector.engines.options import ConnectorConfig
from tensorcast_connector.engines.vllm.scheduler_side import SKIP_LOAD, SKIP_SAVE, SchedulerSide
from tensorcast_connector.errors import Unavailable
from tensorcast_connector.wire.messages import (
    LookupResult,
)

BLOCK = 16


@dataclass
class FakeRequest:
    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    lora_request: Any = None
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.block_hashes = [bytes([i]) * 32 for i in range(self.num_prompt_tokens // BLOCK)]


class FakeWorker:
    def __init__(self) -> None:
        self.connected = True
        self.lookups: list[tuple[str, list[bytes], list[bytes]]] = []
        self.futures: list[Future[LookupResult]] = []
        self.released: list[str] = []
        self.reports: list[tuple[int, int, float | None]] = []

    def report(self, running: int, waiting: int, kv_usage: float | None) -> None:
        self.reports.append((running, waiting, kv_usage))

    def lookup(
        self, lookup_id: str, keyspaces: Sequence[bytes], hashes: Sequence[bytes], timeout_s: float
    ) -> Future[LookupResult]:
        self.lookups.append((lookup_id, list(keyspaces), list(hashes)))
        self.futures.append(Future())
        return self.futures[-1]

    def release(self, hold_ids: Sequence[str]) -> None:
        self.released += hold_ids


class FakePins:
    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.cached = False

    def pin(self, block_ids: Sequence[int]) -> None:
        self.pinned += block_ids

    def usage(self) -> float:
        return 0.25

    def caching(self) -> bool:
        return self.cached

    def unpin(self, block_ids: Sequence[int]) -> None:
        for each in block_ids:
            self.pinned.remove(each)


class World:
    """One scheduler side with its fakes and a clock."""

    def __init__(self, ranks: int = 1, loads: bool = True, saves: bool = True, **config: Any) -> None:
        self.now = 100.0
        self.worker, self.pins = FakeWorker(), FakePins()
        self.side = SchedulerSide(
            ConnectorConfig("unix:/w", **config), self.worker, lambda: self.now, BLOCK, ranks, loads, saves
        )
        self.side.bind_pins(self.pins)
        self.side.use_keyspaces([b"k" * 16] * ranks)

    def new(self, tokens: int, name: str = "r", **fields: Any) -> FakeRequest:
        request = FakeRequest(name, tokens, **fields)
        self.side.on_new_request(request)
        return request


@pytest.fixture
def world() -> Any:
    world = World()
    yield world
    world.side.check()


def test_a_hit_is_loaded_into_the_blocks_that_follow_the_local_ones(world: World) -> None:
    request = world.new(100)
    assert world.side.matched_tokens(request, 32) == (None, False)
    world.worker.futures[0].set_result(LookupResult(5, 4))
    assert world.side.matched_tokens(request, 32) == (48, True)
    assert world.side.matched_tokens(request, 32) == (48, True), "asked again before blocks could be had"
    world.side.allocated(request, [10, 11, 12, 13, 14, 15, 16], 48)
    (load,) = world.side.step({}, lambda _: []).loads
    assert (load.block_ids, load.block_hashes) == ([12, 13, 14], request.block_hashes[2:5])
    assert world.side.split_by_source(request, 48) == (32, 16)
    assert world.worker.released == []
    world.side.loads_finished(["r"])
    assert world.worker.released == ["0:r"]
    assert world.side.step({}, lambda _: []).loads == []


def test_the_second_allocation_after_a_load_asks_for_nothing(world: World) -> None:
    request = world.new(64)
    world.worker.futures[0].set_result(LookupResult(4, 4))
    world.side.matched_tokens(request, 0)
    world.side.allocated(request, [1, 2, 3, 4], 64)
    world.side.allocated(request, [1, 2, 3, 4, 5], 0)
    assert len(world.side.step({}, lambda _: []).loads) == 1
    assert world.side.matched_tokens(request, 0) == (0, False), "after a failed load it is computed, not asked again"


def test_a_late_lookup_is_a_miss_and_is_given_up(world: World) -> None:
    request = world.new(64)
    world.now += 0.49
    assert world.side.matched_tokens(request, 0) == (None, False)
    world.now += 0.02
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert world.worker.released == ["0:r"]
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert world.side.counters["lookups_late"] == 1


def test_a_failed_lookup_is_a_miss(world: World) -> None:
    request = world.new(64)
    world.worker.futures[0].set_exception(Unavailable("gone"))
    assert world.side.matched_tokens(request, 0) == (0, False)


def test_nothing_is_asked_while_there_is_no_worker_or_no_epoch() -> None:
    world = World()
    world.worker.connected = False
    assert world.side.matched_tokens(world.new(64), 0) == (0, False)
    world.worker.connected = True
    world.side.use_keyspaces(None)
    request = world.new(64, "s")
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert world.side.step({"s": 64}, lambda _: [1, 2, 3, 4]).saves == []
    assert world.worker.lookups == []


@pytest.mark.parametrize(
    "fields",
    [{"lora_request": object()}, {"skip_reading_prefix_cache": True}, {"kv_transfer_params": {SKIP_LOAD: True}}],
)
def test_requests_that_must_not_load(world: World, fields: dict[str, Any]) -> None:
    assert world.side.matched_tokens(world.new(64, **fields), 0) == (0, False)
    assert world.worker.lookups == []


@pytest.mark.parametrize("fields", [{"lora_request": object()}, {"kv_transfer_params": {SKIP_SAVE: True}}])
def test_requests_that_must_not_save(world: World, fields: dict[str, Any]) -> None:
    world.new(64, **fields)
    assert world.side.step({"r": 64}, lambda _: [1, 2, 3, 4]).saves == []


def test_the_role_decides_who_loads_and_who_saves() -> None:
    consumer, producer = World(saves=False), World(loads=False)
    request = consumer.new(64)
    assert len(consumer.worker.lookups) == 1
    assert consumer.side.step({"r": 64}, lambda _: [1, 2, 3, 4]).saves == []
    request = producer.new(64)
    assert producer.side.matched_tokens(request, 0) == (0, False)
    assert len(producer.side.step({"r": 64}, lambda _: [1, 2, 3, 4]).saves) == 1


def test_short_hits_are_not_worth_a_load() -> None:
    world = World(min_load_blocks=3)
    request = world.new(100)
    world.worker.futures[0].set_result(LookupResult(4, 4))
    assert world.side.matched_tokens(request, 32) == (0, False)
    assert world.worker.released == ["0:r"]


def test_full_blocks_are_saved_once_and_stay_pinned_until_every_rank_has_copied() -> None:
    world = World(ranks=2)
    request = world.new(70)
    table = [7, 8, 9, 10, 11]
    (save,) = world.side.step({"r": 40}, lambda _: table).saves
    assert (save.block_ids, save.block_hashes) == ([7, 8], request.block_hashes[:2])
    request.num_computed_tokens = 40
    (second,) = world.side.step({"r": 30}, lambda _: table).saves
    assert second.block_ids == [9, 10], "the fifth block is not full"
    assert sorted(world.pins.pinned) == [7, 8, 9, 10]
    world.side.request_finished("r")
    assert sorted(world.pins.pinned) == [7, 8, 9, 10], "the end of the request must not free what is being copied"
    world.side.saves_done({save.job_id: 1})
    world.side.saves_done({second.job_id: 2})
    assert sorted(world.pins.pinned) == [7, 8]
    world.side.saves_done({save.job_id: 1, 999: 1})
    assert world.pins.pinned == []
    assert world.side.blocks_pinned == 0


def test_a_generated_block_is_saved_when_its_hash_is_known_unless_told_otherwise() -> None:
    for save_decode, expected in ((True, [4]), (False, [])):
        world = World(save_decode=save_decode)
        request = world.new(64)
        world.side.step({"r": 64}, lambda _: [0, 1, 2, 3])
        request.num_computed_tokens = 79
        (job, *_), hashed = world.side.step({"r": 1}, lambda _: [0, 1, 2, 3, 4]).saves or [None], request.block_hashes
        assert job is None, "its last token is computed, but its hash is not known yet"
        hashed.append(b"n" * 32)
        request.num_computed_tokens = 80
        saves = world.side.step({"r": 1}, lambda _: [0, 1, 2, 3, 4, 5]).saves
        assert [block for save in saves for block in save.block_ids] == expected


def test_blocks_are_saved_later_when_the_worker_was_away(world: World) -> None:
    request = world.new(64)
    world.worker.connected = False
    assert world.side.step({"r": 32}, lambda _: [1, 2, 3, 4]).saves == []
    world.worker.connected = True
    request.num_computed_tokens = 32
    (save,) = world.side.step({"r": 32}, lambda _: [1, 2, 3, 4]).saves
    assert save.block_ids == [1, 2, 3, 4]


def test_what_the_backlog_has_no_room_for_is_saved_later(world: World) -> None:
    world.side._backlog_blocks_max = 3
    request = world.new(80)
    (first,) = world.side.step({"r": 80}, lambda _: [1, 2, 3, 4, 5]).saves
    request.num_computed_tokens = 80
    assert first.block_ids == [1, 2, 3]
    assert world.side.step({"r": 1}, lambda _: [1, 2, 3, 4, 5]).saves == []
    world.side.saves_done({first.job_id: 1})
    (second,) = world.side.step({"r": 1}, lambda _: [1, 2, 3, 4, 5]).saves
    assert second.block_ids == [4, 5] and world.pins.pinned == [4, 5]


def test_the_backlog_of_pinned_blocks_is_bounded(world: World) -> None:
    tokens = (SAVE_BACKLOG_BLOCKS_MAX + 1) * BLOCK
    request = FakeRequest("r", 0)
    request.block_hashes = [i.to_bytes(32, "big") for i in range(SAVE_BACKLOG_BLOCKS_MAX + 1)]
    world.side.on_new_request(request)
    world.side.step({"r": tokens}, lambda _: list(range(SAVE_BACKLOG_BLOCKS_MAX + 1)))
    assert len(world.pins.pinned) == world.side.blocks_pinned == SAVE_BACKLOG_BLOCKS_MAX


def test_a_new_epoch_ends_what_the_old_one_began(world: World) -> None:
    request = world.new(64)
    world.worker.futures[0].set_result(LookupResult(4, 4))
    world.side.use_keyspaces([b"n" * 16])
    assert world.side.matched_tokens(request, 0) == (0, False), "pages of other weights"
    assert world.side.step({"r": 64}, lambda _: [1, 2, 3, 4]).saves == [], "alive across the change: saves nothing"
    later = world.new(64, "later")
    assert world.worker.lookups[-1][1] == [b"n" * 16]
    assert world.side.step({"later": 64}, lambda _: [1, 2, 3, 4]).saves[0].keyspaces == [b"n" * 16]
    assert later.request_id == "later"


def test_a_preempted_request_is_looked_up_again(world: World) -> None:
    request = world.new(64)
    world.worker.futures[0].set_result(LookupResult(0, 0))
    assert world.side.matched_tokens(request, 0) == (0, False)
    request.num_preemptions = 1
    assert world.side.matched_tokens(request, 0) == (None, False)
    world.worker.futures[1].set_result(LookupResult(4, 4))
    assert world.side.matched_tokens(request, 0) == (64, True)


def test_an_aborted_request_leaves_nothing_behind(world: World) -> None:
    request = world.new(64)
    world.worker.futures[0].set_result(LookupResult(4, 4))
    world.side.matched_tokens(request, 0)
    world.side.allocated(request, [1, 2, 3, 4], 64)
    world.side.request_finished("r")
    assert world.worker.released == ["0:r"]
    assert world.side.step({}, lambda _: []).loads == []
    world.side.request_finished("r")
    world.side.loads_finished(["r"])
    assert world.side.matched_tokens(request, 0) == (0, False)


def test_the_engine_says_how_it_is_doing_at_an_interval_and_when_it_is_idle(world: World) -> None:
    world.side.bind_pins(world.pins)
    requests = [FakeRequest(f"r{number}", BLOCK) for number in range(3)]
    for request in requests:
        world.side.on_new_request(request)
    for _ in range(3):
        world.side.step({"r0": 1, "r1": 1}, lambda _: [])
    assert world.worker.reports == [(2, 1, 0.25)]
    world.now += INSTANCE_REPORT_INTERVAL_S
    world.side.step({"r0": 1}, lambda _: [])
    assert world.worker.reports[1:] == [(1, 2, 0.25)]
    for request in requests:
        world.side.request_finished(request.request_id)
    assert world.worker.reports[2:] == [(0, 0, 0.25)]


def test_an_engine_that_cannot_say_how_it_is_doing_serves_on(world: World) -> None:
    world.side.bind_pins(world.pins)
    world.pins.usage = lambda: 1 / 0  # type: ignore[method-assign]
    world.side.on_new_request(FakeRequest("r", BLOCK))
    for _ in range(2):
        assert world.side.step({"r": 1}, lambda _: []) is not None
        world.now += INSTANCE_REPORT_INTERVAL_S
    world.side.request_finished("r")
    assert world.worker.reports == []
