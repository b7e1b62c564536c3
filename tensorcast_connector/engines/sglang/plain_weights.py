"""Which weights of a model of SGLang's must be in its checkpoint as they are."""

from collections.abc import Iterator

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding


def plain_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of linear layers and embeddings that are computed with as they are in the checkpoint."""
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None))
        plain = isinstance(module, LinearBase) and method is UnquantizedLinearMethod
        if plain or (isinstance(module, VocabParallelEmbedding) and method is UnquantizedEmbeddingMethod):
            weight = getattr(module, "weight", None)
            if isinstance(weight, torch.nn.Parameter) and weight.numel():
                yield f"{name}.weight", weight
