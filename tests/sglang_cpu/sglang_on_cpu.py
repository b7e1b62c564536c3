"""Lets SGLang's hierarchical cache run where "device" is the CPU: an entry point of `sglang.srt.plugins`.

Two things of it are CUDA's: host memory is pinned, and three kernels copy pages between the device pool and the host pool.
Here the first is left out and the second are index copies. Layouts of the host pool are SGLang's: `layer_first` has
tokens in a row per layer as the device pool does, `page_first_direct` is [page][layer][token of the page].
Needs --hicache-io-backend direct. Where CUDA is available it changes nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch

Layers = Sequence[torch.Tensor]


# The names of the arguments are those that SGLang gives.
def transfer_kv_direct(
    src_layers: Layers, dst_layers: Layers, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """Both sides in rows of tokens, layer by layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Layers,
    dst_ptrs: Layers,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer of host pages to rows of tokens."""
    pages = src_indices.long()[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices.long()] = source[pages, layer_id].flatten(0, 1)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Layers, dst_ptrs: Layers, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """Rows of tokens of all layers to host pages; the sources are the layers of the first target, then of the next."""
    pages = dst_indices.long()[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for index, source in enumerate(src_ptrs):
        rows = source[src_indices.long()]
        dst_ptrs[index // layers][pages, index % layers] = rows.unflatten(0, (len(pages), page_size))


def install() -> None:
    """Called by SGLang in each of its processes."""
    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.pool_host import base, mha, mla

    made = base.HostKVCache.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs | {"pin_memory": False})

    base.HostKVCache.__init__ = make
    for module in (mha, mla):
        for kernel in (
            transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf
        ):  # fmt: skip
            setattr(module, kernel.__name__, kernel)
