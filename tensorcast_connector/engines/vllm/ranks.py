"""The ranks of one engine (tensor and pipeline parallel), as far as they have to agree on something."""

from typing import TypeVar

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

T = TypeVar("T")


class Ranks:
    """Made in a rank's process once vLLM has set the groups up. Every rank makes the same calls in the same order."""

    def __init__(self) -> None:
        self._groups = [each for each in (get_tp_group(), get_pp_group()) if each.world_size > 1]
        pp, tp = get_pp_group(), get_tp_group()
        self.count = int(pp.world_size) * int(tp.world_size)
        self.rank = int(pp.rank_in_group) * int(tp.world_size) + int(tp.rank_in_group)

    def __repr__(self) -> str:
        return f"<Ranks {self.rank} of {self.count}>"

    @property
    def is_last(self) -> bool:
        """Whether this is the last one."""
        return self.rank == self.count - 1

    def share(self, value: T) -> list[T]:
        """The values of all ranks, in their order; waits for all of them."""
        values = [value]
        for group in self._groups:
            gathered: list[list[T]] = [[] for _ in range(group.world_size)]
            torch.distributed.all_gather_object(gathered, values, group=group.cpu_group)
            values = [each for part in gathered for each in part]
        return values
