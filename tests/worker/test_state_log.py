"""Changes of state are told once, with the ids as fields."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tensorcast_connector.config import CLAIM_RETRY_S, SHARDS_SETTLED_AFTER_S
from tensorcast_connector.core.metadata import Metadata
from tensorcast_connector.errors import DeadlineExceeded, Unavailable
from tensorcast_connector.types import Token, WorkerId
from tensorcast_connector.wire.store_messages import WorkerRecord
from tensorcast_connector.worker import state_log
from tensorcast_connector.worker.recorder import Recorder, unrecorded
from tensorcast_connector.worker.state_log import StateLog
from tests.cluster import Cluster, plane
from tests.waiting import until

LOGGER = state_log.logger.name


def told(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """The fields of the lines of one kind."""
    return [vars(each) for each in caplog.records if getattr(each, "event", "") == event]


async def test_joined_shards_and_the_store_lost_and_back(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    monkeypatch.setattr(state_log, "SHARDS_SETTLED_AFTER_S", 0.02)
    (a, b), _ = await cluster.pair()
    ids = {a.worker_id, b.worker_id}
    assert sorted(line["worker_id"] for line in told(caplog, "joined")) == sorted(ids)
    await until(lambda: {line["worker_id"] for line in told(caplog, "shards")} == ids)
    for number in (1, 2):
        await cluster.lose_store()
        await until(lambda number=number: len(told(caplog, "store-lost")) == 2 * number)
        await cluster.found_store()
        await until(lambda number=number: len(told(caplog, "store-back")) == 2 * number)
    assert all(line["store"] and line["error"] for line in told(caplog, "store-lost"))
    for lost, back in zip(told(caplog, "store-lost"), told(caplog, "store-back"), strict=True):
        assert (
            lost["message"].startswith("the store cannot be reached: ")
            and "reads and transfers go on" in lost["message"]
        )
        assert back["away_s"] >= 0 and "is back after" in back["message"]
    assert a.peers.statistics()["store_losses"] == 2
    assert len(told(caplog, "joined")) == 2, "nobody had to join again"


async def test_a_lease_that_ends_is_told_and_a_new_one_too(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    (a, b), _ = await cluster.pair()
    before = plane(a).member.lease_id
    assert cluster.kv is not None
    await cluster.kv.lease_revoke(before)
    await until(lambda: len(told(caplog, "joined")) == 3)
    assert [line["worker_id"] for line in told(caplog, "joined")][2] == a.worker_id
    assert told(caplog, "joined")[2]["lease_id"] not in (0, before)
    assert a.peers.statistics()["leases_lost"] == 1 and b.peers.statistics()["leases_lost"] == 0
    assert any("lease lost" in line for line in a.observer._recorder.lines(a.worker_id))


async def test_a_worker_that_cannot_be_reached_is_told_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    monkeypatch.setattr(state_log, "PEER_UNREACHABLE_AFTER_S", 0.02)
    (a, b), _ = await cluster.pair()
    assert a.peers.states() == {"connected": 1, "connecting": 0, "unreachable": 0}
    assert not told(caplog, "peer-unreachable")
    await cluster.crash(b)
    await until(lambda: a.peers.states()["unreachable"])
    assert a.peers.states() == {"connected": 0, "connecting": 0, "unreachable": 1}
    looks = [line["peer"] for line in told(caplog, "peer-unreachable")]
    await cluster.expire_crashed()
    await until(lambda: told(caplog, "peer-left"))
    assert looks == [line["peer"] for line in told(caplog, "peer-unreachable")] == [b.worker_id], "once"
    assert [line["peer"] for line in told(caplog, "peer-left")] == [b.worker_id]
    assert told(caplog, "peer-unreachable")[0]["error"]
    assert sum(a.peers.states().values()) == 0
    assert not told(caplog, "peer-reachable")


def test_only_one_long_absence_counts(caplog: pytest.LogCaptureFixture) -> None:
    """Connections that are soon there again are nothing to tell, however many there are."""
    caplog.set_level(logging.INFO, LOGGER)
    record = WorkerRecord("a/1", "a", "h:1", 1)
    log = StateLog(Metadata(record, Pages()), unrecorded)
    peer = SimpleNamespace(connected=True, error="cut")
    clients: Any = {WorkerId("b/1"): peer}

    def told_at(now: float, connected: bool) -> list[str]:
        peer.connected = connected
        log.tell(clients, "s:1", now)
        return [getattr(each, "event", "") for each in caplog.records]

    assert told_at(0.0, False) == told_at(0.9, False) == told_at(1.2, True) == []
    assert told_at(1.5, False) == told_at(2.4, False) == [], "0.9 s, twice"
    assert told_at(2.7, False) == told_at(9.0, False) == ["peer-unreachable"]
    assert told_at(9.3, True) == told_at(12.0, True) == ["peer-unreachable", "peer-reachable"]
    assert told_at(13.0, False) == told_at(13.9, False) == ["peer-unreachable", "peer-reachable"]


def test_what_callers_are_told_while_the_store_is_away() -> None:
    worker = Holding()
    worker.at(10.0)
    said = worker.log.store_away(DeadlineExceeded("no answer"), 11.0)
    assert str(said).startswith("the store cannot be reached (no answer); what is there can be read")
    assert isinstance(said, DeadlineExceeded), "nobody knows whether it was done"
    worker.metadata.member._lease_error = Unavailable("gone")
    worker.at(20.0)
    worker.at(50.0)
    assert "cannot be reached for 42 s (x)" in str(worker.log.store_away(Unavailable("x"), 62.0))
    worker.metadata.member._lease_error = None
    worker.at(70.0)
    assert "cannot be reached (x)" in str(worker.log.store_away(Unavailable("x"), 71.0))


class Holding:
    """A StateLog whose worker holds what the test says."""

    def __init__(self) -> None:
        self.metadata = Metadata(WorkerRecord("a/1", "a", "h:1", 1), Pages())
        self.recorder = Recorder(lambda: 0.0, lambda: 0.0)
        self.log = StateLog(self.metadata, self.recorder.record)

    def at(self, now: float, *shards: int) -> None:
        """These are held when the log is looked at."""
        self.metadata.leases.held = dict.fromkeys(shards, Token(1, 1))
        self.log.tell({}, "s:1", now)

    def story(self) -> list[str]:
        return [line.split("  ")[1] for line in self.recorder.lines("")]


def test_shards_that_come_and_go_are_one_line_when_they_have_settled(caplog: pytest.LogCaptureFixture) -> None:
    assert SHARDS_SETTLED_AFTER_S > CLAIM_RETRY_S, "the time between two parts of a handover"
    caplog.set_level(logging.INFO, LOGGER)
    worker = Holding()
    worker.at(0.0)
    worker.at(1.0, 0, 1)
    worker.at(2.0, 0, 1, 2, 3)
    worker.at(3.0, 1, 2, 3)
    worker.at(4.9, 1, 2, 3)
    assert not told(caplog, "shards")
    assert worker.story() == [
        "shards gained a/1, shards 0-1",
        "shards gained a/1, shards 2-3",
        "shards lost a/1, shards 0",
    ]
    worker.at(5.0, 1, 2, 3)
    worker.at(90.0, 1, 2, 3)
    [line] = told(caplog, "shards")
    assert (line["gained"], line["lost"], line["held"]) == ([1, 2, 3], [], 3)
    assert line["message"] == "home of 3 shards of 0 (3 gained)"
    worker.at(100.0, 3, 4)
    worker.at(102.0, 3, 4)
    [_, line] = told(caplog, "shards")
    assert (line["gained"], line["lost"], line["held"]) == ([4], [1, 2], 2)
    assert line["message"] == "home of 2 shards of 0 (1 gained, 2 lost)"
    assert (worker.log.counters["shards_gained"], worker.log.counters["shards_lost"]) == (5, 3)
    assert len(worker.story()) == 5


def test_shards_that_are_soon_back_are_in_the_story_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    worker = Holding()
    worker.at(0.0, 1)
    worker.at(5.0, 1)
    worker.at(6.0)
    worker.at(7.0, 1)
    worker.at(50.0, 1)
    assert [line["held"] for line in told(caplog, "shards")] == [1]
    assert worker.story()[1:] == ["shards lost a/1, shards 1", "shards gained a/1, shards 1"]


def test_shards_that_never_settle_are_told_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    worker = Holding()
    for second in range(1, 200):
        worker.at(float(second), *range(second))
    assert [line["held"] for line in told(caplog, "shards")] == [61, 122, 183]


class Pages:
    """A PageIndex without pages."""

    def inventory(self) -> list[bytes]:
        return []

    def resident(self, key: bytes) -> bool:
        return False


async def test_a_worker_that_can_be_reached_again(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    monkeypatch.setattr(state_log, "PEER_UNREACHABLE_AFTER_S", 0.02)
    (a, b), _ = await cluster.pair()
    client = a.peers._clients[b.worker_id]
    connect = client._connect_once
    refused = True

    async def connect_unless_refused() -> Any:
        if refused:
            raise Unavailable("cut")
        return await connect()

    monkeypatch.setattr(client, "_connect_once", connect_unless_refused)
    assert client._stream is not None
    client._stream.close()
    await until(lambda: told(caplog, "peer-unreachable"))
    refused = False
    await until(lambda: told(caplog, "peer-reachable"))
    assert a.peers.states()["connected"] == 1
    assert len(told(caplog, "peer-unreachable")) == 1 and told(caplog, "peer-unreachable")[0]["error"] == "cut"
