"""Prometheus metrics. Every label is from a bounded set.

The label is `engine`, because Prometheus itself uses `instance` for what it scrapes."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from smetric_router.state.statistics import ClusterStatistics
from smetric_router.types import Ticket, Usage

_TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
# Of the hit predicted less the hit reported, in tokens: on both sides of none at all, blocks of 16 and more.
_ERROR_BUCKETS = (-65_536, -8192, -1024, -128, -32, -16, -1, 0, 16, 32, 128, 1024, 8192, 65_536)
_STATUSES = frozenset(str(status.value) for status in HTTPStatus) | {"499"}


@dataclass(frozen=True, slots=True)
class Present:
    """What is read when somebody asks for it."""

    statistics: Callable[[], ClusterStatistics]
    waiting: Callable[[], int]
    """Requests in the queue."""
    connections: Callable[[], int]
    held_bytes: Callable[[], int]
    """Of requests."""


class Metrics:
    """The router's counters, and gauges read from the state when they are asked for."""

    def __init__(self, present: Present, *, multiprocess: bool = False) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which nobody asks for
        self._multiprocess = multiprocess  # the library then counts in files that all processes read
        self._state = _StateCollector(present)
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._rendering: asyncio.Future[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, "metrics")  # not where names are looked up, which may take for ever
        registry = self.registry
        self._requests = Counter(
            "smetric_router_requests", "Answers to clients.", ["engine", "policy", "status"], registry=registry
        )
        self._decisions = Counter(
            "smetric_router_decisions", "Decisions by reason.", ["policy", "reason"], registry=registry
        )
        self._retries, self._failures, self._turned_off = _of_failures(registry)
        self._hits = Counter(
            "smetric_router_hit_tokens",
            "Prompt tokens expected in the instance's cache, and reported by it, of answers that report them.",
            ["engine", "kind"],
            registry=registry,
        )
        self._errors = Histogram(
            "smetric_router_hit_error_tokens",
            "Prompt tokens expected in the instance's cache less those that it reported, of answers that report them.",
            ["engine"],
            buckets=_ERROR_BUCKETS,
            registry=registry,
        )
        self._prompts = Counter(
            "smetric_router_prompt_tokens", "Prompt tokens reported by the engines.", ["engine"], registry=registry
        )
        self._ttft = Histogram(
            "smetric_router_ttft_seconds",
            "From the request to the first byte of the answer.",
            ["engine"],
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self._tpot = Histogram(
            "smetric_router_tpot_seconds",
            "Time per token after the first one, of streams that report their tokens.",
            ["engine"],
            buckets=_TPOT_BUCKETS_S,
            registry=registry,
        )
        self._waited = Histogram(
            "smetric_router_queue_seconds",
            "Time in the queue, of requests that left it for an engine.",
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self._kv_events, self._tokenised, self._shared = _of_the_index(registry)
        # Finding a labelled child costs more than counting.
        self._requests_of = lru_cache(maxsize=4096)(self._requests.labels)
        self._decisions_of = lru_cache(maxsize=256)(self._decisions.labels)
        self._tpot_of = lru_cache(maxsize=4096)(self._tpot.labels)
        self._ttft_of = lru_cache(maxsize=4096)(self._ttft.labels)
        self._prompts_of = lru_cache(maxsize=4096)(self._prompts.labels)
        self._hits_of = lru_cache(maxsize=4096)(self._hits.labels)
        self._errors_of = lru_cache(maxsize=4096)(self._errors.labels)

    def shared(self, kind: str, count: int) -> None:
        """Something was told to or heard from another process."""
        self._shared.labels(kind).inc(count)

    def kv_events(self, kind: str, count: int) -> None:
        """KV events came, or something was wrong with them."""
        self._kv_events.labels(kind).inc(count)

    def tokenised(self, result: str) -> None:
        """A request was tokenised, or not."""
        self._tokenised.labels(result).inc()

    def decided(self, ticket: Ticket, *, cause: str) -> None:
        """A request was given to an instance; `cause`: why again, if it was."""
        self._decisions_of(ticket.policy, ticket.decision.reason).inc()
        if cause:
            self._retries.labels(ticket.decision.instance, cause).inc()

    def failed(self, instance: str, cause: str) -> None:
        """An instance failed an attempt or refused it."""
        self._failures.labels(instance, cause).inc()

    def refused_connection(self) -> None:
        """A client's connection was closed, since there are too many."""
        self._turned_off.inc()

    def answered(self, instance: str, policy: str, status: int) -> None:
        """A client got its answer, or went away (499)."""
        self._requests_of(instance, policy, text if (text := str(status)) in _STATUSES else "other").inc()

    def first_byte(self, instance: str, seconds: float) -> None:
        """The first byte of an answer arrived."""
        self._ttft_of(instance).observe(seconds)

    def paced(self, instance: str, seconds: float) -> None:
        """A stream has ended; seconds per token after the first."""
        self._tpot_of(instance).observe(seconds)

    def waited(self, seconds: float) -> None:
        """A request has left the queue for an engine."""
        self._waited.observe(seconds)

    def used(self, ticket: Ticket, usage: Usage) -> None:
        """An engine reported the usage of an answer."""
        if not usage.prompt_tokens:
            return
        instance = ticket.decision.instance
        self._prompts_of(instance).inc(usage.prompt_tokens)
        if usage.cached_tokens is not None and ticket.request.length:
            predicted = ticket.decision.hit / ticket.request.length * usage.prompt_tokens
            self._hits_of(instance, "predicted").inc(predicted)
            self._hits_of(instance, "actual").inc(usage.cached_tokens)
            self._errors_of(instance).observe(round(predicted) - usage.cached_tokens)

    def render(self, present: Iterable[GaugeMetricFamily] | None = None) -> bytes:
        """The text that a scraper reads. `present`: the gauges, where they have been read already."""
        registry = CollectorRegistry()
        if self._multiprocess:
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            ProcessCollector(registry=registry)
        else:
            registry.register(_Collected(self.registry.collect))
        registry.register(_Collected(lambda: present if present is not None else self._state.collect()))
        return generate_latest(registry)

    async def text(self) -> bytes:
        """The same from a thread, since with hundreds of engines it takes a tenth of a second; one for all who ask meanwhile."""
        if self._rendering is None:
            present = list(self._state.collect())  # the state is the loop's
            loop = asyncio.get_running_loop()
            self._rendering = loop.run_in_executor(self._thread, self.render, present)
            self._rendering.add_done_callback(self._rendered)
        return await asyncio.shield(self._rendering)

    def _rendered(self, _: object) -> None:
        self._rendering = None


def _of_failures(registry: CollectorRegistry) -> tuple[Counter, Counter, Counter]:
    retries = Counter(
        "smetric_router_retries",
        "Attempts after the first one, by why the one before failed.",
        ["engine", "cause"],
        registry=registry,
    )
    failures = Counter(
        "smetric_router_failed_attempts",
        "Attempts that an engine failed or refused, whether or not another followed.",
        ["engine", "cause"],
        registry=registry,
    )
    turned_off = Counter(
        "smetric_router_refused_connections", "Clients' connections over the limit.", registry=registry
    )
    return retries, failures, turned_off


def _of_the_index(registry: CollectorRegistry) -> tuple[Counter, Counter, Counter]:
    """Counters whose values are known beforehand, and so begin with zero."""
    kv_events = Counter(
        "smetric_router_kv_events", "KV events, and what was wrong with them.", ["kind"], registry=registry
    )
    tokenised = Counter(
        "smetric_router_tokenised",
        "Requests that were tokenised for the exact index, and those that the observed one placed.",
        ["result"],
        registry=registry,
    )
    shared = Counter(
        "smetric_router_shared",
        "What processes and routers tell each other of the index.",
        ["kind"],
        registry=registry,
    )
    for counter, values in (
        (kv_events, ("taken", "ignored", "gaps", "lost", "restarts", "garbage")),
        (tokenised, ("tokenised", "observed")),
        (shared, ("told", "heard", "wanted", "left_out", "garbage")),
    ):
        for value in values:
            counter.labels(value)
    return kv_events, tokenised, shared


class _Collected(Collector):
    """What a function gives."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def describe(self) -> Iterable[Metric]:
        """None: nobody is to compare the names."""
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._collect()


class _StateCollector(Collector):
    def __init__(self, present: Present) -> None:
        self._present = present

    def collect(self) -> Iterator[GaugeMetricFamily]:
        statistics = self._present.statistics()
        inflight = GaugeMetricFamily("smetric_router_inflight_requests", "Requests in flight.", labels=["engine"])
        load = GaugeMetricFamily(
            "smetric_router_load_requests",
            "Requests in flight, and those of others that the engine reports.",
            labels=["engine"],
        )
        pending = GaugeMetricFamily(
            "smetric_router_pending_prefill_tokens", "Prompt tokens sent and not computed yet.", labels=["engine"]
        )
        rate = GaugeMetricFamily(
            "smetric_router_prefill_rate", "Work per second on prompts, once it is learnt.", labels=["engine"]
        )
        age = GaugeMetricFamily(
            "smetric_router_report_age_seconds", "Age of the engine's own load report.", labels=["engine"]
        )
        usage = GaugeMetricFamily(
            "smetric_router_kv_usage_ratio", "Share of the KV cache in use, as the engine reports.", labels=["engine"]
        )
        healthy = GaugeMetricFamily("smetric_router_instance_up", "1 if the instance gets requests.", labels=["engine"])
        chunks = GaugeMetricFamily("smetric_router_index_chunks", "Chunks in the hit index.", labels=["engine"])
        broken = GaugeMetricFamily("smetric_router_breaker_open", "1 while failures keep it out.", labels=["engine"])
        for name, instance in statistics.instances.items():
            inflight.add_metric([name], instance.inflight)
            healthy.add_metric([name], float(instance.health == "up" and not instance.draining))
            chunks.add_metric([name], instance.chunks)
            broken.add_metric([name], float(instance.breaker_open))
            load.add_metric([name], instance.load)
            pending.add_metric([name], instance.pending_tokens)
            for family, value in (
                (rate, instance.prefill_rate),
                (age, instance.report_age_s),
                (usage, instance.kv_usage),
            ):
                if value is not None:
                    family.add_metric([name], value)
        yield from (inflight, load, pending, rate, age, usage, healthy, chunks, broken)
        yield GaugeMetricFamily(
            "smetric_router_load_imbalance",
            "Most requests in flight on an instance in use, over their mean; 1 when there are none.",
            value=statistics.load_imbalance,
        )
        yield GaugeMetricFamily(
            "smetric_router_connections", "Clients' open connections.", value=self._present.connections()
        )
        yield GaugeMetricFamily(
            "smetric_router_held_bytes", "Of requests received and not answered yet.", value=self._present.held_bytes()
        )
        yield GaugeMetricFamily(
            "smetric_router_queued_requests", "Requests that wait for room.", value=self._present.waiting()
        )
        yield GaugeMetricFamily(
            "smetric_router_index_evictions", "Answers that showed an eviction.", value=statistics.evictions
        )
