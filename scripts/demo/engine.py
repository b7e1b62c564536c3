"""A real vLLM on this machine's CPU: started, asked for its metrics, stopped."""

import os
import tempfile
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from demo.processes import ROOT, Running, Supervisor, answers, program

START_TIMEOUT_S = 300.0
# What torch compiles on the way (vLLM's sampler, at the first request that asks for log probabilities) takes a compiler
# half a minute; each engine has its own temporary folder, torch's usual place for it, and would compile it again. Headers
# that are compiled beforehand would lie there too, for any setting.
COMPILED = ROOT / ".cache" / "inductor"
# Labels that say which engine it is; there is one per address.
LABELS_DROPPED = frozenset({"engine", "model_name"})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engines of the demo differ in; the rest is in `command`."""

    model: Path
    served_name: str = "demo"
    kv_transfer: Mapping[str, Any] | None = None
    kv_space_gib: int = 1
    max_model_len: int = 16384
    block_size: int | None = None
    tensor_parallel: int = 1
    # CPUs of the compute threads ("0", "0-1", "0|1" for two ranks), see `cpus_of`; None: every CPU, not bound.
    cpus: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        """The command line."""
        line = [program("vllm"), "serve", str(self.model), "--served-model-name", self.served_name]
        line += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(self.max_model_len)]
        line += ["--dtype", "bfloat16", "--enforce-eager", "--enable-prompt-tokens-details"]
        line += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        if self.tensor_parallel > 1:
            line += ["--tensor-parallel-size", str(self.tensor_parallel)]
        if self.block_size is not None:
            line += ["--block-size", str(self.block_size)]
        if self.kv_transfer is not None:
            line += ["--kv-transfer-config", msgspec.json.encode(self.kv_transfer).decode()]
        return [*line, *self.args]

    def environment(self) -> dict[str, str]:
        """Variables added to the environment: nothing is asked of a hub, and nothing is reported to anyone."""
        variables = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(COMPILED),
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_space_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind" if self.cpus is None else self.cpus,
            # The seed of the block hashes: pages are shared only between engines that agree on it.
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        }
        return {**variables, **self.env}


@dataclass(frozen=True, slots=True)
class Engine:
    """A started engine."""

    name: str
    url: str
    served_name: str
    running: Running

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> float:
        """Wait until it serves; the seconds since its start."""
        return self.running.wait(answers(f"{self.url}/health"), timeout_s)

    def metrics(self) -> dict[str, float]:
        """Its counters and gauges now."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            return parse_metrics(response.read().decode())

    def sources(self) -> "PromptTokens":
        """Where its prompt tokens came from until now."""
        return PromptTokens.from_metrics(self.metrics())


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Prompt tokens by source: computed, found in the engine's own cache, loaded from the pool."""

    computed: int = 0
    local: int = 0
    pool: int = 0

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, float]) -> "PromptTokens":
        """Read them from the engine's metrics."""

        def of(source: str) -> int:
            return int(metrics.get(f"vllm:prompt_tokens_by_source_total{{source={source}}}", 0))

        return cls(of("local_compute"), of("local_cache_hit"), of("external_kv_transfer"))

    @property
    def total(self) -> int:
        """All prompt tokens."""
        return self.computed + self.local + self.pool

    def __add__(self, other: "PromptTokens") -> "PromptTokens":
        return PromptTokens(self.computed + other.computed, self.local + other.local, self.pool + other.pool)

    def __sub__(self, other: "PromptTokens") -> "PromptTokens":
        return PromptTokens(self.computed - other.computed, self.local - other.local, self.pool - other.pool)


def parse_metrics(text: str) -> dict[str, float]:
    """Samples of a Prometheus page by `name{label=value,...}`; the labels sorted, those that name the engine left out."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in LABELS_DROPPED)
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def cpus_of(index: int, engines: int) -> str:
    """The CPUs of one of several engines on this machine: an equal part each, at least one.

    Compute threads that wait for each other spin, so engines that share CPUs slow each other down beyond measure: on two
    cores, two engines with a core each prefilled 4,000 tokens in 5 s side by side, and in 12 to 15 s when not bound.
    """
    available = sorted(os.sched_getaffinity(0))
    share = max(1, len(available) // engines)
    first = index * share % len(available)
    return ",".join(str(cpu) for cpu in available[first : first + share])


def start(supervisor: Supervisor, name: str, options: EngineOptions, port: int | None = None) -> Engine:
    """Start an engine; use `wait` before asking it anything, and start several before waiting for the first.

    Args:
        port: that of an engine that was stopped, to stand in for it; any free one unless given.
    """
    port = port or supervisor.port()
    # vLLM leaves its sockets behind in the temporary folder; this one goes with the run.
    temporary = Path(tempfile.mkdtemp(prefix="vllm-"))
    supervisor.cleanup(temporary)
    environment = {**options.environment(), "TMPDIR": str(temporary)}
    running = supervisor.start(name, options.command(port), env=environment)
    return Engine(name, f"http://127.0.0.1:{port}", options.served_name, running)
