"""Prometheus metrics. Every label is from a bounded set.

The label is `engine`, because Prometheus itself uses `instance` for what it scrapes."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from smetric_router.state.cluster import ClusterStatistics
from smetric_router.types import Ticket, Usage

_TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_STATUSES = frozenset(str(status.value) for status in HTTPStatus) | {"499"}


class Metrics:
    """The router's counters, and gauges read from the state when they are asked for."""

    def __init__(self, statistics: Callable[[], ClusterStatistics]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_StateCollector(statistics))
        registry = self.registry
        self._requests = Counter(
            "smetric_router_requests", "Answers to clients.", ["engine", "policy", "status"], registry=registry
        )
        self._decisions = Counter(
            "smetric_router_decisions", "Decisions by reason.", ["policy", "reason"], registry=registry
        )
        self._retries = Counter(
            "smetric_router_retries", "Attempts after the first one.", ["engine"], registry=registry
        )
        self._hits = Counter(
            "smetric_router_hit_tokens",
            "Prompt tokens expected in the instance's cache, and reported by it, of answers that report them.",
            ["engine", "kind"],
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
        # Finding a labelled child costs more than counting.
        self._requests_of = lru_cache(maxsize=4096)(self._requests.labels)
        self._decisions_of = lru_cache(maxsize=256)(self._decisions.labels)
        self._ttft_of = lru_cache(maxsize=4096)(self._ttft.labels)

    def decided(self, ticket: Ticket, *, retry: bool) -> None:
        """A request was given to an instance."""
        self._decisions_of(ticket.policy, ticket.decision.reason).inc()
        if retry:
            self._retries.labels(ticket.decision.instance).inc()

    def answered(self, instance: str, policy: str, status: int) -> None:
        """A client got its answer, or went away (499)."""
        self._requests_of(instance, policy, text if (text := str(status)) in _STATUSES else "other").inc()

    def first_byte(self, instance: str, seconds: float) -> None:
        """The first byte of an answer arrived."""
        self._ttft_of(instance).observe(seconds)

    def used(self, ticket: Ticket, usage: Usage) -> None:
        """An engine reported the usage of an answer."""
        if not usage.prompt_tokens:
            return
        instance = ticket.decision.instance
        self._prompts.labels(instance).inc(usage.prompt_tokens)
        if usage.cached_tokens is not None and ticket.request.chain.length:
            share = ticket.decision.hit / ticket.request.chain.length
            self._hits.labels(instance, "predicted").inc(share * usage.prompt_tokens)
            self._hits.labels(instance, "actual").inc(usage.cached_tokens)

    def render(self) -> bytes:
        """The text that a scraper reads."""
        return generate_latest(self.registry)


class _StateCollector(Collector):
    def __init__(self, statistics: Callable[[], ClusterStatistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        statistics = self._statistics()
        inflight = GaugeMetricFamily("smetric_router_inflight_requests", "Requests in flight.", labels=["engine"])
        healthy = GaugeMetricFamily("smetric_router_instance_up", "1 if the instance gets requests.", labels=["engine"])
        chunks = GaugeMetricFamily("smetric_router_index_chunks", "Chunks in the hit index.", labels=["engine"])
        for name, instance in statistics.instances.items():
            inflight.add_metric([name], instance.inflight)
            healthy.add_metric([name], float(instance.health == "up" and not instance.draining))
            chunks.add_metric([name], instance.chunks)
        yield from (inflight, healthy, chunks)
        yield GaugeMetricFamily(
            "smetric_router_index_evictions", "Answers that showed an eviction.", value=statistics.evictions
        )
