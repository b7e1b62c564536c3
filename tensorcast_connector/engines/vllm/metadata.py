"""The two channels that vLLM carries for a connector: scheduler -> ranks each step, and ranks -> scheduler."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from tensorcast_connector.engines.vllm.jobs import StepJobs


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler -> every rank."""

    jobs: StepJobs = field(default_factory=StepJobs)


@dataclass
class SavesDone(KVConnectorWorkerMetadata):
    """Ranks -> scheduler: how many ranks are done with each save job (with or without success)."""

    counts: Counter[int] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Sums over ranks."""
        assert isinstance(other, SavesDone)
        return SavesDone(self.counts + other.counts)
