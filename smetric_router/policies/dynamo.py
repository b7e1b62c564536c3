"""`dynamo`: prefill to do and blocks to keep, in one sum."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from smetric_router.policies.base import Serving, least_loaded, lowest, new_tokens
from smetric_router.types import Decision, RequestInfo
from smetric_router.view import ClusterView


@dataclass(frozen=True, slots=True)
class Dynamo:
    """Dynamo's cost per instance, in blocks; ties round-robin.

        serving = "colocated":      argmin w * n / block + ceil(n / block) + decode blocks
        serving = "disaggregated":  argmin w * p / block + floor(p / block)

    n = L - c, the request's new tokens; p = n and the prompt tokens that are queued there. Decode blocks are those of the
    prompts that this router has in flight there.

    Inputs: per instance the hit length c, prompt tokens in flight, and prompt tokens not computed yet; L. A request
    without a prompt goes to the least loaded.

    Reasons: `dynamo`, `no-prompt`.

        policy = "dynamo"
        [policies.dynamo]
        overlap_weight = 1.0     # w
        block_tokens = 16
        serving = "colocated"
    """

    name: ClassVar[str] = "dynamo"

    overlap_weight: float = 1.0
    block_tokens: int = 16
    serving: Serving = "colocated"

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens = {self.block_tokens!r} is not at least 1")

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Choose the least cost."""
        if not request.length:
            return least_loaded(view, "no-prompt")
        new, block, weight = new_tokens(request, view), self.block_tokens, self.overlap_weight
        if self.serving == "colocated":
            costs = weight * new / block + np.ceil(new / block) + np.ceil(view.context / block)
        else:
            prefill = view.pending + new
            costs = weight * prefill / block + np.floor(prefill / block)
        return lowest(view, costs, "dynamo")
