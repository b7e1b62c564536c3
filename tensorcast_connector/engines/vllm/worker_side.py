"""The connector inside each of vLLM's ranks: copies pages into blocks and blocks into pages, beside the forward pass."""

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import xxhash

from tensorcast_connector.client.attachment import Mapping
from tensorcast_connector.engines.device import PageCopier
from tensorcast_connector.engines.vllm.jobs import LoadJob, SaveJob
from tensorcast_connector.engines.vllm.weights_state import WeightsReport, WeightsState
from tensorcast_connector.errors import TensorcastError, Unavailable

logger = logging.getLogger(__name__)
LOAD_THREADS = 2
LOAD_PAGES_PER_PART = 16


class Worker(Protocol):
    """What this side needs of the attachment."""

    @property
    def connected(self) -> bool:
        """See Attachment."""

    @property
    def mapping(self) -> Mapping:
        """See Attachment."""

    def still_holds(self, mapping: Mapping) -> bool:
        """See Attachment."""

    def writing(self, mapping: Mapping) -> AbstractContextManager[None]:
        """See Attachment."""

    def acquire(self, hold_id: str, keyspace: bytes, hashes: Sequence[bytes], mapping: Mapping) -> list[memoryview]:
        """See Attachment."""

    def release(self, hold_ids: Sequence[str]) -> None:
        """See Attachment."""

    def reserve(
        self, keyspace: bytes, hashes: Sequence[bytes], page_bytes: int, mapping: Mapping
    ) -> list[memoryview | None]:
        """See Attachment."""

    def commit(self, keyspace: bytes, hashes: Sequence[bytes], digests: Sequence[int]) -> None:
        """See Attachment."""

    def abort(self, keyspace: bytes, hashes: Sequence[bytes]) -> None:
        """See Attachment."""


