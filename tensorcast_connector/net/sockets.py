"""The real network: Unix and TCP sockets, listened to and dialled."""

import asyncio
import contextlib
import logging
import ssl
from pathlib import Path

from tensorcast_connector.config import (
    CONNECTIONS_MAX,
)
from tensorcast_connector.errors import ConfigError, TensorcastError, Unavailable
from tensorcast_connector.net.access import admit, check_tenant_fits, introduce
from tensorcast_connector.net.admission import least_missed
from tensorcast_connector.net.private import bind_private
from tensorcast_connector.net.socket_stream import SocketStream
from tensorcast_connector.net.tls import Tls
from tensorcast_connector.net.transport import Listener, OnStream, Stream
from tensorcast_connector.types import Address
from tensorcast_connector.wire.tokens import Access

logger = logging.getLogger(__name__)
# What connecting to an address or resolving it may raise; a host name that is no name at all is a UnicodeError.
_ADDRESS_ERRORS = (OSError, UnicodeError)


class SocketListener:
    """A listening socket; each accepted connection is served by a task that ends with the listener."""

    def __init__(self, on_stream: OnStream, context: ssl.SSLContext | None = None) -> None:
        self._on_stream = on_stream
        self._context = context  # of TLS
        self._server: asyncio.Server | None = None
        self._tasks: dict[asyncio.Task[None], SocketStream] = {}
        self._leaving: set[asyncio.Task[None]] = set()  # that had to make room
        self._socket_file: tuple[Path, int] | None = None
        self._closed = False
        self.address = Address("tcp")

    def start(self, stream: SocketStream) -> None:
        """Serves an accepted connection."""
        if self._closed or (len(self._tasks) >= CONNECTIONS_MAX and not self._make_room(stream)):
            stream.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(stream))
        self._tasks[task] = stream
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def _make_room(self, newcomer: SocketStream) -> bool:
        now = asyncio.get_running_loop().time()
        victim = least_missed(self._tasks.values(), newcomer, now)
        leaves = victim or newcomer
        silent = f", and this one silent for {now - leaves.heard_at:.0f} s" if victim else ""
        logger.warning("connection from %s closed: %d are open already%s", leaves.peer, CONNECTIONS_MAX, silent)
        if victim is None:
            return False
        task = next(task for task, stream in self._tasks.items() if stream is victim)
        del self._tasks[task]
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        victim.close()
        return True

    async def _serve(self, stream: SocketStream) -> None:
        try:
            if self._context is not None:
                await stream.secure(self._context)
            await self._on_stream(stream)
        except Unavailable:
            pass  # the peer went away; whoever served it has cleaned up
        except TensorcastError as error:
            logger.warning("connection from %s closed: %s", stream.peer, error)
        except Exception:
            logger.exception("serving %s failed", stream.peer)
        finally:
            stream.close()

    def opened(self, server: asyncio.Server, address: Address) -> None:
        """The socket is listening."""
        self._server = server
        if address.scheme == "unix":
            self.address = address
            self._socket_file = Path(address.path), Path(address.path).stat().st_ino
        else:
            self.address = Address("tcp", host=address.host, port=server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """See Listener."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        self._remove_socket_file()
        for task, stream in list(self._tasks.items()):
            stream.close()
            task.cancel()
        await asyncio.gather(*self._tasks, *self._leaving, return_exceptions=True)

    def _remove_socket_file(self) -> None:
        if self._socket_file is not None:
            path, inode = self._socket_file
            with contextlib.suppress(OSError):  # gone, or its folder is: nothing to tidy up
                if path.stat().st_ino == inode:  # else somebody else serves there by now
                    path.unlink()


class SocketNetwork:
    """Dials and listens on real sockets. What is said here of tokens and TLS is for TCP; a Unix socket has the mode of its file.

    Args:
        access: what both sides have to show; None: nothing.
        tls: certificates of both sides; None: none.
        tenant: whom this process acts for when it dials; "" for the cluster.

    Raises:
        ConfigError: the tenant's name is too long.
    """

    def __init__(self, access: Access | None = None, tls: Tls | None = None, tenant: str = "") -> None:
        if access is not None:
            check_tenant_fits(tenant)
        self._access = access
        self._tls = tls
        self._tenant = tenant

    async def dial(self, address: Address, timeout_s: float) -> Stream:
        """See Network."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                if address.scheme == "unix":
                    _, stream = await loop.create_unix_connection(SocketStream, address.path)
                else:
                    tls = self._tls.client if self._tls is not None else None
                    _, stream = await loop.create_connection(SocketStream, address.host, address.port, ssl=tls)
        except TimeoutError as error:
            raise Unavailable(f"no answer from {address} within {timeout_s:g} s") from error
        except _ADDRESS_ERRORS as error:
            raise Unavailable(f"cannot connect to {address}: {_reason(error)}") from error
        stream.peer = str(address)
        if self._access is not None and address.scheme == "tcp":
            try:
                await introduce(stream, self._access, self._tenant)
            except BaseException:
                stream.close()
                raise
        return stream

    async def listen(self, address: Address, on_stream: OnStream) -> Listener:
        """See Network. A Unix socket is readable and writable by its owner only."""
        loop = asyncio.get_running_loop()
        access = self._access if address.scheme == "tcp" else None

        async def admitted(stream: Stream) -> None:
            assert access is not None and isinstance(stream, SocketStream)
            stream.tenant = await admit(stream, access)
            await on_stream(stream)

        # Not asyncio's own handshake: until that is done, nobody would count the connection.
        context = self._tls.server if self._tls is not None and address.scheme == "tcp" else None
        listener = SocketListener(on_stream if access is None else admitted, context)
        try:
            if address.scheme == "unix":
                with contextlib.ExitStack() as on_error:
                    sock = bind_private(address.path)
                    on_error.callback(sock.close)
                    server = await loop.create_unix_server(lambda: SocketStream(listener), sock=sock)
                    on_error.pop_all()
            else:
                server = await loop.create_server(lambda: SocketStream(listener), address.host, address.port)
        except _ADDRESS_ERRORS as error:
            raise ConfigError(f"cannot listen on {address}: {_reason(error)}") from error
        listener.opened(server, address)
        return listener


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
