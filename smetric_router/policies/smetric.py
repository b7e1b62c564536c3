"""`smetric`: first turns go where the load is least, follow-ups back to where their history is cached."""

from dataclasses import dataclass
from typing import ClassVar

from smetric_router.policies.base import LoadUnit, follow, least_loaded, longest_holder
from smetric_router.types import Decision, RequestInfo
from smetric_router.view import ClusterView


@dataclass(frozen=True, slots=True)
class SMetric:
    """Balance the first request of a session; the rest of the session follows the cache.

        s = argmax c
        s if turn > 0
             and (l_s <= overload * mean(l) or l_s - mean(l) < overload_min)
             and c_s > hit_ratio * est_hit
        otherwise the round-robin argmin of l

    Inputs: turn and est_hit of the request; per instance the hit length c and the load l: requests in flight, or with
    load = "tokens", for engines that only prefill, prompt tokens that are not computed yet. Of several longest hits the least
    loaded one is s; what is still tied goes round.

    Two parameters keep small numbers from being taken for load; with 0 each gives the published rule. `overload_min`:
    with loads of 1, 0, 0, 0 the ratio alone would break up every session; its size in tokens is `overload_min_tokens`.
    `tie_spread`: requests in flight only hint at how many sessions an instance has, so loads within that many times
    sqrt(least l) of the least are a tie. It is what keeps the sessions even. Tokens are not counted by chance and have none.

    Reasons: `sticky`, or why not: `first-turn`, `no-hit` (no instance holds any of it), `evicted` (too little of the
    history is left), `overloaded`.

        policy = "smetric"
        [policies.smetric]
        overload = 2.0
        hit_ratio = 0.5
        overload_min = 4
        tie_spread = 1.0
        load = "requests"
        overload_min_tokens = 8192
    """

    name: ClassVar[str] = "smetric"

    overload: float = 2.0
    hit_ratio: float = 0.5
    overload_min: float = 4.0
    tie_spread: float = 1.0
    load: LoadUnit = "requests"
    overload_min_tokens: float = 8192.0

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Stick to the instance with the longest hit, or balance."""
        if not request.turn:
            return self._balance(view, "first-turn")
        longest = view.longest_hit
        if not longest:
            return self._balance(view, "no-hit")
        if longest <= self.hit_ratio * request.est_hit:
            return self._balance(view, "evicted")
        load, least_excess = view.load, self.overload_min
        if self.load == "tokens":
            load, least_excess = view.pending, self.overload_min_tokens
        at = longest_holder(view, load)
        mean = load.sum() / len(load)
        if load[at] > self.overload * mean and load[at] - mean >= least_excess:
            return self._balance(view, "overloaded")
        return follow(view, at, "sticky")

    def _balance(self, view: ClusterView, reason: str) -> Decision:
        return least_loaded(view, reason, self.tie_spread, self.load)
