"""The real network: Unix and TCP sockets, listened to and dialled."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tensorcast_connector.config import (
    CONNECTIONS_MAX,
)
from tensorcast_connector.errors import ConfigError, TensorcastError, Unauthorized, Unavailable
from tensorcast_connector.net.accepting import BACKLOG, Acceptor, listen_tcp
from tensorcast_connector.net.access import FRAME_MAGIC, admit, check_tenant_fits, introduce, refused
from tensorcast_connector.net.admission import least_missed
from tensorcast_connector.net.private import bind_private
from tensorcast_connector.net.refusals import FULL, PROTOCOL, UNAUTHORIZED, Refusals
from tensorcast_connector.net.socket_stream import SocketStream
from tensorcast_connector.net.tls import FLAGS, HELLO, Tls, seen_by_caller
from tensorcast_connector.net.transport import Listener, OnStream, Stream
from tensorcast_connector.types import Address
from tensorcast_connector.wire.tokens import Access

logger = logging.getLogger(__name__)
# What connecting to an address or resolving it may raise; a host name that is no name at all is a UnicodeError.
_ADDRESS_ERRORS = (OSError, UnicodeError)


class SocketListener:
    """A listening socket; each accepted connection is served by a task that ends with the listener.

    Args:
        on_stream: serves a connection.
        refused: counts those that are closed, by the kinds of net/refusals.py.
        context: of TLS.
    """

    def __init__(self, on_stream: OnStream, refused: Counter[str], context: ssl.SSLContext | None = None) -> None:
        self._on_stream = on_stream
        self._refused = refused
        self._context = context
        self._acceptors: list[Acceptor] = []
        self._tasks: dict[asyncio.Task[None], SocketStream] = {}
        self._leaving: set[asyncio.Task[None]] = set()  # that had to make room
        self._socket_file: tuple[Path, int] | None = None
        self._closed = False
        self._refusals = Refusals()
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
        self._refused[FULL] += 1
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
                await self._secure(stream, self._context)
            await self._on_stream(stream)
        except Unavailable:
            pass  # the peer went away; whoever served it has cleaned up
        except TensorcastError as error:
            if self._context is None and stream.host and stream.first.startswith(HELLO):
                self._refuse(stream, f"it speaks TLS, and this listener was started without {FLAGS}")
            elif isinstance(error, Unauthorized):
                self._refuse(stream, str(error))
            else:
                logger.warning("connection from %s closed: %s", stream.peer, error)
                self._refused[PROTOCOL] += 1
        except Exception:
            logger.exception("serving %s failed", stream.peer)
        finally:
            stream.close()

    async def _secure(self, stream: SocketStream, context: ssl.SSLContext) -> None:
        """TLS, with who speaks it; who speaks as one without it is told."""
        first = await stream.beginning()
        if first.startswith(FRAME_MAGIC[:1]):
            raise refused(stream, f"{stream.local} wants TLS, and the caller came without: give it {FLAGS}")
        if first and not first.startswith(HELLO):
            raise Unauthorized(f"it does not speak TLS ({FLAGS}), nor our protocol")
        await stream.secure(context)

    def _refuse(self, stream: SocketStream, why: str) -> None:
        self._refusals.tell(stream.peer, stream.host, why, asyncio.get_running_loop().time())
        self._refused[UNAUTHORIZED] += 1

    def open(self, bound: Sequence[socket.socket], address: Address) -> None:
        """Accepts at these sockets, which are the listener's from now on."""
        port = 0 if address.scheme == "unix" else bound[0].getsockname()[1]
        if address.scheme == "unix":
            self.address = address
            self._socket_file = Path(address.path), Path(address.path).stat().st_ino
        else:
            self.address = Address("tcp", host=address.host, port=port)
        self._acceptors = [Acceptor(each, lambda: SocketStream(self), str(self.address)) for each in bound]

    async def close(self) -> None:
        """See Listener."""
        self._closed = True
        for acceptor in self._acceptors:
            await acceptor.close()
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
        refused: counts the connections that listeners have closed, by the kinds of net/refusals.py.

    Raises:
        ConfigError: the tenant's name is too long.
    """

    def __init__(
        self,
        access: Access | None = None,
        tls: Tls | None = None,
        tenant: str = "",
        refused: Counter[str] | None = None,
    ) -> None:
        if access is not None:
            check_tenant_fits(tenant)
        self._access = access
        self._tls = tls
        self._tenant = tenant
        self._refused = refused if refused is not None else Counter()

    async def dial(self, address: Address, timeout_s: float) -> Stream:
        """See Network."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                if address.scheme == "unix":
                    _, stream = await loop.create_unix_connection(SocketStream, address.path)
                else:
                    context = self._tls.client if self._tls is not None else None
                    _, stream = await loop.create_connection(SocketStream, address.host, address.port, ssl=context)
        except TimeoutError as error:
            raise Unavailable(f"no answer from {address} within {timeout_s:g} s") from error
        except (ssl.SSLError, ConnectionResetError, ConnectionAbortedError) as error:
            if address.scheme == "unix" or self._tls is None:
                raise Unavailable(f"cannot connect to {address}: {_reason(error)}") from error
            raise seen_by_caller(str(address), error) from error
        except _ADDRESS_ERRORS as error:
            raise Unavailable(f"cannot connect to {address}: {_reason(error)}") from error
        stream.peer = str(address)
        if self._tls is not None and address.scheme == "tcp":
            tls = self._tls
            stream.unheard = lambda: tls.unheard(str(address))
        if self._access is not None and address.scheme == "tcp":
            try:
                await introduce(stream, self._access, self._tenant)
            except BaseException:
                stream.close()
                raise
        return stream

    async def listen(self, address: Address, on_stream: OnStream) -> Listener:
        """See Network. A Unix socket is readable and writable by its owner only."""
        access = self._access if address.scheme == "tcp" else None

        async def admitted(stream: Stream) -> None:
            assert access is not None and isinstance(stream, SocketStream)
            stream.tenant = await admit(stream, access)
            await on_stream(stream)

        # Not asyncio's own handshake: until that is done, nobody would count the connection.
        context = self._tls.server if self._tls is not None and address.scheme == "tcp" else None
        listener = SocketListener(on_stream if access is None else admitted, self._refused, context)
        try:
            with contextlib.ExitStack() as on_error:
                unix = address.scheme == "unix"
                bound = [bind_private(address.path)] if unix else await listen_tcp(address.host, address.port)
                for sock in bound:
                    on_error.callback(sock.close)
                    sock.listen(BACKLOG)  # for a second time, which does nothing, or that of a Unix socket
                listener.open(bound, address)
                on_error.pop_all()
        except _ADDRESS_ERRORS as error:
            raise ConfigError(f"cannot listen on {address}: {_reason(error)}") from error
        return listener


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
