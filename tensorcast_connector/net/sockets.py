"""The real network: Unix and TCP sockets on asyncio (or uvloop), reading straight into the caller's memory."""

import asyncio
import contextlib
import logging
import os
import socket
import stat
from pathlib import Path

from tensorcast_connector.errors import ConfigError, TensorcastError, Unavailable
from tensorcast_connector.net.transport import Buffer, Listener, OnStream, Stream
from tensorcast_connector.types import Address

logger = logging.getLogger(__name__)
RECEIVE_BUFFER_BYTES = 256 << 10


class SocketStream(asyncio.BufferedProtocol):
    """One connection. Received bytes go to the waiting `receive_into` target, else to a small buffer of our own."""

    def __init__(self, accepted: "SocketListener | None" = None) -> None:
        self._accepted = accepted
        self._transport: asyncio.Transport | None = None
        self._buffer = memoryview(bytearray(RECEIVE_BUFFER_BYTES))
        self._start = self._end = 0
        self._target: memoryview | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._write_paused = False
        self._read_paused = False
        self._ended = False
        self._lost: Exception | None = None
        self._closed = False
        self.peer = "?"

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection is up."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        # A send returns when nothing is queued any more, so the caller may reuse the memory it sent from.
        self._transport.set_write_buffer_limits(high=0)  # type: ignore[union-attr]
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.peer = "{}:{}".format(*transport.get_extra_info("peername")[:2])
        elif sock is not None:
            self.peer = "unix"
        if self._accepted is not None:
            self._accepted.start(self)

    def get_buffer(self, _sizehint: int) -> memoryview:
        """asyncio: where the next bytes go."""
        if self._target is not None:
            return self._target
        return self._buffer[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """asyncio: so many bytes went there."""
        if self._target is not None:
            self._target = self._target[nbytes:]
            if self._target.nbytes:
                return
            self._target = None
        else:
            self._end += nbytes
            if self._end == RECEIVE_BUFFER_BYTES and self._transport is not None:
                self._transport.pause_reading()
                self._read_paused = True
        self._wake(self._reader)

    def eof_received(self) -> bool:
        """asyncio: the peer will send no more. Returning False lets asyncio close the transport."""
        self._ended = True
        self._wake(self._reader)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the connection is gone."""
        self._ended = True
        self._closed = True
        self._lost = exc
        self._target = None
        self._wake(self._reader)
        self._wake(self._writable)

    def pause_writing(self) -> None:
        """asyncio: bytes are queued."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """asyncio: nothing is queued any more."""
        self._write_paused = False
        self._wake(self._writable)

    @staticmethod
    def _wake(future: asyncio.Future[None] | None) -> None:
        if future is not None and not future.done():
            future.set_result(None)

    # --- the Stream seam ---

    async def _wait_for_bytes(self) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    async def receive(self) -> bytes:
        """See Stream."""
        while self._start == self._end:
            if self._lost is not None:
                raise Unavailable(f"connection to {self.peer} broke: {self._lost}")
            if self._ended:
                return b""
            await self._wait_for_bytes()
        data = bytes(self._buffer[self._start : self._end])
        self._start = self._end = 0
        self._resume()
        return data

    def _resume(self) -> None:
        if self._read_paused and self._transport is not None and not self._ended:
            self._read_paused = False
            self._transport.resume_reading()

    async def receive_into(self, target: memoryview) -> None:
        """See Stream."""
        ready = min(self._end - self._start, target.nbytes)
        if ready:
            target[:ready] = self._buffer[self._start : self._start + ready]
            self._start += ready
            if self._start == self._end:
                self._start = self._end = 0
                self._resume()
            target = target[ready:]
        if not target.nbytes:
            return
        if self._ended:
            raise Unavailable(f"{self.peer} ended the connection with {target.nbytes} bytes still to come")
        self._target = target
        try:
            while self._target is not None:
                await self._wait_for_bytes()
                if self._interrupted():
                    raise Unavailable(f"{self.peer} ended the connection in the middle of a transfer")
        finally:
            self._target = None

    def _interrupted(self) -> bool:
        return self._ended and (self._target is not None or self._closed)

    def write(self, data: Buffer) -> None:
        """See Stream."""
        if self._transport is not None and not self._closed and not self._transport.is_closing():
            self._transport.write(data)

    async def send(self, data: Buffer) -> None:
        """See Stream."""
        self.write(data)
        while self._write_paused and not self._closed:
            self._writable = asyncio.get_running_loop().create_future()
            try:
                await self._writable
            finally:
                self._writable = None
        if self._closed:
            raise Unavailable(f"connection to {self.peer} broke: {self._lost or 'closed'}")

    async def send_descriptor(self, descriptor: int) -> None:
        """See Stream."""
        await self.send(b"")
        assert self._transport is not None
        sock = self._transport.get_extra_info("socket")
        if sock is None or sock.family != socket.AF_UNIX:
            raise Unavailable("file descriptors can only be passed over a Unix socket")
        with socket.socket(fileno=os.dup(sock.fileno())) as duplicate:
            try:
                socket.send_fds(duplicate, [b"\0"], [descriptor])
            except OSError as error:
                raise Unavailable(f"cannot pass the arena to {self.peer}: {error.strerror}") from error

    def close(self) -> None:
        """See Stream."""
        if not self._closed:
            self._closed = self._ended = True
            self._lost = self._lost or ConnectionAbortedError("closed on this side")
            if self._transport is not None:
                self._transport.close()
            self._wake(self._reader)
            self._wake(self._writable)


class SocketListener:
    """A listening socket; each accepted connection is served by a task that ends with the listener."""

    def __init__(self, on_stream: OnStream) -> None:
        self._on_stream = on_stream
        self._server: asyncio.Server | None = None
        self._tasks: dict[asyncio.Task[None], Stream] = {}
        self._path: str = ""
        self.address = Address("tcp")

    def start(self, stream: SocketStream) -> None:
        """Serves an accepted connection."""
        task = asyncio.get_running_loop().create_task(self._serve(stream))
        self._tasks[task] = stream
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _serve(self, stream: SocketStream) -> None:
        try:
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
        self.address = address
        if address.scheme == "unix":
            self._path = address.path
        else:
            self.address = Address("tcp", host=address.host, port=server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """See Listener."""
        if self._server is not None:
            self._server.close()
        for task, stream in list(self._tasks.items()):
            stream.close()
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._path:
            Path(self._path).unlink(missing_ok=True)


class SocketNetwork:
    """Dials and listens on real sockets."""

    async def dial(self, address: Address, timeout_s: float) -> Stream:
        """See Network."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                if address.scheme == "unix":
                    _, stream = await loop.create_unix_connection(SocketStream, address.path)
                else:
                    _, stream = await loop.create_connection(SocketStream, address.host, address.port)
        except TimeoutError as error:
            raise Unavailable(f"no answer from {address} within {timeout_s:g} s") from error
        except OSError as error:
            raise Unavailable(f"cannot connect to {address}: {error.strerror or error}") from error
        stream.peer = str(address)
        return stream

    async def listen(self, address: Address, on_stream: OnStream) -> Listener:
        """See Network. A Unix socket is readable and writable by its owner only."""
        loop = asyncio.get_running_loop()
        listener = SocketListener(on_stream)
        try:
            if address.scheme == "unix":
                await self._clear_stale_socket(address.path)
                # The folder is private (0700), so nobody can connect between bind and chmod.
                private_directory(Path(address.path).parent)
                server = await loop.create_unix_server(lambda: SocketStream(listener), address.path)
                Path(address.path).chmod(0o600)
            else:
                server = await loop.create_server(lambda: SocketStream(listener), address.host, address.port)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror or error}") from error
        listener.opened(server, address)
        return listener

    async def _clear_stale_socket(self, path: str) -> None:
        """Removes the socket file of a process that died; refuses if somebody answers there or it is no socket."""
        try:
            if not stat.S_ISSOCK(Path(path).stat().st_mode):
                raise ConfigError(f"cannot listen on unix:{path}: a file that is no socket is in the way")
        except FileNotFoundError:
            return
        try:
            stream = await self.dial(Address("unix", path=path), timeout_s=0.5)
        except Unavailable:
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
            return
        stream.close()
        raise ConfigError(
            f"cannot listen on unix:{path}: another process serves there; stop it or choose another socket"
        )


def private_directory(path: Path) -> None:
    """Makes `path` (mode 0700) if it is missing; a folder that exists keeps its mode.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror}") from error
