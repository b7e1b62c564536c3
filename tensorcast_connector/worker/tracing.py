"""OpenTelemetry spans of plans and their steps, where the package is installed and the operator has set up a provider.

A plan's trace id is the caller's: 32 hex digits, or a whole W3C `traceparent`, whose span then is the parent of the plan's. The
gateway makes a span for each plan while it runs there, and one for each attempt of a step; both carry the plan's key. As long as
no provider is set up nothing is made at all: spans that go nowhere take as long as a commit of the store.
"""

import contextlib
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from tensorcast_connector.core.plan import DONE, PlanRecord
from tensorcast_connector.wire.plan_messages import RunStep

try:
    from opentelemetry import trace
except ImportError:
    trace = None

SPANS_MAX = 10_000  # of plans that run
_PARENT = re.compile(r"(?:00-)?([0-9a-f]{32})(?:-([0-9a-f]{16})-([0-9a-f]{2}))?")


def parent_of(trace_id: str) -> Any:
    """The context that a caller's trace id names; None if it is none."""
    found = _PARENT.fullmatch(trace_id)
    if trace is None or found is None or not int(found.group(1), 16):
        return None
    span = (
        int(found.group(2) or found.group(1)[16:], 16) or 1
    )  # a trace without a span: the spans are its roots' children
    context = trace.SpanContext(int(found.group(1), 16), span, True, trace.TraceFlags(int(found.group(3) or "01", 16)))
    return trace.set_span_in_context(trace.NonRecordingSpan(context))


class Tracing:
    """See the module. Does nothing without the package, or before a provider is set up."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("tensorcast") if trace is not None else None
        self._plans: dict[str, Any] = {}
        self._on = False  # looked at with each plan

    def _look(self) -> None:
        """Whether spans go anywhere. A tracer that was made before the provider is a proxy, and finds it later."""
        self._on = trace is not None and not (
            isinstance(self._tracer, trace.ProxyTracer)
            and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
        )

    def began(self, key: str, record: PlanRecord) -> None:
        """A plan runs here from now on."""
        self._look()
        if self._tracer is None or not self._on or len(self._plans) >= SPANS_MAX:
            return
        attributes = {"tensorcast.plan.key": key, "tensorcast.plan.steps": len(record.plan.steps)}
        span = self._tracer.start_span("tensorcast.plan", context=parent_of(record.trace_id), attributes=attributes)
        self._plans[key] = span

    def over(self, key: str, record: PlanRecord | None) -> None:
        """It does not any more: it has ended like that, or another gateway has it (None)."""
        span = self._plans.pop(key, None)
        if span is None or trace is None:
            return
        span.set_attribute("tensorcast.plan.state", "followed" if record is None else record.state)
        if record is not None and record.state != DONE:
            span.set_status(trace.StatusCode.ERROR, record.message)
        span.end()

    def step(self, message: RunStep) -> AbstractContextManager[None] | None:
        """Around an attempt of a step; what it raises is recorded. None: nothing is."""
        return self._span(message) if self._on else None

    @contextlib.contextmanager
    def _span(self, message: RunStep) -> Iterator[None]:
        assert self._tracer is not None and trace is not None
        plan = self._plans.get(message.key)
        context = trace.set_span_in_context(plan) if plan is not None else parent_of(message.trace_id)
        attributes = {
            "tensorcast.plan.key": message.key, "tensorcast.step": message.step,
            "tensorcast.step.operation": message.operation, "tensorcast.step.target": message.target,
        }  # fmt: skip
        with self._tracer.start_as_current_span(
            f"tensorcast.{message.operation}", context=context, attributes=attributes
        ):
            yield
