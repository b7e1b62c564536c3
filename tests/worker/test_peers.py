"""What a worker answers other workers: redirects, fences, refusals, peers of the former protocol version, and false claims."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from tensorcast_connector.config import KEY_BYTES_MAX, KEYS_PER_MESSAGE_MAX
from tensorcast_connector.core import leases
from tensorcast_connector.core.cluster import shard_key
from tensorcast_connector.core.metadata import Metadata
from tensorcast_connector.core.placement import shard_of
from tensorcast_connector.errors import Exhausted, ProtocolError, TensorcastError, Unavailable
from tensorcast_connector.net import rpc
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.store.kv import Put
from tensorcast_connector.types import page_key
from tensorcast_connector.wire.codec import unpack_indexes
from tensorcast_connector.wire.messages import (
    PROTOCOL_VERSION,
    AskInventory,
    Fenced,
    FindKeys,
    FindPages,
    Hello,
    Message,
    PagesFound,
    Reported,
    ReportKeys,
    ReportPages,
)
from tensorcast_connector.wire.store_messages import ShardRecord
from tensorcast_connector.worker.server import Worker
from tests.cluster import SHARDS, SPACE, Cluster, T, hashes, located, plane
from tests.core.made import find, report
from tests.waiting import until

KEYS = hashes(SHARDS)
PAGES = [page_key(SPACE, key) for key in KEYS]
ALL = list(range(SHARDS))
Connect = Callable[..., Awaitable[RpcClient]]


@pytest.fixture
async def connect(cluster: Cluster) -> AsyncIterator[Connect]:
    """A connection to a worker under any name, of any protocol version."""
    clients: list[RpcClient] = []

    async def connect(worker: Worker, name: str = "somebody/1", version: int = PROTOCOL_VERSION) -> RpcClient:
        client = RpcClient(cluster.network, worker.address, "worker", name, cluster.chance)
        client._hello = Hello(2, version, "worker", name)
        clients.append(client)
        client.start()
        await client.wait_connected(T)
        return client

    yield connect
    for client in clients:
        await client.close()


async def move(cluster: Cluster, shard: int, to: Worker) -> None:
    """The store takes a shard from its home and gives it to another, which no worker asked for."""
    assert cluster.kv is not None
    lease_id = plane(to).member.lease_id
    record = msgspec.json.encode(ShardRecord(to.worker_id, lease_id))
    await cluster.kv.txn([], [Put(shard_key(shard), record, lease_id)])


def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on shards stay where they are, also where another home would be better."""
    monkeypatch.setattr(leases, "HANDOVER_AFTER_S", 1000.0)


# --- redirects and fences ---


async def test_a_home_answers_for_its_shards_and_says_who_has_the_others(cluster: Cluster, connect: Connect) -> None:
    (a, b), (at_a, _) = await cluster.pair()
    await at_a.save(KEYS)
    await cluster.settled()
    for worker in (a, b):
        client = await connect(worker)
        reply = await client.call(find(ALL, PAGES), PagesFound, T)
        found = [reply.holders[index] for index in unpack_indexes(reply.which)]
        mine = {shard for shard in ALL if cluster.at(shard) is worker}
        assert found == [[a.worker_id] if shard in mine else [] for shard in ALL]
        view = plane(worker).view.shards
        assert reply.moved == [(each, *view[each].token, view[each].worker_id) for each in ALL if each not in mine]


