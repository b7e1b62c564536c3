"""A pool of SGLang's host memory as pages of the tensor pool: where each page lies, and where it is kept."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tensorcast_connector.config import SLAB_BYTES
from tensorcast_connector.engines.sglang.namespace import Pool, Rank, chunks, describe, keyspaces
from tensorcast_connector.engines.sglang.page_copies import Parts, Span

_MAMBA = "mamba"  # its states are of one rank each, also where the KV cache is the same in all ranks


class HostPages:
    """See the module.

    Args:
        name: of the pool.
        pool: SGLang's object.
        rank: which share of the model this process has.
        same_kv: the KV cache is the same in all tensor-parallel ranks (MLA).
        tp_lcm_size: ranks of sizes that divide it share pages, where the layout allows.
        zero_copy: pages are read and written in place; else they come as flat tensors.
    """

    def __init__(
        self, name: str, pool: Any, rank: Rank, same_kv: bool, tp_lcm_size: int | None, zero_copy: bool
    ) -> None:
        self.name = name
        self.pool = pool
        of_one_rank = name == _MAMBA or getattr(pool, "head_num", None) is not None
        self._rank = replace(rank, replicated=same_kv and not of_one_rank)
        self._tp_lcm_size = tp_lcm_size if zero_copy else None
        self.page_tokens = int(getattr(pool, "page_size", 0) or 1)
        facts = describe(pool, "in place" if zero_copy else "flat")
        first = int(getattr(pool, "start_layer", 0) or 0)
        last = int(getattr(pool, "end_layer", 0) or first + int(getattr(pool, "layer_num", 0) or 0))
        self._pool = Pool(name, facts, (first, last))
        self._chunks = chunks(self._pool, self._rank, self._tp_lcm_size)
        self.unusable = self._why_not() if zero_copy else ""
        self._spaces: tuple[str, list[bytes]] = "", []

    def __repr__(self) -> str:
        return self.unusable or f"{self._pool.facts['kind']}, {self._pool.facts['layout']}, {self._rank}"

    def _why_not(self) -> str:
        """Why pages of this pool cannot be taken in place; "" if they can."""
        try:
            parts = self.pages(torch.arange(self.page_tokens), 1)[0][0]
        except Exception as error:
            return f"its pages cannot be named ({type(error).__name__}: {error}); they are not shared"
        size = sum(part.length for part in parts)
        return "" if 0 < size <= SLAB_BYTES else f"a page of {size} bytes is too large to be shared"

    def spaces(self, namespace: str) -> list[bytes]:
        """The keyspaces of this rank's pages, one for each range of heads that they are cut into."""
        known, spaces = self._spaces
        if known != namespace:
            spaces = keyspaces(namespace, self._pool, self._rank, self._tp_lcm_size)
            self._spaces = namespace, spaces
        return spaces

    def pages(self, host_indices: torch.Tensor, count: int) -> list[list[Parts]]:
        """Of each keyspace, where each of `count` pages lies.

        Args:
            host_indices: the places of all their tokens in the pool, page by page.
        """
        if self._chunks > 1:
            addresses, lengths = self.pool.get_split_heads_page_buffer_meta(host_indices, self._chunks)
        else:
            addresses, lengths = self.pool.get_page_buffer_meta(host_indices)
        each = len(addresses) // count
        if each * count != len(addresses) or each % self._chunks:
            raise ValueError(f"{len(addresses)} parts for {count} pages of {self._chunks} ranges of heads")
        spans = list(map(Span, addresses, lengths))
        width = each // self._chunks
        return [
            [spans[page * each + chunk * width : page * each + (chunk + 1) * width] for page in range(count)]
            for chunk in range(self._chunks)
        ]


def pages_of_tensors(tensors: Sequence[torch.Tensor]) -> list[Parts]:
    """Where contiguous tensors lie, one page each."""
    return [[Span(each.data_ptr(), each.nbytes)] for each in tensors]
