"""OpenTelemetry: a server span for each request with the decision in it, where the package is installed and the operator has
set up a provider (as `opentelemetry-instrument smetric-router serve ...` does).

Without one the client's `traceparent` goes to the engine as it is; with one the engine gets the router's span as its parent.
"""

import re
from typing import Any

from smetric_router.server.exchange import Exchange
from smetric_router.server.http1 import Headers

try:
    from opentelemetry import trace
except ImportError:
    trace = None

_PARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?").fullmatch
TRACEPARENT = b"traceparent"


class Tracing:
    """See the module. Does nothing without a provider."""

    def __init__(self) -> None:
        self._tracer: Any = None
        if trace is not None and not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            self._tracer = trace.get_tracer("smetric_router")

    def began(self, exchange: Exchange, headers: Headers) -> None:
        """A request has come."""
        if self._tracer is None:
            return
        attributes = {"http.request.method": exchange.method, "url.path": exchange.path.decode("latin-1")}
        exchange.span = self._tracer.start_span(
            "smetric_router.request", context=_parent(headers), kind=trace.SpanKind.SERVER, attributes=attributes
        )

    def headers(self, exchange: Exchange, headers: Headers) -> Headers:
        """Those for the engine, with the span of the request as the parent of what it does."""
        span: Any = exchange.span
        if span is None or not span.is_recording():
            return headers
        context = span.get_span_context()
        text = b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, context.trace_flags)
        return [each for each in headers if each[0] != TRACEPARENT] + [(TRACEPARENT, text)]

    def over(self, exchange: Exchange) -> None:
        """It has been answered, or its client has gone."""
        span: Any = exchange.span
        if span is None:
            return
        exchange.span = None
        span.set_attribute("http.response.status_code", exchange.status)
        span.set_attribute("smetric.attempts", len(exchange.tried))
        if (ticket := exchange.ticket) is not None:
            span.set_attribute("smetric.instance", ticket.decision.instance)
            span.set_attribute("smetric.reason", ticket.decision.reason)
            span.set_attribute("smetric.policy", ticket.policy)
            span.set_attribute("smetric.hit", ticket.decision.hit)
            span.set_attribute("smetric.turn", ticket.request.turn or 0)
        if exchange.ttft_s is not None:
            span.set_attribute("smetric.ttft_s", exchange.ttft_s)
        if exchange.error is not None and (exchange.status >= 500 or exchange.status < 400):
            span.set_status(trace.StatusCode.ERROR, exchange.error)
        span.end()


def _parent(headers: Headers) -> Any:
    """The context that the client's `traceparent` names; None if there is none."""
    for name, value in headers:
        if name == TRACEPARENT and (found := _PARENT(value)):
            numbers = [int(part, 16) for part in found.groups()]
            if numbers[0] and numbers[1]:
                context = trace.SpanContext(numbers[0], numbers[1], True, trace.TraceFlags(numbers[2]))
                return trace.set_span_in_context(trace.NonRecordingSpan(context))
    return None
