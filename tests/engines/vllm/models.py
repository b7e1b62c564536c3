"""Real vLLM models in this process, made as a rank makes them, without an engine around them; and what they compute with."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest


class Models:
    """Loads models. One process can have one parallel layout, which is a single rank."""

    def __init__(self, folder: Path) -> None:
        import torch
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        with self.configured(self.config(folder)):
            rendezvous = folder / "rendezvous"
            init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
            initialize_model_parallel(1, 1)
        self._torch = torch

    @staticmethod
    def config(folder: Path) -> Any:
        """An engine's whole configuration for the model in a folder, which may be empty."""
        from vllm.config import VllmConfig
        from vllm.engine.arg_utils import EngineArgs

        if not (folder / "config.json").exists():
            return VllmConfig()
        arguments = EngineArgs(model=str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=512)
        return arguments.create_engine_config()

    @staticmethod
    def configured(config: Any) -> Any:
        """vLLM's code asks for the configuration as a global."""
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(config)

    def load(self, folder: Path) -> tuple[Any, Any]:
        """The model, and its configuration."""
        from vllm.model_executor.model_loader import get_model

        config = self.config(folder)
        with self.configured(config):
            return get_model(vllm_config=config), config

    def computes(self, model: Any) -> dict[str, Any]:
        """What the model computes with, by layer: the layer's answer to a fixed input where its weights are packed, else them."""
        torch, answers = self._torch, dict[str, Any]()
        chance = torch.Generator().manual_seed(0)
        for name, layer in model.named_modules():
            gemm = getattr(layer, "cpu_linear", None)
            if gemm is not None:
                width = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
                given = torch.randn(3, width, generator=chance).bfloat16()
                answers[f"{name} (packed)"] = gemm(given, layer.weight, None)
            for kind, tensor in [*layer._parameters.items(), *layer._buffers.items()]:
                if tensor is not None:
                    answers[f"{name}.{kind}"] = tensor.detach().clone()
        return answers

    def differ(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
        """Where two models compute with something else."""
        assert one.keys() == other.keys()
        return [name for name in one if not self._torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """See Models."""
    import torch
    from vllm.distributed import cleanup_dist_env_and_memory

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        # As vLLM's CPU runner does it: there is no accelerator whose cache could be emptied.
        for name in ("empty_cache", "synchronize"):
            patch.setattr(torch.accelerator, name, lambda *_: None)
        stack.callback(cleanup_dist_env_and_memory)
        yield Models(tmp_path_factory.mktemp("models"))
