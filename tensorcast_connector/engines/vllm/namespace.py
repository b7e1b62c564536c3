"""The KV namespace of a vLLM engine: all that determines a page's bytes besides its tokens, from its configuration."""

import json
import logging
from pathlib import Path
from typing import Any

from tensorcast_connector.config import default_cache_dir, environment
from tensorcast_connector.core.identity import keyspace, namespace_digest, precision
from tensorcast_connector.engines.options import ConnectorConfig
from tensorcast_connector.engines.weights_epoch import hub_snapshot, private_epoch, weights_epoch
from tensorcast_connector.errors import ConfigError

logger = logging.getLogger(__name__)
# They name where the model was or who wrote it, not what it computes.
_IRRELEVANT = ("_name_or_path", "transformers_version", "architectures_source")
# These propose tokens without weights of their own, so the KV cache holds nothing but the model's.
_DRAFTLESS = ("ngram", "ngram_gpu", "suffix")


def why_not_shared(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why this engine's pages cannot be shared by this version; None if they can."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups; only models with one are shared"
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        return f"its attention is {type(spec).__name__}; only full attention is shared"
    parallel = vllm_config.parallel_config
    if (
        getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        return "context parallelism splits blocks between ranks"
    if kv_cache_config.hash_block_size not in (None, spec.block_size):
        return f"block hashes are per {kv_cache_config.hash_block_size} tokens but blocks have {spec.block_size}"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _DRAFTLESS:
        return f"speculative decoding by {speculative.method} keeps a draft model's KV in the same blocks"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "KV scales are calculated from the first requests, so bytes differ between engines"
    return None


def epoch_of_weights(vllm_config: Any, config: ConnectorConfig) -> str:
    """The declared version, the hub commit, or the content digest; a private random one if none of them can be had.

    May read all weight files once: not for the engine's own thread.
    """
    model = vllm_config.model_config
    if config.weight_version:
        return f"declared:{config.weight_version}"
    try:
        load = vllm_config.load_config
        if load.load_format == "dummy":
            raise ConfigError("load_format is dummy, so the weights are random")
        if load.load_format == "tensorcast" and (source := load.model_loader_extra_config.get("source")):
            raise ConfigError(f"the weights come from {source!r}, and {model.model} does not say which those are")
        folder = Path(model.model)
        if not folder.is_dir():
            folder = hub_snapshot(model.model, model.revision)
        return weights_epoch(folder, default_cache_dir(), lambda name: logger.info("digesting %s once", name))
    except ConfigError as error:
        logger.warning("%s; pages are shared with nobody (declare weight_version to share them)", error)
        return private_epoch()


def facts(vllm_config: Any, kv_cache_config: Any, epoch: str, tenant: str) -> dict[str, Any]:
    """All that determines a page's bytes besides tokens and the place in the model. Call once the engine has started."""
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.core import kv_cache_utils

    model, cache = vllm_config.model_config, vllm_config.cache_config
    hf_config = json.loads(model.hf_config.to_json_string(use_diff=False))
    for name in _IRRELEVANT:
        hf_config.pop(name, None)
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    return {
        "weights": epoch,
        "tenant": tenant,
        "model": hf_config,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_tokens": kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
        # The order of bytes inside a head block is the attention backend's own, so another release may change it.
        "engine": ["vllm", vllm.__version__],
        "layout": [current_platform.device_type, str(kv_cache_config.kv_cache_layout), str(backend)],
        "hash": [str(cache.prefix_caching_hash_algo), kv_cache_utils.NONE_HASH.hex()],
        **precision(environment()),
    }


def keyspaces(vllm_config: Any, kv_cache_config: Any, epoch: str, tenant: str) -> tuple[str, list[bytes]]:
    """The namespace, and the keyspace of every rank (pipeline stage by stage)."""
    from vllm.distributed.utils import get_pp_indices

    namespace = namespace_digest(facts(vllm_config, kv_cache_config, epoch, tenant))
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    parallel = vllm_config.parallel_config
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    group = {
        "kind": type(spec).__name__,
        "kv_heads": spec.num_kv_heads,
        "head_size": [spec.head_size, spec.head_size_v],
        "dtype": str(spec.dtype),
        "block_tokens": spec.block_size,
    }
    spaces = [
        keyspace(namespace, group, get_pp_indices(layers, stage, parallel.pipeline_parallel_size),
                 parallel.tensor_parallel_size, rank)
        for stage in range(parallel.pipeline_parallel_size)
        for rank in range(parallel.tensor_parallel_size)
    ]  # fmt: skip
    return namespace, spaces
