"""`--load-format tensorcast`: the weights of a model as fast as they can be had, and the engine's own way if anything is unusual.

    vllm serve MODEL --load-format tensorcast [--model-loader-extra-config '{"worker": "unix:/run/tensorcast/worker.sock"}']

See engines/weights/loading.py; here is what is vLLM's about it.
"""

import dataclasses
import logging
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from vllm.config import LoadConfig, get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.base_loader import _has_online_quant
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from tensorcast_connector.engines.options import LoaderConfig
from tensorcast_connector.engines.vllm.logs import log_with_vllm
from tensorcast_connector.engines.weights.load_plan import LoadPlan
from tensorcast_connector.engines.weights.loading import Load, Ordinary
from tensorcast_connector.engines.weights.materialised import KeyDocument, Materialised, NotShared, key_document
from tensorcast_connector.engines.weights_epoch import hub_snapshot
from tensorcast_connector.errors import ConfigError

logger = logging.getLogger(__name__)
_loaded: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()
_QUANTIZATIONS_REFUSED = ("bitsandbytes", "gguf", "torchao")


class TensorcastModelLoader(DefaultModelLoader):
    """See the module. Everything that is not said here is as DefaultModelLoader does it for load_format auto."""

    def __init__(self, load_config: LoadConfig) -> None:
        log_with_vllm()
        self.options = LoaderConfig.from_extra(load_config.model_loader_extra_config)
        super().__init__(dataclasses.replace(load_config, load_format="auto", model_loader_extra_config={}))
        self.processed: threading.Event | None = None  # set when the engine has processed what is being loaded

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> torch.nn.Module:
        """See BaseModelLoader. What is loaded is shared once the engine has packed it, which needs all cores and the memory."""
        self.processed = threading.Event()
        try:
            return super().load_model(vllm_config, model_config, prefix)
        finally:
            self.processed.set()
            self.processed = None

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """See BaseModelLoader. A model that was loaded before, and all that is unusual, is loaded by the engine's own loader."""
        try:
            if model in _loaded:
                raise Ordinary("it was loaded before")
            if why := unusual(model, model_config):
                raise Ordinary(why)
            with ExitStack() as stack:
                Load(_Loaded(self, model, model_config), self.options, model, stack).run()
        except Ordinary as error:
            logger.warning("weights of %s: %s; the engine's own loader reads them", model_config.model, error)
            super().load_weights(model, model_config)
        _loaded.add(model)


class _Loaded:
    """See Engine (loading.py): vLLM, while it loads a model."""

    name = "vllm"

    def __init__(self, loader: TensorcastModelLoader, model: torch.nn.Module, model_config: Any) -> None:
        self._loader = loader
        self._model = model
        self._config = model_config
        self.model = str(model_config.model)
        self.processed = loader.processed
        self.whole = model_config.quantization is None and getattr(model_config, "runner_type", "") != "draft"

    def folder(self) -> Path | None:
        """See Engine."""
        path = Path(self._config.model)
        if path.is_dir():
            return path
        try:
            return hub_snapshot(self._config.model, self._config.revision, self._loader.load_config.download_dir)
        except ConfigError:
            return None

    def files(self) -> tuple[str, Sequence[str], bool]:
        """See Engine."""
        folder, files, safetensors, _ = self._loader._prepare_weights(
            self._config.model, None, self._config.revision, getattr(self._model, "fall_back_to_pt_during_load", True),
            getattr(self._model, "allow_patterns_overrides", None),
        )  # fmt: skip
        return folder, files, safetensors

    def missing(self, plan: LoadPlan) -> list[str]:
        """See Engine."""
        return missing(self._model, plan)

    def loaded(self, names: Any) -> None:
        """See Engine."""
        if self._config.quantization is None and names is not None:
            self._loader.track_weights_loading(self._model, names, quantized=False)

    def document(self, materialised: Materialised, epoch: str) -> KeyDocument:
        """See Engine."""
        import vllm
        from vllm.platforms import current_platform

        vllm_config = get_current_vllm_config()
        parallel = vllm_config.parallel_config
        if getattr(parallel, "enable_eplb", False):
            raise NotShared("experts are moved between ranks while it serves")
        facts = {
            "dtype": str(self._config.dtype),
            "quantization": [str(self._config.quantization), type(vllm_config.quant_config).__name__],
            "layout": _layout(parallel),
            "engine": ["vllm", vllm.__version__, torch.__version__],
            "device": current_platform.device_type,
        }
        return key_document(materialised, self._config.hf_config, epoch, facts, {"model": self.model})


def unusual(model: torch.nn.Module, model_config: Any) -> str:
    """Why a model is left to the engine's own loader; "" if it is not."""
    if model_config.quantization in _QUANTIZATIONS_REFUSED:
        return f"quantization {model_config.quantization} has files of its own kind"
    if _has_online_quant(model):
        return "it is quantised while it is loaded"
    if list(getattr(model, "secondary_weights", ())):
        return "it has weights in a second place"
    multimodal = getattr(model_config, "multimodal_config", None)
    if multimodal is not None and getattr(multimodal, "mm_encoder_only", False):
        return "only its encoder is loaded"
    for name, parameter in model.named_parameters():
        if parameter.is_meta or getattr(parameter, "_vllm_is_uva_offloaded", False):
            return f"parameter {name} is not in memory of its own"
    return ""


def missing(model: torch.nn.Module, plan: LoadPlan) -> list[str]:
    """Weights of linear layers and embeddings that the plan leaves as they were made: without values, in whole or in part."""
    weights: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        plain = isinstance(module, LinearBase) and type(module.quant_method) is UnquantizedLinearMethod
        if plain or (
            isinstance(module, VocabParallelEmbedding) and type(module.quant_method) is UnquantizedEmbeddingMethod
        ):
            weight = getattr(module, "weight", None)
            if isinstance(weight, torch.nn.Parameter) and weight.numel():
                weights[f"{name}.weight"] = weight
    return plan.left(weights)


def _layout(parallel: Any) -> dict[str, Any]:
    """The ranks that this process has, and all sizes."""
    from vllm.distributed import parallel_state

    ranks: dict[str, list[int]] = {}
    # Ranks of data parallelism alone have the same parameters.
    kinds = ("tp", "pp", "etp", "pcp", *(("dp", "ep") if parallel.enable_expert_parallel else ()))
    for kind in kinds:
        group = getattr(parallel_state, f"_{kind.upper()}", None)
        if group is not None and (kind == "tp" or group.world_size > 1):
            ranks[kind] = [group.rank_in_group, group.world_size]
    return {
        "ranks": ranks,
        "sizes": [
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            bool(parallel.enable_expert_parallel),
            str(getattr(parallel, "expert_placement_strategy", "")),
        ],
    }
