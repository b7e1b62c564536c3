"""What engines say of their load, well and badly."""

import json
import random

import pytest

from smetric_router.state.engine_reports import read_loads, read_metrics
from smetric_router.types import EngineReport

VLLM = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-0.6B"} 3.0
vllm:num_requests_running{engine="1",model_name="odd } \\" name"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen3-0.6B"} 1.0
vllm:num_requests_waiting{engine="1",model_name="odd } \\" name"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5 1700000000000
vllm:num_preemptions_total{engine="0"} 9.0
"""
SGLANG = b"""\
sglang:num_running_reqs{model_name="m"} 4
sglang:num_running_reqs_offline_batch{model_name="m"} 44
sglang:num_queue_reqs{model_name="m"} 2
sglang:token_usage{model_name="m"} 2.5e-1
"""
LOADS = json.dumps(
    {
        "timestamp": "2026-01-01T00:00:00Z",
        "dp_rank_count": 2,
        "loads": [
            {
                "dp_rank": 0,
                "num_running_reqs": 3,
                "num_waiting_reqs": 1,
                "num_waiting_uncached_tokens": 70,
                "token_usage": 0.5,
            },
            {
                "dp_rank": 1,
                "num_running_reqs": 2,
                "num_waiting_reqs": 0,
                "num_waiting_uncached_tokens": 0,
                "token_usage": 0.1,
            },
        ],
    }
).encode()


def test_prometheus_text() -> None:
    assert read_metrics(VLLM) == EngineReport(5, 1, 0.5, None)
    assert read_metrics(VLLM.replace(b"\n", b"\r\n")) == EngineReport(5, 1, 0.5, None)
    assert read_metrics(SGLANG) == EngineReport(4, 2, 0.25, None)
    assert read_metrics(b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0") == EngineReport(1, 0)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>not found</html>",
        b"vllm:num_requests_running 1.0\n",
        b"vllm:num_requests_running NaN\nvllm:num_requests_waiting 0\n",
        b"vllm:num_requests_running 1e400\nvllm:num_requests_waiting 0\n",
        b"vllm:num_requests_running -1\nvllm:num_requests_waiting 0\n",
        b"vllm:num_requests_running 1-e\nvllm:num_requests_waiting 0\n",
        b"vllm:num_requests_running{ 1\nvllm:num_requests_waiting 0\n",
        b"# vllm:num_requests_running 1\n# vllm:num_requests_waiting 0\n",
    ],
)
def test_no_report_in_it(text: bytes) -> None:
    assert read_metrics(text) is None
    assert read_loads(text) is None


def test_a_figure_that_cannot_be_is_left_out() -> None:
    assert read_metrics(VLLM.replace(b"0.5 17", b"1.5 17")) == EngineReport(5, 1, None, None)
    assert read_loads(LOADS.replace(b"70", b"-70")) == EngineReport(5, 1, 0.5, None)


def test_loads() -> None:
    assert read_loads(LOADS) == EngineReport(5, 1, 0.5, 70)
    assert read_loads(b'{"loads": []}') is None
    assert read_loads(b'{"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 2}]}') == EngineReport(1, 2)
    assert read_loads(b'{"loads": [{"num_running_reqs": "1"}]}') is None
    assert read_loads(b"[" * 100_000) is None
    assert read_loads(b'{"loads": [{"num_running_reqs": ' + b"9" * 5000 + b', "num_waiting_reqs": 0}]}') is None


@pytest.mark.slow
def test_mutations() -> None:
    draw = random.Random(1)
    for source, read in ((VLLM, read_metrics), (SGLANG, read_metrics), (LOADS, read_loads)):
        for _ in range(1000):
            text = bytearray(source)
            for _ in range(draw.randint(1, 8)):
                at = draw.randrange(len(text))
                text[at : at + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
            found = read(bytes(text))
            assert found is None or (found.running >= 0 and found.waiting >= 0 and 0 <= (found.kv_usage or 0) <= 1)
