"""Connections to the engines: one exchange at a time on each, kept open between exchanges.

A link tells its listener what arrives, in the transport's callback: no task is woken for a chunk.
"""

import asyncio
import errno
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, cast

from smetric_router.errors import (
    ConfigError,
    OutOfResources,
    RouterError,
    UpstreamDisconnected,
    UpstreamFailed,
    UpstreamUnreachable,
)
from smetric_router.server.addresses import EngineAddress
from smetric_router.server.http1 import HEAD_END, AnswerHead, ChunkedBody, Malformed, parse_answer_head
from smetric_router.server.logs import log

_OWN_FAULTS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EADDRNOTAVAIL))
_HEAD_BYTES_MAX = 262_144
_COPIED_BYTES_MAX = 16_384  # a second write costs more than to copy so much
STALE_S = 1.0
"""An idle connection that the engine had closed breaks within so long; what breaks later had been given the request."""


class Listener(Protocol):
    """Who waits for an answer. After `on_end` or `on_broken` nothing more comes."""

    def on_head(self, head: AnswerHead) -> None:
        """The head of the answer."""

    def on_data(self, data: bytes) -> None:
        """More of its body; never empty."""

    def on_end(self) -> None:
        """The answer is complete."""

    def on_broken(self, error: UpstreamFailed, *, stale: bool) -> None:
        """The connection broke first. `stale`: it had been open before, and broke at once, with nothing at all back on it."""


class EngineLink(asyncio.Protocol):
    """See the module."""

    def __init__(self, links: "EngineLinks", engine: str, *, once: bool = False) -> None:
        self._links = links
        self._once = once
        self.engine = engine
        self._transport: asyncio.Transport | None = None
        self._listener: Listener | None = None
        self._head: AnswerHead | None = None
        self._chunks: ChunkedBody | None = None
        self._left: int | None = None  # bytes of a body whose length is known
        self._partial = b""  # of a head
        self._to_head = False
        self._paused = False
        self._begun_s = 0.0
        self._used = False
        self._silent = True  # nothing has come back for this exchange
        self.idle_since_s = 0.0

    def __repr__(self) -> str:
        return f"<EngineLink {self.engine} {'busy' if self._listener else 'idle'}>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it is open."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    @property
    def usable(self) -> bool:
        """Whether an exchange can begin."""
        return self._transport is not None and not self._transport.is_closing() and self._listener is None

    @property
    def _wanted(self) -> bool:
        return self._listener is not None

    def begin(self, listener: Listener, head: bytes, body: bytes, *, to_head: bool = False) -> None:
        """Sends a request and listens for its answer; `to_head`: it is a HEAD request, whose answer has no body."""
        assert self._transport is not None and self._listener is None
        self._listener, self._to_head, self._silent = listener, to_head, True
        self._begun_s = self._links.clock()
        if len(body) <= _COPIED_BYTES_MAX:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    def abandon(self) -> None:
        """The answer is not wanted any more: the engine sees the connection close, and stops its work."""
        self._listener = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """The listener's reader is slow: nothing more is read meanwhile."""
        if self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """It has caught up."""
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    # --- what arrives ---

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes."""
        self._silent = False
        try:
            while data and self._wanted:
                data = self._body(data) if self._head is not None else self._read_head(data)
            if data:
                self.abandon()  # more than was asked for, or nothing was: what comes next could be taken for another's answer
        except Malformed as error:
            self._break(UpstreamDisconnected(f"{self.engine} does not answer in HTTP: {error}"))
        except Exception:
            log.exception("internal error", extra={"fields": {"instance": self.engine}})
            self._break(UpstreamDisconnected(f"the router failed to read the answer of {self.engine}"))

    def _read_head(self, data: bytes) -> bytes:
        """Returns what follows the head."""
        before = len(self._partial)
        if before:
            data, self._partial = self._partial + data, b""
        end = data.find(HEAD_END, max(0, before - 3))
        if end < 0:
            if len(data) > _HEAD_BYTES_MAX:
                raise Malformed("its head is too long")
            self._partial = data
            return b""
        head = parse_answer_head(data[: end + 4], to_head=self._to_head)
        data = data[end + 4 :]
        if head.status < 200:
            return data  # only says that it is at work
        assert self._listener is not None
        self._head, self._left = head, head.length
        self._chunks = ChunkedBody() if head.chunked and head.length is None else None
        self._listener.on_head(head)
        if head.length == 0 and self._listener is not None:
            self._end(data)
            return b""
        return data

    def _body(self, data: bytes) -> bytes:
        """Hands on what belongs to the body; returns what does not."""
        assert self._listener is not None
        if self._chunks is not None:
            pieces = self._chunks.feed(data)
            if pieces:
                self._listener.on_data(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            if self._chunks.done and self._listener is not None:
                self._end(self._chunks.rest)
            return b""
        if self._left is None:
            self._listener.on_data(data)
            return b""
        rest = data[self._left :]
        mine = data[: self._left] if rest else data
        self._left -= len(mine)
        if mine:
            self._listener.on_data(mine)
        if not self._left and self._listener is not None:
            self._end(rest)
        return b""

    def _end(self, rest: bytes) -> None:
        listener, head = self._listener, self._head
        assert listener is not None and head is not None and self._transport is not None
        self._listener = self._head = self._chunks = self._left = None
        self._used = True
        unsent = self._transport.get_write_buffer_size()  # answered before it had the request: it may not read the rest
        if rest or unsent or self._once or not head.keep_alive or self._transport.is_closing():
            self._transport.abort()
        else:
            self.resume()  # its last bytes may have been too many for the listener's reader
            self._links.give_back(self)
        listener.on_end()

    def eof_received(self) -> None:
        """asyncio: the engine sends no more."""
        if self._listener is not None and self._head is not None and self._left is None and self._chunks is None:
            self._end(b"\0")  # that is how this body ends

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: it is closed."""
        self._links.forget(self)
        self._transport = None
        cause = str(error) if error else "closed by the engine"
        self._break(UpstreamDisconnected(f"the connection to {self.engine} broke: {cause}"))

    def _break(self, error: UpstreamFailed) -> None:
        listener, self._listener = self._listener, None
        if self._transport is not None:
            self._transport.abort()
        if listener is not None:
            soon = self._links.clock() - self._begun_s < STALE_S
            listener.on_broken(error, stale=self._used and self._silent and soon)


