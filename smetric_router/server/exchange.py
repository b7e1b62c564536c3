"""One request from its last byte to the last byte of its answer: placed, sent, passed on, and if need be tried again.

    begin -> attempt -> on_head -> on_data ... -> on_end
                 ^---- retry ---- on_broken, or a status that another instance may not give

Everything happens in the callback of what arrived, so there is no task per request, and one owner of its state: this.
Nothing reaches the client before the first byte of the body has arrived, so an engine that dies before is replaced.
"""

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from smetric_router.errors import (
    Overloaded,
    RouterError,
    UpstreamDisconnected,
    UpstreamFailed,
    UpstreamTimedOut,
    UpstreamUnreachable,
)
from smetric_router.policies.base import Policy
from smetric_router.server.connection import ClientConnection
from smetric_router.server.host import Host
from smetric_router.server.http1 import AnswerHead, RequestHead, is_event_stream, request_bytes
from smetric_router.server.links import EngineLink
from smetric_router.server.logs import log
from smetric_router.state.requests import is_repeatable
from smetric_router.state.usage import UsageScan
from smetric_router.types import RequestInfo, Ticket, Usage

CLIENT_GONE_STATUS = 499
# What vLLM's web server says once its engine process has ended, also while it is being stopped.
ENGINE_DEAD = b"EngineCore encountered an issue"
_REFUSALS = frozenset((429, 503))
_RETRIED_STATUSES = _REFUSALS | {502}
_P = ParamSpec("_P")


