"""Spans of requests, with a real provider that keeps them."""

import pytest

from ..conftest import until
from ..fake_engine import status

trace = pytest.importorskip("opentelemetry.trace")
sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch):
    """What has been exported. The provider is the process's, so it is taken back."""
    kept = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield kept.get_finished_spans
    provider.shutdown()


async def test_a_request_is_a_span_with_its_decision(engines, route, spans):
    one, other = await engines(2)
    router = await route(one, other)
    one.behaviour = status(502)
    answers = [await router.chat("x", headers={"traceparent": PARENT}) for _ in range(2)]
    await until(lambda: len(spans()) == 2)
    retried = [span for span in spans() if span.attributes["smetric.attempts"] == 2]
    assert retried, "one of them was made twice"
    for span, answer in zip(spans(), answers, strict=True):
        assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
        assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
        assert span.kind is trace.SpanKind.SERVER
        assert span.attributes["http.response.status_code"] == 200
        assert span.attributes["url.path"] == "/v1/chat/completions"
        assert span.attributes["smetric.instance"] == answer.headers["x-smetric-instance"] == other.url
        assert span.attributes["smetric.reason"] == answer.headers["x-smetric-reason"]
        assert span.attributes["smetric.policy"] == "smetric"
        assert span.status.is_ok or span.status.is_unset
    sent = {request.headers["traceparent"] for request in other.requests}
    assert sent == {f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01" for span in spans()}


async def test_failures_and_requests_without_a_parent(engines, route, spans):
    (engine,) = await engines()
    router = await route(engine)
    await router.chat("x", headers={"traceparent": "00-" + "0" * 32 + "-" + "0" * 16 + "-01"})
    await router.chat("x", headers={"traceparent": "nonsense"})
    await router.chat("x", headers={"x-smetric-turn": "none"})
    await engine.stop()
    await router.chat("x")
    await until(lambda: len(spans()) == 4)
    assert [span.parent for span in spans()] == [None] * 4
    codes = [span.attributes["http.response.status_code"] for span in spans()]
    assert codes[:3] == [200, 200, 400] and codes[3] in (502, 503)
    assert [span.status.status_code is trace.StatusCode.ERROR for span in spans()] == [False, False, False, True]


async def test_without_a_provider_the_clients_header_goes_on_as_it_is(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    await router.chat("x", headers={"traceparent": PARENT, "tracestate": "a=b"})
    assert (engine.requests[0].headers["traceparent"], engine.requests[0].headers["tracestate"]) == (PARENT, "a=b")
