"""Membership over the fake network: joining, heartbeats, restarts, expiry, and what the store refuses."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tensorcast_connector.config import MEMBER_TTL_S
from tensorcast_connector.errors import Conflict, NotFound, ProtocolError, Unavailable
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.store.client import Membership
from tensorcast_connector.store.kv import Put
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.testing.network import FakeNetwork
from tensorcast_connector.types import InstanceId, WorkerId
from tensorcast_connector.wire.messages import (
    GetStatistics,
    Hello,
    Ok,
    Statistics,
    Welcome,
)
from tensorcast_connector.wire.store_messages import (
    InstanceRecord,
    KeepAlive,
    LeaseGranted,
    RegisterInstance,
    RegisterWorker,
    WorkerRecord,
)
from tests.cluster import Cluster, quick
from tests.waiting import until

__all__ = ["quick"]
pytestmark = pytest.mark.usefixtures("quick")


class Members:
    """A store, and memberships in it."""

    def __init__(self, folder: Path) -> None:
        self.network = FakeNetwork(random.Random(7))
        self.cluster = Cluster(self.network, folder)
        self.all: list[Membership] = []
        self.seen: dict[str, list[set[str]]] = {}

    def client(self, name: str) -> RpcClient:
        return RpcClient(self.network, self.cluster.store_address, "worker", name, random.Random(1))

    async def join(self, name: str) -> Membership:
        seen = self.seen.setdefault(name, [])
        record = WorkerRecord(name, name.split("/")[0], "host:1", 1 << 20)
        membership = Membership(self.client(name), record, lambda workers: seen.append(set(workers)))
        self.all.append(membership)
        await membership.start()
        return membership

    async def crash(self, membership: Membership) -> None:
        membership._lease_id = 0
        self.all.remove(membership)
        await membership.close()

    async def listed(self) -> tuple[set[str], set[str]]:
        members = await self.cluster.members()
        return {each.worker_id for each in members.workers}, {each.instance_id for each in members.instances}

    async def advance(self, seconds: float) -> None:
        """Time passes in steps, and the living renew their leases."""
        kv = self.cluster.kv
        assert kv is not None
        for _ in range(4):
            self.cluster.clock.advance(seconds / 4)
            now = self.cluster.clock()
            await until(
                lambda now=now: all(kv._deadline.get(each._lease_id) == now + MEMBER_TTL_S for each in self.all)
            )


@pytest.fixture
async def members(tmp_path: Path) -> AsyncIterator[Members]:
    members = Members(tmp_path)
    await members.cluster.start_store()
    yield members
    for membership in members.all:
        await membership.close()
    await members.cluster.stop_store()


def instance(name: str, worker: str = "a/1") -> InstanceRecord:
    return InstanceRecord(name, worker, "vllm", "m", "n")


async def test_everybody_learns_of_everybody(members: Members) -> None:
    a = await members.join("a/1")
    b = await members.join("b/1")
    await until(lambda: set(a.workers) == set(b.workers) == {"a/1", "b/1"})
    assert await members.listed() == ({"a/1", "b/1"}, set())
    await b.close()
    members.all.remove(b)
    await until(lambda: set(a.workers) == {"a/1"})
    assert members.seen["a/1"] == [{"a/1", "b/1"}, {"a/1"}], "told of each change once"


async def test_who_stops_beating_is_forgotten_after_the_ttl(members: Members) -> None:
    a, b = await members.join("a/1"), await members.join("b/1")
    await until(lambda: len(a.workers) == 2)
    await members.crash(b)
    await members.advance(MEMBER_TTL_S - 1)
    assert len(a.workers) == 2
    await members.advance(2)
    await until(lambda: set(a.workers) == {"a/1"})


async def test_instances_are_listed_while_they_live(members: Members) -> None:
    a = await members.join("a/1")
    a.add_instance(instance("one"))
    a.add_instance(instance("two"))
    await eventually(members, {"one", "two"})
    a.remove_instance(InstanceId("one"))
    a.remove_instance(InstanceId("never there"))
    await eventually(members, {"two"})
    await members.crash(a)
    members.cluster.clock.advance(MEMBER_TTL_S)
    assert await members.listed() == (set(), set()), "they go with their worker's lease"


async def eventually(members: Members, instances: set[str]) -> None:
    async with asyncio.timeout(10):
        while (await members.listed())[1] != instances:  # noqa: ASYNC110 - in the store, not here
            await asyncio.sleep(0.002)


async def test_a_change_while_one_is_being_told_is_not_lost(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    a = await members.join("a/1")
    call = a._client.call

    async def call_and_leave(message: Any, expected: Any, timeout_s: float) -> Any:
        reply = await call(message, expected, timeout_s)
        if isinstance(message, RegisterInstance):
            a.remove_instance(InstanceId("x"))
        return reply

    monkeypatch.setattr(a._client, "call", call_and_leave)
    a.add_instance(instance("x"))
    await until(lambda: not a._instances and not a._unlisted)
    assert (await members.listed())[1] == set()


async def test_an_instance_that_the_store_refuses_holds_nothing_up(
    members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    a = await members.join("a/1")
    a.add_instance(instance("two\nlines"))
    a.add_instance(instance("fine"))
    await eventually(members, {"fine"})
    await members.join("b/1")
    await until(lambda: len(a.workers) == 2)
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "engine 'two\\nlines' is not listed: 'two\\nlines' is no id: 1 to 256 printable characters"
    ]


async def test_a_store_restart_goes_unnoticed(members: Members) -> None:
    a, b = await members.join("a/1"), await members.join("b/1")
    a.add_instance(instance("one"))
    await until(lambda: len(a.workers) == len(b.workers) == 2)
    await eventually(members, {"one"})
    lease = a._lease_id
    await members.cluster.lose_store(a, b)
    assert len(a.workers) == 2, "the last known members stay"
    await members.cluster.start_store()
    await until(lambda: not a._store_lost and not b._store_lost)
    assert a._lease_id == lease and await members.listed() == ({"a/1", "b/1"}, {"one"})


async def test_a_store_that_lost_everything_is_told_everything(members: Members, tmp_path: Path) -> None:
    a, b = await members.join("a/1"), await members.join("b/1")
    a.add_instance(instance("one"))
    await eventually(members, {"one"})
    await until(lambda: len(a.workers) == len(b.workers) == 2)
    await members.cluster.stop_store()
    for file in (tmp_path / "store").iterdir():
        file.unlink()
    await members.cluster.start_store()
    await eventually(members, {"one"})
    await until(lambda: a._revision == b._revision and set(a.workers) == set(b.workers) == {"a/1", "b/1"})


async def test_another_store_at_the_same_revision_is_not_taken_for_the_same(members: Members, tmp_path: Path) -> None:
    a, b = await members.join("a/1"), await members.join("b/1")
    await until(lambda: len(a.workers) == 2 and a._revision == b._revision)
    revision = a._revision
    await members.cluster.stop_store()
    await members.crash(b)
    for file in (tmp_path / "store").iterdir():
        file.unlink()
    other = SqliteKv(tmp_path / "store" / "store.db", members.cluster.clock)
    record = msgspec.json.encode(WorkerRecord("x/1", "x", "host:1", 1))
    while await other.revision() < revision - 1:
        await other.txn([], [Put("workers/x/1", record)])
    await other.close()
    await members.cluster.start_store()
    await until(lambda: set(a.workers) == {"a/1", "x/1"})
    assert a._revision == revision


async def test_a_lease_that_expired_is_registered_anew(members: Members) -> None:
    a = await members.join("a/1")
    a.add_instance(instance("one"))
    await eventually(members, {"one"})
    lease = a._lease_id
    members.cluster.clock.advance(MEMBER_TTL_S)
    await until(lambda: a._lease_id not in (0, lease))
    await eventually(members, {"one"})
    assert WorkerId("a/1") in a.workers


async def test_the_same_id_twice_waits_for_the_former_lease(members: Members) -> None:
    first = await members.join("a/1")
    await until(lambda: first._lease_id)
    second = await members.join("a/1")
    await until(lambda: second._client.connected)
    await asyncio.sleep(0.02)
    assert not second._lease_id
    await members.crash(first)
    members.cluster.clock.advance(MEMBER_TTL_S)
    await until(lambda: second._lease_id)


async def test_the_same_name_again_is_another_member(members: Members) -> None:
    first = await members.join("a/1")
    await until(lambda: first._lease_id)
    await members.crash(first)
    second = await members.join("a/2")
    await until(lambda: set(second.workers) == {"a/1", "a/2"})
    await members.advance(MEMBER_TTL_S + 1)
    await until(lambda: set(second.workers) == {"a/2"})


async def test_without_a_store_it_warns_once_and_goes_on(members: Members, caplog: pytest.LogCaptureFixture) -> None:
    await members.cluster.stop_store()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorcast_connector.store.client.STORE_TIMEOUT_S", 0.01)
        a = await members.join("a/1")
        await until(lambda: a._store_lost)
        await asyncio.sleep(0.05)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
    await members.cluster.start_store()
    await until(lambda: not a._store_lost)


async def test_what_the_store_refuses(members: Members) -> None:
    client = members.client("x")
    client.start()
    await client.wait_connected(5)

    async def register(worker_id: str, ttl_s: int = 6, address: str = "h:1") -> LeaseGranted:
        return await client.call(RegisterWorker(WorkerRecord(worker_id, "n", address, 1), ttl_s), LeaseGranted, 5)

    for ttl_s in (0, -1, 3601):
        with pytest.raises(ProtocolError, match=f"ttl_s={ttl_s} is not within 1..3600"):
            await register("a/1", ttl_s)
    for worker_id in ("", "x" * 257, "a\nb", "\0"):
        with pytest.raises(ProtocolError, match="is no id"):
            await register(worker_id)
    with pytest.raises(ProtocolError, match="is not an address"):
        await register("a/1", address="nowhere")
    with pytest.raises(ProtocolError, match="the store does not take Hello"):
        await client.call(Hello(1, 1, "x", "x"), Welcome, 5)
    lease = (await register("a/1")).lease_id
    with pytest.raises(Conflict, match="worker a/1 is registered already"):
        await register("a/1")
    for lease_id in (0, -1, lease + 1000):
        with pytest.raises(NotFound):
            await client.call(RegisterInstance(instance("i"), lease_id), Ok, 5)
    with pytest.raises(NotFound):
        await client.call(KeepAlive(lease + 1000), Ok, 5)
    assert await members.listed() == ({"a/1"}, set())
    values = (await client.call(GetStatistics(), Statistics, 5)).values
    assert values["requests"] > 10 and values["revision"] > 1
    await client.close()
    with pytest.raises(Unavailable):
        await client.call(GetStatistics(), Statistics, 5)
