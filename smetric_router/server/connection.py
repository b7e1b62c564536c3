"""One connection of a client: its requests, one after the other, and their answers.

What it reads while an answer is under way is kept, up to a limit; beyond it, it is thrown away and the connection ends with
that answer. So the socket is always read, and a client that leaves noticed at once: were reading paused, a client with a full
window could not even be told from one that has left. A client that ends its side (FIN) counts as one that has left.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

from smetric_router.errors import BadRequest, HeadTooLarge, RouterError, TimedOut, TooLarge
from smetric_router.server.client_limits import HeldBytes, Limits
from smetric_router.server.http1 import (
    CONTINUE,
    HEAD_END,
    LAST_CHUNK,
    ChunkedBody,
    Headers,
    Malformed,
    RequestHead,
    answer_bytes,
    check_beginning,
    chunk_bytes,
    parse_request_head,
)
from smetric_router.server.logs import log

BODY_RATE_MIN = 1024
"""Bytes per second: who sends a body more slowly only wants to keep the connection."""
_NO_BODY_STATUSES = frozenset((204, 304))
_LINGER_S = 5.0
"""After an answer to half a request so much longer is read: closing on unread bytes resets the connection, answer and all."""


class Work(Protocol):
    """What answers one request."""

    def client_gone(self) -> None:
        """The client has left. Nothing may be sent any more."""

    def pause(self) -> None:
        """The client reads more slowly than it is answered."""

    def resume(self) -> None:
        """It has caught up."""


Admit = Callable[[RequestHead], None]
"""Raises RouterError for a request whose head tells that it may not be made; its body is not read then."""
Begin = Callable[[RequestHead, bytes, "ClientConnection"], Work | None]
"""Begins the work on a request, with its body; None if it has been answered already."""


class ClientConnection(asyncio.Protocol):
    """See the module.

    Args:
        admit: called with each head.
        begin: called with each request.
        refuse: called with the head, if it could be read, and the error for what is no request; answers by `answer`.
        connections: those that are open; it enters and leaves.
        clock: time in seconds.
        held: what all connections hold; it counts its own part there.
    """

    def __init__(
        self,
        limits: Limits,
        admit: Admit,
        begin: Begin,
        refuse: Callable[["ClientConnection", RequestHead | None, RouterError], None],
        connections: "set[ClientConnection]",
        clock: Callable[[], float],
        held: HeldBytes,
    ) -> None:
        self._limits = limits
        self._admit = admit
        self._begin = begin
        self._refuse = refuse
        self._connections = connections
        self._clock = clock
        self._held = held
        self._holds = 0  # of that
        self._transport: asyncio.Transport | None = None
        self._partial = bytearray()  # of a head
        self._head: RequestHead | None = None
        self._parts: list[bytes] = []  # of its body
        self._size = 0
        self._chunks: ChunkedBody | None = None
        self._work: Work | None = None
        self._busy = False  # from the end of a request to the end of its answer
        self._early: list[bytes] = []  # what came meanwhile
        self._early_bytes = 0
        self._chunked = False  # the answer
        self._close = False  # after the answer
        self._full = False  # the client reads more slowly than it is answered
        self._full_s = 0.0  # since when
        self._deaf = False  # what still comes is thrown away
        self._lingering = False  # until the client has seen the answer to what it had no time to finish
        self._http11 = True
        self._to_head = False
        self._last_s = self._begun_s = clock()
        self.draining = False
        self.address: tuple[str, int] | None = None
        """Host and port of the client."""
        self.asked: RequestHead | None = None
        """What was read last; None where it could not be."""

    def __repr__(self) -> str:
        return f"<ClientConnection {'busy' if self._busy else 'reading' if self.reading else 'idle'}>"

    @property
    def busy(self) -> bool:
        """Whether an answer is under way."""
        return self._busy

    @property
    def reading(self) -> bool:
        """Whether part of a request has come."""
        return bool(self._partial or self._head is not None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it is open."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self.address = transport.get_extra_info("peername")
        self._connections.add(self)

    # --- requests ---

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes."""
        if self._deaf or (data.isspace() and not self.reading and not self._busy):
            return  # empty lines between requests are nothing, and keep no connection open
        self._last_s = self._clock()
        if self._busy or self._full:
            self._keep(data)
            return
        if not self.reading:
            self._begun_s = self._last_s
        try:
            self._read(data)
        except RouterError as error:
            self._give_up(error)
        except Malformed as error:
            self._give_up(BadRequest(f"this is no HTTP request: {error}"))
        except Exception:
            log.exception("internal error")
            self._give_up(RouterError("the router failed to read the request"))

    def _read(self, data: bytes) -> None:
        while data and not (self._busy or self._full) and self._transport is not None:
            data = self._read_head(data) if self._head is None else self._read_body(data)
        if data:
            self._keep(data)

    def _keep(self, data: bytes) -> None:
        """Until the answer under way is over, and has been taken."""
        self._early.append(data)
        self._early_bytes += len(data)
        self._hold(len(data))
        if self._early_bytes > self._limits.early_bytes_max or self._held.count > self._held.bytes_max:
            self._early.clear()
            self._hold(-self._early_bytes)
            self._early_bytes = 0
            self._deaf = self._close = True

    def _read_head(self, data: bytes) -> bytes:
        """Returns what follows the head."""
        if self._partial:
            before = len(self._partial)
            self._partial += data
            end = self._partial.find(HEAD_END, max(0, before - 3))
            if end >= 0:
                data = bytes(self._partial)
                self._partial.clear()
        else:
            data = data.lstrip(b"\r\n")
            end = data.find(HEAD_END)
            if end < 0:
                self._partial += data
        if end > self._limits.head_bytes_max or len(self._partial) > self._limits.head_bytes_max:
            raise HeadTooLarge(f"the request's headers have more than {self._limits.head_bytes_max} bytes")
        if end < 0:
            check_beginning(self._partial)
            return b""
        self.asked = None
        self.asked = head = self._head = parse_request_head(data[: end + 4])
        self._admit(head)
        if head.length == 0:
            self._complete(b"")
        else:
            self._expect_body(head)
        return data[end + 4 :]

    def _expect_body(self, head: RequestHead) -> None:
        limit = self._limits.body_bytes_max
        if head.length is not None and head.length > limit:
            raise TooLarge(f"the body has {head.length} bytes; the limit is {limit}")
        self._held.check(head.length or 0)
        self._size = 0
        self._chunks = ChunkedBody() if head.length is None else None
        if head.expects and self._transport is not None:
            self._transport.write(CONTINUE)

    def _read_body(self, data: bytes) -> bytes:
        """Returns what follows the body."""
        assert self._head is not None
        if self._chunks is None:
            assert self._head.length is not None
            missing = self._head.length - self._size
            mine = data if len(data) <= missing else data[:missing]
            self._parts.append(mine)
            self._size += len(mine)
            self._hold(len(mine))
            done, rest = self._size == self._head.length, data[missing:]
        else:
            for piece in self._chunks.feed(data):
                self._parts.append(piece)
                self._size += len(piece)
                self._hold(len(piece))
            if self._size > self._limits.body_bytes_max:
                raise TooLarge(f"the body has more than {self._limits.body_bytes_max} bytes, which is the limit")
            done, rest = self._chunks.done, self._chunks.rest
        if not done:
            self._held.check()
            return b""
        parts, self._parts, self._chunks, self._size = self._parts, [], None, 0
        self._complete(parts[0] if len(parts) == 1 else b"".join(parts))
        return rest

    def _hold(self, size: int) -> None:
        self._holds += size
        self._held.count += size

    def _let_go(self) -> None:
        """Nobody needs the request any more, apart from what has come early."""
        self._hold(self._early_bytes - self._holds)

    def _complete(self, body: bytes) -> None:
        head, self._head = self._head, None
        assert head is not None
        self._busy = True
        self._http11 = head.http11
        self._close = not head.keep_alive or not head.http11 or self.draining
        self._to_head = head.method == b"HEAD"
        work = self._begin(head, body, self)
        if self._busy:
            self._work = work

    def _give_up(self, error: RouterError) -> None:
        """Answers what was no request, and reads no more."""
        head, self._head = self._head, None
        self._to_head = head is not None and head.method == b"HEAD"
        self._chunks, self._parts, self._size = None, [], 0
        self._partial.clear()
        self._early.clear()
        self._early_bytes = 0
        self._let_go()
        self._busy, self._close, self._http11 = True, True, True
        self._deaf = self._lingering = True
        self._refuse(self, head, error)

    def eof_received(self) -> None:
        """asyncio: the client sends no more, which is how clients leave."""
        if self._busy and self._transport is not None and not self._transport.is_closing() and not self._lingering:
            self._transport.abort()  # a mere close would first wait for what the client may never read

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """asyncio: it is closed."""
        self._transport = None
        self._connections.discard(self)
        work, self._work = self._work, None
        self._early.clear()
        self._early_bytes = 0
        self._let_go()
        if work is not None:
            work.client_gone()

    # --- answers ---

    def start(self, status: int, headers: Headers, data: bytes, *, end: bool, length_known: bool = False) -> None:
        """The head of the answer with the first piece of its body, in one write.

        Args:
            end: whether that was all.
            length_known: whether a Content-Length is among the headers.
        """
        if self._transport is None:
            return
        self._let_go()
        bodiless = self._to_head or status in _NO_BODY_STATUSES
        self._chunked = not length_known and not bodiless and self._http11 and not end
        self._close |= self.draining or (not length_known and not self._http11 and not end)
        if end and not length_known and not bodiless:
            headers = [*headers, (b"content-length", b"%d" % len(data))]
        text = answer_bytes(status, headers, chunked=self._chunked, close=self._close)
        if data and not bodiless:
            text += chunk_bytes(data) if self._chunked else data
        self._transport.write(text)
        if end:
            self._over()

    def send(self, data: bytes, *, end: bool) -> None:
        """More of the body; `end`: the last of it."""
        if self._transport is None:
            return
        if self._chunked:
            text = chunk_bytes(data) if data else b""
            data = text + LAST_CHUNK if end else text
        if data:
            self._transport.write(data)
        if end:
            self._over()

    def answer(self, status: int, headers: Headers, data: bytes) -> None:
        """A whole answer."""
        self.start(status, headers, data, end=True)

    def cut(self) -> None:
        """The answer cannot be completed: the connection ends, so that the client does not take it for complete."""
        if self._transport is not None:
            self._transport.abort()

    def _over(self) -> None:
        self._work = None
        self._last_s = self._clock()
        if self._transport is None:
            return
        if self._close:
            if self._lingering and self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()
            return
        self._busy = False
        if self._early and not self._full:
            # Not from here: the answers of a long row of early requests would be nested in each other.
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        data, self._early, self._early_bytes = b"".join(self._early), [], 0
        self._let_go()
        if self._transport is None or self._transport.is_closing():
            return
        if data:
            self.data_received(data)

    def pause_writing(self) -> None:
        """asyncio: the client does not read as fast."""
        self._full, self._full_s = True, self._clock()
        if self._work is not None:
            self._work.pause()

    def resume_writing(self) -> None:
        """asyncio: it has caught up."""
        self._full = False
        if self._work is not None:
            self._work.resume()
        elif self._early and not self._busy:
            asyncio.get_running_loop().call_soon(self._next)

    # --- time ---

    def check(self, now: float) -> None:
        """Gives up who stands still. Call it now and then."""
        if self._transport is None:
            return
        if self._full and now - self._full_s > self._limits.stall_s:
            self._transport.abort()
        elif self._lingering or self._transport.is_closing():
            if now - self._last_s > (_LINGER_S if self._lingering else self._limits.stall_s):
                self._transport.abort()
        elif not self._busy:
            self._check_reading(now)

    def _check_reading(self, now: float) -> None:
        assert self._transport is not None
        quiet_s, limit_s = now - self._last_s, self._limits.request_timeout_s
        if not self.reading:
            if quiet_s > self._limits.keepalive_s:
                self._transport.close()
        elif quiet_s > limit_s or now - self._begun_s > limit_s + self._size / BODY_RATE_MIN:
            self._give_up(TimedOut("the request did not come to its end in time"))

    def drain(self) -> None:
        """Closes once what is under way is answered."""
        self.draining = self._close = True
        if not self._busy and self._transport is not None and not self.reading:
            self._transport.close()
