"""What the connector adds to vLLM's own `/metrics`: whether the pool is there, and the pages that moved.

    tensorcast:attached              1 if every rank had a worker at the engine's last step, else 0
    tensorcast:pages_loaded_total    pages copied from the pool into the KV cache
    tensorcast:pages_failed_total    pages that could not be loaded and were computed
    tensorcast:pages_saved_total     pages copied from the KV cache into the pool

Ranks report what has changed since their last step; vLLM sums it over ranks and hands it to the API server.
"""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "pages_loaded": "Pages copied from the pool into the KV cache.",
    "pages_failed": "Pages that could not be loaded from the pool and were computed.",
    "pages_saved": "Pages copied from the KV cache into the pool.",
}
ATTACHED = "attached"


@dataclass
class PoolStats(KVConnectorStats):
    """Counts since the last report, and whether the reporting ranks are attached."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Nothing has happened."""
        self.data = dict.fromkeys(COUNTERS, 0)

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return ATTACHED not in self.data and not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Over ranks and over time: counts add up, and one rank without a worker is one too many."""
        for name in COUNTERS:
            self.data[name] = self.data.get(name, 0) + other.data.get(name, 0)
        if ATTACHED in other.data:
            self.data[ATTACHED] = min(self.data.get(ATTACHED, 1), other.data[ATTACHED])
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return dict(self.data)


class PoolMetrics(KVConnectorPromMetrics):
    """The Prometheus side, in the API server."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._attached = self._gauge_cls(
            name="tensorcast:attached",
            documentation="1 if every rank had a worker at the last engine step, else 0.",
            multiprocess_mode="mostrecent",
            labelnames=labelnames,
        )
        self._counters = {
            name: self._counter_cls(name=f"tensorcast:{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        for labels in per_engine_labelvalues.values():
            self._attached.labels(*labels).set(0)
            for counter in self._counters.values():
                counter.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """One report."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, counter in self._counters.items():
            counter.labels(*labels).inc(transfer_stats_data.get(name, 0))
        if ATTACHED in transfer_stats_data:
            self._attached.labels(*labels).set(transfer_stats_data[ATTACHED])
