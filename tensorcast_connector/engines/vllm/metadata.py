"""The two channels that vLLM carries for a connector: scheduler -> ranks each step, and ranks -> scheduler."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from tensorcast_connector.engines.vllm.jobs import StepJobs
from tensorcast_connector.engines.vllm.weights_state import WeightsReport


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler -> every rank. `ask_weights`: each is to say what weights it has."""

    jobs: StepJobs = field(default_factory=StepJobs)
    ask_weights: bool = False


@dataclass
class RankReport(KVConnectorWorkerMetadata):
    """Ranks -> scheduler: how many ranks are done with each save job (with or without success), and which have which weights."""

    saved: Counter[int] = field(default_factory=Counter)
    weights: Counter[WeightsReport] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Sums over ranks."""
        assert isinstance(other, RankReport)
        return RankReport(self.saved + other.saved, self.weights + other.weights)
