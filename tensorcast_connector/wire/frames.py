"""The byte format of every connection, and a decoder that does no I/O.

A connection is a sequence of frames, each a header of 32 bytes (network byte order), a body, and for bulk data a payload:

    offset  size  field
         0     2  magic, the letters "TC"
         2     1  frame version, 1
         3     1  kind: 1 request, 2 reply, 3 error, 4 cancel
         4     4  body length in bytes, at most FRAME_BODY_BYTES_MAX
         8     8  request id, chosen by the caller, unique on the connection; a reply, error or cancel repeats it
        16     4  timeout in milliseconds that the caller gives the request; 0 = none
        20     4  zero
        24     8  payload length in bytes; 0 except in replies on bulk connections
        32     n  body: one msgpack message of wire/messages.py (empty for cancel)
      32+n     m  payload: raw bytes, read by the receiver straight into its arena

Anything else is a ProtocolError, and the connection is closed: there is no resynchronisation. Every length is checked
before a byte is allocated for it.

The first frame of a connection is a request with the body Hello; the caller sends nothing more until it is answered.
"""

import enum
import struct
from typing import NamedTuple

from tensorcast_connector.errors import ProtocolError

MAGIC = b"TC"
FRAME_VERSION = 1
FRAME_BODY_BYTES_MAX = 16 << 20
FRAME_PAYLOAD_BYTES_MAX = 1 << 40
TIMEOUT_MS_MAX = (1 << 32) - 1
HEADER = struct.Struct("!2sBBIQIIQ")
HEADER_BYTES = HEADER.size
assert HEADER_BYTES == 32


class Kind(enum.IntEnum):
    """What a frame is."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    CANCEL = 4


_KINDS = {kind.value: kind for kind in Kind}


class Header(NamedTuple):
    """The decoded fixed part of a frame."""

    kind: Kind
    body_bytes: int
    request_id: int
    timeout_ms: int
    payload_bytes: int


class Frame(NamedTuple):
    """A whole frame without payload."""

    kind: Kind
    request_id: int
    body: bytes
    timeout_ms: int = 0


def encode_frame(kind: Kind, request_id: int, body: bytes, timeout_ms: int = 0, payload_bytes: int = 0) -> bytes:
    """Header and body; a payload, if any, is written by the caller afterwards.

    Raises:
        ProtocolError: the body is larger than a frame may be (our own fault; the peer would refuse it).
    """
    if len(body) > FRAME_BODY_BYTES_MAX:
        raise ProtocolError(f"a message of {len(body)} bytes exceeds the frame limit of {FRAME_BODY_BYTES_MAX}")
    timeout_ms = min(timeout_ms, TIMEOUT_MS_MAX)
    return HEADER.pack(MAGIC, FRAME_VERSION, kind, len(body), request_id, timeout_ms, 0, payload_bytes) + body


def check_magic(start: bytes | bytearray) -> None:
    """Checks the first bytes of a frame, as many as there are, so that garbage is refused at its first byte.

    Raises:
        ProtocolError: no frame starts like that.
    """
    if start[: len(MAGIC)] != MAGIC[: len(start)]:
        raise ProtocolError(f"not a tensorcast connection: it starts with {bytes(start)!r}, expected {MAGIC!r}")


def decode_header(data: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """Checks and decodes the 32 bytes at `offset`.

    Raises:
        ProtocolError: wrong magic, version, kind or a length above its limit; says which.
    """
    magic, version, kind, body_bytes, request_id, timeout_ms, zero, payload_bytes = HEADER.unpack_from(data, offset)
    if magic != MAGIC:
        check_magic(bytes(data[offset : offset + 8]))
    if version != FRAME_VERSION:
        raise ProtocolError(f"frame version {version} is not supported; this side speaks version {FRAME_VERSION}")
    if kind not in _KINDS:
        raise ProtocolError(f"unknown frame kind {kind}")
    if zero:
        raise ProtocolError("bytes 20 to 23 of a frame must be zero")
    if body_bytes > FRAME_BODY_BYTES_MAX:
        raise ProtocolError(f"a frame of {body_bytes} bytes exceeds the limit of {FRAME_BODY_BYTES_MAX}")
    if payload_bytes > FRAME_PAYLOAD_BYTES_MAX:
        raise ProtocolError(f"a payload of {payload_bytes} bytes exceeds the limit of {FRAME_PAYLOAD_BYTES_MAX}")
    return Header(_KINDS[kind], body_bytes, request_id, timeout_ms, payload_bytes)


class FrameDecoder:
    """Bytes in, whole frames out, for connections without payloads. After an error it must not be used again.

    Args:
        body_bytes_max: a lower limit, for peers that have not yet said who they are.
    """

    def __init__(self, body_bytes_max: int = FRAME_BODY_BYTES_MAX) -> None:
        self._body_bytes_max = body_bytes_max
        self._buffer = bytearray()
        self._header: Header | None = None

    def __repr__(self) -> str:
        return f"<FrameDecoder {len(self._buffer)} bytes waiting, {'in' if self._header else 'between'} frame(s)>"

    @property
    def empty(self) -> bool:
        """Whether the bytes so far end with a frame."""
        return self._header is None and not self._buffer

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """All frames completed by `data`, which may be reused afterwards.

        Raises:
            ProtocolError: the bytes are not frames. Frames completed before the bad one are lost with the connection.
        """
        kept = self._buffer
        if kept:
            kept += data
        source = kept or data  # what arrives as whole frames is not copied into the buffer first
        size = len(source)
        frames: list[Frame] = []
        at = 0
        while True:
            header = self._header
            if header is None:
                if size - at < HEADER_BYTES:
                    if at < size:
                        check_magic(bytes(source[at : at + 8]))
                    break
                header = decode_header(source, at)
                if header.payload_bytes:
                    raise ProtocolError("a payload is only allowed in replies on bulk connections")
                if header.body_bytes > self._body_bytes_max:
                    raise ProtocolError(f"a frame of {header.body_bytes} bytes; here at most {self._body_bytes_max}")
                at += HEADER_BYTES
            end = at + header.body_bytes
            if end > size:
                self._header = header
                break
            frames.append(Frame(header.kind, header.request_id, bytes(memoryview(source)[at:end]), header.timeout_ms))
            at = end
            self._header = None
        if source is kept:
            del kept[:at]
        else:
            kept += source[at:]
        return frames

    def feed_eof(self) -> None:
        """The connection ended.

        Raises:
            ProtocolError: it ended inside a frame.
        """
        if not self.empty:
            wanted = HEADER_BYTES if self._header is None else self._header.body_bytes
            raise ProtocolError(f"connection ended inside a frame: {len(self._buffer)} of {wanted} bytes arrived")
