"""The weights of one rank loaded as an engine's worker process loads them, again and again, without the rest of the engine.

    python -m demo.loading --port PORT --ranks 2 --rank 0

Reads one request a line from its standard input, for example

    {"model": FOLDER, "load_format": "tensorcast", "extra": {"worker": "unix:/run/w.sock"}}

and answers each with one line of JSON: a digest of every parameter and buffer as `load_weights` left it, the seconds of each
phase, how the memory of this process has grown, and what the loader said. A model stays until the next request.
"""

import argparse
import gc
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="demo.loading")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_DIST_IDENT": f"loading-{options.port}",
    }  # fmt: skip
    rank = Rank(options)
    print("{}", flush=True)  # ready
    for line in sys.stdin:
        print(json.dumps(rank.load(**json.loads(line))), flush=True)


class Rank:
    """One of the processes of an engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from vllm.distributed import init_distributed_environment

        torch.set_num_threads(options.threads)
        self._options = options
        self._parallel = False
        self._model: Any = None
        init_distributed_environment(
            options.ranks, options.rank, f"tcp://127.0.0.1:{options.port}", options.rank, "gloo"
        )  # fmt: skip

    def load(
        self, model: str, load_format: str, extra: dict[str, Any] | None = None, again: bool = False,
        process: bool = False, digests: bool = True, read: bool = False, arguments: dict[str, Any] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """A new model is loaded.

        Args:
            again: twice.
            read: every byte of the parameters is looked at before the memory is.
            process: what the engine does with the weights afterwards is done too.
        """
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.distributed import initialize_model_parallel
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
        from vllm.utils.torch_utils import set_default_torch_dtype

        self._model = None
        gc.collect()
        config = EngineArgs(
            model=model, load_format=load_format, model_loader_extra_config=extra or {}, dtype="bfloat16",
            tensor_parallel_size=self._options.ranks, enforce_eager=True, max_model_len=512, **(arguments or {}),
        ).create_engine_config()  # fmt: skip
        said = _Said()
        logging.getLogger("tensorcast_connector").addHandler(said)
        logging.getLogger("tensorcast_connector").setLevel("INFO")
        with set_current_vllm_config(config):
            if not self._parallel:
                initialize_model_parallel(self._options.ranks)
                self._parallel = True
            with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
                made = initialize_model(vllm_config=config)
            loader, seconds, before = get_model_loader(config.load_config), {}, memory()
            with set_default_torch_dtype(config.model_config.dtype):
                begun = time.perf_counter()
                try:
                    loader.load_weights(made, config.model_config)
                except Exception as error:  # what an engine ends with
                    return {"error": f"{type(error).__name__}: {error}", "said": said.lines}
                seconds["load"] = time.perf_counter() - begun
                if read:
                    digests_of(made)
                grown = {key: value - before[key] for key, value in memory().items()}
                if again:
                    loader.load_weights(made, config.model_config)
                found = digests_of(made) if digests else {}
                if process:
                    begun = time.perf_counter()
                    process_weights_after_loading(made, config.model_config, torch.device("cpu"))
                    seconds["process"] = time.perf_counter() - begun
        logging.getLogger("tensorcast_connector").removeHandler(said)
        self._model = made
        return {"digests": found, "seconds": seconds, "memory": grown, "said": said.lines}


class _Said(logging.Handler):
    """Keeps lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def digests_of(model: Any) -> dict[str, list[Any]]:
    """Of every parameter and buffer: dtype, shape, and a digest of its bytes."""
    import blake3
    import torch

    found = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        found[name] = [str(tensor.dtype), list(tensor.shape), blake3.blake3(data.numpy()).hexdigest()]
    return found


def memory() -> dict[str, int]:
    """Bytes of this process that are in memory: of its own, and shared with others."""
    found = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            found[name] = int(value.split()[0]) * 1024
    return {key: found[key] for key in ("Rss", "Pss", "Anonymous", "Private_Dirty")}


if __name__ == "__main__":
    main()
