"""Receiving a file descriptor over a Unix socket, which asyncio's streams cannot do: a short exchange of its own."""

import asyncio
import contextlib
import os
import socket
from typing import TypeVar

from tensorcast_connector.config import CONNECT_TIMEOUT_S
from tensorcast_connector.errors import Exhausted, ProtocolError, TensorcastError, Unavailable
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

R = TypeVar("R", bound=Message)


async def receive_arena(path: str, name: str) -> tuple[int, ArenaInfo]:
    """The arena's file descriptor (the caller closes it) and what it is. Raises as `DescriptorChannel.call`."""
    channel = DescriptorChannel(path, Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION, "engine", name))
    try:
        return await channel.call(MapArena(), ArenaInfo, CONNECT_TIMEOUT_S)
    finally:
        channel.close()


class DescriptorChannel:
    """A connection on which a worker passes file descriptors, one request at a time; opened when needed and kept.

    Args:
        path: the worker's Unix socket.
        hello: who calls.
    """

    def __init__(self, path: str, hello: Hello) -> None:
        self._path = path
        self._hello = hello
        self._socket: socket.socket | None = None
        self._turn = asyncio.Lock()
        self._calls = 0

    def __repr__(self) -> str:
        return f"<DescriptorChannel {self._path}>"

    async def call(self, message: Message, expected: type[R], timeout_s: float) -> tuple[int, R]:
        """The descriptor that comes before the answer to `message` (the caller closes it), and the answer.

        Raises:
            Unavailable: no worker there, or it went away.
            Exhausted: this process has as many open files as it may have.
            ProtocolError: what is there is no worker.
            TensorcastError: what the worker answered instead.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._exchange(await self._connected(), message, expected)
            except TimeoutError as error:
                self.close()
                raise Unavailable(f"unix:{self._path} did not pass its memory within {timeout_s:g} s") from error
            except OSError as error:
                self.close()
                raise Unavailable(f"cannot map the memory of unix:{self._path}: {error.strerror or error}") from error
            except TensorcastError:
                raise
            except BaseException:
                self.close()  # its answer is still to come
                raise

    async def _connected(self) -> socket.socket:
        if self._socket is not None and _has_ended(self._socket):
            self.close()
        if self._socket is None:
            loop = asyncio.get_running_loop()
            self._socket = sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            await loop.sock_connect(sock, self._path)
            await loop.sock_sendall(sock, _request(self._hello, 0))
            result_of(await self._reply(sock), Welcome)
        return self._socket

    async def _exchange(self, sock: socket.socket, message: Message, expected: type[R]) -> tuple[int, R]:
        self._calls += 1
        await asyncio.get_running_loop().sock_sendall(sock, _request(message, self._calls))
        with contextlib.ExitStack() as on_error:
            await _readable(sock)
            # What is read here is the byte that carries the descriptor, or the first byte of an error.
            first, descriptors, flags, _ = socket.recv_fds(sock, 1, 1)
            for descriptor in descriptors:
                on_error.callback(os.close, descriptor)
                os.set_inheritable(descriptor, False)  # recv_fds takes no MSG_CMSG_CLOEXEC
            if flags & socket.MSG_CTRUNC and not descriptors:  # one was passed, and the kernel had no number for it
                self.close()
                raise Exhausted(
                    f"no file descriptor is left for the memory of unix:{self._path}: let go of tensors, or raise the limit of "
                    "open files (ulimit -n)"
                )
            if len(descriptors) != 1:
                result_of(await self._reply(sock, first), expected)
                raise ProtocolError("the worker did not pass its memory")
            info = result_of(await self._reply(sock), expected)
            on_error.pop_all()
        return descriptors[0], info

    async def _reply(self, sock: socket.socket, start: bytes = b"") -> Frame:
        """One frame. An error that speaks of the whole connection ends it, and so does what is none."""
        try:
            header = decode_header(await _receive_exactly(sock, HEADER_BYTES, start))
            frame = Frame(header.kind, header.request_id, await _receive_exactly(sock, header.body_bytes))
        except TensorcastError:
            self.close()
            raise
        if frame.kind is Kind.ERROR and not frame.request_id:
            self.close()
        return frame

    def close(self) -> None:
        """Ends the connection; the next call opens another one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _has_ended(sock: socket.socket) -> bool:
    """Whether the other side has closed it: there is something to read, and nothing was asked."""
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


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
