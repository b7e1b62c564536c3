"""Spans of plans and steps, as a real exporter gets them."""

from collections.abc import Iterator

import pytest

from tensorcast_connector.client.plan import CallContext
from tensorcast_connector.errors import TensorcastError
from tensorcast_connector.worker import tracing
from tests.client.callers import weights
from tests.worker.test_plans import Plans, plans  # noqa: F401 - the latter is a fixture

trace = pytest.importorskip("opentelemetry.trace")
sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
pytestmark = pytest.mark.usefixtures("quick")
TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing.trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


@pytest.mark.parametrize("trace_id", [TRACE, f"00-{TRACE}-{SPAN}-01"])
async def test_a_plan_and_its_steps_are_spans_of_the_callers_trace(
    exporter: object, plans: Plans, trace_id: str
) -> None:
    a, _ = await plans.begin()
    session = await plans.session(a)
    await session.put(weights(), name="w")
    plan = session.plan(CallContext(trace_id=trace_id, idempotency_key="k"))
    there = plan.on_worker("b").prefetch("w")
    plan.on_worker("a").pin(there, 30.0)
    await plan.run().result(10)
    spans = {each.name: each for each in exporter.get_finished_spans()}  # type: ignore[attr-defined]
    assert set(spans) == {"tensorcast.plan", "tensorcast.prefetch", "tensorcast.pin"}
    whole = spans["tensorcast.plan"]
    assert all(f"{each.context.trace_id:032x}" == TRACE for each in spans.values())
    assert f"{whole.parent.span_id:016x}" == (SPAN if SPAN in trace_id else TRACE[16:])
    assert all(
        spans[name].parent.span_id == whole.context.span_id for name in ("tensorcast.prefetch", "tensorcast.pin")
    )
    assert whole.attributes["tensorcast.plan.state"] == "done" and whole.attributes["tensorcast.plan.steps"] == 2
    assert spans["tensorcast.pin"].attributes["tensorcast.step.target"] == "a"
    assert (
        whole.start_time
        <= spans["tensorcast.prefetch"].start_time
        <= spans["tensorcast.pin"].start_time
        <= whole.end_time
    )


async def test_a_failure_is_in_both(exporter: object, plans: Plans) -> None:
    a, _ = await plans.begin()
    plan = (await plans.session(a)).plan()
    plan.on_worker("a").prefetch("nothing")
    with pytest.raises(TensorcastError):
        await plan.run().result(10)
    spans = {each.name: each for each in exporter.get_finished_spans()}  # type: ignore[attr-defined]
    assert "no artifact has the name" in spans["tensorcast.plan"].status.description
    assert spans["tensorcast.prefetch"].events[0].name == "exception"


@pytest.mark.parametrize("text", ["", "x", "0" * 32, TRACE[:31], f"01-{TRACE}-{SPAN}-01"])
def test_what_is_no_trace_id_has_no_parent(text: str) -> None:
    assert tracing.parent_of(text) is None


async def test_without_the_package_nothing_is_missing(monkeypatch: pytest.MonkeyPatch, plans: Plans) -> None:
    monkeypatch.setattr(tracing, "trace", None)
    a, _ = await plans.begin()
    session = await plans.session(a)
    await session.put(weights(), name="w")
    plan = session.plan()
    there = plan.on_worker("a").prefetch("w")
    assert (await plan.run().result(10))[there]["bytes"]


class _Made:
    """A proxy of a tracer, as the package gives it before there is a provider, which counts what it is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans = 0
        start = trace.ProxyTracer.start_span

        def counted(proxy: object, *args: object, **named: object) -> object:
            self.spans += 1
            return start(proxy, *args, **named)

        monkeypatch.setattr(trace.ProxyTracer, "start_span", counted)
        monkeypatch.setattr(tracing.trace, "_TRACER_PROVIDER", None)


async def test_nothing_is_made_before_a_provider_is_set_up_and_spans_are_from_then_on(
    monkeypatch: pytest.MonkeyPatch, plans: Plans
) -> None:
    made = _Made(monkeypatch)
    a, _ = await plans.begin()
    session = await plans.session(a)
    await session.put(weights(), name="w")
    for provider in (None, sdk.TracerProvider()):
        if provider is not None:
            exporter = memory.InMemorySpanExporter()
            provider.add_span_processor(export.SimpleSpanProcessor(exporter))
            monkeypatch.setattr(tracing.trace, "_TRACER_PROVIDER", provider)
        plan = session.plan()
        plan.on_worker("a").prefetch("w")
        await plan.run().result(10)
        if provider is None:
            assert made.spans == 0
    assert {each.name for each in exporter.get_finished_spans()} == {"tensorcast.plan", "tensorcast.prefetch"}
    provider.shutdown()
