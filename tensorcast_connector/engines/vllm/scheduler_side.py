"""The connector inside vLLM's scheduler: looks pages up, decides what to load and save, pins blocks while they are copied.

Every hook answers at once. State changes only here, in engine hooks, on the scheduler's thread. Time and the worker are
passed in, so the whole side runs in a test without an engine.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from tensorcast_connector.config import INSTANCE_REPORT_INTERVAL_S, SAVE_BACKLOG_BLOCKS_MAX
from tensorcast_connector.engines.options import ConnectorConfig
from tensorcast_connector.engines.vllm.jobs import LoadJob, SaveJob, StepJobs
from tensorcast_connector.engines.vllm.weights_state import CHANGING, WeightsReport
from tensorcast_connector.wire.messages import (
    LookupResult,
)

logger = logging.getLogger(__name__)
SKIP_LOAD = "tensorcast.skip_load"
SKIP_SAVE = "tensorcast.skip_save"


class Worker(Protocol):
    """What this side needs of the attachment."""

    @property
    def connected(self) -> bool:
        """Whether there is a worker."""

    def lookup(
        self, lookup_id: str, keyspaces: Sequence[bytes], hashes: Sequence[bytes], timeout_s: float
    ) -> "Future[LookupResult]":
        """See Attachment."""

    def report(self, running: int, waiting: int, kv_usage: float | None) -> None:
        """See Attachment."""

    def release(self, hold_ids: Sequence[str]) -> None:
        """See Attachment."""


class BlockPins(Protocol):
    """The engine's block pool, as far as pinning goes."""

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keeps blocks from being reused."""

    def usage(self) -> float:
        """How much of the pool is in use, from 0 to 1."""

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Ends that."""

    def caching(self) -> bool:
        """Whether the engine's own prefix cache holds anything."""


@dataclass(slots=True)
class _Tracked:
    """What is known of one live request."""

    request: Any
    hold_id: str
    epoch: int
    may_load: bool
    may_save: bool
    deferred: bool  # arrived before it was known which weights the ranks have: it is looked up once they have said
    deferred_until_s: float = math.inf
    lookup: "Future[LookupResult] | None" = None
    lookup_started_s: float = 0.0
    looked_up_for: int = -1  # the preemption count at which the last lookup began
    matched_from: int = 0  # blocks the engine had itself when it was told of a hit
    local_blocks: int = 0
    saved_blocks: int = 0  # leading blocks handed to a save job


