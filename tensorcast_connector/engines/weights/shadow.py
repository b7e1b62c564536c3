"""The copies of a plan once more, to other memory, without holding on to the memory that they were made to first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tensorcast_connector.config import SHADOW_RUNS_MAX, SNAPSHOT_GAP_BYTES
from tensorcast_connector.engines.weights.load_plan import Copy


@dataclass(frozen=True, slots=True)
class Shadow:
    """A copy to a part of a tensor, wherever that tensor will be.

    Attributes:
        slot: the tensor's name.
        start: of the part in it, in bytes.
    """

    slot: str
    start: int
    dtype: torch.dtype
    stride: tuple[int, ...]
    _copy: Copy  # its target is empty

    @classmethod
    def of(cls, copy: Copy, slot: str, whole: torch.Tensor) -> "Shadow":
        """Of a copy to a view of `whole`."""
        target = copy.target
        start = target.storage_offset() * target.itemsize - whole.storage_offset() * whole.itemsize
        return cls(slot, start, target.dtype, target.stride(), replace(copy, target=torch.empty(0)))

    def on(self, memory: torch.Tensor) -> Copy:
        """The copy, to the same part of `memory`: the bytes of such a tensor."""
        start = self.start // self.dtype.itemsize
        return replace(
            self._copy, target=memory.view(self.dtype).as_strided(self._copy.shape, self.stride, start)
        )  # fmt: skip

    @property
    def bytes(self) -> int:
        """How many it covers."""
        return math.prod(self._copy.shape) * int(self.dtype.itemsize)

    def runs(self) -> tuple[np.ndarray, int] | None:
        """Where in the tensor each run of bytes begins, and how long all of them are; None if they are very many."""
        length: int = self.dtype.itemsize
        steps: list[tuple[int, int]] = []
        for step, count in sorted(
            (s * self.dtype.itemsize, c) for c, s in zip(self._copy.shape, self.stride, strict=True)
        ):
            if count == 1:
                continue
            if step == length and not steps:
                length *= count
            else:
                steps.append((step, count))
        if math.prod(count for _, count in steps) > SHADOW_RUNS_MAX:
            return None
        starts = np.array([self.start], np.int64)
        for step, count in steps:
            starts = (starts[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
        return starts, length


def uncovered(size: int, shadows: Sequence[Shadow]) -> list[tuple[int, int]]:
    """First and last byte (exclusive) of all ranges of a tensor of `size` bytes that no copy goes to.

    What lies between ranges that are close to each other is in them, and so is what is covered in very small pieces.
    """
    if sum(each.bytes for each in shadows) == size:  # they do not overlap
        return []
    found = [each for each in (shadow.runs() for shadow in shadows) if each is not None]
    starts = np.concatenate([np.empty(0, np.int64), *(starts for starts, _ in found)])
    ends = np.concatenate([np.empty(0, np.int64), *(starts + length for starts, length in found)])
    order = np.argsort(starts)
    firsts = np.concatenate([[0], np.maximum.accumulate(ends[order])])
    lasts = np.concatenate([starts[order], [size]])
    there = lasts > firsts
    firsts, lasts = firsts[there], lasts[there]
    if not firsts.size:
        return []
    apart = np.flatnonzero(firsts[1:] - lasts[:-1] >= SNAPSHOT_GAP_BYTES)
    return [
        (int(firsts[begin]), int(lasts[end]))
        for begin, end in zip([0, *(apart + 1)], [*apart, firsts.size - 1], strict=True)
    ]
