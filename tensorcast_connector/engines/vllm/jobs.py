"""What the scheduler side and the ranks of one engine tell each other each step."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True)
class LoadJob:
    """Pages to copy into blocks, in order. `keyspaces` has one entry per rank."""

    request_id: str
    keyspaces: list[bytes]
    block_ids: list[int]
    block_hashes: list[bytes]


@dataclass(frozen=True)
class SaveJob:
    """Blocks to copy into pages once this step's forward pass is done; pinned in the engine until every rank reports."""

    job_id: int
    keyspaces: list[bytes]
    block_ids: list[int]
    block_hashes: list[bytes]


@dataclass
class StepJobs(KVConnectorMetadata):
    """Scheduler side -> every rank."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)


@dataclass
class SavesDone(KVConnectorWorkerMetadata):
    """Ranks -> scheduler side: how many ranks are done with each save job (with or without success)."""

    counts: Counter[int] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Sums over ranks."""
        assert isinstance(other, SavesDone)
        return SavesDone(self.counts + other.counts)
