"""A program: SGLang's real loaders and weight updater in one process; says what the parameters are after each step.

    python -m tests.engines.sglang.loading --model DIR [--worker unix:/path/worker.sock] STEP...

A step is one of
- a load format (`auto`, `tensorcast`): a new model;
- `wait`: for what is published behind a load;
- `update=FORMAT[,DIR]`: SGLang's own update of the last model, from the folder DIR;
- `flush`: what a server's hierarchical cache says when it was emptied;
- `computing`, `failing`: from now on the last model computes on tensors while it loads them; and fails half way.

Each prints a line of JSON: the step, `ok`, `message`, a digest of all parameters and buffers, which loader it was, our log lines,
and to which weights pages that are shared belong. One run per process: SGLang's configuration is global.
"""

# ruff: noqa: E402 - SGLang reads the environment and its plugins before the rest is imported
import argparse
import hashlib
import json
import logging
import os
import sys
import tempfile
import threading
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import sglang.srt.managers.scheduler  # noqa: F401 - a process that computes has it when its plugins are loaded
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.loader import get_model_loader
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

from tensorcast_connector.engines.sglang.live_weights import live


class Lines(logging.Handler):
    """Our log lines since they were last taken."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


def digest(model: torch.nn.Module) -> str:
    """Of all names and values."""
    made = hashlib.sha256()
    for name, each in sorted([*model.named_parameters(remove_duplicate=False), *model.named_buffers()]):
        made.update(name.encode() + each.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


class Engine:
    """One SGLang rank without a scheduler.

    Args:
        rank, size: of tensor parallelism; the ranks meet at the file `meet`.
    """

    def __init__(self, model: str, extra: str, rank: int, size: int, meet: str) -> None:
        args = ServerArgs(
            model_path=model, device="cpu", attention_backend="torch_native", load_format="tensorcast",
            model_loader_extra_config=extra, tp_size=size,
        )  # fmt: skip
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0, dp_rank=None))
        init_distributed_environment(
            world_size=size, rank=rank, local_rank=rank, backend="gloo",
            distributed_init_method=f"file://{meet or tempfile.mkdtemp() + '/meet'}",
        )  # fmt: skip
        initialize_model_parallel()
        self.config = ModelConfig.from_server_args(args)
        initialize_dp_attention(args)
        self.model: Any = None
        self.loader: Any = None
        self.extra = extra

    def load(self, load_format: str) -> tuple[bool, str]:
        """A new model."""
        extra = self.extra if load_format == "tensorcast" else "{}"
        self.loader = get_model_loader(
            LoadConfig(load_format=load_format, model_loader_extra_config=extra), self.config
        )
        self.model = self.loader.load_model(model_config=self.config, device_config=DeviceConfig("cpu"))
        return True, ""

    def update(self, load_format: str, folder: str) -> tuple[bool, str]:
        """SGLang's own update of that model."""
        updater = WeightUpdater(
            tp_rank=0, device="cpu", gpu_id=0, model_config=self.config, custom_weight_loaders={},
            get_model=lambda: self.model, update_model_fields=lambda *_, **__: None,
            recapture_cuda_graph=lambda: None, get_model_runner=lambda: None,
        )  # fmt: skip
        answer: tuple[bool, str] = updater.update_weights_from_disk(folder, load_format)
        return answer


def computing(load_weights: Any, model: Any, fails: bool) -> Any:
    """A `load_weights` that needs values."""

    def load(weights: Any) -> Any:
        given = [(name, each * 1) for name, each in weights]
        if fails:
            load_weights(model, given[: len(given) // 2])
            raise RuntimeError("half way")
        return load_weights(model, given)

    return load


def wait() -> tuple[bool, str]:
    """Until nothing is being published."""
    for thread in threading.enumerate():
        if thread.name == "publishing":
            thread.join(60)
    return True, ""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--worker", default="")
    parser.add_argument("--extra", default="{}", help="more options of our loader, as JSON")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--meet", default="", help="a file that all ranks are given")
    parser.add_argument("steps", nargs="+")
    options = parser.parse_args()
    ours, lines = logging.getLogger("tensorcast_connector"), Lines()
    ours.addHandler(lines)
    ours.setLevel(logging.INFO)
    extra = {**({"worker": options.worker} if options.worker else {}), **json.loads(options.extra)}
    engine = Engine(options.model, json.dumps(extra), options.rank, options.size, options.meet)
    live.found("files")
    for step in options.steps:
        kind, _, rest = step.partition("=")
        if kind == "wait":
            ok, message = wait()
        elif kind == "flush":
            live.flushed()
            ok, message = True, ""
        elif kind in ("computing", "failing"):
            engine.model.load_weights = computing(type(engine.model).load_weights, engine.model, kind == "failing")
            ok, message = True, ""
        elif kind == "update":
            load_format, _, folder = rest.partition(",")
            ok, message = engine.update(load_format, folder or options.model)
        else:
            ok, message = engine.load(step)
        loader = type(engine.loader).__name__ if engine.loader is not None else ""
        said = {
            "step": step, "ok": ok, "message": message, "digest": digest(engine.model), "loader": loader,
            "lines": lines.take(), "live": live.identity,
        }  # fmt: skip
        print(json.dumps(said), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the engine's threads have no end


if __name__ == "__main__":
    main()
