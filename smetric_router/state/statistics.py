"""The state in figures: for people, and for metrics."""

from dataclasses import asdict, dataclass
from typing import Any

from smetric_router.state.exact_index import ExactStatistics


@dataclass(frozen=True, slots=True)
class InstanceStatistics:
    """One instance in `ClusterStatistics`."""

    health: str
    cause: str
    since_s: float
    draining: bool
    breaker_open: bool
    inflight: int
    load: int
    """In flight, others' included as far as the engine reports them."""
    pending_tokens: int
    prefill_rate: float | None
    """Work per second; None until it is learnt."""
    report_age_s: float | None
    """None: there is no report, or it is too old to be believed."""
    kv_usage: float | None
    models: list[str] | None
    chunks: int


@dataclass(frozen=True, slots=True)
class ClusterStatistics:
    """The whole state in figures."""

    instances: dict[str, InstanceStatistics]
    digests: int
    chunks_dropped: int
    evictions: int
    load_imbalance: float
    """Most requests in flight on an instance in use, over their mean; 1 when there are none."""
    exact: ExactStatistics | None = None
    feeds: tuple[str, ...] = ()
    """The instances that tell what they hold."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
