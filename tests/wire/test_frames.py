"""The byte format from both ends, and bytes that are not it."""

import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.wire.frames import (
    FRAME_BODY_BYTES_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    TIMEOUT_MS_MAX,
    Frame,
    FrameDecoder,
    Kind,
    decode_header,
    encode_frame,
)

frames = st.builds(
    Frame,
    st.sampled_from(Kind),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=60),
    st.integers(0, TIMEOUT_MS_MAX),
)

seldom = settings(max_examples=30, derandomize=True)


def encoded(frame: Frame) -> bytes:
    return encode_frame(frame.kind, frame.request_id, frame.body, frame.timeout_ms)


def test_the_table_in_the_module_is_the_format() -> None:
    body = b"\x91\xa2Ok"
    data = encode_frame(Kind.REPLY, 0x0102, body, 7, 9)
    assert data == bytes.fromhex("5443 01 02 00000004 0000000000000102 00000007 00000000 0000000000000009") + body
    assert HEADER_BYTES == 32


@seldom
@given(st.lists(frames, min_size=1, max_size=3))
def test_round_trip_at_every_split(sent: list[Frame]) -> None:
    data = b"".join(map(encoded, sent))
    for split in range(len(data) + 1):
        decoder = FrameDecoder()
        assert decoder.feed(data[:split]) + decoder.feed(data[split:]) == sent
        assert decoder.empty
        decoder.feed_eof()


@seldom
@given(st.lists(frames, max_size=4), st.data())
def test_round_trip_in_many_pieces(sent: list[Frame], data: st.DataObject) -> None:
    decoder, left, got = FrameDecoder(), b"".join(map(encoded, sent)), []
    while left:
        count = data.draw(st.integers(1, len(left)))
        got += decoder.feed(memoryview(left)[:count])
        left = left[count:]
    assert got == sent


@seldom
@given(frames)
def test_truncated_at_every_byte(frame: Frame) -> None:
    data = encoded(frame)
    for end in range(1, len(data)):
        decoder = FrameDecoder()
        assert decoder.feed(data[:end]) == []
        with pytest.raises(ProtocolError, match="ended inside a frame"):
            decoder.feed_eof()


def header(
    magic: bytes = MAGIC, version: int = 1, kind: int = 1, body: int = 0, zero: int = 0, payload: int = 0
) -> bytes:
    return HEADER.pack(magic, version, kind, body, 1, 0, zero, payload)


HOSTILE = {
    "another protocol": (b"GET / HTTP/1.1\r\n\r\n", "starts with b'GET / HT'"),
    "another protocol, one byte": (b"G", "starts with b'G'"),
    "half of the magic": (b"TX", "starts with b'TX'"),
    "TLS": (bytes.fromhex("160301020001"), "not a tensorcast connection"),
    "wrong magic": (header(magic=b"tc"), "starts with b'tc"),
    "wrong version": (header(version=2), "frame version 2 is not supported; this side speaks version 1"),
    "kind 0": (header(kind=0), "unknown frame kind 0"),
    "kind 5": (header(kind=5), "unknown frame kind 5"),
    "reserved bytes": (header(zero=1), "must be zero"),
    "oversized body": (header(body=FRAME_BODY_BYTES_MAX + 1), "exceeds the limit of 16777216"),
    "the largest body": (header(body=2**32 - 1), "exceeds the limit of 16777216"),
    "oversized payload": (header(payload=FRAME_PAYLOAD_BYTES_MAX + 1), "payload of 1099511627777 bytes exceeds"),
    "the largest payload": (header(payload=2**64 - 1), "exceeds the limit"),
    "a payload where none belongs": (header(payload=1), "only allowed in replies on bulk"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("before", [b"", encode_frame(Kind.REQUEST, 1, b"first")], ids=["first", "second"])
def test_hostile(name: str, before: bytes) -> None:
    data, message = HOSTILE[name]
    with pytest.raises(ProtocolError, match=message):
        FrameDecoder().feed(before + data)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_byte_by_byte(name: str) -> None:
    data, message = HOSTILE[name]
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError, match=f"{message}|not a tensorcast connection"):
        for at in range(len(data)):
            decoder.feed(data[at : at + 1])


@settings(derandomize=True)
@given(st.binary(min_size=1, max_size=200))
def test_garbage_is_one_clear_error(data: bytes) -> None:
    decoder = FrameDecoder()
    try:
        got = decoder.feed(data)
        decoder.feed_eof()
    except ProtocolError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert b"".join(map(encoded, got)) == data  # it was frames after all


@settings(derandomize=True)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_a_header_is_refused_or_exact(data: bytes) -> None:
    try:
        got = decode_header(data)
    except ProtocolError:
        return
    assert HEADER.pack(MAGIC, 1, got.kind, got.body_bytes, got.request_id, got.timeout_ms, 0, got.payload_bytes) == data


def test_the_memory_that_was_fed_may_be_reused_at_once() -> None:
    decoder, memory = FrameDecoder(), bytearray(200)
    one, two = encode_frame(Kind.REQUEST, 1, b"first"), encode_frame(Kind.REPLY, 2, b"second")

    def feed(data: bytes) -> list[Frame]:
        memory[: len(data)] = data
        got = decoder.feed(memoryview(memory)[: len(data)])
        memory[:] = b"x" * len(memory)
        return got

    got = feed(one + two[:10])
    got += feed(two[10:35])
    got += feed(two[35:] + one)
    assert got == [Frame(Kind.REQUEST, 1, b"first"), Frame(Kind.REPLY, 2, b"second"), Frame(Kind.REQUEST, 1, b"first")]
    assert decoder.empty


def test_frames_that_arrive_whole_are_copied_once() -> None:
    body = bytes(1 << 20)
    data = encode_frame(Kind.REQUEST, 1, body)
    tracemalloc.start()
    try:
        assert FrameDecoder().feed(data)[0].body == body
        assert tracemalloc.get_traced_memory()[1] < 1.5 * len(body)
    finally:
        tracemalloc.stop()


def test_a_claimed_length_allocates_nothing() -> None:
    claimed = header(body=FRAME_BODY_BYTES_MAX)
    tracemalloc.start()
    try:
        FrameDecoder().feed(claimed)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_lower_limit_for_strangers() -> None:
    with pytest.raises(ProtocolError, match="a frame of 101 bytes; here at most 100"):
        FrameDecoder(100).feed(header(body=101))
    assert FrameDecoder(100).feed(encode_frame(Kind.REQUEST, 1, bytes(100)))


def test_our_own_mistakes_are_refused_before_they_are_sent() -> None:
    with pytest.raises(ProtocolError, match="exceeds the frame limit"):
        encode_frame(Kind.REQUEST, 1, bytes(FRAME_BODY_BYTES_MAX + 1))
    assert decode_header(encode_frame(Kind.REQUEST, 1, b"", 10**12)).timeout_ms == TIMEOUT_MS_MAX
    with pytest.raises(struct.error):
        encode_frame(Kind.REQUEST, -1, b"")


def test_repr_says_where_it_is() -> None:
    decoder = FrameDecoder()
    decoder.feed(header(body=10) + b"abc")
    assert repr(decoder) == "<FrameDecoder 3 bytes waiting, in frame(s)>" and not decoder.empty
