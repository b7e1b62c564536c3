"""KV events over real sockets: what is missed is asked for, and what cannot be had is forgotten."""

import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from smetric_router.blocks import TokenPrompt, array
from smetric_router.errors import UpstreamUnreachable
from smetric_router.server.event_sources import _reachable, discovered
from smetric_router.server.feeds import Feeds
from smetric_router.state.cluster import ClusterState
from smetric_router.state.exact_index import ExactIndex
from smetric_router.types import Chain, InstanceUp, RequestInfo

from ..conftest import until
from ..publisher import Cleared, Publisher, Removed, Stored

ENGINE = "http://127.0.0.1:1"


class Listening:
    """A router's feeds on one engine, and what it then believes."""

    def __init__(self, *publishers: Publisher, answer: Any = None) -> None:
        self.state = ClusterState((ENGINE, "other"), chunk_bytes=64, index_chunks_max=10, exact=ExactIndex(10_000))
        self.state.apply(InstanceUp(ENGINE), 0)
        self.counts: Counter[str] = Counter()
        self._answer = answer
        endpoints = {ENGINE: tuple(each.endpoints for each in publishers)} if answer is None else {}
        self.feeds = Feeds(self.state, (ENGINE,), endpoints, self, lambda: 0.0, self._count)

    def _count(self, kind: str, count: int) -> None:
        self.counts[kind] += count

    async def get(self, instance: str, path: str) -> tuple[int, bytes]:
        return self._answer(path)

    def hit(self, *tokens: int) -> int:
        asked = RequestInfo(chain=Chain((1,), (8,)), tokens=TokenPrompt(array("I", [*tokens, 0])))
        return self.state.view(asked).hits.get(ENGINE, 0)

    @property
    def live(self) -> bool:
        return self.state.statistics(0).feeds == (ENGINE,)


def one(at: int, parent: int | None = None) -> Stored:
    """The block with the one token `at`, called so."""
    return Stored([at], parent, [at], 1)


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    made = Publisher()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def listen() -> AsyncIterator[Callable[..., Any]]:
    started: list[Listening] = []

    async def start(*publishers: Publisher, **options: Any) -> Listening:
        made = Listening(*publishers, **options)
        started.append(made)
        await made.feeds.start()
        await until(lambda: made.live)
        return made

    yield start
    for each in started:
        await each.feeds.stop()
        each.state.check()


async def test_what_was_published_before_is_learnt_and_then_what_comes(publisher: Publisher, listen: Any) -> None:
    await publisher.publish(one(1), sent=False)
    heard = await listen(publisher)
    assert heard.hit(1) == 1
    await publisher.publish(one(2, 1))
    await until(lambda: heard.hit(1, 2) == 2)
    await publisher.publish(Removed([2]))
    await until(lambda: heard.hit(1, 2) == 1)
    await publisher.publish(Cleared())
    await until(lambda: heard.hit(1, 2) == 0)
    assert heard.counts["gaps"] == heard.counts["restarts"] == 0


async def test_after_a_gap_the_missing_ones_are_asked_for(publisher: Publisher, listen: Any) -> None:
    heard = await listen(publisher)
    await publisher.publish(one(1))
    await publisher.publish(one(2, 1), sent=False)
    await publisher.publish(one(3, 2))
    await until(lambda: heard.hit(1, 2, 3) == 3)
    assert publisher.replays == [0, 1]
    assert (heard.counts["gaps"], heard.counts["lost"]) == (1, 0)
    await publisher.publish(one(4, 3))
    await until(lambda: heard.hit(1, 2, 3, 4) == 4)
    assert heard.counts["taken"] == 4, "what came twice was taken once"


async def test_the_very_first_one_is_missed_as_well(publisher: Publisher, listen: Any) -> None:
    heard = await listen(publisher)
    await publisher.publish(one(1), sent=False)
    await publisher.publish(one(2, 1))
    await until(lambda: heard.hit(1, 2) == 2)
    assert heard.counts["gaps"] == 1


async def test_a_gap_that_cannot_be_filled_costs_what_was_known(publisher: Publisher, listen: Any) -> None:
    heard = await listen(publisher)
    await publisher.publish(one(1))
    await until(lambda: heard.hit(1) == 1)
    await publisher.publish(Removed([1]), sent=False)
    del publisher.buffer[:]
    await publisher.publish(one(5))
    await until(lambda: heard.hit(5) == 1)
    assert heard.hit(1) == 0, "it may have been removed, and it was"
    assert heard.counts["lost"] == 1
    await publisher.publish(one(1))
    await until(lambda: heard.hit(1) == 1)


