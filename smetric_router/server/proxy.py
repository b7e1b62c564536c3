"""What the exchanges share: reading requests, placing them, which headers go where, what is counted and logged.

Chat completions and completions are placed by their prompt; every other path is passed through and counts as load.
"""

import asyncio
import os
from collections.abc import Callable, Mapping

from smetric_router.config import RouterConfig
from smetric_router.dispatch import Dispatcher
from smetric_router.errors import (
    BadRequest,
    Overloaded,
    RouterError,
    UpstreamDisconnected,
    UpstreamFailed,
    UpstreamTimedOut,
)
from smetric_router.policies.base import Policy
from smetric_router.server.access import log_access
from smetric_router.server.breakers import Breakers
from smetric_router.server.connection import ClientConnection
from smetric_router.server.exact import ExactPrompts
from smetric_router.server.exchange import Exchange
from smetric_router.server.guard import KEY_HEADERS, Guard
from smetric_router.server.health import HealthMonitor
from smetric_router.server.http1 import AnswerHead, Headers, RequestHead, headers_to_send_on
from smetric_router.server.links import EngineLinks
from smetric_router.server.logs import log
from smetric_router.server.metrics import Metrics
from smetric_router.server.origins import Origins
from smetric_router.server.tracing import Tracing
from smetric_router.state.requests import CACHE_CLEARING_PATHS, MESSAGES_PATHS, MODEL_CHANGING_PATHS, RequestReader
from smetric_router.state.waiting import WaitingRoom
from smetric_router.types import CacheCleared, RequestInfo, Ticket, Usage

_REQUEST_ID_CHARS_MAX = 512
_OWN_HEADERS = frozenset((b"x-request-id", b"x-smetric-instance", b"x-smetric-reason"))
# An instance that turned a request away is not offered what another turned away for so long, unless it says how long.
FULL_S = 1
FULL_MAX_S = 10


