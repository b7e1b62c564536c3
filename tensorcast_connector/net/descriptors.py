"""Receiving a file descriptor over a Unix socket, which asyncio's streams cannot do: a short exchange of its own."""

import asyncio
import contextlib
import os
import socket

from tensorcast_connector.config import CONNECT_TIMEOUT_S
from tensorcast_connector.errors import ProtocolError, Unavailable
from tensorcast_connector.net.rpc import result_of
from tensorcast_connector.wire.codec import (
    encode,
)
from tensorcast_connector.wire.frames import HEADER_BYTES, Frame, Kind, decode_header, encode_frame
from tensorcast_connector.wire.messages import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    ArenaInfo,
    Hello,
    MapArena,
    Message,
    Welcome,
)


async def receive_arena(path: str, name: str) -> tuple[int, ArenaInfo]:
    """The arena's file descriptor (the caller closes it) and what it is.

    Raises:
        Unavailable: no worker there, or it went away.
        ProtocolError: what is there is no worker.
    """
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as on_error, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.sock_connect(sock, path)
                await loop.sock_sendall(
                    sock, _request(Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION, "engine", name), 1)
                )
                result_of(await _receive_reply(sock), Welcome)
                await loop.sock_sendall(sock, _request(MapArena(), 2))
                await _readable(sock)
                # What is read here is the byte that carries the descriptor, or the first byte of an error.
                first, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
                for descriptor in descriptors:
                    on_error.callback(os.close, descriptor)
                    os.set_inheritable(descriptor, False)  # recv_fds takes no MSG_CMSG_CLOEXEC
                if len(descriptors) != 1:
                    result_of(await _receive_reply(sock, first), ArenaInfo)
                    raise ProtocolError("the worker did not pass its arena")
                info = result_of(await _receive_reply(sock), ArenaInfo)
        except TimeoutError as error:
            raise Unavailable(f"unix:{path} did not pass its arena within {CONNECT_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise Unavailable(f"cannot map the arena of unix:{path}: {error.strerror or error}") from error
        on_error.pop_all()
        return descriptors[0], info


def _request(message: Message, request_id: int) -> bytes:
    return encode_frame(Kind.REQUEST, request_id, encode(message))


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock.fileno())


async def _receive_exactly(sock: socket.socket, count: int, start: bytes = b"") -> bytes:
    data = bytearray(start)
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not part:
            raise Unavailable("the worker closed the connection")
        data += part
    return bytes(data)


async def _receive_reply(sock: socket.socket, start: bytes = b"") -> Frame:
    header = decode_header(await _receive_exactly(sock, HEADER_BYTES, start))
    return Frame(header.kind, header.request_id, await _receive_exactly(sock, header.body_bytes))