async def test_without_a_replay_socket_as_well(listen: Any) -> None:
    publisher = Publisher(replay=False)
    await publisher.start()
    try:
        heard = await listen(publisher)
        await publisher.publish(one(1))
        await until(lambda: heard.hit(1) == 1)
        publisher.next += 3
        await publisher.publish(one(5))
        await until(lambda: heard.hit(5) == 1)
        assert heard.hit(1) == 0
        publisher.next = 0
        await publisher.publish(one(7))
        await until(lambda: heard.hit(7) == 1)
        assert heard.hit(5) == 0
        assert heard.counts["restarts"] == 1
    finally:
        await publisher.stop()


async def test_numbers_that_begin_anew_are_another_life(publisher: Publisher, listen: Any) -> None:
    heard = await listen(publisher)
    for at in (1, 2, 3):
        await publisher.publish(one(at))
    await until(lambda: heard.hit(3) == 1)
    publisher.buffer, publisher.next = [], 0
    await publisher.publish(one(7), sent=False)
    await publisher.publish(one(8, 7))
    await until(lambda: heard.hit(7, 8) == 2)
    assert heard.hit(1) == heard.hit(3) == 0
    assert heard.counts["restarts"] == 1


@pytest.mark.slow
async def test_an_engine_that_goes_and_comes_back_with_an_empty_cache(publisher: Publisher, listen: Any) -> None:
    heard = await listen(publisher)
    await publisher.publish(one(1))
    await until(lambda: heard.hit(1) == 1)
    await publisher.stop()
    await until(lambda: not heard.live)
    await publisher.start()
    await publisher.publish(one(2), sent=False)
    await until(lambda: heard.live)
    assert (heard.hit(1), heard.hit(2)) == (0, 1)


@pytest.mark.slow
async def test_a_connection_that_broke_costs_nothing(publisher: Publisher, listen: Any) -> None:
    heard = await listen(publisher)
    await publisher.publish(one(1))
    await until(lambda: heard.hit(1) == 1)
    buffer = publisher.buffer
    await publisher.stop()
    await until(lambda: not heard.live)
    await publisher.start()
    publisher.buffer, publisher.next = buffer, 1
    await publisher.publish(one(2, 1), sent=False)
    await until(lambda: heard.live)
    assert heard.hit(1, 2) == 2
    assert heard.counts["restarts"] == 0


async def test_every_rank_has_its_publisher_and_all_must_be_heard(publisher: Publisher, listen: Any) -> None:
    other = Publisher()
    await other.start()
    try:
        heard = await listen(publisher, other)
        await publisher.publish(one(1))
        await other.publish(one(1), one(2, 1), rank=1)
        await until(lambda: heard.hit(1, 2) == 2)
        await other.publish(Cleared(), rank=1)
        await until(lambda: heard.hit(1, 2) == 1)
    finally:
        await other.stop()
    await until(lambda: not heard.live)


