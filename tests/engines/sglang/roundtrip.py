"""A program: SGLang's real controller and host pool store pages in the pool and prefetch them again; says what came back.

    python -m tests.engines.sglang.roundtrip --worker unix:/path/worker.sock --layout page_first_direct --pages 1000

No server and no model run, so every layout can be tried, also those that SGLang's copies to a device do not support here.
Prints one line of JSON. One run per process: SGLang's configuration is global.
"""

# ruff: noqa: E402 - SGLang reads the environment and its plugins before the rest is imported
import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import torch
import torch.distributed
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_host_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

PAGE, LAYERS, HEADS, DIM = 16, 4, 4, 64
LATENT, ROPE = 128, 32
TIMEOUT_S = 60.0


def device_pool(kind: str, tokens: int, heads: int) -> Any:
    """The pool that the host pool is made for."""
    if kind == "mla":
        return MLATokenToKVPool(
            tokens, page_size=PAGE, dtype=torch.bfloat16, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE,
            layer_num=LAYERS, device="cpu", enable_memory_saver=False,
        )  # fmt: skip
    return MHATokenToKVPool(tokens, PAGE, torch.bfloat16, heads, DIM, LAYERS, "cpu", False)


class Engine:
    """The storage half of one SGLang rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.tokens = options.pages * PAGE
        extra = {
            "backend_name": "tensorcast", "module_path": "tensorcast_connector.engines.sglang.hicache",
            "class_name": "TensorcastHiCache", "interface_v1": int(options.layout != "layer_first"),
            "worker": options.worker, "weight_version": options.weights, "transfer_deadline_s": 30.0,
        }  # fmt: skip
        if options.tp_lcm_size:
            extra["tp_lcm_size"] = options.tp_lcm_size
        args = ServerArgs(
            model_path=str(options.model), device="cpu", attention_backend="torch_native", page_size=PAGE,
            enable_hierarchical_cache=True, hicache_ratio=2.0, hicache_io_backend=options.io,
            hicache_mem_layout=options.layout, hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(extra), max_total_tokens=self.tokens,
        )  # fmt: skip
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0, dp_rank=None))
        folder = tempfile.mkdtemp()
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        pool = device_pool(options.kind, self.tokens, HEADS // options.tp_size)
        allocator = PagedTokenToKVPoolAllocator(self.tokens, PAGE, torch.bfloat16, "cpu", pool, False)
        self.host = build_kv_host_pool(kv_pool=pool, page_size=PAGE, use_mla=options.kind == "mla")
        made = HiCacheController._generate_storage_config
        if options.tp_size > 1:  # as this rank of several would be told

            def as_rank(*told: Any) -> Any:
                config = made(*told)
                config.tp_rank, config.tp_size = options.tp_rank, options.tp_size
                config.should_split_heads = False
                return config

            HiCacheController._generate_storage_config = as_rank
        self.controller = HiCacheController(
            allocator, self.host, PAGE, torch.distributed.group.WORLD, threading.Event(), write_policy="write_through",
            io_backend=options.io, storage_backend="dynamic", model_name="tiny", storage_backend_extra_config=extra,
            prefetch_threshold=PAGE,
        )  # fmt: skip
        self.storage = self.controller.storage_backend
        deadline = time.monotonic() + TIMEOUT_S
        while not (self.storage._attachment.connected and self.storage._spaces("kv")):
            if time.monotonic() > deadline:
                raise SystemExit("the storage did not become ready")
            time.sleep(0.01)

    def fill(self, tp_rank: int) -> torch.Tensor:
        """Writes known bytes into host memory, the same for each head whichever rank has it; returns the places of tokens."""
        places = self.host.alloc(self.tokens)
        generator = torch.Generator().manual_seed(7)
        buffer = self.host.kv_buffer
        whole = list(buffer.shape)
        if buffer.dim() == 6 and self.host.layout == "page_head":  # [k or v][page][head][token][layer][dim]
            whole[2] = HEADS
            values = torch.randn(whole, generator=generator).to(torch.bfloat16)
            own = buffer.shape[2]
            buffer.copy_(values[:, :, tp_rank * own : (tp_rank + 1) * own])
        else:
            buffer.copy_(torch.randn(whole, generator=generator).to(torch.bfloat16))
        return places

    def store(self, places: torch.Tensor, tokens: list[int]) -> int:
        """Host memory to the pool; returns how many tokens were stored."""
        hashes = get_storage_hash_str(tokens, None, page_size=PAGE)
        self.controller.write_storage(places, tokens, hash_value=hashes)
        return int(self.controller.ack_backup_queue.get(timeout=TIMEOUT_S).completed_tokens)

    def prefetch(self, tokens: list[int]) -> tuple[torch.Tensor, int]:
        """The pool to host memory, as the scheduler does it; the places, and how many tokens came."""
        self.controller.prefetch("request", tokens)
        found = self.controller.prefetch_hit_queue.get(timeout=TIMEOUT_S)
        found.host_indices = self.host.alloc(found.storage_hit_count)
        self.controller.prefetch_buffer.put(found)
        done = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=TIMEOUT_S)
            done = max(done, ack.completed_tokens or 0)
            if ack.completed_req:
                return found.host_indices, done

    def forget(self) -> None:
        """Empties host memory."""
        self.host.kv_buffer.zero_()
        self.host.clear()

    def pages(self, places: torch.Tensor) -> list[torch.Tensor]:
        """The bytes of each page, by SGLang's own function."""
        return [self.host.get_data_page(int(place)).clone() for place in places[::PAGE]]


