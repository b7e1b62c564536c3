"""The device seam: copies between an engine's paged KV cache and head-major pages in the arena.

A page holds one block of tokens of one KV group for one rank:

    [kv_head][layer][head block: the bytes of one head, one block, one layer, as the attention backend stores them]

so a tensor-parallel rank's heads are one contiguous range of a page of the whole model (ARCHITECTURE.md, "Data structures").
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tensorcast_connector.errors import ConfigError

Bytes = npt.NDArray[np.uint8]


class PageCopier(Protocol):
    """Copies whole pages. Calls may come from several threads, for different blocks."""

    page_bytes: int

    def save(self, block_id: int, page: memoryview) -> None:
        """KV cache -> page; the block's KV must be complete."""

    def load(self, block_id: int, page: memoryview) -> None:
        """Page -> KV cache; nobody reads the block meanwhile."""


class CpuPageCopier:
    """Page copies by numpy, which copies long runs at memory speed, on the calling thread only, without the GIL.

    Args:
        layers: one tensor per layer in layer order, logically [blocks, heads, tokens, width]; tokens and width of one
            head and block must be contiguous.

    Raises:
        ConfigError: a layout that is not like this.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = [_head_blocks(tensor) for tensor in layers]
        blocks, heads, run = self._layers[0].shape
        if any(layer.shape != (blocks, heads, run) for layer in self._layers):
            raise ConfigError(
                f"layers of different shapes share one KV group: {sorted({x.shape for x in self._layers})}"
            )
        self._shape = (heads, len(self._layers), run)
        self.page_bytes = heads * len(self._layers) * run
        self._all = _one_view(self._layers)

    def __repr__(self) -> str:
        heads, layers, run = self._shape
        way = "one copy a page" if self._all is not None else "one copy a layer"
        return f"<CpuPageCopier {heads} heads x {layers} layers x {run} bytes, {way}>"

    def save(self, block_id: int, page: memoryview) -> None:
        """See PageCopier."""
        target = np.frombuffer(page, np.uint8).reshape(self._shape)
        if self._all is not None:
            np.copyto(target, self._all[:, block_id].transpose(1, 0, 2))
            return
        for index, layer in enumerate(self._layers):
            target[:, index] = layer[block_id]

    def load(self, block_id: int, page: memoryview) -> None:
        """See PageCopier."""
        source = np.frombuffer(page, np.uint8).reshape(self._shape)
        if self._all is not None:
            np.copyto(self._all[:, block_id], source.transpose(1, 0, 2))
            return
        for index, layer in enumerate(self._layers):
            layer[block_id] = source[:, index]


def _head_blocks(tensor: Any) -> Bytes:
    """[blocks, heads, bytes of a head block], a view of the tensor's own memory."""
    import torch

    if tensor.dim() != 4:
        raise ConfigError(f"KV cache of shape {tuple(tensor.shape)}; expected [blocks, heads, tokens, width]")
    blocks, heads, tokens, width = tensor.shape
    if tensor.stride(3) != 1 or tensor.stride(2) != width:
        raise ConfigError(f"KV cache with strides {tensor.stride()}: the tokens of a head are not contiguous")
    raw = tensor.view(torch.uint8).numpy()
    run = tokens * width * tensor.element_size()
    return np.lib.stride_tricks.as_strided(raw, (blocks, heads, run), (raw.strides[0], raw.strides[1], 1))


def _one_view(layers: Sequence[Bytes]) -> Bytes | None:
    """[layers, blocks, heads, bytes] over all layers if they lie at equal distances with equal strides, else None."""
    starts = [layer.__array_interface__["data"][0] for layer in layers]
    steps = {after - before for before, after in pairwise(starts)}
    if len(steps) > 1 or len({layer.strides for layer in layers}) > 1 or any(step <= 0 for step in steps):
        return None
    step = steps.pop() if steps else 0
    first = layers[0]
    return np.lib.stride_tricks.as_strided(first, (len(layers), *first.shape), (step, *first.strides))


def copier_for(layers: Sequence[Any]) -> PageCopier:
    """The copier for the device that the tensors are on.

    Raises:
        ConfigError: a device that is not supported yet.
    """
    kinds = {str(tensor.device.type) for tensor in layers}
    if kinds == {"cpu"}:
        return CpuPageCopier(layers)
    raise ConfigError(f"KV cache on {', '.join(sorted(kinds))}: only the CPU backend is supported by this version")