async def test_publishers_are_asked_of_the_engine(
    publisher: Publisher, listen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smetric_router.server.feeds.DISCOVERY_INTERVAL_S", 0.01)
    calls: list[str] = []

    def answer(path: str) -> tuple[int, bytes]:
        calls.append(path)
        stream, replay = (each.replace("127.0.0.1", "*") for each in publisher.endpoints.split())
        if len(calls) <= 2:
            raise UpstreamUnreachable("not yet")
        source = (
            f'{{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"{stream}","replay_endpoint":"{replay}"}}'
        )
        return 200, f'{{"0":{source}}}'.encode()

    await publisher.publish(one(1), sent=False)
    heard = await listen(answer=answer)
    assert heard.hit(1) == 1
    assert calls == ["/kv_event_sources", "/server_info", "/kv_event_sources"]


async def test_sglang_says_it_in_its_server_info(publisher: Publisher, listen: Any) -> None:
    stream, replay = (int(each.rpartition(":")[2]) for each in publisher.endpoints.split())

    def answer(path: str) -> tuple[int, bytes]:
        if path != "/server_info":
            return 404, b"{}"
        events = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": stream, "topic": "", "dp_size": 1}
        return 200, json.dumps({"kv_events": {**events, "replay_endpoint_port_base": replay}, "more": [1]}).encode()

    await publisher.publish(one(1), sent=False)
    heard = await listen(answer=answer)
    assert heard.hit(1) == 1


async def test_each_data_parallel_rank_of_sglang_has_ports_of_its_own() -> None:
    events = {"publisher": "zmq", "endpoint_host": "10.0.0.9", "endpoint_port_base": 5557, "dp_size": 2, "topic": "kv"}
    said: list[object] = [{**events, "replay_endpoint_port_base": 6000}, events, {**events, "publisher": "null"}, None]

    class Asked:
        async def get(self, _: str, path: str) -> tuple[int, bytes]:
            return (200, json.dumps({"kv_events": said.pop(0)}).encode()) if path == "/server_info" else (404, b"")

    found = await discovered(Asked(), ENGINE)
    assert [(each.endpoint, each.replay_endpoint, each.topic) for each in found] == [
        ("tcp://10.0.0.9:5557", "tcp://10.0.0.9:6000", "kv"),
        ("tcp://10.0.0.9:5558", "tcp://10.0.0.9:6001", "kv"),
    ]
    assert [each.replay_endpoint for each in await discovered(Asked(), ENGINE)] == [None, None]
    assert await discovered(Asked(), ENGINE) == await discovered(Asked(), ENGINE) == []


def test_where_a_publisher_binds_everything_it_is_reached_at_the_engine() -> None:
    assert _reachable("tcp://*:5557", "host") == "tcp://host:5557"
    assert _reachable("tcp://[::]:5557", "fe80::1") == "tcp://[fe80::1]:5557"
    assert _reachable("tcp://10.0.0.1:5557", "host") == "tcp://10.0.0.1:5557"
    assert _reachable(None, "host") is None


@pytest.mark.slow
async def test_ten_thousand_mutated_frames_do_no_harm(publisher: Publisher, listen: Any) -> None:
    heard = await listen(publisher)
    draw = random.Random(3)
    good = publisher.buffer
    await publisher.publish(one(1), Removed([9]), sent=False)
    whole = (b"", (0).to_bytes(8, "big"), good[0][1])
    for at in range(10_000):
        frames = [bytearray(each) for each in whole]
        # Numbers stay in order now and then, so that mutated payloads are read as well.
        frames[1][:] = draw.randbytes(8) if at % 500 == 0 else (at + 1).to_bytes(8, "big")
        for _ in range(draw.randrange(4)):
            frame = draw.choice((frames[2], draw.choice(frames) if at % 100 == 0 else frames[2]))
            place = draw.randrange(len(frame) + 1)
            frame[place : place + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        if draw.randrange(1000) == 0:
            frames.append(bytearray(b"more"))
        await publisher.send(*map(bytes, frames))
    await until(lambda: heard.counts["garbage"] > 100, 30)
    publisher.buffer, publisher.next = [], 0
    await publisher.publish(one(5), one(6, 5), sent=False)
    await until_sent(publisher, lambda: heard.hit(5, 6) == 2)
    heard.state.check()


async def until_sent(publisher: Publisher, condition: Callable[[], bool]) -> None:
    """Publishes on until it is so: after garbage any number may look new."""
    last = publisher.buffer[-1]
    for _ in range(200):
        await publisher.send(b"", last[0].to_bytes(8, "big"), last[1])
        try:
            await until(condition, 0.1)
        except TimeoutError:
            continue
        return
    raise AssertionError("never")


def of_group(number: int, kind: str, at: int, parent: int | None = None) -> Stored:
    return Stored([at], parent, [at], 1, group_idx=number, kv_cache_spec_kind=kind)


async def test_a_model_whose_first_group_is_a_window(publisher, listen, caplog) -> None:
    """What slides out of the window is removed, and the prompt is still a hit."""
    caplog.set_level("INFO")
    heard = await listen(publisher)
    for at in range(1, 5):
        parent = at - 1 or None
        await publisher.publish(of_group(0, "sliding_window", at, parent), of_group(1, "full_attention", at, parent))
    await publisher.publish(Removed([1, 2], group_idx=0))
    await until(lambda: heard.hit(1, 2, 3, 4) == 4)
    assert heard.live
    await publisher.publish(Removed([3], group_idx=1))
    await until(lambda: heard.hit(1, 2, 3, 4) == 2)
    told = [entry.fields for entry in caplog.records if entry.getMessage() == "KV events: groups of layers"]
    assert [(each["groups"], each["taken"]) for each in told] == [("0: sliding_window, 1: full_attention", 1)]


async def test_where_no_group_tells_how_long_a_hit_is_the_observed_index_stands_in(publisher, listen, caplog) -> None:
    caplog.set_level("INFO")
    heard = await listen(publisher)
    await until(lambda: heard.live)
    await publisher.publish(of_group(0, "mamba", 1))
    await until(lambda: not heard.live)
    (told,) = [entry.fields for entry in caplog.records if entry.getMessage() == "KV events: groups of layers"]
    assert "observed index" in told["cause"]
    await publisher.stop()
    await publisher.start()
    await publisher.publish(of_group(0, "full_attention", 1))
    await until(lambda: heard.live and heard.hit(1) == 1)
