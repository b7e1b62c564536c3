"""Reads what engines say of their load: the Prometheus text of vLLM and SGLang, and SGLang's `/v1/loads`.

Bytes from outside: only the few figures that are needed are looked for, whatever else is there, and a figure that cannot be
is left out. An engine with several ranks or models lists each; they are added up, and the fullest cache counts.
"""

import re

import msgspec

from smetric_router.types import EngineReport

REPORT_BYTES_MAX = 8 << 20
# No engine has more requests or tokens: a figure beyond it is no figure.
COUNT_MAX = 10**9

_RUNNING = (b"vllm:num_requests_running", b"sglang:num_running_reqs")
_WAITING = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs")
# The second is what vLLM called it before its version 0.10.
_USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", b"sglang:token_usage")
_line = re.compile(
    rb"^(" + b"|".join((*_RUNNING, *_WAITING, *_USAGE)) + rb")"
    rb"(?:\{[^\n]*\})?[ \t]+([0-9.eE+-]{1,32})[ \t]*(?:[0-9]+[ \t]*)?\r?$",
    re.M,
)


class _Load(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int | None = None
    token_usage: float | None = None


class _Loads(msgspec.Struct):
    loads: list[_Load]


_decode_loads = msgspec.json.Decoder(_Loads).decode


def read_metrics(text: bytes) -> EngineReport | None:
    """The report in an answer to `GET /metrics`; None if there is none in it."""
    running: list[float] = []
    waiting: list[float] = []
    usage: list[float] = []
    for found in _line.finditer(text[:REPORT_BYTES_MAX]):
        name, value = found[1], _number(found[2])
        if value is None:
            continue
        (running if name in _RUNNING else waiting if name in _WAITING else usage).append(value)
    if not running or not waiting:
        return None
    return _report(sum(running), sum(waiting), max(usage, default=None), None)


def read_loads(body: bytes) -> EngineReport | None:
    """The report in an answer to SGLang's `GET /v1/loads`; None if there is none in it."""
    if len(body) > REPORT_BYTES_MAX:
        return None
    try:
        loads = _decode_loads(body).loads
    # UnicodeDecodeError is a ValueError, as is what Python says of a number with too many digits.
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if not loads:
        return None
    queued = [each.num_waiting_uncached_tokens for each in loads if each.num_waiting_uncached_tokens is not None]
    usages = [each.token_usage for each in loads if each.token_usage is not None]
    return _report(
        sum(each.num_running_reqs for each in loads),
        sum(each.num_waiting_reqs for each in loads),
        max(usages, default=None),
        sum(queued) if queued else None,
    )


def _number(text: bytes) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _report(running: float, waiting: float, usage: float | None, queued: float | None) -> EngineReport | None:
    if not (0 <= running <= COUNT_MAX and 0 <= waiting <= COUNT_MAX):
        return None
    if usage is not None and not 0 <= usage <= 1:
        usage = None
    if queued is not None and not 0 <= queued <= COUNT_MAX:
        queued = None
    return EngineReport(int(running), int(waiting), usage, None if queued is None else int(queued))
