"""A store's metrics are what the documents say, count what happens, and tell when its database does not answer."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tensorcast_connector.errors import NotFound, TensorcastError, Unavailable
from tensorcast_connector.net.metrics_server import serve_metrics
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.store import measured_kv, metrics
from tensorcast_connector.store.incarnation import ensure_incarnation
from tensorcast_connector.store.kv import KeyValue, KvStore
from tensorcast_connector.store.measured_kv import MeasuredKv
from tensorcast_connector.store.metrics import StoreMetrics
from tensorcast_connector.store.server import Store, listen, open_store
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.testing.clock import SettableClock
from tensorcast_connector.types import Address
from tensorcast_connector.wire.messages import Ok
from tensorcast_connector.wire.store_messages import (
    Alive,
    Changes,
    ClaimShards,
    InstanceRecord,
    KeepAlive,
    LeaseGranted,
    PutReplica,
    RegisterInstance,
    RegisterWorker,
    ReplicaRecord,
    RevokeLease,
    Watch,
    WorkerRecord,
)
from tests.documented import check_documented, families
from tests.scrape import Scraped, get, scrape
from tests.waiting import until

S = "tensorcast_store_"
T = 5.0
ANYWHERE = Address("tcp", host="127.0.0.1")


class Breakable(SqliteKv):
    """A database that can stop answering, or answer after a while only."""

    broken = False

    async def range(self, prefix: str) -> tuple[int, list[KeyValue]]:
        if self.broken:
            raise Unavailable("no answer from the disk")
        return await super().range(prefix)


class Running:
    """A store with its metrics, and a client."""

    def __init__(self, folder: Path) -> None:
        self.clock = SettableClock(1000)
        self.kv = Breakable(folder / "s" / "store.db", self.clock)
        self.measured = MeasuredKv(self.kv, self.clock)
        self.store: Store
        self.client: RpcClient
        self.metrics: Address

    async def scrape(self) -> Scraped:
        return await scrape(self.metrics)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    """On loopback."""
    running = Running(tmp_path)
    network = SocketNetwork()
    await ensure_incarnation(running.kv, 77)
    running.store = await open_store(running.measured, "s", 8)
    listener = await listen(network, ANYWHERE, running.store)
    served = await serve_metrics(ANYWHERE, [StoreMetrics(running.store, running.measured)])
    running.metrics = served.address
    running.client = RpcClient(network, listener.address, "client", "test", random.Random(1))
    running.client.start()
    await running.client.wait_connected(T)
    yield running
    await running.client.close()
    await served.close()
    await listener.close()
    await running.measured.close()


def test_the_documented_families_are_those_of_the_code() -> None:
    assert families("Store") == list(metrics.FAMILIES)


async def test_a_store_exports_what_is_documented(running: Running) -> None:
    with pytest.raises(NotFound):
        await running.client.call(KeepAlive(5), Alive, T)
    check_documented(await running.scrape(), "Store", S)


async def test_what_is_counted(running: Running) -> None:
    call = running.client.call
    lease = (await call(RegisterWorker(WorkerRecord("w/1", "w", "h:1", 1), 10), LeaseGranted, T)).lease_id
    await call(RegisterInstance(InstanceRecord("i", "w/1", "vllm", "m", "n"), lease), Ok, T)
    await call(ClaimShards("w/1", lease, [0, 1, 2]), Ok, T)
    await call(PutReplica(ReplicaRecord("a", "w/1", "memory", 5), lease), Ok, T)
    for _ in range(3):
        await call(KeepAlive(lease), Alive, T)
    with pytest.raises(NotFound):
        await call(KeepAlive(999), Alive, T)
    found = await running.scrape()
    assert found.value(S + "requests_total", kind="KeepAlive", outcome="ok") == 3
    assert found.value(S + "requests_total", kind="KeepAlive", outcome="not-found") == 1
    assert found.value(S + "requests_total", kind="RegisterWorker", outcome="ok") == 1
    assert found.value(S + "kv_seconds_count", operation="lease_keepalive") == 4
    assert found.value(S + "kv_errors_total", operation="lease_keepalive") == 0, "that it does not exist is an answer"
    listed = {name: found.value(S + name) for name in ("workers", "instances", "replicas", "incarnation", "backend_up")}
    assert listed == {"workers": 1, "instances": 1, "replicas": 1, "incarnation": 77, "backend_up": 1}
    assert found.value(S + "shards", state="held") == 3 and found.value(S + "shards", state="homeless") == 5
    revision = found.value(S + "revision")
    assert revision == await running.kv.revision()
    await call(RevokeLease(lease), Ok, T)
    found = await running.scrape()
    assert found.value(S + "workers") == found.value(S + "instances") == found.value(S + "shards", state="held") == 0
    assert found.value(S + "revision") > revision


async def test_watches_that_wait_are_seen_and_those_that_are_given_up_counted(running: Running) -> None:
    now = await running.client.call(Watch(0, 0, 0), Changes, T)
    waiting = asyncio.create_task(running.client.call(Watch(77, now.revision, 9000), Changes, 9.0))
    await until(lambda: running.store.watchers == 1)
    assert (await running.scrape()).value(S + "watchers") == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: running.store.watchers == 0)
    found = await running.scrape()
    assert found.value(S + "watchers") == 0
    assert found.value(S + "requests_total", kind="Watch", outcome="cancelled") == 1


async def test_a_database_that_does_not_answer(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, measured_kv.logger.name)
    assert (await get(running.metrics, "/healthz"))[::2] == (200, "ok\n")
    lease = (
        await running.client.call(RegisterWorker(WorkerRecord("w/1", "w", "h:1", 1), 10), LeaseGranted, T)
    ).lease_id
    assert (await running.scrape()).value(S + "workers") == 1
    running.kv.broken = True
    status, _, text = await get(running.metrics, "/healthz")
    assert (status, text) == (503, "no answer from the disk\n")
    with pytest.raises(TensorcastError, match="no answer from the disk"):
        await running.client.call(ClaimShards("w/1", lease, [1]), Ok, T)
    found = await running.scrape()
    assert found.value(S + "backend_up") == 0 and found.value(S + "kv_errors_total", operation="range") >= 2
    assert found.value(S + "workers") == 1, "what was known last"
    assert found.value(S + "requests_total", kind="ClaimShards", outcome="unavailable") == 1
    running.kv.broken = False
    assert (await get(running.metrics, "/healthz"))[0] == 200
    assert (await running.scrape()).value(S + "backend_up") == 1
    events = [getattr(each, "event", "") for each in caplog.records]
    assert [each for each in events if each] == ["backend-lost", "backend-back"], "once each"


async def test_a_database_that_takes_too_long(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "STORE_TIMEOUT_S", 0.01)

    async def never(*_: object) -> Changes:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(running.store, "changes", never)
    status, _, text = await get(running.metrics, "/healthz")
    assert (status, text) == (503, "the database does not answer within 0.01 s\n")


async def test_another_database_in_its_place(tmp_path: Path) -> None:
    """Its incarnation may be lower: numbers are read anew, instead of an error for ever."""
    stores = []
    for number, incarnation in enumerate((9, 5)):
        kv = MeasuredKv(SqliteKv(tmp_path / str(number) / "store.db", SettableClock(1)), SettableClock(1))
        await ensure_incarnation(kv, incarnation)
        stores.append((await open_store(kv, "s", 8), kv))
    source = StoreMetrics(*stores[0])
    await source.refresh()
    source._store = stores[1][0]
    await source.refresh()
    assert source.ill() == "" and (S + "incarnation", (), 5) in list(source.values())
    for _, kv in stores:
        await kv.close()


async def test_each_operation_is_timed_by_the_clock_given(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that fails."""
    real = running.kv.lease_grant

    async def slowly(ttl_s: int) -> int:
        running.clock.advance(0.3)
        return await real(ttl_s)

    monkeypatch.setattr(running.kv, "lease_grant", slowly)
    await running.measured.lease_grant(5)
    cumulative = dict(running.measured.seconds["lease_grant"].cumulative())
    assert (cumulative["0.25"], cumulative["0.5"]) == (0, 1)

    async def fails(ttl_s: int) -> int:
        running.clock.advance(2)
        raise Unavailable("x")

    monkeypatch.setattr(running.kv, "lease_grant", fails)
    with pytest.raises(Unavailable):
        await running.measured.lease_grant(5)
    assert running.measured.seconds["lease_grant"].sum == pytest.approx(2.3)
    assert running.measured.errors["lease_grant"] == 1
    assert running.measured.error is not None
    with pytest.raises(NotFound):
        await running.measured.lease_keepalive(999)
    assert running.measured.error is None, "that it does not exist is an answer"


def test_every_operation_of_the_port_is_there() -> None:
    names: Sequence[str] = [name for name in vars(KvStore) if not name.startswith("_")]
    assert names and all(name in vars(MeasuredKv) for name in names)