def beside(engine: Engine, tokens: list[int]) -> dict[str, Any]:
    """A second pool, of which only two pages in the middle are stored: what can be restored, and whether they come back."""
    name, window = PoolName.SWA, 2
    pool = build_kv_host_pool(
        kv_pool=MHATokenToKVPool(engine.tokens, PAGE, torch.bfloat16, 2, DIM, LAYERS, "cpu", False),
        page_size=PAGE, use_mla=False,
    )  # fmt: skip
    engine.storage.register_mem_host_pool_v2(pool, name)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape).to(torch.bfloat16))
    hashes = get_storage_hash_str(tokens, None, page_size=PAGE)
    keys = hashes[2 : 2 + window]
    places = pool.alloc(window * PAGE)
    expected = [pool.get_data_page(int(place)).clone() for place in places[::PAGE]]
    written = engine.storage.batch_set_v2([PoolTransfer(name=name, host_indices=places, keys=keys)])
    pool.kv_buffer.zero_()
    read = engine.storage.batch_get_v2([PoolTransfer(name=name, host_indices=places, keys=keys)])
    found = {
        policy.value: engine.storage.batch_exists_v2(
            hashes[:8], [PoolTransfer(name=name, keys=keys, hit_policy=policy)]
        )
        for policy in PoolHitPolicy
    }
    return {
        "written": written[name],
        "read": read[name],
        "same": sum(map(torch.equal, [pool.get_data_page(int(place)) for place in places[::PAGE]], expected)),
        **{policy: [each.kv_hit_pages, each.restorable_prefix_pages] for policy, each in found.items()},
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--layout", default="page_first_direct")
    parser.add_argument("--io", default="direct")
    parser.add_argument("--kind", default="mha", choices=["mha", "mla"])
    parser.add_argument("--pages", type=int, default=1000)
    parser.add_argument("--weights", default="v1")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--tp-rank", type=int, default=0)
    parser.add_argument("--tp-lcm-size", type=int, default=0)
    parser.add_argument("--only", choices=["read"], help="what another process has stored")
    parser.add_argument("--beside", action="store_true", help="with a second pool")
    options = parser.parse_args()
    engine = Engine(options)
    tokens = list(range(engine.tokens))
    places = engine.fill(options.tp_rank)
    expected = engine.pages(places)
    stored = 0 if options.only else engine.store(places, tokens)
    engine.forget()
    places, prefetched = engine.prefetch(tokens)
    same = sum(map(torch.equal, engine.pages(places), expected))
    second = beside(engine, tokens) if options.beside else None
    engine.storage.clear()
    after_clear = engine.storage.batch_exists(get_storage_hash_str(tokens, None, page_size=PAGE))
    engine.controller.detach_storage_backend()
    torch.distributed.destroy_process_group()
    print(
        json.dumps(
            {"pages": options.pages, "stored": stored // PAGE, "prefetched": prefetched // PAGE, "same": same,
             "after_clear": after_clear, "beside": second}
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
