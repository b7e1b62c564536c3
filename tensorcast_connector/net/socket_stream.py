"""One TCP or Unix connection on asyncio (or uvloop), reading straight into the caller's memory: the real Stream."""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any, Protocol

from tensorcast_connector.config import (
    HELLO_TIMEOUT_S,
    TCP_KEEPALIVE_IDLE_S,
    TCP_KEEPALIVE_INTERVAL_S,
    TCP_KEEPALIVE_PROBES,
)
from tensorcast_connector.errors import TensorcastError, Unauthorized, Unavailable
from tensorcast_connector.net.admission import Stage
from tensorcast_connector.net.tls import seen_by_listener
from tensorcast_connector.net.transport import Buffer

RECEIVE_BUFFER_BYTES = 256 << 10
FIRST_BYTES = 4  # by which it is told what somebody speaks


class Accepting(Protocol):
    """The listener that a connection came to."""

    def start(self, stream: "SocketStream") -> None:
        """It is up: serves it."""


class SocketStream(asyncio.BufferedProtocol):
    """One connection. Received bytes go to the waiting `receive_into` target, else to a small buffer of our own."""

    def __init__(self, accepted: Accepting | None = None) -> None:
        self._accepted = accepted
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = memoryview(bytearray(RECEIVE_BUFFER_BYTES))
        self._start = self._end = 0
        self._target: memoryview | None = None  # what `receive_into` still wants; None: nothing
        self._reader: asyncio.Future[None] | None = None
        self._take: Callable[[memoryview], bool] | None = None  # of `deliver`
        self._wants_more = True  # what `_take` said last
        self._failure: Exception | None = None  # what it raised
        self._flushed = asyncio.Event()  # nothing is queued for sending
        self._flushed.set()
        self._read_paused = False
        self._held = False  # by `pause`
        self._ended = False  # no more bytes will come
        self._closed = False  # and none can be sent
        self._lost: Exception | None = None
        self.first = b""  # of the bytes that came, the first few
        self.unheard: Callable[[], TensorcastError] | None = (
            None  # what it means that a dialled one ended before any came
        )
        self._closing = False  # by this side
        self.peer = "?"
        self.local = "?"  # this side's address
        self.tenant: str | None = None
        self.host = ""  # these three as in admission.py, by the event loop's time
        self.heard_at = 0.0
        self.stage = Stage.UNGREETED

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection is up."""
        self._transport = transport  # type: ignore[assignment]
        self.heard_at = self._loop.time()
        _limit_queue(self._transport)  # type: ignore[arg-type]
        sock = transport.get_extra_info("socket")
        self.peer = "unix"
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(sock)
            peer = transport.get_extra_info("peername")  # None if it has left already
            self.peer = f"{peer[0]}:{peer[1]}" if peer else "a peer that left"
            self.host = peer[0] if peer else "?"
            own = transport.get_extra_info("sockname")
            self.local = f"{own[0]}:{own[1]}" if own else "?"
        if self._accepted is not None:
            self._accepted.start(self)

    async def beginning(self) -> bytes:
        """The first bytes that come, which stay to be read; b"" if none do. For the listener's side, before anything else.

        Raises:
            Unavailable: there are none for a while.
        """
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                while self._start == self._end and not self._ended:
                    await self._wait_for_bytes()
        except TimeoutError:
            raise Unavailable(f"{self.peer} says nothing") from None
        return self.first

    async def secure(self, context: ssl.SSLContext) -> None:
        """The listener's side of a TLS handshake; before anything else is done with the connection.

        Raises:
            Unauthorized: the certificate of one side is not accepted by the other.
            Unavailable: the other side left, or this one has closed the connection.
        """
        assert self._transport is not None
        if self._ended:
            raise Unavailable(f"{self.peer} left")
        self._loop.call_soon(self._give, self._transport)
        try:
            made = await self._loop.start_tls(
                self._transport, self, context, server_side=True,
                ssl_handshake_timeout=HELLO_TIMEOUT_S, ssl_shutdown_timeout=HELLO_TIMEOUT_S,
            )  # fmt: skip
        except OSError as error:
            if self._closing or isinstance(
                error, ConnectionAbortedError
            ):  # that is how a handshake that takes too long ends
                raise Unavailable(f"no TLS with {self.peer}: {error}") from error
            raise Unauthorized(seen_by_listener(error)) from error
        if made is None or self._closed:  # what was closed on this side meanwhile looks like success
            if made is not None:
                made.close()
            raise Unavailable(f"the connection to {self.peer} was closed")
        self._transport = made
        _limit_queue(made)

    def _give(self, transport: asyncio.Transport) -> None:
        """What came already (uvloop reads at once) is of the handshake."""
        protocol: Any = transport.get_protocol()  # the handshake's, which takes what comes as we do
        if protocol is self:
            return
        data = self._buffer[: self._end]
        while data.nbytes:
            room = memoryview(protocol.get_buffer(data.nbytes))
            count = min(room.nbytes, data.nbytes)
            room[:count] = data[:count]
            protocol.buffer_updated(count)
            data = data[count:]
        self._start = self._end = 0
        self._read_paused = False

    def get_buffer(self, _sizehint: int) -> memoryview:
        """asyncio: where the next bytes go."""
        if self._target is not None:
            return self._target
        return self._buffer[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """asyncio: so many bytes went there."""
        self.heard_at = self._loop.time()
        if self.stage is not Stage.ASKED:
            self._begins(nbytes)
        if self._target is not None:
            self._target = self._target[nbytes:]
            if self._target.nbytes:
                return
            self._target = None
        elif self._take is not None:
            self._hand(self._buffer[:nbytes])
            return
        else:
            self._end += nbytes
            if self._end == RECEIVE_BUFFER_BYTES and self._transport is not None:
                self._transport.pause_reading()
                self._read_paused = True
        self._wake_reader()

    def _begins(self, nbytes: int) -> None:
        """Bytes have come, of the first there are."""
        if not self.first:
            came = self._target if self._target is not None else self._buffer[self._end :]
            self.first = bytes(came[: min(nbytes, FIRST_BYTES)])
        if self.stage is Stage.GREETED:
            self.stage = Stage.ASKED

    def eof_received(self) -> bool:
        """asyncio: the peer will send no more. Returning False lets asyncio close the transport."""
        self._ended = True
        self._wake_reader()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the connection is gone."""
        self._ended = self._closed = True
        self._lost = self._lost or exc
        self._wake_reader()
        self._flushed.set()

    def pause_writing(self) -> None:
        """asyncio: bytes are queued."""
        self._flushed.clear()

    def resume_writing(self) -> None:
        """asyncio: nothing is queued any more."""
        self.heard_at = self._loop.time()
        self._flushed.set()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _check_heard(self) -> None:
        """Raises what it means that a connection that was dialled has ended without any answer."""
        asked = self.stage is not Stage.UNGREETED
        if self.unheard is not None and asked and not self.first and self._ended and not self._closing:
            raise self.unheard()

    # --- the Stream seam ---

    async def _wait_for_bytes(self) -> None:
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    async def receive(self) -> bytes:
        """See Stream."""
        while self._start == self._end:
            self._check_heard()
            if self._lost is not None:
                raise Unavailable(f"connection to {self.peer} broke: {self._lost}")
            if self._ended:
                return b""
            await self._wait_for_bytes()
        data = bytes(self._buffer[self._start : self._end])
        self._emptied()
        return data

    async def deliver(self, take: Callable[[memoryview], bool]) -> None:
        """See Stream."""
        self._take = take
        try:
            if self._start < self._end:  # it came before
                self._hand(self._buffer[self._start : self._end])
            self._start = self._end = 0
            while self._failure is None and not self._closed and not (self._ended and self._wants_more):
                if self._wants_more:
                    await self._wait_for_bytes()
                else:
                    await self._flushed.wait()
                    self._hand(memoryview(b""))
        finally:
            self._take = None
            self._held = False
            self._emptied()
        if self._failure is not None:
            raise self._failure
        self._check_heard()
        if self._lost is not None:
            raise Unavailable(f"connection to {self.peer} broke: {self._lost}")

    def _hand(self, data: memoryview) -> None:
        """Gives bytes to `_take`, and stops reading while it wants no more."""
        assert self._take is not None and self._transport is not None
        try:
            self._wants_more = self._take(data)
        except Exception as error:
            self._failure = error
        if self._failure is None and self._wants_more:
            self._emptied()
        else:
            self._transport.pause_reading()
            self._read_paused = True
            self._wake_reader()

    def pause(self) -> None:
        """See Stream."""
        self._held = True
        if not self._read_paused and self._transport is not None and not self._ended:
            self._read_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """See Stream."""
        self._held = False
        if self._wants_more and self._end < RECEIVE_BUFFER_BYTES:
            self._read_on()

    @property
    def flushed(self) -> bool:
        """See Stream."""
        return self._flushed.is_set()

    @property
    def unsent_bytes(self) -> int:
        """See Stream."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    async def drained(self) -> None:
        """See Stream."""
        await self._flushed.wait()

    def _emptied(self) -> None:
        self._start = self._end = 0
        if not self._held:
            self._read_on()

    def _read_on(self) -> None:
        if self._read_paused and self._transport is not None and not self._ended:
            self._read_paused = False
            self._transport.resume_reading()

    async def receive_into(self, target: memoryview) -> None:
        """See Stream."""
        ready = min(self._end - self._start, target.nbytes)
        if ready:
            target[:ready] = self._buffer[self._start : self._start + ready]
            self._start += ready
            target = target[ready:]
            if self._start == self._end:
                self._emptied()
        if not target.nbytes:
            return
        self._target = target
        try:
            while self._target is not None:
                if self._ended:
                    self._check_heard()
                    why = f": {self._lost}" if self._lost else ""
                    raise Unavailable(f"{self.peer} left with {self._target.nbytes} bytes still to come{why}")
                await self._wait_for_bytes()
        finally:
            self._target = None

    def write(self, data: Buffer) -> None:
        """See Stream."""
        if self._transport is not None and not self._closed and not self._transport.is_closing():
            if self.stage is Stage.UNGREETED:
                self.stage = Stage.GREETED
            self._transport.write(data)

    async def send(self, data: Buffer) -> None:
        """See Stream."""
        self.write(data)
        await self._flushed.wait()
        if self._closed:
            raise Unavailable(f"connection to {self.peer} broke: {self._lost or 'it ended'}")

    async def send_descriptor(self, descriptor: int) -> None:
        """See Stream."""
        passed = -1
        try:
            # While this waits its turn, what it was asked for may be closed, and its number be something else's.
            passed = os.dup(descriptor)
            await self.send(b"")
            assert self._transport is not None
            sock = self._transport.get_extra_info("socket")
            if sock is None or sock.family != socket.AF_UNIX:
                raise Unavailable("file descriptors can only be passed over a Unix socket")
            with socket.socket(fileno=os.dup(sock.fileno())) as duplicate:
                socket.send_fds(duplicate, [b"\0"], [passed])
        except OSError as error:
            raise Unavailable(f"cannot pass a descriptor to {self.peer}: {error.strerror}") from error
        finally:
            if passed >= 0:
                os.close(passed)

    def close(self) -> None:
        """See Stream."""
        self._closing = True
        if self._closed:
            return
        self._closed = self._ended = True
        self._lost = self._lost or ConnectionAbortedError("closed on this side")
        if self._transport is not None:
            # What is still queued waits for a peer that does not read, and may be memory that is about to be reused.
            if self._flushed.is_set():
                self._transport.close()
            else:
                self._transport.abort()
        self._wake_reader()
        self._flushed.set()


def _limit_queue(transport: asyncio.Transport) -> None:
    """A send returns when nothing is queued any more, so the caller may reuse the memory it sent from."""
    # TLS pauses the writer at exactly `high` bytes: with 0 it would pause after having sent everything, for ever.
    secure = transport.get_extra_info("sslcontext") is not None
    transport.set_write_buffer_limits(high=1 if secure else 0, low=0)


def _keep_alive(sock: socket.socket) -> None:
    """A host that vanished without a word is noticed by the kernel, and what its connections held is given back."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, TCP_KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, TCP_KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, TCP_KEEPALIVE_PROBES)