class WorkerSide:
    """See the module.

    Results are kept under one lock until the engine asks for them; a job always ends, so a request never waits for one.
    A job that was planned under other weights than those of `weights` copies nothing.
    """

    def __init__(self, worker: Worker, rank: int, weights: WeightsState) -> None:
        self._worker = worker
        self._rank = rank
        self._weights = weights
        self._told = weights.report
        self._copier: PageCopier | None = None
        self._loading = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="tensorcast-load")
        self._saving = ThreadPoolExecutor(1, thread_name_prefix="tensorcast-save")
        self._lock = threading.Lock()
        self._parts: dict[str, int] = {}
        self._received: list[LoadJob] = []
        self._failed_blocks: set[int] = set()
        self._saved: Counter[int] = Counter()
        self._counts = Counter[str]()
        self._attached: bool | None = None

    def use(self, copier: PageCopier) -> None:
        """The KV cache exists now."""
        self._copier = copier
        logger.info("KV pages of %d bytes: %r", copier.page_bytes, copier)

    # --- loads ---

    def start_loads(self, jobs: Sequence[LoadJob]) -> None:
        """Begins; each request is reported by `take_received` once all its parts have ended."""
        for job in jobs:
            starts = range(0, len(job.block_ids), LOAD_PAGES_PER_PART)
            with self._lock:
                self._parts[job.request_id] = len(starts)
            for start in starts:
                self._loading.submit(self._load_part, job, start, start + LOAD_PAGES_PER_PART)

    def _load_part(self, job: LoadJob, start: int, end: int) -> None:
        block_ids = job.block_ids[start:end]
        loaded = 0
        hold_id = f"load:{job.request_id}:{start}"
        try:
            self._check_weights(job)
            loaded = self._copy_in(hold_id, job.keyspaces[self._rank], job.block_hashes[start:end], block_ids)
        except TensorcastError as error:
            logger.info("loading for %s: %s; computing instead", job.request_id, error)
        except Exception:
            logger.exception("loading for %s failed; computing instead", job.request_id)
        finally:
            self._worker.release([hold_id])
            with self._lock:
                self._counts["pages_loaded"] += loaded
                self._counts["pages_failed"] += len(block_ids) - loaded
                self._failed_blocks.update(block_ids[loaded:])
                self._parts[job.request_id] -= 1
                if not self._parts[job.request_id]:
                    del self._parts[job.request_id]
                    self._received.append(job)

    def _copy_in(self, hold_id: str, keyspace: bytes, hashes: Sequence[bytes], block_ids: Sequence[int]) -> int:
        copier = self._copier
        if copier is None:
            raise Unavailable("the KV cache is not shared")
        mapping = self._worker.mapping
        pages = self._worker.acquire(hold_id, keyspace, hashes, mapping)
        for count, (block_id, page) in enumerate(zip(block_ids, pages, strict=False)):
            if page.nbytes != copier.page_bytes:
                logger.warning("a page of %d bytes where %d belong; computing instead", page.nbytes, copier.page_bytes)
                return count
            copier.load(block_id, page)
        if not self._worker.still_holds(mapping):
            # The pages were no longer held while they were copied, so others may have written there.
            raise Unavailable("lost the worker while pages were copied")
        return len(pages)

    def take_received(self) -> set[str]:
        """Requests whose loads have ended since the last call. Called between forward passes.

        Weights do not change before the next pass: what was loaded for others until now is computed.
        """
        with self._lock:
            received, self._received = self._received, []
            for job in received:
                if not self._weights.serves(job.changes):
                    self._failed_blocks.update(job.block_ids)
            return {job.request_id for job in received}

    def take_failed_blocks(self) -> set[int]:
        """Blocks that were not loaded, no later than their request is reported."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
            return failed

    # --- saves ---

    def start_saves(self, jobs: Sequence[SaveJob]) -> None:
        """Begins, once the forward pass that computed the blocks is done."""
        for job in jobs:
            self._saving.submit(self._save, job)

    def _save(self, job: SaveJob) -> None:
        saved = 0
        try:
            self._check_weights(job)
            saved = self._copy_out(job.keyspaces[self._rank], job)
        except TensorcastError as error:
            logger.debug("saving %d blocks: %s", len(job.block_ids), error)
        except Exception:
            logger.exception("saving %d blocks failed", len(job.block_ids))
        finally:
            with self._lock:
                self._saved[job.job_id] += 1
                self._counts["pages_saved"] += saved

    def _copy_out(self, keyspace: bytes, job: SaveJob) -> int:
        copier = self._copier
        if copier is None:
            raise Unavailable("the KV cache is not shared")
        mapping = self._worker.mapping
        slots = self._worker.reserve(keyspace, job.block_hashes, copier.page_bytes, mapping)
        reserved = [each for each, slot in zip(job.block_hashes, slots, strict=True) if slot is not None]
        digests: list[int] = []
        try:
            for block_id, slot in zip(job.block_ids, slots, strict=True):
                if slot is not None:
                    with self._worker.writing(mapping):
                        copier.save(block_id, slot)
                    digests.append(xxhash.xxh3_64_intdigest(slot))
            self._check_weights(job)
        except BaseException:
            self._worker.abort(keyspace, reserved)
            raise
        if reserved:
            self._worker.commit(keyspace, reserved, digests)
        return len(reserved)

    def take_saved(self) -> Counter[int]:
        """Save jobs that have ended since the last call."""
        with self._lock:
            saved, self._saved = self._saved, Counter()
            return saved

    def _check_weights(self, job: LoadJob | SaveJob) -> None:
        if not self._weights.serves(job.changes):
            raise Unavailable("the weights have changed since this was planned")

    def take_weights(self, asked: bool) -> WeightsReport | None:
        """What weights this rank has, if they have changed since the last call or somebody asks."""
        report = self._weights.report
        if report == self._told and not asked:
            return None
        self._told = report
        return report

    def take_report(self) -> dict[str, int]:
        """What to count: pages since the last call, and whether there is a worker if that has changed; empty: nothing."""
        attached = self._worker.connected
        with self._lock:
            report = {name: count for name, count in self._counts.items() if count}
            self._counts.clear()
        if report or attached is not self._attached:
            self._attached = attached
            report["attached"] = int(attached)
        return report

    def close(self) -> None:
        """Waits for what is under way and drops what has not begun."""
        self._loading.shutdown(cancel_futures=True)
        self._saving.shutdown(cancel_futures=True)


def ranks_of(parallel_config: Any) -> int:
    """How many ranks hold a share of each page."""
    return int(parallel_config.tensor_parallel_size) * int(parallel_config.pipeline_parallel_size)