def _ends(step: Callable[Concatenate["Exchange", _P], None]) -> Callable[Concatenate["Exchange", _P], None]:
    """A step that nobody else looks after: with what it raises the exchange ends, and whoever called it goes on."""

    @wraps(step)
    def guarded(exchange: "Exchange", /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            try:
                step(exchange, *args, **kwargs)
            except RouterError as error:
                if exchange.started:
                    raise
                exchange._refuse(error)
        except Exception as error:
            exchange._crashed(error)

    return guarded


class Exchange:
    """See the module. Made by the proxy, which it tells what became of it."""

    __slots__ = (
        "__weakref__", "_answer", "_body", "_connecting", "_held", "_link", "_over", "_paused", "_proxy", "_repeatable",
        "_request", "_scan", "_whole", "attempt_s", "avoided", "begun_s", "cause", "client", "error", "id", "info",
        "last_arrival_s", "policy", "span", "started", "status", "ticket", "tried", "ttft_s",
    )  # fmt: skip

    def __init__(
        self, proxy: "Host[Exchange]", client: ClientConnection, request: RequestHead, body: bytes, begun_s: float
    ) -> None:
        self._proxy = proxy
        self.client = client
        self._request = request
        self._body = body
        self._repeatable = is_repeatable(request.method, self.path)
        self._link: EngineLink | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._answer: AnswerHead | None = None
        self._scan: UsageScan | None = None
        self._over = False
        self._whole = False  # the client has got all of the answer
        self._paused = False  # the client is slow, so nothing is read from the engine
        self.id = b""
        self.begun_s = self.attempt_s = self.last_arrival_s = begun_s
        self.info = RequestInfo()
        self.policy: Policy | None = None
        self.tried: list[str] = []
        self.avoided: frozenset[str] = frozenset()  # not tried, and known to be full
        self.cause = ""  # why the last attempt failed
        self.span: object = None
        self.ticket: Ticket | None = None  # of the last attempt
        self._held: Ticket | None = None  # the same, until it is given back
        self.status = 0
        self.ttft_s: float | None = None
        self.started = False  # whether the client has got any byte
        self.error: str | None = None

    def __repr__(self) -> str:
        return f"<Exchange {self.id!r} {self._request.method!r} {self._request.target!r} at {self.tried}>"

    @property
    def method(self) -> str:
        """Of the request."""
        return self._request.method.decode("latin-1")

    @property
    def target(self) -> str:
        """Path and query."""
        return self._request.target.decode("latin-1")

    @property
    def instance(self) -> str:
        """Where it is now, or was last."""
        return self.tried[-1] if self.tried else ""

    # --- attempts ---

    @_ends
    def begin(self) -> None:
        """Reads the request, and makes the first attempt or waits for room."""
        self.id = self._proxy.request_id(self._request.headers)
        if self._proxy.read(self, self._request, self._body) and not self._proxy.must_wait(self):
            self.go()

    @_ends
    def go(self) -> None:
        """The first attempt; it may wait again if the room is of no use to it."""
        try:
            self._attempt()
        except Overloaded:
            self._proxy.wait(self)

    @_ends
    def read(self, info: RequestInfo) -> None:
        """What a decision sees of it has been found out in the background."""
        if self._over:
            return
        self.info = info
        if not self._proxy.must_wait(self):
            self.go()

    def _attempt(self) -> None:
        """One attempt at one instance. Raises RouterError when there is none for it."""
        self.ticket = self._held = ticket = self._proxy.place(self)
        self.tried.append(ticket.decision.instance)
        self._proxy.placed(self, ticket)
        self._connect_and_send()

    def _connect_and_send(self) -> None:
        self.attempt_s = self.last_arrival_s = self._proxy.clock()
        # Of a connection that closes as it is used again nobody knows whether the engine has the request.
        link = self._proxy.links.take(self.instance) if self._repeatable else None
        if link is not None:
            self._send(link)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        try:
            link = await self._proxy.links.connect(self.instance)
        except RouterError as error:
            self._connecting = None
            self._attempt_failed(error)
        except Exception as error:
            self._connecting = None
            self._crashed(error)
        else:
            self._connecting = None
            self._send(link)

    @_ends
    def _send(self, link: EngineLink) -> None:
        if not link.usable:  # closed since
            self._attempt_failed(UpstreamDisconnected(f"{self.instance} closed the connection at once"))
            return
        self._link = link
        prefix, host = self._proxy.links.address(self.instance)
        request = self._request
        headers = self._proxy.headers_for_engine(self, request.headers)
        head = request_bytes(request.method, prefix + request.target, host, headers, len(self._body))
        link.begin(self, head, self._body, to_head=request.method == b"HEAD")

    def _released(self, *, failed: bool | None, computed: bool = False, usage: Usage | None = None) -> None:
        """The present attempt is over, however it ended. `failed`: by the instance's fault; None: that is not known."""
        ticket, self._held, self._answer = self._held, None, None
        if ticket is not None:
            self._proxy.finished(ticket, failed=failed, computed=computed, usage=usage or Usage())

    @_ends
    def _attempt_failed(self, error: RouterError) -> None:
        """Nothing has reached the client of this attempt: another one, or the error."""
        self._link = None
        upstream = isinstance(error, UpstreamFailed)
        self._released(failed=True if upstream else None)
        if isinstance(error, UpstreamFailed):
            fields = {"request_id": self.id.decode("latin-1"), "cause": error.message}
            log.warning("attempt failed", extra={"fields": fields})
            self._proxy.suspect(self.instance, error)
            lost = isinstance(error, UpstreamUnreachable) or (
                self._repeatable and not isinstance(error, UpstreamTimedOut)
            )
            if lost and self._proxy.may_retry(self):
                self._retry(error.code.removeprefix("upstream_"))
                return
        self._refuse(error)

    @_ends
    def _retry(self, cause: str) -> None:
        self.cause = cause
        self._attempt()

    # --- what the engine answers ---

    def on_head(self, head: AnswerHead) -> None:
        """See Listener."""
        self.last_arrival_s = self._proxy.clock()
        if head.status in _RETRIED_STATUSES:
            self._proxy.turned_away(self, head)
            if (self._repeatable or head.status in _REFUSALS) and self._proxy.may_retry(self):
                self._abandon_link()
                self._released(failed=head.status != 429)
                self._retry(f"status_{head.status}")
                return
        self._answer = head

    def on_data(self, data: bytes) -> None:
        """See Listener."""
        self.last_arrival_s = now = self._proxy.clock()
        head = self._answer
        assert head is not None
        if self.started:
            assert self._scan is not None
            self._scan.feed(data)
            self.client.send(data, end=False)
            return
        if head.status == 500 and ENGINE_DEAD in data:
            self._abandon_link()
            self._attempt_failed(UpstreamDisconnected(f"{self.instance} answers that its engine has died"))
            return
        self.ttft_s = now - self.begun_s
        self._proxy.first_byte(self, head.status)
        self._start(head, data, end=head.length == len(data))

    def _start(self, head: AnswerHead, data: bytes, *, end: bool) -> None:
        self._scan = UsageScan(stream=is_event_stream(head), limit=self._proxy.config.usage_scan_bytes_max)
        self._scan.feed(data)
        headers = self._proxy.headers_for_client(self, head.headers)
        self.started, self.status = True, head.status
        self._body = b""  # nobody else will get it
        self.client.start(head.status, headers, data, end=end, length_known=head.length is not None)

    @_ends
    def on_end(self) -> None:
        """See Listener."""
        self._link = None
        head = self._answer
        assert head is not None
        if not self.started:
            self.ttft_s = self._proxy.clock() - self.begun_s
            self._proxy.first_byte(self, head.status)
            self._start(head, b"", end=True)
        elif head.length is None or self.client.busy:
            self.client.send(b"", end=True)
        self._whole = True
        self._done(computed=head.status < 400, failed=head.status >= 500)

    @_ends
    def on_broken(self, error: UpstreamFailed, *, stale: bool) -> None:
        """See Listener."""
        self._link = None
        if stale and not self.started:
            # The engine closed a connection that had been idle just when it was used again; it has not seen the request.
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        elif not self.started:
            self._attempt_failed(error)
        else:
            self._stream_failed(error)

    def _stream_failed(self, error: UpstreamFailed) -> None:
        """The client has got part of the answer: an error event at the end of a stream, and never a false end of it."""
        head, scan = self._answer, self._scan
        assert head is not None and scan is not None
        self._proxy.suspect(self.instance, error)
        self.error = error.message
        if is_event_stream(head) and not scan.is_done():
            self.client.send((b"" if scan.at_event_end() else b"\n\n") + self._proxy.error_event(self, error), end=True)
        else:
            self.client.cut()  # left incomplete, as the engine did
        self._done(computed=head.status < 400, failed=True)

    @_ends
    def fail(self, error: UpstreamFailed) -> None:
        """It is given up: the engine has been silent for too long. Another is asked only if it is known to be down."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        self._abandon_link()
        if self.started:
            self._stream_failed(error)
        else:
            self._attempt_failed(error)

    @_ends
    def give_up(self, error: RouterError) -> None:
        """It has waited for too long."""
        self._refuse(error)

    def _abandon_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.abandon()

    # --- ends ---

    def _done(self, *, computed: bool, failed: bool) -> None:
        usage = self._scan.usage() if self._scan is not None else Usage()
        if not failed and self._scan is not None and self._scan.is_stream:
            self._proxy.streamed(self, usage)
        self._released(failed=failed, computed=computed, usage=usage)
        self._close()

    def _refuse(self, error: RouterError) -> None:
        """Answers with the error."""
        self._released(failed=None)
        self.error, self.status, self.started = error.message, error.status, True
        self._proxy.answer_error(self.client, error, self._proxy.own_headers(self))
        self._whole = True
        self._close()

    def _crashed(self, error: Exception) -> None:
        """A fault of the router's own: one line in the log, and everything is given back."""
        log.error("internal error", exc_info=error, extra={"fields": {"request_id": self.id.decode("latin-1")}})
        if self._over:
            return
        self._abandon_link()
        self._released(failed=None)
        failure = RouterError(f"the router failed: {type(error).__name__}")
        if not self.started:
            try:
                self._refuse(failure)
            except Exception as again:
                log.error("internal error", exc_info=again)
        if not self._over:
            self.error = failure.message
            if not self._whole:
                self.client.cut()
            self._close()

    def client_gone(self) -> None:
        """See Work: the engine stops its work."""
        if self._over:
            return
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        computed = self._answer is not None and self._answer.status < 400
        usage = self._scan.usage() if self._scan is not None else None
        self._abandon_link()
        self.status, self.error = CLIENT_GONE_STATUS, "client gone"
        self._released(failed=None, computed=computed, usage=usage)
        self._close()

    def pause(self) -> None:
        """See Work."""
        self._paused = True
        if self._link is not None:
            self._link.pause()

    def resume(self) -> None:
        """See Work."""
        self._paused, self.last_arrival_s = False, self._proxy.clock()
        if self._link is not None:
            self._link.resume()

    def _close(self) -> None:
        self._over = True
        self._body = b""
        self._proxy.answered(self)

    @property
    def delivered(self) -> bool:
        """Whether the engine has the request."""
        return self._link is not None

    @property
    def awaits_engine(self) -> bool:
        """Whether it is the engine's turn, and not the client's."""
        return self._link is not None and not self._paused

    @property
    def path(self) -> bytes:
        """Of the request, without the query."""
        return self._request.target.partition(b"?")[0]

    @property
    def over(self) -> bool:
        """Whether it has been answered, or its client has gone."""
        return self._over
