"""Messages grow at their end, and an unknown one is told apart from a broken one."""

import msgspec
import pytest

from tensorcast_connector.wire.codec import (
    EngineRequest,
    PeerRequest,
    Reply,
    StoreRequest,
    encode,
    failure_decoder,
    reply_decoder,
)
from tensorcast_connector.wire.messages import (
    Hello,
    Lookup,
    LookupResult,
    Message,
)
from tensorcast_connector.wire.store_messages import (
    WorkerRecord,
)


class LookupOfTomorrow(Message, tag="Lookup"):
    """The same message of a later version: one more field, with a default."""

    lookup_id: str
    keyspaces: list[bytes]
    block_hashes: list[bytes]
    tiers: list[str] = msgspec.field(default_factory=lambda: ["dram"])


def test_an_older_receiver_skips_what_it_does_not_know() -> None:
    new = LookupOfTomorrow("l", [b"k"], [b"h"], ["disk"])
    assert msgspec.msgpack.decode(encode(new), type=EngineRequest) == Lookup("l", [b"k"], [b"h"])


def test_a_newer_receiver_fills_in_what_is_missing() -> None:
    old = Lookup("l", [b"k"], [b"h"])
    assert msgspec.msgpack.decode(encode(old), type=LookupOfTomorrow) == LookupOfTomorrow("l", [b"k"], [b"h"], ["dram"])


def test_records_skip_and_fill_as_well() -> None:
    raw = {"worker_id": "a/1", "name": "a", "address": "h:1", "arena_bytes": 5, "colour": "red"}
    assert msgspec.json.decode(msgspec.json.encode(raw), type=WorkerRecord) == WorkerRecord("a/1", "a", "h:1", 5)


def test_on_the_wire_a_message_is_its_name_and_its_fields() -> None:
    assert msgspec.msgpack.decode(encode(LookupResult(3, 2))) == ["LookupResult", 3, 2]
    assert encode(Hello(1, 1, "engine", "e", "t")).hex() == "96a548656c6c6f0101a6656e67696e65a165a174"
    former = bytes.fromhex("95a548656c6c6f0101a6656e67696e65a165")  # before callers had tenants
    assert msgspec.msgpack.decode(former, type=Hello) == Hello(1, 1, "engine", "e")


@pytest.mark.parametrize("union", [EngineRequest, PeerRequest, StoreRequest, Reply])
def test_unknown_tag(union: type) -> None:
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'Explode'"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(["Explode", 1]), type=union)


@pytest.mark.parametrize("union", [EngineRequest, PeerRequest, StoreRequest, Reply])
def test_every_tag_is_unique_in_its_union(union: type) -> None:
    names = [each.__struct_config__.tag for each in union.__args__]  # type: ignore[attr-defined]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91", b"\x93\xacLookupResult\x01\xa1x", b"\x80", b"\x00" * 50])
def test_broken_bodies(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        reply_decoder.decode(data)
    with pytest.raises(msgspec.DecodeError):
        failure_decoder.decode(data)


def test_too_short_a_message_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="Expected `array` of at least length 3, got 2"):
        reply_decoder.decode(msgspec.msgpack.encode(["LookupResult", 1]))
