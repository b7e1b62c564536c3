"""Receiving a file descriptor over a Unix socket, which asyncio's streams cannot do: one short blocking exchange."""

import os
import socket

from tensorcast_connector.config import CONNECT_TIMEOUT_S
from tensorcast_connector.errors import ProtocolError, Unavailable
from tensorcast_connector.net.rpc import result_of
from tensorcast_connector.wire.frames import HEADER_BYTES, Frame, Kind, decode_header, encode_frame
from tensorcast_connector.wire.messages import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    ArenaInfo,
    Hello,
    MapArena,
    Message,
    Welcome,
    encode,
)


def _receive_exactly(sock: socket.socket, count: int, start: bytes = b"") -> bytes:
    data = bytearray(start)
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise Unavailable("the worker closed the connection")
        data += part
    return bytes(data)


def _receive_reply(sock: socket.socket, start: bytes = b"") -> Frame:
    header = decode_header(_receive_exactly(sock, HEADER_BYTES, start))
    return Frame(header.kind, header.request_id, _receive_exactly(sock, header.body_bytes))


def receive_arena(path: str, name: str) -> tuple[int, ArenaInfo]:
    """The arena's file descriptor (the caller closes it) and what it is.

    Raises:
        Unavailable: no worker there, or it went away.
        ProtocolError: what is there is no worker.
    """

    def request(message: Message, request_id: int) -> bytes:
        return encode_frame(Kind.REQUEST, request_id, encode(message))

    descriptors: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(CONNECT_TIMEOUT_S)
        try:
            sock.connect(path)
            sock.sendall(request(Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION, "engine", name), 1))
            result_of(_receive_reply(sock), Welcome)
            sock.sendall(request(MapArena(), 2))
            first, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
            if len(descriptors) != 1:
                result_of(_receive_reply(sock, first), ArenaInfo)
                raise ProtocolError("the worker did not pass its arena")
            return descriptors.pop(), result_of(_receive_reply(sock), ArenaInfo)
        except OSError as error:
            raise Unavailable(f"cannot map the arena of unix:{path}: {error.strerror or error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
