"""Changes of state are told once, with the ids as fields."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tensorcast_connector.core.metadata import Metadata
from tensorcast_connector.errors import Unavailable
from tensorcast_connector.types import WorkerId
from tensorcast_connector.wire.store_messages import WorkerRecord
from tensorcast_connector.worker import state_log
from tensorcast_connector.worker.recorder import unrecorded
from tensorcast_connector.worker.state_log import StateLog
from tests.cluster import Cluster, plane
from tests.waiting import until

LOGGER = state_log.logger.name


def told(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """The fields of the lines of one kind."""
    return [vars(each) for each in caplog.records if getattr(each, "event", "") == event]


async def test_joined_shards_and_the_store_lost_and_back(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    (a, b), _ = await cluster.pair()
    ids = {a.worker_id, b.worker_id}
    assert sorted(line["worker_id"] for line in told(caplog, "joined")) == sorted(ids)
    for worker in (a, b):
        held = set()
        for line in told(caplog, "shards"):
            if line["worker_id"] == worker.worker_id:
                assert not held & set(line["gained"]) and set(line["lost"]) <= held
                held = held - set(line["lost"]) | set(line["gained"])
                assert line["held"] == len(held)
        assert held == set(plane(worker).leases.held)
    for number in (1, 2):
        await cluster.lose_store()
        await until(lambda number=number: len(told(caplog, "store-lost")) == 2 * number)
        await cluster.found_store()
        await until(lambda number=number: len(told(caplog, "store-back")) == 2 * number)
    assert all(line["store"] and line["error"] for line in told(caplog, "store-lost"))
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
