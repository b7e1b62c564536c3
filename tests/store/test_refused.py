"""What the store refuses: in one line, and nothing has changed."""

import pytest

from tensorcast_connector.core.cluster import (
    INCARNATION,
)
from tensorcast_connector.errors import NotFound, ProtocolError, TensorcastError, Unavailable
from tensorcast_connector.store.kv import Delete
from tensorcast_connector.wire.messages import Hello, Message
from tensorcast_connector.wire.store_messages import (
    ClaimShards,
    KeepAlive,
    PutReplica,
    RegisterInstance,
    RegisterWorker,
    ReleaseShards,
    RevokeLease,
)
from tests.store.served import LIFE, Served, instance, record, replica

REFUSED: dict[str, tuple[Message, type[TensorcastError], str]] = {
    "no time": (RegisterWorker(record(), 0), ProtocolError, r"ttl_s=0 is not within 1..3600"),
    "negative time": (RegisterWorker(record(), -1), ProtocolError, r"ttl_s=-1 is not within 1..3600"),
    "too much time": (RegisterWorker(record(), 3601), ProtocolError, r"ttl_s=3601 is not within 1..3600"),
    "no id": (RegisterWorker(record(""), 6), ProtocolError, "'' is no id: 1 to 256 printable characters"),
    "a long id": (RegisterWorker(record("x" * 257), 6), ProtocolError, "is no id"),
    "an id of two lines": (RegisterWorker(record("a\nb"), 6), ProtocolError, r"'a\\nb' is no id"),
    "no address": (RegisterWorker(record(address="nowhere"), 6), ProtocolError, "address='nowhere' is not an address"),
    "a Unix socket": (
        RegisterWorker(record(address="unix:/a"), 6), ProtocolError, "other workers can only reach a TCP address"),
    "an instance of two lines": (RegisterInstance(instance("a\nb"), 1), ProtocolError, "is no id"),
    "an artifact of two lines": (PutReplica(replica("a\nb"), 1), ProtocolError, "is no id"),
    "a copy at nobody": (PutReplica(replica("m", ""), 1), ProtocolError, "is no id"),
    "an instance without a lease": (RegisterInstance(instance("i"), 0), NotFound, "lease 0 does not exist"),
    "an instance on a lease that is none": (RegisterInstance(instance("i"), 12345), NotFound, "lease 12345 does not exist"),
    "a copy without a lease": (PutReplica(replica("m"), 0), NotFound, "lease 0 does not exist"),
    "a copy on a lease that is none": (PutReplica(replica("m"), 12345), NotFound, "lease 12345 does not exist"),
    "a negative lease": (PutReplica(replica("m"), -3), NotFound, "lease -3 does not exist"),
    "renewing what is none": (KeepAlive(12345), NotFound, "lease 12345"),
    "claiming without a lease": (ClaimShards("a/1", 0, [1]), NotFound, "lease 0 does not exist"),
    "claiming on a lease that is none": (ClaimShards("a/1", 12345, [1]), NotFound, "lease 12345 does not exist"),
    "a shard beyond the last": (ClaimShards("a/1", 1, [0, 64]), ProtocolError, r"shards \[0, 64\] are not all within 0..63"),
    "a negative shard": (ReleaseShards(1, [-1]), ProtocolError, r"shards \[-1\] are not all within 0..63"),
    "no request": (Hello(1, 1, "x", "x"), ProtocolError, "the store does not take Hello"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused_is_refused_in_one_line_and_changes_nothing(served: Served, name: str) -> None:
    message, kind, why = REFUSED[name]
    before = await served.revision()
    with pytest.raises(kind, match=why) as error:
        await served.ask(message)
    assert type(error.value) is kind and "\n" not in str(error.value)
    assert await served.revision() == before and repr(served.kv) == "<SqliteKv 0 leases>"


async def test_a_claim_on_a_lease_that_is_none_takes_no_shard_away(served: Served) -> None:
    lease = await served.join()
    await served.ask(RevokeLease(lease))
    with pytest.raises(NotFound):
        await served.ask(ClaimShards("a/1", lease, [1]))
    other = await served.join("b/1")
    await served.ask(ClaimShards("b/1", other, [1]))
    assert (await served.view()).shards[1].worker_id == "b/1"


async def test_a_database_without_its_incarnation_is_one_line(served: Served) -> None:
    await served.kv.txn([], [Delete(INCARNATION)])
    with pytest.raises(Unavailable, match="has lost its key 'cluster/incarnation'"):
        await served.watch()
    with pytest.raises(Unavailable, match="has lost its key 'cluster/incarnation'"):
        await served.watch(5, LIFE)
