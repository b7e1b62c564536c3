"""The proxy path, plain ASGI: read a request, place it, pass the answer on as it arrives.

Chat completions and completions are placed by their prompt; every other path is passed through and counts as load.
Nothing reaches the client before the first chunk of the body has arrived, so an engine that dies before is replaced.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from smetric_router.config import RouterConfig
from smetric_router.dispatch import Dispatcher
from smetric_router.errors import BadRequest, RouterError, UpstreamDisconnected, UpstreamFailed
from smetric_router.policies.base import Policy
from smetric_router.server.asgi import Headers, Receive, Scope, Send, read_body, send_error
from smetric_router.server.disconnect import ClientGone, UntilDisconnect
from smetric_router.server.health import HealthMonitor
from smetric_router.server.logs import access_log, log
from smetric_router.server.metrics import Metrics
from smetric_router.server.upstream import Answer, Upstream
from smetric_router.state.requests import RequestReader
from smetric_router.state.usage import UsageScan
from smetric_router.types import RequestInfo, Ticket, Usage

CLIENT_GONE_STATUS = 499
# What vLLM's web server says once its engine process has ended, also while it is being stopped.
ENGINE_DEAD = b"EngineCore encountered an issue"
_RETRIED_STATUSES = (502, 503)


@dataclass(slots=True)
class Exchange:
    """One request and what became of it: the source of the access log line."""

    id: str
    method: str
    target: str
    headers: Headers
    body: bytes
    begun: float
    info: RequestInfo = field(default_factory=RequestInfo)
    policy: Policy | None = None
    tried: list[str] = field(default_factory=list)
    ticket: Ticket | None = None
    status: int = 0
    ttft_s: float | None = None
    started: bool = False
    """Whether the client has got any byte."""
    error: str | None = None


class Proxy:
    """Everything that is not the router's own surface."""

    def __init__(
        self,
        config: RouterConfig,
        dispatcher: Dispatcher,
        policies: Mapping[str, Policy],
        upstream: Upstream,
        health: HealthMonitor,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._policies = policies
        self._upstream = upstream
        self._health = health
        self._metrics = metrics
        self._clock = clock
        self._reader = RequestReader(config.chunk_bytes, config.chunks_per_request_max)
        self._turn_header = config.turn_header.lower().encode()
        self._tenant_header = config.tenant_header.lower().encode()
        self._policy_header = config.policy_header.lower().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request."""
        begun = self._clock()
        headers: Headers = scope["headers"]
        request_id = _header(headers, b"x-request-id") or uuid.uuid4().hex
        query: bytes = scope.get("query_string", b"")
        target = scope.get("raw_path") or scope["path"].encode()
        target = (target + b"?" + query if query else target).decode("latin-1")
        exchange = Exchange(request_id, scope["method"], target, headers, b"", begun)
        try:
            if not target.startswith("/"):
                raise BadRequest(f"{scope['method']} {target}: not a path")
            body = await read_body(receive, self._config.body_bytes_max, headers)
            if body is None:
                raise ClientGone
            exchange.body = body
            self._read(exchange, scope["path"])
            async with UntilDisconnect(receive) as client:
                await self._forward(exchange, send, client)
        except ClientGone:
            exchange.status, exchange.error = CLIENT_GONE_STATUS, "client gone"
        except RouterError as error:
            await self._refuse(exchange, error, send)
        except asyncio.CancelledError:
            exchange.error = "the router stopped"
            raise
        except Exception as error:
            log.exception("internal error", extra={"fields": {"request_id": exchange.id}})
            await self._refuse(exchange, RouterError(f"the router failed: {type(error).__name__}"), send)
        finally:
            self._answered(exchange)

    async def _refuse(self, exchange: Exchange, error: RouterError, send: Send) -> None:
        """Answer with the error, unless the client has got something already."""
        exchange.error = error.message
        if not exchange.started:
            exchange.started, exchange.status = True, error.status
            await send_error(send, error, self._own_headers(exchange))

    def _read(self, exchange: Exchange, path: str) -> None:
        headers = exchange.headers
        if name := _header(headers, self._policy_header):
            exchange.policy = self._policies.get(name)
            if exchange.policy is None:
                known = ", ".join(self._policies)
                raise BadRequest(f"unknown policy {name!r}; known: {known}", param=self._config.policy_header)
        # A compressed body cannot be read here; the engine may be able to.
        readable = exchange.method == "POST" and not _header(headers, b"content-encoding")
        exchange.info = self._reader.read(
            path if readable else "",
            exchange.body if readable else b"",
            tenant=_header(headers, self._tenant_header) or "",
            turn=_header(headers, self._turn_header),
        )

    async def _forward(self, exchange: Exchange, send: Send, client: UntilDisconnect) -> None:
        """Try one instance, and another one if nothing was lost by the first."""
        while True:
            ticket = self._dispatcher.dispatch(
                exchange.info, self._clock(), policy=exchange.policy, exclude=exchange.tried
            )
            self._metrics.decided(ticket, retry=bool(exchange.tried))
            exchange.ticket = ticket
            exchange.tried.append(ticket.decision.instance)
            if await self._attempt(ticket, exchange, send, client):
                return

    async def _attempt(self, ticket: Ticket, exchange: Exchange, send: Send, client: UntilDisconnect) -> bool:
        """One attempt at one instance. False if the request should be tried at another one."""
        instance = ticket.decision.instance
        answer: Answer | None = None
        computed, usage = False, Usage()
        try:
            headers = self._upstream_headers(exchange)
            sending = self._upstream.send(instance, exchange.method, exchange.target, headers, exchange.body)
            answer = await self._health.arrivals.wait(instance, sending)
            if answer.status in _RETRIED_STATUSES:
                self._health.suspect(instance, UpstreamFailed(f"{instance} answered {answer.status}"))
                if self._may_retry(exchange):
                    return False
            chunk = await self._next_chunk(exchange, answer)
            if answer.status == 500 and ENGINE_DEAD in chunk:
                raise UpstreamDisconnected(f"{instance} answers that its engine has died")
            exchange.ttft_s = self._clock() - exchange.begun
            self._metrics.first_byte(instance, exchange.ttft_s)
            computed = answer.status < 400
            usage = await self._relay(exchange, answer, chunk, send, client)
            return True
        except UpstreamFailed as error:
            log.warning("attempt failed", extra={"fields": {"request_id": exchange.id, "cause": error.message}})
            self._health.suspect(instance, error)
            if not exchange.started and self._may_retry(exchange):
                return False
            raise
        finally:
            if answer is not None:
                answer.close()
            self._dispatcher.finish(ticket, self._clock(), computed=computed, usage=usage)
            self._metrics.used(ticket, usage)

    async def _relay(
        self, exchange: Exchange, answer: Answer, chunk: bytes, send: Send, client: UntilDisconnect
    ) -> Usage:
        """Pass the whole answer on, starting with the chunk that has arrived."""
        stream = _is_event_stream(answer.headers)
        scan = UsageScan(stream=stream, limit=self._config.usage_scan_bytes_max)
        own = self._own_headers(exchange)
        names = {name for name, _ in own}
        headers = [(name, value) for name, value in answer.headers if name not in names] + own
        exchange.started, exchange.status = True, answer.status
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        more = True
        while more:
            scan.feed(chunk)
            more = not answer.at_end
            if not more:
                client.over()
            await send({"type": "http.response.body", "body": chunk, "more_body": more})
            if more:
                try:
                    chunk = await self._next_chunk(exchange, answer)
                except UpstreamDisconnected as error:
                    if not stream or scan.is_done():
                        # Left incomplete, so the server cuts the connection, as the engine did.
                        raise
                    client.over()
                    event = (b"" if scan.at_event_end() else b"\n\n") + b"data: " + error.body() + b"\n\n"
                    await send({"type": "http.response.body", "body": event, "more_body": False})
                    raise
        return scan.usage()

    async def _next_chunk(self, exchange: Exchange, answer: Answer) -> bytes:
        return await self._health.arrivals.wait(exchange.tried[-1], answer.next_chunk())

    def _may_retry(self, exchange: Exchange) -> bool:
        """Whether another attempt is allowed and there is an instance for it."""
        return len(exchange.tried) <= self._config.retries_max and self._dispatcher.state.has_candidate(
            exchange.info.model, exchange.tried
        )

    def _upstream_headers(self, exchange: Exchange) -> Headers:
        headers = [(name, value) for name, value in exchange.headers if name != b"x-request-id"]
        headers.append((b"x-request-id", exchange.id.encode("latin-1", "replace")))
        return headers

    def _own_headers(self, exchange: Exchange) -> Headers:
        headers = [(b"x-request-id", exchange.id.encode("latin-1", "replace"))]
        if exchange.ticket is not None:
            decision = exchange.ticket.decision
            headers.append((b"x-smetric-instance", decision.instance.encode()))
            headers.append((b"x-smetric-reason", decision.reason.encode()))
        return headers

    def _answered(self, exchange: Exchange) -> None:
        """Count and log a request that is over."""
        ticket = exchange.ticket
        instance = ticket.decision.instance if ticket else "none"
        policy = ticket.policy if ticket else "none"
        self._metrics.answered(instance, policy, exchange.status)
        if not access_log.isEnabledFor(logging.INFO):
            return
        fields = {
            "request_id": exchange.id,
            "method": exchange.method,
            "path": exchange.target,
            "status": exchange.status,
            "instance": instance,
            "reason": ticket.decision.reason if ticket else None,
            "policy": policy,
            "attempts": len(exchange.tried),
            "turn": ticket.request.turn if ticket else None,
            "prompt_bytes": exchange.info.chain.length,
            "hit_bytes": ticket.decision.hit if ticket else None,
            "ttft_ms": None if exchange.ttft_s is None else round(exchange.ttft_s * 1000, 2),
            "duration_ms": round((self._clock() - exchange.begun) * 1000, 2),
            "error": exchange.error,
        }
        access_log.info("request", extra={"fields": fields})


def _header(headers: Headers, wanted: bytes) -> str | None:
    """The value of the first header of that name, in the characters that give the same bytes back."""
    for name, value in headers:
        if name == wanted:
            return value.decode("latin-1")
    return None


def _is_event_stream(headers: Headers) -> bool:
    """Whether events follow, and as many as there are. With a length given nothing could be added at the end."""
    kind = _header(headers, b"content-type") or ""
    return kind.startswith("text/event-stream") and _header(headers, b"content-length") is None
