"""`smetric-slo`: a follow-up stays while its instance can answer in time."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from smetric_router.policies.base import (
    Serving,
    follow,
    least_loaded,
    longest_holder,
    lowest,
    new_tokens,
    prompt_tokens,
)
from smetric_router.types import Decision, RequestInfo
from smetric_router.view import ClusterView, Figures


@dataclass(frozen=True, slots=True)
class SMetricSlo:
    """`smetric` with a limit on the time to first token in the place of its overload guard, as its authors' public code.

        own_i    = c_lin * n + c_att * n * (L - n / 2),  n = L - c_i
        queued_i = pending work_i + own_i
        i meets   iff queued_i / rate_i <= slack * (ttft_base_s + ttft_per_token_s * L)
        s = argmax c
        s if turn > 0 and c_s > hit_ratio * est_hit and (s meets or no instance does)
        otherwise the round-robin argmin of queued * l (serving = "colocated") or queued ("disaggregated")

    L and n in tokens; c_lin and c_att are the router's `prefill_cost_linear` and `prefill_cost_attention`, as the state counts
    pending work by them. A prompt's work is pending until its first token, or the end of the request. The rate is
    `prefill_rate` in work per second, or with 0 learnt per instance: the 90th percentile of work / TTFT of its last 64
    streams. Until there are 8 the instance meets.

    Inputs: turn and est_hit of the request; per instance the hit length c, the requests in flight l, pending work, rate.
    Of several longest hits the least loaded one is s. A request without a prompt goes to the least loaded.

    Reasons: `home-meets` and `none-meets-stick` for s; why not: `first-turn`, `no-hit`, `evicted`, `home-rejected`; `no-prompt`.

        policy = "smetric-slo"
        [policies.smetric-slo]
        hit_ratio = 0.5
        slack = 1.0
        ttft_base_s = 1.0
        ttft_per_token_s = 0.0000625
        prefill_rate = 0.0
        serving = "colocated"
    """

    name: ClassVar[str] = "smetric-slo"

    hit_ratio: float = 0.5
    slack: float = 1.0
    ttft_base_s: float = 1.0
    ttft_per_token_s: float = 0.0000625
    prefill_rate: float = 0.0
    serving: Serving = "colocated"

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Stick to the instance with the longest hit while it is quick enough, or balance."""
        if not request.length:
            return least_loaded(view, "no-prompt")
        length = prompt_tokens(request, view)
        queued: Figures = view.work + view.cost.work(length, new_tokens(request, view))
        if not request.turn:
            return self._balance(view, queued, "first-turn")
        longest = view.longest_hit
        if not longest:
            return self._balance(view, queued, "no-hit")
        if longest <= self.hit_ratio * request.est_hit:
            return self._balance(view, queued, "evicted")
        at = longest_holder(view, view.load)
        limit_s = self.slack * (self.ttft_base_s + self.ttft_per_token_s * length)
        # An unknown rate is infinite.
        takes_s = queued / (self.prefill_rate or view.rate)
        if takes_s[at] <= limit_s:
            return follow(view, at, "home-meets")
        if not np.any(takes_s <= limit_s):
            return follow(view, at, "none-meets-stick")
        return self._balance(view, queued, "home-rejected")

    def _balance(self, view: ClusterView, queued: Figures, reason: str) -> Decision:
        return lowest(view, queued * view.load if self.serving == "colocated" else queued, reason)