class SchedulerSide:
    """See the module.

    Args:
        block_tokens: tokens per block.
        ranks: how many ranks report on each save.
        loads, saves: from kv_role.
        backlog_blocks_max: blocks that may be pinned for saving; beyond it new ones are not saved.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        worker: Worker,
        now: Callable[[], float],
        block_tokens: int,
        ranks: int,
        loads: bool,
        saves: bool,
        backlog_blocks_max: int = SAVE_BACKLOG_BLOCKS_MAX,
    ) -> None:
        self._backlog_blocks_max = backlog_blocks_max
        self._config = config
        self._worker = worker
        self._now = now
        self._block_tokens = block_tokens
        self._ranks = ranks
        self._loads = loads
        self._saves = saves
        self._tracked: dict[str, _Tracked] = {}
        self._pins: BlockPins | None = None
        self._new_loads: list[LoadJob] = []
        self._saving: dict[int, tuple[list[int], int]] = {}  # job -> (pinned blocks, ranks still to report)
        self._job_ids = itertools.count()
        self._hold_ids = itertools.count()
        self._keyspaces: list[bytes] | None = None
        self._epoch = 0
        self._weights = WeightsReport()  # of all ranks, as last heard
        self._asking = False
        self._deferring = False  # after a reset new requests wait for the ranks' answer
        self._local_stale = False  # the engine's own cache holds blocks of former weights
        self._report_at_s = 0.0
        self.counters = {"lookups": 0, "lookups_late": 0, "hits": 0, "tokens_matched": 0, "save_jobs": 0}

    def __repr__(self) -> str:
        return (
            f"<SchedulerSide {len(self._tracked)} requests, {len(self._saving)} saves under way, epoch {self._epoch}>"
        )

    def use_keyspaces(self, keyspaces: list[bytes] | None) -> None:
        """Where pages live from now on, one keyspace per rank; None: nothing is shared. Requests alive now save nothing more."""
        self._epoch += 1
        self._keyspaces = keyspaces

    def reset(self) -> None:
        """The engine has emptied its own cache, mostly since its weights will change: the ranks are asked which they have."""
        self._asking = self._deferring = True
        self._local_stale = self._local_stale and self._caching()

    def weights_heard(self, reports: Mapping[WeightsReport, int]) -> str | None:
        """Ranks say which weights they have: the identity of new ones if all have the same, else None.

        While some rank has others than were known nothing is shared; the ranks refuse what was planned until then.
        """
        report, count = next(iter(reports.items()))
        if len(reports) == 1 and count == self._ranks and report.identity != CHANGING:
            self._asking = self._deferring = False
            if report == self._weights:
                return None
            self._weights = report
            self._local_stale = self._local_stale or self._caching()
            return report.identity
        self._asking = True
        if any(each != self._weights for each in reports) and self._keyspaces is not None:
            self.use_keyspaces(None)
        return None

    @property
    def asks_weights(self) -> bool:
        """Whether the ranks are to say which weights they have."""
        return self._asking

    def _caching(self) -> bool:
        return self._pins is None or self._pins.caching()

    def bind_pins(self, pins: BlockPins) -> None:
        """The engine's block pool exists now."""
        self._pins = pins

    # --- lookup and load ---

    def on_new_request(self, request: Any) -> None:
        """Starts the lookup."""
        params = request.kv_transfer_params or {}
        # Adapters are named, not identified by content, so their pages are not shared.
        plain = request.lora_request is None and not getattr(request, "pooling_params", None)
        tracked = _Tracked(
            request, f"{next(self._hold_ids)}:{request.request_id}", self._epoch,
            may_load=self._loads and plain and not request.skip_reading_prefix_cache and not params.get(SKIP_LOAD),
            may_save=self._saves and plain and not params.get(SKIP_SAVE),
            deferred=self._deferring,
        )  # fmt: skip
        self._tracked[request.request_id] = tracked
        if tracked.may_load and not tracked.deferred:
            self._start_lookup(tracked)

    def _start_lookup(self, tracked: _Tracked) -> None:
        tracked.looked_up_for = tracked.request.num_preemptions
        hashes = [bytes(each) for each in tracked.request.block_hashes]
        if not hashes or self._keyspaces is None or tracked.epoch != self._epoch or not self._worker.connected:
            return
        self.counters["lookups"] += 1
        tracked.lookup_started_s = self._now()
        tracked.lookup = self._worker.lookup(tracked.hold_id, self._keyspaces, hashes, self._config.lookup_deadline_s)

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM's get_num_new_matched_tokens: None while the lookup is under way, 0 once it is late."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0, False
        if tracked.deferred:
            tracked.deferred_until_s = min(tracked.deferred_until_s, self._now() + self._config.lookup_deadline_s)
            if self._deferring and self._now() < tracked.deferred_until_s:
                return None, False
            self._deferring = tracked.deferred = False
            tracked.epoch = self._epoch  # nothing of it has been computed
        if computed_tokens and self._local_stale:
            tracked.may_save = False
        if not tracked.may_load:
            return 0, False
        if tracked.lookup is None and tracked.looked_up_for != request.num_preemptions:
            self._start_lookup(tracked)
        if tracked.lookup is None:
            return 0, False
        if not tracked.lookup.done():
            if self._now() - tracked.lookup_started_s < self._config.lookup_deadline_s:
                return None, False
            self.counters["lookups_late"] += 1
            tracked.lookup.cancel()
            self._drop_lookup(tracked)
            return 0, False
        if tracked.epoch != self._epoch or tracked.lookup.cancelled() or tracked.lookup.exception() is not None:
            self._drop_lookup(tracked)
            return 0, False
        found = tracked.lookup.result()
        known = computed_tokens // self._block_tokens
        if found.blocks - known < self._config.min_load_blocks:
            self._drop_lookup(tracked)
            return 0, False
        tracked.matched_from = known
        tracked.local_blocks = found.local_blocks
        return (found.blocks - known) * self._block_tokens, True

    def _drop_lookup(self, tracked: _Tracked) -> None:
        if tracked.lookup is not None:
            tracked.lookup = None
            self._worker.release([tracked.hold_id])

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """vLLM's update_state_after_alloc: the blocks to load into exist (or nothing is to be loaded)."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if not external_tokens:
            self._drop_lookup(tracked)
            return
        start = tracked.matched_from
        end = start + external_tokens // self._block_tokens
        hashes = [bytes(each) for each in request.block_hashes[start:end]]
        self._new_loads.append(
            LoadJob(
                request.request_id, self._keyspaces or [], list(block_ids[start:end]), hashes, self._weights.changes
            )
        )
        self.counters["hits"] += 1
        self.counters["tokens_matched"] += external_tokens
        # The hold stays until the load has finished; the lookup itself is used up.
        tracked.lookup = None

    def split_by_source(self, request: Any, external_tokens: int) -> tuple[int, int]:
        """Of the tokens just allocated: (from this host's arena, from other workers)."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return external_tokens, 0
        local = max(0, tracked.local_blocks - tracked.matched_from) * self._block_tokens
        return min(local, external_tokens), external_tokens - min(local, external_tokens)

    # --- save ---

    def step(self, scheduled_tokens: dict[str, int], block_ids_of: Callable[[str], Sequence[int]]) -> StepJobs:
        """vLLM's build_connector_meta: this step's jobs."""
        jobs = StepJobs(self._new_loads, [])
        self._new_loads = []
        if self._saves and self._keyspaces is not None and self._worker.connected and self._pins is not None:
            try:
                for request_id, tokens in scheduled_tokens.items():
                    job = self._save_job(request_id, tokens, block_ids_of)
                    if job is not None:
                        jobs.saves.append(job)
            except Exception:
                # The loads must go out whatever happens: their requests wait for them.
                logger.exception("tensorcast: planning saves failed; serving without the pool from now on")
                self.stop()
        self._report(len(scheduled_tokens))
        return jobs

    def _save_job(self, request_id: str, tokens: int, block_ids_of: Callable[[str], Sequence[int]]) -> SaveJob | None:
        tracked = self._tracked.get(request_id)
        if tracked is None or not tracked.may_save or tracked.epoch != self._epoch:
            return None
        request = tracked.request
        # A block is saved once this step computes its last token and its hash, hence all its tokens, is known.
        full = min((request.num_computed_tokens + tokens) // self._block_tokens, len(request.block_hashes))
        if not self._config.save_decode:
            full = min(full, request.num_prompt_tokens // self._block_tokens)
        start = tracked.saved_blocks
        # What the backlog has no room for is saved with a later step, if there is one.
        full = min(full, start + self._backlog_blocks_max - self.blocks_pinned)
        if full <= start:
            return None
        block_ids = list(block_ids_of(request_id))[start:full]
        if len(block_ids) < full - start:
            return None
        assert self._pins is not None and self._keyspaces is not None
        self._pins.pin(block_ids)
        hashes = [bytes(each) for each in request.block_hashes[start:full]]
        job = SaveJob(next(self._job_ids), self._keyspaces, block_ids, hashes, self._weights.changes)
        self._saving[job.job_id] = (block_ids, self._ranks)
        self.counters["save_jobs"] += 1
        tracked.saved_blocks = full
        return job

    @property
    def blocks_pinned(self) -> int:
        """Blocks that wait to be copied."""
        return sum(len(blocks) for blocks, _ in self._saving.values())

    def saves_done(self, counts: dict[int, int]) -> None:
        """Ranks are done with save jobs; unpins what all have copied."""
        for job_id, ranks in counts.items():
            if job_id not in self._saving:
                continue  # of before a fault; its blocks were unpinned then
            blocks, missing = self._saving[job_id]
            if missing > ranks:
                self._saving[job_id] = (blocks, missing - ranks)
                continue
            del self._saving[job_id]
            assert self._pins is not None
            self._pins.unpin(blocks)

    # --- ends ---

    def loads_finished(self, request_ids: Iterable[str]) -> None:
        """Loads are done, well or not: the pages need no longer be held."""
        self._worker.release([self._tracked[each].hold_id for each in request_ids if each in self._tracked])

    def request_finished(self, request_id: str) -> None:
        """The request has ended, or was aborted."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None and tracked.looked_up_for >= 0:
            if tracked.lookup is not None:
                tracked.lookup.cancel()
            self._worker.release([tracked.hold_id])
        self._new_loads = [job for job in self._new_loads if job.request_id != request_id]
        if not self._tracked and self._report_at_s < math.inf:  # there may be no step for long
            self._report_at_s = 0.0
            self._report(0)

    def _report(self, running: int) -> None:
        """Tells the worker how the engine is doing, at an interval."""
        now = self._now()
        if now < self._report_at_s:
            return
        self._report_at_s = now + INSTANCE_REPORT_INTERVAL_S
        try:
            usage = self._pins.usage() if self._pins is not None else None
            self._worker.report(running, max(0, len(self._tracked) - running), usage)
        except Exception:
            logger.exception("tensorcast: this engine cannot say how it is doing; it does not from now on")
            self._report_at_s = math.inf

    def stop(self) -> None:
        """Something is wrong with us: nothing is looked up, loaded or saved any more. What is under way still ends."""
        self._keyspaces = None
        self._epoch += 1

    def check(self) -> None:
        """Raises AssertionError unless nothing is pinned that no rank will report on."""
        assert all(0 < missing <= self._ranks for _, missing in self._saving.values())
        assert all(job.request_id in self._tracked for job in self._new_loads)
