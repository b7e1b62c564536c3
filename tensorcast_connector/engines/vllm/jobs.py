"""What the scheduler side and the ranks of one engine have to do for each other, as plain values."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Pages to copy into blocks, in order. `keyspaces` has one entry per rank.

    `changes` says under which weights it was planned: how often the ranks' weights had changed by then.
    """

    request_id: str
    keyspaces: list[bytes]
    block_ids: list[int]
    block_hashes: list[bytes]
    changes: int = 0


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Blocks to copy into pages once this step's forward pass is done; pinned in the engine until every rank reports.

    `changes` as in LoadJob.
    """

    job_id: int
    keyspaces: list[bytes]
    block_ids: list[int]
    block_hashes: list[bytes]
    changes: int = 0


@dataclass(slots=True)
class StepJobs:
    """All of one engine step."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
