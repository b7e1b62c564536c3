"""One storage backend behind SGLang's real controller and host pool: batches of pages written and read, and timed.

    python -m benchmarks.programs.hicache SYSTEM OPTIONS_AS_JSON

Runs in SGLang's environment. SYSTEM is `ours`, `mooncake` or `file`; the calls are those that SGLang's controller makes for
each. {"do": "set", "key": N} writes one batch under keys that follow from N, and {"do": "get", "key": N} reads it; both answer
{"seconds", "bytes"}, and reading also says whether the bytes are "same". {"do": "clear"} empties the storage where it can.
{"do": "copy"} copies a batch to memory of this process that was touched before, by one thread.
"""

# ruff: noqa: E402 - SGLang reads the environment and its plugins before the rest is imported
import ctypes
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from types import SimpleNamespace
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import torch
import torch.distributed
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

PAGE, HEADS, DIM = 64, 8, 128
PAGES = 128
READY_TIMEOUT_S = 60.0


class Batch:
    """One rank of SGLang without a model; `layers` says how large a page is: 256 KiB each."""

    def __init__(self, system: str, options: dict[str, Any]) -> None:
        tokens = PAGES * PAGE
        extra = options["extra"]
        backend = "dynamic" if system == "ours" else system
        args = ServerArgs(
            model_path=options["model"], device="cpu", attention_backend="torch_native", page_size=PAGE,
            enable_hierarchical_cache=True, hicache_ratio=2.0, hicache_io_backend="direct",
            hicache_mem_layout="page_first_direct", hicache_storage_backend=backend,
            hicache_storage_backend_extra_config=json.dumps(extra), max_total_tokens=tokens,
        )  # fmt: skip
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0, dp_rank=None))
        meeting = f"file://{tempfile.mkdtemp()}/meet"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        pool = MHATokenToKVPool(tokens, PAGE, torch.bfloat16, HEADS, DIM, options["layers"], "cpu", False)
        allocator = PagedTokenToKVPoolAllocator(tokens, PAGE, torch.bfloat16, "cpu", pool, False)
        self.host = build_kv_host_pool(kv_pool=pool, page_size=PAGE, use_mla=False)
        self.controller = HiCacheController(
            allocator, self.host, PAGE, torch.distributed.group.WORLD, threading.Event(), write_policy="write_through",
            io_backend="direct", storage_backend=backend, model_name="bench", storage_backend_extra_config=extra,
            prefetch_threshold=PAGE,
        )  # fmt: skip
        self.host.kv_buffer.copy_(torch.randn(self.host.kv_buffer.shape).to(torch.bfloat16))
        self.source, self.target = self.host.alloc(tokens), self.host.alloc(tokens)
        self.bytes = PAGES * PAGE * self.host.size_per_token
        self.copied = torch.ones(self.bytes, dtype=torch.uint8)  # the limit's memory, touched
        if system == "ours":
            storage = self.controller.storage_backend
            deadline = time.monotonic() + READY_TIMEOUT_S
            while not (storage._attachment.connected and storage._spaces("kv")):
                if time.monotonic() > deadline:
                    raise SystemExit("the storage did not become ready")
                time.sleep(0.01)

    def keys(self, number: int) -> list[str]:
        """Page hashes as SGLang's."""
        return [hashlib.sha256(f"{number}/{page}".encode()).hexdigest() for page in range(PAGES)]

    def set(self, number: int) -> dict[str, Any]:
        """One batch from host memory to the storage."""
        began = time.perf_counter()
        done = self.controller.page_set_func(self.keys(number), self.source)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "bytes": self.bytes} if done else {"error": "a batch was not stored"}

    def get(self, number: int) -> dict[str, Any]:
        """One batch from the storage to other host memory."""
        operation = SimpleNamespace(request_id="bench", is_terminated=lambda: False)
        for page in self.target[::PAGE].tolist():
            self.host.set_from_flat_data_page(page, torch.zeros_like(self.host.get_data_page(page)))
        began = time.perf_counter()
        done = self.controller.page_get_func(operation, self.keys(number), self.target)
        seconds = time.perf_counter() - began
        if done != PAGES:
            return {"error": f"{done} of {PAGES} pages came back"}
        same = all(
            torch.equal(self.host.get_data_page(int(source)), self.host.get_data_page(int(target)))
            for source, target in zip(self.source[::PAGE], self.target[::PAGE], strict=True)
        )
        return {"seconds": seconds, "bytes": self.bytes, "same": same}

    def copy(self) -> dict[str, Any]:
        """What only copying costs."""
        addresses, lengths = self.host.get_page_buffer_meta(self.source)
        at = self.copied.data_ptr()
        began = time.perf_counter()
        for address, length in zip(addresses, lengths, strict=True):
            ctypes.memmove(at, address, length)
            at += length
        return {"seconds": time.perf_counter() - began, "bytes": self.bytes}

    def clear(self) -> dict[str, Any]:
        """Empties the storage."""
        self.controller.storage_backend.clear()
        return {}


def main() -> None:
    """See the module."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    batch = Batch(sys.argv[1], json.loads(sys.argv[2]))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        what = told["do"]
        answer = getattr(batch, what)(*([told["key"]] if "key" in told else []))
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # threads of SGLang and of the peers do not end by themselves


if __name__ == "__main__":
    main()
