"""Connections that say hello at most, and then nothing."""

import asyncio
import contextlib
import socket
from collections.abc import Sequence

from tensorcast_connector.types import Address
from tensorcast_connector.wire.codec import encode
from tensorcast_connector.wire.frames import Kind, encode_frame
from tensorcast_connector.wire.messages import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Hello, Message, Ping


class Strangers:
    """Any number of them, to any server."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []

    async def come(self, address: Address, count: int, hello: bool = True, ping: bool = False) -> None:
        """One after the other; some may be turned away."""
        said = [Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION, "engine", "stranger")] if hello else []
        for _ in range(count):
            sock = socket.socket(socket.AF_UNIX if address.scheme == "unix" else socket.AF_INET)
            self._open.append(sock)
            sock.setblocking(False)
            with contextlib.suppress(ConnectionError):
                await self._talk(sock, address, [*said, Ping()] if ping else said)

    async def _talk(self, sock: socket.socket, address: Address, said: Sequence[Message]) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, address.path if address.scheme == "unix" else (address.host, address.port))
        for number, message in enumerate(said, 1):
            await loop.sock_sendall(sock, encode_frame(Kind.REQUEST, number, encode(message)))
            await loop.sock_recv(sock, 1000)

    @property
    def closed(self) -> int:
        """How many were closed on the other side."""
        return sum(self._is_closed(each) for each in self._open)

    def _is_closed(self, sock: socket.socket) -> bool:
        try:
            return sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def leave(self) -> None:
        for each in self._open:
            each.close()
