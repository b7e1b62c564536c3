"""A real SGLang server on this machine's CPU, in the environment that `scripts/install sglang` makes."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.processes import ROOT, DemoError, Running, Supervisor, answers

PYTHON = ROOT / ".envs" / "sglang" / "bin" / "python"
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 120.0
FLUSH_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class SglangOptions:
    """What the servers differ in; the rest is in `command`.

    `kv_tokens` bounds the device pool: on a CPU, SGLang would take most of the memory for it.
    """

    model: Path
    storage: Mapping[str, Any] | None = (
        None  # --hicache-storage-backend-extra-config of the dynamic backend; None: no storage
    )
    page_tokens: int = 64
    kv_tokens: int = 4096
    host_ratio: float = 2.0
    layout: str = "page_first_direct"
    tensor_parallel: int = 1
    admin_key: str = ""  # with one, the storage can be attached, detached and cleared while the server runs
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int, python: Path = PYTHON) -> list[str]:
        """The command line."""
        line = [str(python), "-m", "sglang.launch_server", "--model-path", str(self.model)]
        line += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--attention-backend", "torch_native"]
        line += ["--max-total-tokens", str(self.kv_tokens), "--mem-fraction-static", "0.1"]
        line += ["--max-running-requests", "4", "--page-size", str(self.page_tokens), "--enable-cache-report"]
        line += ["--enable-hierarchical-cache", "--hicache-ratio", str(self.host_ratio)]
        line += ["--hicache-io-backend", "direct", "--hicache-mem-layout", self.layout]
        line += ["--hicache-write-policy", "write_through", "--hicache-storage-prefetch-policy", "wait_complete"]
        if self.tensor_parallel > 1:
            line += ["--tp-size", str(self.tensor_parallel)]
        if self.admin_key:
            line += ["--admin-api-key", self.admin_key]
        if self.storage is not None:
            line += ["--hicache-storage-backend", "dynamic"]
            line += ["--hicache-storage-backend-extra-config", json.dumps(self.storage)]
        return [*line, *self.args]

    def environment(self) -> dict[str, str]:
        """Variables added to the environment."""
        variables = {
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONDONTWRITEBYTECODE": "",  # else each process compiles thousands of modules
        }
        if self.tensor_parallel > 1:  # else it wants a NUMA node for each rank
            cpus = sorted(os.sched_getaffinity(0))
            ranks = [str(cpus[rank % len(cpus)]) for rank in range(self.tensor_parallel)]
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(ranks)
        return {**variables, **self.env}


@dataclass(frozen=True, slots=True)
class Answer:
    """What was generated, and where the prompt's cached tokens came from (`device`, `host`, `storage`)."""

    tokens: list[int]
    cached: dict[str, int]


@dataclass(frozen=True, slots=True)
class SglangServer:
    """A started server."""

    name: str
    url: str
    running: Running
    admin_key: str = ""

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> float:
        """Wait until it serves; the seconds since its start."""
        return self.running.wait(answers(f"{self.url}/health"), timeout_s)

    def ask(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, str]:
        """Status and text of a request."""
        headers = {"content-type": "application/json"}
        if self.admin_key:
            headers["authorization"] = f"Bearer {self.admin_key}"
        data = None if method == "GET" else json.dumps(body if body is not None else {}).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
                return int(response.status), response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")

    def generate(self, prompt: list[int], tokens: int = 8, **request: Any) -> Answer:
        """Greedy tokens for a prompt of token ids."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            **request,
        }
        status, text = self.ask("/generate", body)
        if status != 200:
            raise DemoError(f"{self.name} answered {status}: {text}")
        answer = json.loads(text)
        details = answer["meta_info"].get("cached_tokens_details") or {}
        cached = {source: int(count) for source, count in details.items() if isinstance(count, int) and count}
        return Answer(answer["output_ids"], cached)

    def flush(self) -> None:
        """Empties what the server has cached on the device and in host memory."""
        status, text = self.ask(f"/flush_cache?timeout={FLUSH_TIMEOUT_S:g}")  # once it is idle
        if status != 200:
            raise DemoError(f"{self.name} did not flush its caches: {text}")


def storage(worker: str, **options: Any) -> dict[str, Any]:
    """The extra configuration that attaches a server to a worker."""
    return {
        "backend_name": "tensorcast",
        "module_path": "tensorcast_connector.engines.sglang.hicache",
        "class_name": "TensorcastHiCache",
        "interface_v1": 1,
        "worker": worker,
        **options,
    }


def start(supervisor: Supervisor, name: str, options: SglangOptions, port: int | None = None) -> SglangServer:
    """Start a server; use `wait` before asking it anything."""
    if not PYTHON.exists():
        raise DemoError(f"{PYTHON} is not there; run scripts/install sglang")
    port = port or supervisor.port()
    running = supervisor.start(name, options.command(port), env=options.environment())
    return SglangServer(name, f"http://127.0.0.1:{port}", running, options.admin_key)
