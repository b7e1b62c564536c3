"""TensorcastConnector: vLLM's KV connector interface (V1), each hook passed to the side that runs in this process.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "TensorcastConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"worker": "unix:/path/worker.sock"}}'

vLLM makes one in the scheduler and one in every rank. Which hook runs where, and in what order, is in vLLM's
distributed/kv_transfer/kv_connector/v1/base.py.
"""

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tensorcast_connector.client.attachment import Attachment
from tensorcast_connector.config import SAVE_BACKLOG_BLOCKS_MAX, parse_address
from tensorcast_connector.engines.device import copier_for
from tensorcast_connector.engines.options import ConnectorConfig
from tensorcast_connector.engines.vllm.jobs import StepJobs
from tensorcast_connector.engines.vllm.logs import log_with_vllm
from tensorcast_connector.engines.vllm.metadata import RankReport, StepMetadata
from tensorcast_connector.engines.vllm.metrics import PoolMetrics, PoolStats
from tensorcast_connector.engines.vllm.namespace import epoch_of_weights, keyspaces, why_not_shared
from tensorcast_connector.engines.vllm.plugin import check_transfer_config
from tensorcast_connector.engines.vllm.scheduler_side import SchedulerSide
from tensorcast_connector.engines.vllm.weights_state import UNKNOWN, WeightsReport, weights_state
from tensorcast_connector.engines.vllm.worker_side import WorkerSide, ranks_of
from tensorcast_connector.engines.weights_epoch import private_epoch
from tensorcast_connector.errors import ConfigError
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.wire.messages import (
    AttachInstance,
)

logger = logging.getLogger(__name__)


Hook = TypeVar("Hook", bound=Callable[..., Any])


log_with_vllm()


def _harmless(default: Any) -> Callable[[Hook], Hook]:
    """A scheduler hook that must not take the engine down: a fault of ours is logged, and we stay out from then on."""

    def wrap(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                logger.exception("tensorcast: %s failed; serving without the pool from now on", hook.__name__)
                if self._scheduler is not None:
                    self._scheduler.stop()
                return default() if callable(default) else default

        return cast(Hook, guarded)

    return wrap


class _BlockPoolPins:
    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def pin(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[each] for each in block_ids])

    def usage(self) -> float:
        return float(self._pool.get_usage())

    def unpin(self, block_ids: Sequence[int]) -> None:
        # Last first, as vLLM frees a request: the head of a prompt is the part most worth keeping.
        self._pool.free_blocks([self._pool.blocks[each] for each in reversed(block_ids)])

    def caching(self) -> bool:
        return len(self._pool.cached_block_hash_to_block) > 0


class TensorcastConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = check_transfer_config(
            {
                "kv_connector": "TensorcastConnector",
                "kv_load_failure_policy": transfer.kv_load_failure_policy,
                "kv_connector_extra_config": transfer.kv_connector_extra_config,
            }
        )
        assert config is not None
        self._config: ConnectorConfig = config
        self._scheduler: SchedulerSide | None = None
        self._rank: WorkerSide | None = None
        self._attachment: Attachment | None = None
        self._new_epoch: str | None = None  # found by a thread, taken over by the scheduler's
        self._epoch_lock = threading.Lock()
        self._was_reset = False
        reason = why_not_shared(vllm_config, kv_cache_config)
        if reason is not None:
            if role is KVConnectorRole.SCHEDULER:
                logger.warning("tensorcast: %s; serving without the pool", reason)
            return
        name = f"{transfer.engine_id}/{role.name.lower()}"
        self._attachment = Attachment(SocketNetwork(), parse_address(config.worker, "worker"), name)
        if role is KVConnectorRole.SCHEDULER:
            self._start_scheduler_side()
        else:
            from vllm.distributed.parallel_state import get_pp_group, get_tp_group

            rank = get_pp_group().rank_in_group * get_tp_group().world_size + get_tp_group().rank_in_group
            self._rank = WorkerSide(self._attachment, rank, weights_state(vllm_config.instance_id))

    def _start_scheduler_side(self) -> None:
        assert self._attachment is not None
        transfer = self._vllm_config.kv_transfer_config
        self._scheduler = SchedulerSide(
            self._config, self._attachment, time.monotonic,
            block_tokens=self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
            ranks=ranks_of(self._vllm_config.parallel_config),
            loads=transfer.is_kv_consumer, saves=transfer.is_kv_producer,
            backlog_blocks_max=max(1, min(SAVE_BACKLOG_BLOCKS_MAX, self._kv_cache_config.num_blocks // 8)),
        )  # fmt: skip
        self._attachment.describe(self._instance("not known yet"))
        # Reading the weights may take long; until their epoch is known nothing is shared.
        threading.Thread(target=self._find_epoch, name="tensorcast-epoch", daemon=True).start()

    def _instance(self, namespace: str) -> AttachInstance:
        model = self._vllm_config.model_config
        served = model.served_model_name
        shown = served[0] if isinstance(served, list) else served or model.model
        engine_id = str(self._vllm_config.kv_transfer_config.engine_id)
        return AttachInstance(engine_id, "vllm", str(shown), namespace, self._config.tenant)

    def _find_epoch(self) -> None:
        epoch = epoch_of_weights(self._vllm_config, self._config)
        with self._epoch_lock:
            if not self._was_reset:  # else what the files hold is no longer what the engine holds
                self._new_epoch = epoch

    def _take_epoch(self) -> None:
        """On the scheduler's thread, where the engine has settled all that the identity of a page is made of."""
        with self._epoch_lock:
            epoch = self._new_epoch
            self._new_epoch = None
        if epoch is None or self._scheduler is None or self._attachment is None:
            return
        try:
            namespace, spaces = keyspaces(self._vllm_config, self._kv_cache_config, epoch, self._config.tenant)
        except Exception:
            # The engine's configuration is not what this version knows: never guess an identity.
            logger.exception("tensorcast: the identity of this engine's pages is unknown; serving without the pool")
            self._scheduler.use_keyspaces(None)
            return
        self._attachment.describe(self._instance(namespace))
        logger.info("tensorcast: KV namespace %s (weights %s)", namespace[:16], epoch)
        self._scheduler.use_keyspaces(spaces)

    # --- scheduler ---

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a save that is dropped is only a later miss."""
        return False

    @_harmless(None)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM: the block pool exists."""
        if self._scheduler is not None:
            self._scheduler.bind_pins(_BlockPoolPins(gpu_block_pool))

    @_harmless(None)
    def on_new_request(self, request: Any) -> None:
        """vLLM: a request has arrived."""
        self._take_epoch()
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @_harmless((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM: how many tokens beyond those computed can be loaded."""
        return self._scheduler.matched_tokens(request, num_computed_tokens) if self._scheduler else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM: blocks are allocated."""
        if self._scheduler is not None:
            block_ids = blocks.get_block_ids()[0] if num_external_tokens else []
            self._scheduler.allocated(request, block_ids, num_external_tokens)

    @_harmless(dict)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """vLLM: which tier the loaded tokens come from, for its metrics."""
        if self._scheduler is None:
            return {}
        here, elsewhere = self._scheduler.split_by_source(request, num_external_tokens)
        sources = {CacheHitSource.HOST: here, CacheHitSource.P2P: elsewhere}
        return {source: tokens for source, tokens in sources.items() if tokens}

    @_harmless(StepMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """vLLM: the step is planned."""
        if self._scheduler is None:
            return StepMetadata()
        state = scheduler_output.kv_connector_block_state
        tokens = scheduler_output.num_scheduled_tokens
        jobs = self._scheduler.step(tokens, lambda each: (state.get_block_ids(each) or ([],))[0])
        return StepMetadata(jobs, self._scheduler.asks_weights)

    @_harmless(None)
    def update_connector_output(self, connector_output: Any) -> None:
        """vLLM: what the ranks report."""
        if self._scheduler is None:
            return
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, RankReport):
            self._scheduler.saves_done(report.saved)
            if report.weights:
                self._hear_weights(report.weights)
        self._scheduler.loads_finished(connector_output.finished_recving or ())

    def _hear_weights(self, reports: Counter[WeightsReport]) -> None:
        assert self._scheduler is not None
        identity = self._scheduler.weights_heard(reports)
        with self._epoch_lock:
            self._was_reset = self._was_reset or any(report.changes for report in reports)
            if identity is not None:
                self._new_epoch = private_epoch() if identity == UNKNOWN else f"weights:{identity}"
        self._take_epoch()

    @_harmless((False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """vLLM: a request has ended; its blocks need not wait, those being saved are pinned on their own."""
        if self._scheduler is not None:
            self._scheduler.request_finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM: the same for hybrid models."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def has_pending_block_frees(self) -> bool:
        """vLLM: saves under way will free blocks soon, so wait instead of preempting."""
        return self._scheduler is not None and self._scheduler.blocks_pinned > 0

    def has_pending_push_work(self) -> bool:
        """vLLM: keep stepping until saves have been reported, so that no block stays pinned in an idle engine."""
        return self._scheduler is not None and self._scheduler.blocks_pinned > 0

    def reset_cache(self) -> bool | None:
        """vLLM: cached KV is void (new weights, sleep): a new private epoch; other engines' pages stay as they are.

        It ends when the ranks say that they have been given weights that have an identity since.
        """
        if self._scheduler is not None:
            with self._epoch_lock:
                self._was_reset = True
                self._new_epoch = private_epoch()
            self._take_epoch()
            self._scheduler.reset()
        return True

    # --- ranks ---

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """vLLM: the KV cache exists."""
        if self._rank is None:
            return
        names = self._kv_cache_config.kv_cache_groups[0].layer_names
        try:
            self._rank.use(copier_for([kv_caches[name] for name in names]))
        except ConfigError as error:
            logger.warning("tensorcast: %s; serving without the pool", error)
        except Exception:
            logger.exception("tensorcast: this KV cache is not understood; serving without the pool")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """vLLM: loads of this step begin."""
        if self._rank is not None:
            self._rank.start_loads(self._jobs().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """vLLM: loads are asynchronous, so no layer waits."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """vLLM: whole blocks are saved after the pass, so nothing is done per layer."""

    def wait_for_save(self) -> None:
        """vLLM: the forward pass is done; saves begin and are not waited for."""
        if self._rank is not None:
            self._rank.start_saves(self._jobs().saves)

    def _jobs(self) -> StepJobs:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.jobs

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """vLLM: which loads have ended."""
        return None, (self._rank.take_received() if self._rank is not None else None)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """vLLM: which blocks must be computed after all."""
        return self._rank.take_failed_blocks() if self._rank is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """vLLM: which saves have ended, and which weights this rank has."""
        if self._rank is None:
            return None
        metadata = self._get_connector_metadata() if self.has_connector_metadata() else None
        asked = isinstance(metadata, StepMetadata) and metadata.ask_weights
        saved, weights = self._rank.take_saved(), self._rank.take_weights(asked)
        if not saved and weights is None:
            return None
        return RankReport(saved, Counter() if weights is None else Counter([weights]))

    def get_kv_connector_stats(self) -> PoolStats | None:
        """vLLM: what to count."""
        report = self._rank.take_report() if self._rank is not None else None
        return PoolStats(report) if report else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PoolStats:
        """vLLM: the same in the API server."""
        return PoolStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PoolMetrics:
        """vLLM: our metrics beside its own."""
        return PoolMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """vLLM: the process ends."""
        if self._rank is not None:
            self._rank.close()
        if self._attachment is not None:
            self._attachment.close()
