"""Other weights for a running model: layer by layer, as vLLM's own reloading does it, for the layers that change alone.

A layer gets parameters as its checkpoint has them, its tensors are loaded, it is processed as after its first load (repacked,
quantised), and the result is copied into the memory that the engine computes with.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors

logger = logging.getLogger(__name__)


def reload_layers(
    model: Any, model_config: Any, layers: Sequence[int], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Loads tensors into some layers of a model; they must be all tensors of these layers, and have been checked.

    Args:
        layers: by their place in `model.modules()`.
    """
    every, given = list(model.modules()), set(layers)
    # Attention may have made something of its projections' weights.
    changed = [each for number, each in enumerate(every) if number in given or is_deferred_attention_layer(each)]
    with torch.no_grad():
        try:
            for layer in changed:
                _begin(layer)
            with disable_mtp_completeness_check():
                model.load_weights(iter(tensors))
        finally:
            finalize_layerwise_reload(model, model_config)
        _process_tied(every, changed)


def _begin(layer: Any) -> None:
    """What vLLM's `initialize_layerwise_reload` does to each layer of a model."""
    info = get_layerwise_info(layer)
    info.kernel_tensors = get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    restore_layer_on_meta(layer, info)
    initialize_online_processing(layer)


def _process_tied(every: Sequence[Any], changed: Sequence[Any]) -> None:
    """Layers that compute with a parameter of another one's memory have their own packed copy of it, which is made again."""
    memory = {each.data_ptr() for layer in changed for each in get_layer_tensors(layer).values() if each.numel()}
    done = {id(each) for each in changed}
    for layer in every:
        if id(layer) in done or not any(
            each.numel() and each.data_ptr() in memory for each in get_layer_tensors(layer).values()
        ):
            continue
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(layer)