class _Engine:
    """Where an engine is, and the links to it that are idle; the one used last is taken first."""

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        self.at = EngineAddress(url, clock)
        self.idle: deque[EngineLink] = deque()
        self.open: set[EngineLink] = set()


class EngineLinks:
    """The links to all engines.

    Args:
        connect_timeout_s: a connection that has not come about by then is given up.
        keepalive_s: a link that was idle for longer is not used again.
        clock: time in seconds.
        tls_ca: PEM file with the authorities that sign the engines' certificates; empty: the system's.
    """

    def __init__(
        self, *, connect_timeout_s: float, keepalive_s: float, clock: Callable[[], float], tls_ca: str = ""
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self.clock = clock
        self._engines: dict[str, _Engine] = {}
        self._tls: ssl.SSLContext | None = engine_tls(tls_ca) if tls_ca else None

    def __repr__(self) -> str:
        return f"<EngineLinks {sum(len(each.open) for each in self._engines.values())} open>"

    def _engine(self, url: str) -> _Engine:
        return self._engines.get(url) or self._engines.setdefault(url, _Engine(url, self.clock))

    def address(self, engine: str) -> tuple[bytes, bytes]:
        """What goes before a target, and the Host header."""
        at = self._engine(engine).at
        return at.prefix, at.host

    def take(self, engine: str) -> EngineLink | None:
        """An idle link, if there is one."""
        idle = self._engine(engine).idle
        while idle:
            link = idle.pop()
            if self.clock() - link.idle_since_s > self._keepalive_s:
                idle.append(link)
                self.close_idle(engine)  # all the others are older
                return None
            if link.usable:
                return link
        return None

    async def connect(self, engine: str, *, once: bool = False) -> EngineLink:
        """A new link; `once`: it is for a single exchange and not for others, even if the engine keeps it open.

        Raises:
            UpstreamUnreachable: no connection came about.
            OutOfResources: by the router's own fault.
        """
        found = self._engine(engine)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                link = await self._reach(found.at, lambda: EngineLink(self, engine, once=once))
        except TimeoutError:
            raise UpstreamUnreachable(f"no connection to {engine}: none within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            if error.errno in _OWN_FAULTS:
                message = f"the router cannot open another connection: {error.strerror}"
                raise OutOfResources(message, retry_after_s=1) from error
            raise UpstreamUnreachable(f"no connection to {engine}: {_cause(error)}") from error
        except UnicodeError as error:
            raise UpstreamUnreachable(f"no connection to {engine}: {error}") from error
        found.open.add(link)
        return link

    async def _reach(self, at: EngineAddress, make: Callable[[], EngineLink]) -> EngineLink:
        """The first of its addresses that takes a connection. Raises what the last one that does not raises."""
        if at.secure and self._tls is None:
            self._tls = engine_tls()
        secure: dict[str, Any] = {"ssl": self._tls, "server_hostname": at.name} if at.secure else {}
        addresses = await at.resolved(self._connect_timeout_s)
        share_s = self._connect_timeout_s / len(addresses)  # one that is silent leaves time for the others
        for number, address in enumerate(addresses, 1):
            try:
                async with asyncio.timeout(share_s):
                    _, link = await asyncio.get_running_loop().create_connection(make, address, at.port, **secure)
            except OSError as error:  # a time-out is one
                at.failed()
                if number == len(addresses) or error.errno in _OWN_FAULTS:
                    raise
            else:
                return link
        raise AssertionError(addresses)

    def give_back(self, link: EngineLink) -> None:
        """Its exchange has ended, and it is still open."""
        link.idle_since_s = self.clock()
        self._engine(link.engine).idle.append(link)

    def forget(self, link: EngineLink) -> None:
        """It is closed."""
        self._engine(link.engine).open.discard(link)

    def close_idle(self, engine: str) -> None:
        """Closes the links that are idle."""
        idle = self._engine(engine).idle
        while idle:
            idle.pop().abandon()

    def sweep(self) -> None:
        """Closes the links that have been idle for too long, oldest first. Call it now and then."""
        now = self.clock()
        for each in self._engines.values():
            while each.idle and (not each.idle[0].usable or now - each.idle[0].idle_since_s > self._keepalive_s):
                each.idle.popleft().abandon()

    def close(self) -> None:
        """Closes all."""
        for each in self._engines.values():
            each.idle.clear()
            for link in list(each.open):
                link.abandon()


def engine_tls(ca_file: str = "") -> ssl.SSLContext:
    """For connections to engines. Raises ConfigError when the file is of no use."""
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"engine_tls_ca: cannot read {ca_file}: {error.strerror or error}") from None
    context.set_alpn_protocols(["http/1.1"])
    return context


def _cause(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS: {error.reason or error}"
    return error.strerror or str(error)


class Collected:
    """A listener for a small answer that is wanted whole."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._parts: list[bytes] = []
        self._size = self._status = 0
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def on_head(self, head: AnswerHead) -> None:
        """See Listener."""
        self._status = head.status

    def on_data(self, data: bytes) -> None:
        """See Listener."""
        self._parts.append(data)
        self._size += len(data)
        if self._size > self._bytes_max:
            self._fail(UpstreamDisconnected("its answer is too long"))

    def on_end(self) -> None:
        """See Listener."""
        if not self.done.done():
            self.done.set_result((self._status, b"".join(self._parts)))

    def on_broken(self, error: UpstreamFailed, *, stale: bool) -> None:  # noqa: ARG002
        """See Listener."""
        self._fail(error)

    def _fail(self, error: RouterError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
