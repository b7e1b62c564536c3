"""Sockets that listen, and what happens when the process has no descriptor left for one more connection.

asyncio's own server then logs an error for each place in its backlog, a hundred times a second; here it is said once.
"""

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable

from tensorcast_connector.config import ACCEPT_RETRY_S

logger = logging.getLogger(__name__)
BACKLOG = 100
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


async def listen_tcp(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address that `host` stands for; port 0 is any.

    Raises:
        OSError: one of them cannot be bound, or there is no such host.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError as error:
                if error.errno != errno.EAFNOSUPPORT:
                    raise
                continue  # a name may stand for an address of a family that this kernel does not have
            bound.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
    except BaseException:
        for sock in bound:
            sock.close()
        raise
    if not bound:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
    return bound


class Acceptor:
    """Accepts at one listening socket, which it owns, until it is closed.

    Args:
        protocol: makes the protocol of each connection.
        name: of the address, for the log.
    """

    def __init__(self, sock: socket.socket, protocol: Callable[[], asyncio.BaseProtocol], name: str) -> None:
        self._sock = sock
        self._protocol = protocol
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._short = False  # of descriptors or memory, which the log has been told
        self._joining: set[asyncio.Task[None]] = set()
        self._loop.add_reader(sock.fileno(), self._accept)

    def __repr__(self) -> str:
        return f"<Acceptor at {self._name}{', which waits for descriptors' if self._short else ''}>"

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            try:
                accepted, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORT_OF:
                    raise
                self._pause(error)
                return
            if self._short:
                self._short = False
                logger.info("%s accepts connections again", self._name)
            accepted.setblocking(False)
            task = self._loop.create_task(self._join(accepted))
            self._joining.add(task)
            task.add_done_callback(self._joining.discard)

    async def _join(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, accepted)
        except OSError as error:  # it has left already
            logger.debug("a connection to %s ended at once: %s", self._name, error)
            accepted.close()

    def _pause(self, error: OSError) -> None:
        """Those who wait stay in the kernel's queue, which would call again at once."""
        self._loop.remove_reader(self._sock.fileno())
        self._retry = self._loop.call_later(ACCEPT_RETRY_S, self._go_on)
        if not self._short:
            self._short = True
            logger.warning(
                "%s accepts no connections for now: %s; it goes on when there is room (see ulimit -n)",
                self._name, error.strerror,
            )  # fmt: skip

    def _go_on(self) -> None:
        self._retry = None
        self._loop.add_reader(self._sock.fileno(), self._accept)

    async def close(self) -> None:
        """Stops listening. Idempotent."""
        if self._sock.fileno() < 0:
            return
        if self._retry is not None:
            self._retry.cancel()
        else:
            self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        await asyncio.gather(*self._joining, return_exceptions=True)
