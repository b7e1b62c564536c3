"""Messages of the metadata plane as bytes: the layout is fixed, the former version's too, and the largest ones fit a frame."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcast_connector.config import KEYS_PER_MESSAGE_MAX, REPORT_KEYS_PER_MESSAGE, SHARDS_MAX
from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.wire.codec import (
    PeerRequest,
    Reply,
    StoreRequest,
    decode,
    encode,
    pack_indexes,
    reply_decoder,
    unpack_indexes,
)
from tensorcast_connector.wire.frames import FRAME_BODY_BYTES_MAX, Kind, encode_frame
from tensorcast_connector.wire.messages import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    AskInventory,
    Fenced,
    FindKeys,
    FindPages,
    Message,
    PagesFound,
    Reported,
    ReportKeys,
    ReportPages,
)
from tensorcast_connector.wire.store_messages import (
    Alive,
    Changes,
    ClaimShards,
    Entry,
    KeepAlive,
    LeaseGranted,
    PutReplica,
    RegisterWorker,
    ReleaseShards,
    ReplicaRecord,
    ShardRecord,
    Watch,
    WorkerRecord,
)

KEY_BYTES_MAX = 16 + 64
peer_decoder = msgspec.msgpack.Decoder(PeerRequest)
store_decoder = msgspec.msgpack.Decoder(StoreRequest)

# Rolling upgrades depend on it: a field may be added at the end and nothing else may change.
LAYOUT: dict[str, tuple[Message, list[object]]] = {
    "FindKeys": (FindKeys([1, 2], 3, b"keykey"), [[1, 2], 3, b"keykey"]),
    "PagesFound": (
        PagesFound([[], ["a/1"]], b"\1\0\0\0", [(2, 7, 9, "b/1")]), [[[], ["a/1"]], b"\1\0\0\0", [[2, 7, 9, "b/1"]]]),
    "ReportKeys": (
        ReportKeys("a/1", 5, [(1, 7, 9)], [1], 1, b"k", b"l"), ["a/1", 5, [[1, 7, 9]], [1], 1, b"k", b"l"]),
    "Reported": (Reported([(1, 7, 9, "b/1")], [2]), [[[1, 7, 9, "b/1"]], [2]]),
    "AskInventory": (AskInventory("a/1", [(1, 7, 9)]), ["a/1", [[1, 7, 9]]]),
    "Fenced": (Fenced([(1, 7, 9, "b/1")]), [[[1, 7, 9, "b/1"]]]),
    "ClaimShards": (ClaimShards("a/1", 5, [1, 2]), ["a/1", 5, [1, 2]]),
    "ReleaseShards": (ReleaseShards(5, [1, 2], [7, 8]), [5, [1, 2], [7, 8]]),
    "PutReplica": (
        PutReplica(ReplicaRecord("m", "a/1", "disk", 9), 5),
        [{"artifact_id": "m", "worker_id": "a/1", "tier": "disk", "bytes": 9, "keeper": False}, 5]),
    "Watch": (Watch(7, 9, 1000, "k"), [7, 9, 1000, "k"]),
    "Changes": (
        Changes(7, 9, True, [Entry("k", b"v", 3)], ["d"], "j", True),
        [7, 9, True, [["Entry", "k", b"v", 3]], ["d"], "j", True]),
    # the former version
    "FindPages": (FindPages([1, 2], [b"k"]), [[1, 2], [b"k"]]),
    "ReportPages": (
        ReportPages("a/1", 5, [(1, 7, 9)], [1], [b"k"], [b"l"]), ["a/1", 5, [[1, 7, 9]], [1], [b"k"], [b"l"]]),
    "KeepAlive": (KeepAlive(5), [5]),
    "Alive": (Alive(9), [9]),
    "LeaseGranted": (LeaseGranted(5, 9), [5, 9]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUT)
def test_the_layout_of_a_message_does_not_change(name: str) -> None:
    message, fields = LAYOUT[name]
    assert msgspec.msgpack.decode(encode(message)) == [name, *fields]


@pytest.mark.parametrize("name", LAYOUT)
def test_whoever_takes_a_message_reads_what_was_written(name: str) -> None:
    message, _ = LAYOUT[name]
    for union in (PeerRequest, StoreRequest, Reply):
        if type(message) in union.__args__:
            got = msgspec.msgpack.decode(encode(message), type=union)
            assert got == message and encode(got) == encode(message)
            return
    raise AssertionError("nobody takes it")


def test_a_worker_that_names_no_roles_has_the_basic_one() -> None:
    old = ["RegisterWorker", {"worker_id": "a/1", "name": "a", "address": "h:1", "arena_bytes": 5}, 6]
    got = store_decoder.decode(msgspec.msgpack.encode(old))
    assert got == RegisterWorker(WorkerRecord("a/1", "a", "h:1", 5, 1, ("basic",)), 6)
    assert (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION) == (2, 3)


def test_records_in_the_database_are_json_that_may_grow() -> None:
    stored = msgspec.json.encode(WorkerRecord("a/1", "a", "h:1", 5, 2, ("basic", "shard-home")))
    assert msgspec.json.decode(stored) == {
        "worker_id": "a/1", "name": "a", "address": "h:1", "arena_bytes": 5, "version": 2,
        "roles": ["basic", "shard-home"],
    }  # fmt: skip
    grown = {"worker_id": "a/1", "lease_id": 5, "colour": "red"}
    assert msgspec.json.decode(msgspec.json.encode(grown), type=ShardRecord) == ShardRecord("a/1", 5)


@settings(derandomize=True, max_examples=50)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_indexes_round_trip(indexes: list[int]) -> None:
    assert list(unpack_indexes(pack_indexes(indexes))) == indexes


def test_indexes_are_little_endian_and_whole() -> None:
    assert pack_indexes([1, 258, 2**32 - 1]) == bytes.fromhex("01000000 02010000 ffffffff")
    assert pack_indexes([]) == b""
    for data in (b"\1", b"\1\0\0", bytes(5)):
        with pytest.raises(ValueError, match="bytes"):
            unpack_indexes(data)
    for wrong in (-1, 2**32):
        with pytest.raises(OverflowError):
            pack_indexes([wrong])


def test_the_largest_messages_fit_into_a_frame() -> None:
    keys = [bytes([number % 256]) * KEY_BYTES_MAX for number in range(KEYS_PER_MESSAGE_MAX)]
    packed, reported = b"".join(keys), b"".join(keys[:REPORT_KEYS_PER_MESSAGE])
    grants = [(shard, 2**40, 2**62) for shard in range(SHARDS_MAX)]
    moved = [(*grant, "x" * 256) for grant in grants]
    holders = [[f"worker-{number}/00000000"] * 3 for number in range(4096)]
    for message in (
        FindKeys(list(range(SHARDS_MAX)), KEY_BYTES_MAX, packed),
        FindPages(list(range(SHARDS_MAX)), keys),
        PagesFound(holders, pack_indexes(range(KEYS_PER_MESSAGE_MAX)), moved),
        ReportKeys("x" * 256, 2**62, grants, list(range(SHARDS_MAX)), KEY_BYTES_MAX, reported, b""),
        ReportPages("x" * 256, 2**62, grants, list(range(SHARDS_MAX)), keys[:REPORT_KEYS_PER_MESSAGE], []),
        AskInventory("x" * 256, grants),
    ):
        body = encode(message)
        assert len(body) < FRAME_BODY_BYTES_MAX
        encode_frame(Kind.REQUEST, 1, body)


BROKEN = {
    "a grant of two": ["AskInventory", "a/1", [[1, 7]]],
    "a grant of four": ["AskInventory", "a/1", [[1, 7, 9, 9]]],
    "text for a number": ["ReportKeys", "a/1", "5", [], [], 4, b"", b""],
    "a list for packed keys": ["FindKeys", [0], 1, [b"k"]],
    "text for a key": ["FindPages", [0], ["k"]],
    "a missing field": ["ReportKeys", "a/1", 5, [], [], 4, b""],
    "a message of the store": ["Watch", 1, 2, 3],
    "a reply": ["Fenced", []],
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_understood_is_one_line(name: str) -> None:
    with pytest.raises(ProtocolError, match=r"^request not understood: ") as error:
        decode(peer_decoder, msgspec.msgpack.encode(BROKEN[name]), "request")
    assert "\n" not in str(error.value)


def test_lists_in_lists_without_end_are_one_line() -> None:
    deep = b"\x92\xa9FindPages" + b"\x91" * 100_000
    for decoder in (peer_decoder, store_decoder, reply_decoder):
        with pytest.raises(ProtocolError, match="not understood"):
            decode(decoder, deep)
