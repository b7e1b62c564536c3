"""Metrics of decisions, without a server."""

from smetric_router.server.metrics import Metrics, Present
from smetric_router.state.cluster import ClusterState
from smetric_router.types import Chain, Decision, EngineReport, EngineReported, InstanceUp, RequestInfo, Ticket, Usage


def made() -> tuple[Metrics, ClusterState]:
    state = ClusterState(["http://a", "http://b"], chunk_bytes=512, index_chunks_max=100)
    return Metrics(Present(lambda: state.statistics(5), lambda: 0, lambda: 0, lambda: 0)), state


def ticket(hit: int, length: int = 400) -> Ticket:
    request = RequestInfo("m", chain=Chain((1,), (length,)) if length else Chain())
    return Ticket(1, request, Decision("http://a", "sticky", {}, False, hit), "smetric")


def lines(metrics: Metrics, name: str) -> dict[str, float]:
    found = [line for line in metrics.render().decode().splitlines() if line.startswith(name)]
    return {line.rsplit(" ", 1)[0].removeprefix(name): float(line.rsplit(" ", 1)[1]) for line in found}


def test_the_error_of_a_prediction_has_a_sign() -> None:
    metrics, _ = made()
    metrics.used(ticket(hit=100), Usage(100, 9))  # 25 tokens predicted: 16 too many
    metrics.used(ticket(hit=100), Usage(100, 25))
    metrics.used(ticket(hit=100), Usage(100, 57))  # 32 too few
    metrics.used(ticket(hit=100), Usage(100, None))
    metrics.used(ticket(hit=0, length=0), Usage(100, 50))
    buckets = lines(metrics, "smetric_router_hit_error_tokens_bucket")
    counts = {bound.split('le="')[1].split('"')[0]: count for bound, count in buckets.items()}
    assert (counts["-128.0"], counts["-32.0"], counts["-1.0"], counts["0.0"], counts["16.0"], counts["+Inf"]) == (
        0,
        1,
        1,
        2,
        3,
        3,
    )
    assert lines(metrics, "smetric_router_hit_tokens_total") == {
        '{engine="http://a",kind="predicted"}': 75,
        '{engine="http://a",kind="actual"}': 91,
    }


def test_gauges_of_load() -> None:
    metrics, state = made()
    for name in ("http://a", "http://b"):
        state.apply(InstanceUp(name), 0)
    state.apply(EngineReported("http://a", EngineReport(3, 1, 0.5, 200), own=0), 2)
    assert lines(metrics, "smetric_router_load_requests") == {'{engine="http://a"}': 4, '{engine="http://b"}': 0}
    assert lines(metrics, "smetric_router_pending_prefill_tokens")['{engine="http://a"}'] == 200
    assert lines(metrics, "smetric_router_report_age_seconds") == {'{engine="http://a"}': 3}
    assert lines(metrics, "smetric_router_kv_usage_ratio") == {'{engine="http://a"}': 0.5}
    assert lines(metrics, "smetric_router_prefill_rate") == {}, "nothing is learnt"
    assert lines(metrics, "smetric_router_load_imbalance") == {"": 1}