class Proxy:
    """Everything that is not the router's own surface."""

    def __init__(
        self,
        config: RouterConfig,
        dispatcher: Dispatcher,
        policies: Mapping[str, Policy],
        links: EngineLinks,
        health: HealthMonitor,
        breakers: Breakers,
        guard: Guard,
        metrics: Metrics,
        clock: Callable[[], float],
        exact: ExactPrompts | None = None,
    ) -> None:
        self.config = config
        self._exact = exact
        self.links = links
        self.clock = clock
        self._dispatcher = dispatcher
        self._policies = policies
        self._health = health
        self._breakers = breakers
        self._waiting: WaitingRoom[Exchange] = WaitingRoom(config.queue_max, config.queue_timeout_s)
        self._admitting = False
        self._tracing = Tracing()
        self._full_until_s: dict[str, float] = {}
        self._origins = Origins(config.cors_origins)
        self._hides_keys = guard.has_keys and not config.api_keys_pass_on
        key = config.engine_api_key.encode()
        self._own_key = [(b"authorization", b"Bearer " + key)] if key and self._hides_keys else []
        self._metrics = metrics
        self._reader = RequestReader(config.chunk_bytes, config.chunks_per_request_max)
        self._turn_header = config.turn_header.lower().encode()
        self._tenant_header = config.tenant_header.lower().encode()
        self._session_header = config.session_header.lower().encode()
        self._policy_header = config.policy_header.lower().encode()
        self._active: set[Exchange] = set()
        self._process = os.urandom(8).hex().encode()
        self._serial = 0

    def __repr__(self) -> str:
        return f"<Proxy {len(self._active)} exchanges, {self.waiting} waiting>"

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def begin(self, request: RequestHead, body: bytes, client: ClientConnection) -> Exchange | None:
        """Begins the work on a request."""
        exchange = Exchange(self, client, request, body, self.clock())
        self._tracing.began(exchange, request.headers)
        self._active.add(exchange)
        exchange.begin()
        return None if exchange.over else exchange

    def check(self, now: float) -> None:
        """Gives up what an engine that is down does not go on with. Call it now and then.

        An engine may stop and leave its connections open and silent; what still arrives from such an engine is passed on.
        """
        self._breakers.check(now)
        if self._waiting:
            self._admit()
            for exchange in list(self._waiting.overdue(now)):
                self._waiting.leave(exchange)
                waited_s = self.config.queue_timeout_s
                exchange.give_up(Overloaded(f"no instance had room for it within {waited_s:g} s", retry_after_s=1))
        if self.config.first_byte_timeout_s or self.config.stream_stall_timeout_s:
            self._check_silence(now)
        if not self._health.any_down:
            return
        grace_s = self.config.down_grace_s
        for exchange in [each for each in self._active if each.tried]:
            since_s = self._health.down_since_s(exchange.instance)
            if since_s is not None and now - max(since_s, exchange.last_arrival_s) > grace_s:
                exchange.fail(UpstreamDisconnected(f"{exchange.instance} is down and silent for {grace_s:g} s"))

    def _check_silence(self, now: float) -> None:
        first_s, stall_s = self.config.first_byte_timeout_s, self.config.stream_stall_timeout_s
        for exchange in [each for each in self._active if each.awaits_engine]:
            if exchange.started:
                if stall_s and now - exchange.last_arrival_s > stall_s:
                    exchange.fail(UpstreamTimedOut(f"{exchange.instance} sent nothing more for {stall_s:g} s"))
            elif first_s and now - exchange.attempt_s > first_s:
                exchange.fail(UpstreamTimedOut(f"{exchange.instance} answered nothing within {first_s:g} s"))

    # --- limits ---

    def must_wait(self, exchange: Exchange) -> bool:
        """Whether others are before it, or there is no room: then it is in the queue. Raises Overloaded."""
        limit = self.config.inflight_max
        if self._waiting.has(exchange.info.model) or (limit and self._dispatcher.state.inflight >= limit):
            self.wait(exchange)
            return True
        return False

    def wait(self, exchange: Exchange) -> None:
        """Until there is room. Raises Overloaded if too many wait already."""
        self._waiting.enter(exchange.info.model, exchange, self.clock())

    def _admit(self) -> None:
        """Those who wait and for whom there is room."""
        self._admitting = False
        state, limit = self._dispatcher.state, self.config.inflight_max
        for model in self._waiting.models():
            while (not limit or state.inflight < limit) and state.has_room(model):
                exchange = self._waiting.first(model)
                if exchange is None:
                    break
                self._waiting.leave(exchange)
                self._metrics.waited(self.clock() - exchange.begun_s)
                exchange.go()
                if limit:
                    self._waiting.served(model)

    # --- for the exchanges ---

    def request_id(self, headers: Headers) -> bytes:
        """That of the client, if it gave one, or one that nobody else has."""
        if given := _header(headers, b"x-request-id"):
            return given[:_REQUEST_ID_CHARS_MAX]
        self._serial += 1  # random bytes for each would be a system call
        return b"%s%016x" % (self._process, self._serial)

    def read(self, exchange: Exchange, request: RequestHead, body: bytes) -> bool:
        """What a decision sees of the request; False: the exchange is told later. Raises BadRequest."""
        target = request.target
        headers = dict(reversed(request.headers))  # of several with one name the first counts
        if not target.startswith(b"/"):
            raise BadRequest(f"{exchange.method} {exchange.target}: not a path")
        if name := _text(headers, self._policy_header):
            exchange.policy = self._policies.get(name)
            if exchange.policy is None:
                known = ", ".join(self._policies)
                raise BadRequest(f"unknown policy {name!r}; known: {known}", param=self.config.policy_header)
        # A compressed body cannot be read here; the engine may be able to.
        readable = request.method == b"POST" and not headers.get(b"content-encoding")
        path = target.partition(b"?")[0].decode("latin-1") if readable else ""
        info: RequestInfo | None = self._reader.read(
            path,
            body if readable else b"",
            tenant=_text(headers, self._tenant_header),
            turn=_text(headers, self._turn_header) or None,
            session=_text(headers, self._session_header),
        )
        assert info is not None
        exchange.info = info
        if self._exact is not None and info.chain.digests:
            info = self._exact.read(path, body, info, exchange.read)
            if info is None:
                return False
            exchange.info = info
        return True

    def place(self, exchange: Exchange) -> Ticket:
        """Chooses an instance that was not tried, and counts the request there. Raises RouterError."""
        exclude = [*exchange.tried, *exchange.avoided] if exchange.tried else ()
        return self._dispatcher.dispatch(exchange.info, self.clock(), policy=exchange.policy, exclude=exclude)

    def placed(self, exchange: Exchange, ticket: Ticket) -> None:
        """It has the ticket, and gives it back from now on whatever happens."""
        self._breakers.sent(ticket.decision.instance)
        self._metrics.decided(ticket, cause=exchange.cause)

    def may_retry(self, exchange: Exchange) -> bool:
        """Whether another attempt is allowed and there is an instance for it."""
        return len(exchange.tried) <= self.config.retries_max and self._dispatcher.state.has_candidate(
            exchange.info.model, [*exchange.tried, *exchange.avoided]
        )

    def turned_away(self, exchange: Exchange, head: AnswerHead) -> None:
        """An instance answered that it is full (429, or 503 that says when to come again) or out of order.

        Who is known to be full is not asked instead of one that is.
        """
        instance, now = exchange.instance, self.clock()
        self._metrics.failed(instance, f"status_{head.status}")
        if head.status != 429:
            self._health.suspect(instance, UpstreamFailed(f"{instance} answered {head.status}"))
        said = _header(head.headers, b"retry-after")
        if head.status == 429 or (head.status == 503 and said):
            pause_s = min(int(said), FULL_MAX_S) if said.isdigit() and len(said) < 9 else FULL_S
            self._full_until_s[instance] = now + max(pause_s, FULL_S)
            exchange.avoided = frozenset(name for name, until_s in self._full_until_s.items() if now < until_s)

    def suspect(self, instance: str, error: UpstreamFailed) -> None:
        """A request failed there."""
        self._metrics.failed(instance, error.code.removeprefix("upstream_"))
        self._health.suspect(instance, error)

    def first_byte(self, exchange: Exchange, status: int) -> None:
        """The first byte of an answer has come."""
        assert exchange.ttft_s is not None and exchange.ticket is not None
        self._dispatcher.first_byte(exchange.ticket, self.clock(), computed=status < 400)
        if status < 500:
            self._breakers.began(exchange.instance)
        self._metrics.first_byte(exchange.instance, exchange.ttft_s)

    def finished(self, ticket: Ticket, *, failed: bool | None, computed: bool, usage: Usage) -> None:
        """An attempt is over. What is only counted may fail: the answer stands."""
        try:
            self._dispatcher.finish(ticket, self.clock(), computed=computed, usage=usage)
            self._breakers.ended(ticket.decision.instance, failed=failed)
            self._metrics.used(ticket, usage)
        except Exception:
            log.exception("internal error")
        if self._waiting and not self._admitting:
            self._admitting = True  # not from here, in the middle of another's end
            asyncio.get_running_loop().call_soon(self._admit)

    def streamed(self, exchange: Exchange, usage: Usage) -> None:
        """A stream has come to its end."""
        tokens = usage.completion_tokens
        if tokens is not None and tokens > 1 and exchange.ttft_s is not None:
            seconds = exchange.last_arrival_s - exchange.begun_s - exchange.ttft_s
            self._metrics.paced(exchange.instance, max(0.0, seconds) / (tokens - 1))

    def answered(self, exchange: Exchange) -> None:
        """Counts and logs an exchange that is over; the client has its answer, whatever becomes of that."""
        self._active.discard(exchange)
        self._waiting.leave(exchange)
        try:
            self._count_answer(exchange)
        except Exception:
            log.exception("internal error", extra={"fields": {"request_id": exchange.id.decode("latin-1")}})

    def _count_answer(self, exchange: Exchange) -> None:
        self._tracing.over(exchange)
        ticket = exchange.ticket
        if exchange.status == 200 and exchange.path in CACHE_CLEARING_PATHS:
            self._dispatcher.state.apply(CacheCleared(exchange.instance), self.clock())
        elif exchange.status == 200 and exchange.path in MODEL_CHANGING_PATHS:
            self._health.models_changed(exchange.instance)
        self._metrics.answered(exchange.instance or "none", ticket.policy if ticket else "none", exchange.status)
        log_access(exchange, self.clock())

    # --- headers ---

    def headers_for_engine(self, exchange: Exchange, headers: Headers) -> Headers:
        """Those of the client, and the id."""
        kept = headers_to_send_on(headers)
        if self._hides_keys:
            kept = [each for each in kept if each[0] not in KEY_HEADERS] + self._own_key
        kept.append((b"x-request-id", exchange.id))
        return kept if exchange.span is None else self._tracing.headers(exchange, kept)

    def headers_for_client(self, exchange: Exchange, headers: Headers) -> Headers:
        """Those of the engine, and the router's own."""
        return [each for each in headers if each[0] not in _OWN_HEADERS] + self.own_headers(exchange)

    def own_headers(self, exchange: Exchange) -> Headers:
        """Which request this answers, where it was computed, and why there."""
        own = [(b"x-request-id", exchange.id)]
        if exchange.ticket is not None:
            decision = exchange.ticket.decision
            own.append((b"x-smetric-instance", decision.instance.encode()))
            own.append((b"x-smetric-reason", decision.reason.encode()))
        return own

    def answer_error(self, client: ClientConnection, error: RouterError, headers: Headers) -> None:
        """Answers with the error, in the shape of the interface that was called."""
        headers = [(b"content-type", b"application/json"), *headers]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after_s))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        asked = client.asked
        headers += self._origins.headers(asked)
        anthropic = asked is not None and asked.target.partition(b"?")[0] in MESSAGES_PATHS
        client.answer(error.status, headers, error.anthropic_body() if anthropic else error.body())

    def error_event(self, exchange: Exchange, error: RouterError) -> bytes:
        """The error as the last event of a stream."""
        if exchange.path in MESSAGES_PATHS:
            return b"event: error\ndata: " + error.anthropic_body() + b"\n\n"
        return b"data: " + error.body() + b"\n\n"


def _header(headers: Headers, wanted: bytes) -> bytes:
    """The value of the first header of that name."""
    for name, value in headers:
        if name == wanted:
            return value
    return b""


def _text(headers: Mapping[bytes, bytes], wanted: bytes) -> str:
    """The value in the characters that give the same bytes back."""
    return headers[wanted].decode("latin-1") if wanted in headers else ""