async def test_a_caller_that_the_store_tells_nothing_is_redirected_and_reports_to_the_new_home(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    stay(monkeypatch)
    await cluster.start_store()
    second = await cluster.another_store()
    homes = [await cluster.worker(name) for name in ("a", "b")]
    stale = await cluster.worker("c", roles="basic", stores=[second])
    await until(lambda: len(plane(stale).view.shards) == SHARDS and len(plane(stale).view.workers) == 3)
    shard = 3
    await until(lambda: any(shard in plane(worker).catalog.held for worker in homes))
    former, new = sorted(homes, key=lambda worker: shard not in plane(worker).catalog.held)
    at_former, at_stale = await cluster.engine(former), await cluster.engine(stale)
    key, page = KEYS[shard], PAGES[shard]
    await at_former.save([key])
    await at_stale.finds([key])
    await cluster.stop_one_store(second)
    await until(lambda: plane(stale).member.store_error)
    await move(cluster, shard, new)
    await until(lambda: shard in plane(new).catalog.held and shard not in plane(former).catalog.held)
    await until(lambda: located(new, page) == {former.worker_id})
    assert plane(stale).view.shards[shard].worker_id == former.worker_id, "it has not heard of it"
    await at_stale.finds([key])
    assert await at_stale.load([key]) == 1
    known = plane(stale).homes
    assert (known.home(shard), known.token(shard)) == (new.worker_id, plane(new).leases.held[shard])
    await until(lambda: located(new, page) == {former.worker_id, stale.worker_id})


async def test_a_former_home_takes_no_reports_and_knows_who_does(
    cluster: Cluster, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a, b), (at_a, _) = await cluster.pair()
    stay(monkeypatch)
    await at_a.save(KEYS)
    shard = next(iter(plane(a).leases.held))
    before = plane(a).leases.held[shard]
    await move(cluster, shard, b)
    await until(lambda: shard in plane(b).catalog.held and shard not in plane(a).catalog.held)
    await until(lambda: shard in plane(b).leases.held)
    now = plane(b).leases.held[shard]
    assert now > before
    client = await connect(a, b.worker_id)
    late = report(b.worker_id, 10**9, [(shard, *before)], [shard], [PAGES[shard]])
    assert await client.call(late, Reported, T) == Reported([(shard, *now, b.worker_id)], [])
    assert located(a, PAGES[shard]) == set()


async def test_a_former_home_that_asks_for_inventories_is_told_that_it_is_none(
    cluster: Cluster, connect: Connect
) -> None:
    (a, b), _ = await cluster.pair()
    shard = next(iter(plane(b).leases.held))
    token = plane(b).leases.held[shard]
    client = await connect(b, a.worker_id)
    ask = AskInventory(a.worker_id, [(shard, token.incarnation, token.revision - 1)])
    assert await client.call(ask, Fenced, T) == Fenced([(shard, *token, b.worker_id)])
    assert plane(b).homes.home(shard) == b.worker_id


# --- what is refused ---

MANY = KEYS_PER_MESSAGE_MAX + 1
SIZES = f"a page key has 1 to {KEY_BYTES_MAX} bytes"
REFUSED: dict[str, tuple[Message, type[TensorcastError], str]] = {
    "a report for another": (report("b/1", 1, []), ProtocolError, "'somebody/1' speaks for 'b/1'"),
    "an ask for another": (AskInventory("b/1", []), ProtocolError, "'somebody/1' speaks for 'b/1'"),
    "a report of a stranger": (
        report("somebody/1", 1, [(0, 1, 1)], added=[b"k"]), Unavailable, "somebody/1 is not known here yet"),
    "half a key": (FindKeys([0], 4, b"123456"), ProtocolError, "6 bytes are no whole number of page keys of 4 bytes"),
    "keys of no length": (FindKeys([0], 0, b"123456"), ProtocolError, "6 bytes are no whole number of page keys of 0 bytes"),
    "keys of less": (FindKeys([0], -6, b"123456"), ProtocolError, "6 bytes are no whole number of page keys of -6 bytes"),
    "a key that is none of an engine": (FindKeys([0], 257, b"k" * 257), ProtocolError, SIZES),
    "a long key that is new": (
        ReportKeys("somebody/1", 1, [], [], 300, b"k" * 300, b""), ProtocolError, SIZES),
    "half a key that is new": (
        ReportKeys("somebody/1", 1, [], [], 4, b"12345", b""), ProtocolError, "5 bytes are no whole number of page keys"),
    "half a key that is gone": (
        ReportKeys("somebody/1", 1, [], [], 4, b"", b"12345"), ProtocolError, "5 bytes are no whole number of page keys"),
    "too many keys": (FindKeys([0], 1, b"k" * MANY), Exhausted, "65537 keys in one request; the limit is 65536"),
    "too many keys in a report": (
        ReportKeys("somebody/1", 1, [], [], 1, b"k" * KEYS_PER_MESSAGE_MAX, b"k"), Exhausted, "65537 keys"),
    # the former version
    "an empty key": (FindPages([0], [b"k", b""]), ProtocolError, SIZES),
    "a long key in a list": (FindPages([0], [b"k", b"k" * 257]), ProtocolError, SIZES),
    "an empty key that is new": (ReportPages("somebody/1", 1, [], [], [b""], []), ProtocolError, SIZES),
    "an empty key that is gone": (ReportPages("somebody/1", 1, [], [], [], [b""]), ProtocolError, SIZES),
    "too many keys in a list": (FindPages([0], [b"k"] * MANY), Exhausted, "65537 keys in one request; the limit is 65536"),
    "too many keys in a list of a report": (
        ReportPages("somebody/1", 1, [], [], [b"k"] * KEYS_PER_MESSAGE_MAX, [b"k"]), Exhausted, "65537 keys"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused_in_one_line_and_the_connection_goes_on(
    cluster: Cluster, connect: Connect, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    message, kind, why = REFUSED[name]
    await cluster.start_store()
    worker = await cluster.worker("w")
    await cluster.settled()
    client = await connect(worker)
    with pytest.raises(kind, match=why) as error:
        await client.call(message, Message, T)
    assert type(error.value) is kind and "\n" not in str(error.value)
    assert isinstance(await client.call(find([], []), PagesFound, T), PagesFound)
    assert client.connected and not [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert plane(worker).catalog.pages == 0


async def test_shards_that_do_not_exist_harm_nothing(cluster: Cluster, connect: Connect) -> None:
    (a, b), _ = await cluster.pair()
    client = await connect(a, b.worker_id)
    odd = [-1, SHARDS, 2**40]
    assert (await client.call(find(odd, []), PagesFound, T)).moved == [(each, 0, 0, "") for each in odd]
    claim = report(b.worker_id, 10**9, [(each, 9, 9) for each in odd], odd, [b"k"])
    assert (await client.call(claim, Reported, T)).moved == [(each, 0, 0, "") for each in odd]
    ask = AskInventory(b.worker_id, [(each, 9, 9) for each in odd])
    assert (await client.call(ask, Fenced, T)).shards == [(each, 0, 0, "") for each in odd]
    cluster.check()


# --- the former protocol version ---


async def test_lookups_and_reports_of_the_former_version_are_answered_the_same(
    cluster: Cluster, connect: Connect
) -> None:
    """Also with keys of several lengths in one list."""
    (a, b), (at_a, at_b) = await cluster.pair()
    await at_a.save(KEYS[:6])
    await at_b.save(KEYS[2:4])
    await cluster.settled()
    odd = [b"an odd key" + bytes([shard]) for shard in ALL]
    for worker, other in ((a, b), (b, a)):
        client = await connect(worker, other.worker_id, version=2)
        assert client.version == 2
        mixed = [key for pair in zip(PAGES, odd, strict=True) for key in pair]
        reply = await client.call(FindPages(ALL, mixed), PagesFound, T)
        assert reply.moved == (await client.call(find(ALL, PAGES), PagesFound, T)).moved
        found = [set(reply.holders[index]) for index in unpack_indexes(reply.which)]
        one, both = {a.worker_id}, {a.worker_id, b.worker_id}
        expected = [one, one, both, both, one, one, set(), set()]
        mine = plane(worker).catalog.held
        assert found[::2] == [expected[shard] if shard in mine else set() for shard in ALL]
        assert not any(found[1::2])
        grants = [(shard, *token) for shard, token in mine.items()]
        claim = ReportPages(other.worker_id, 10**9, grants, [], odd, [PAGES[shard] for shard in mine])
        assert await client.call(claim, Reported, T) == Reported([], [])
        reply = await client.call(FindPages(list(mine), mixed), PagesFound, T)
        found = [set(reply.holders[index]) for index in unpack_indexes(reply.which)]
        assert [other.worker_id in each for each in found[1::2]] == [shard in mine for shard in ALL]
        assert not any(other.worker_id in each for each in found[::2])


async def test_a_home_of_the_former_version_is_told_and_asked_in_its_words(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: dict[str, set[type[Message]]] = {"a": set(), "b": set()}
    serve = Metadata.serve

    def listening(self: Metadata, message: Message, now: float) -> Message:
        heard[self.worker_id[0]].add(type(message))
        return serve(self, message, now)

    monkeypatch.setattr(Metadata, "serve", listening)
    monkeypatch.setattr(rpc, "PROTOCOL_VERSION", 2)
    (a, b), (at_a, at_b) = await cluster.pair()
    assert {client.version for worker in (a, b) for client in worker.peers._clients.values()} == {2}
    await at_a.save(KEYS)
    await at_b.finds(KEYS)
    assert await at_b.load(KEYS) == SHARDS
    assert heard["a"] >= {FindPages, ReportPages, ReportKeys} and FindKeys not in heard["a"], (
        "b looked pages up, a did not"
    )
    assert heard["b"] >= {FindKeys, ReportPages, ReportKeys} and FindPages not in heard["b"]


# --- false claims ---


async def test_pages_that_a_worker_does_not_have_cost_one_miss_and_are_computed(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (a, _), (at_a, at_b) = await cluster.pair()
    size = 1 << 20  # an arena of four of them
    await at_a.save(KEYS[:4], size)
    await at_b.finds(KEYS[:4])
    a.pages.elsewhere = None  # from now on it tells nobody what it evicts
    await at_a.save(hashes(3, 100), size)
    assert await at_b.lookup(KEYS[:4]) == (4, 0), "it is believed"
    assert await at_b.load(KEYS[:4]) == 1, "the first of a chain is evicted last"
    lines = [record.getMessage() for record in caplog.records if "does not have" in record.getMessage()]
    assert lines == [f"{a.worker_id} was said to hold 3 pages that it does not have (of 4 asked)"]
    assert await at_b.save(KEYS[:4], size) == 3, "they are computed"
    assert await at_b.load(KEYS[:4], "again") == 4
    a.pages.elsewhere = a.peers


async def test_a_claim_of_a_page_in_another_shard_is_not_listed(cluster: Cluster, connect: Connect) -> None:
    """Only what falls into the shards of the report is taken."""
    (a, b), _ = await cluster.pair()
    mine, other = (next(iter(plane(worker).leases.held)) for worker in (a, b))
    client = await connect(a, b.worker_id)
    token = plane(a).leases.held[mine]
    claim = report(b.worker_id, 10**9, [(mine, *token)], [], [PAGES[mine], PAGES[other]])
    assert await client.call(claim, Reported, T) == Reported([], [])
    assert plane(a).catalog.pages == 1 and shard_of(PAGES[mine], SHARDS) == mine
