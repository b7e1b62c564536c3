"""`smetric`: first turns go where the load is least, follow-ups back to where their history is cached."""

from dataclasses import dataclass
from typing import ClassVar

from smetric_router.policies.base import least_loaded, next_after
from smetric_router.types import ClusterView, Decision, RequestInfo


@dataclass(frozen=True, slots=True)
class SMetric:
    """Balance the first request of a session; the rest of the session follows the cache.

        s = argmax c
        s if turn > 0
             and (l_s <= overload * mean(l) or l_s - mean(l) < overload_min)
             and c_s > hit_ratio * est_hit
        otherwise the round-robin argmin of l

    Inputs: turn and est_hit of the request; per instance the hit length c and the requests in flight l. Ties of c and
    of l go round. `overload_min` keeps the ratio from firing when few requests run: with loads of 1, 0, 0, 0 a ratio
    alone would break up every session; 0 gives the published rule.

    Reasons: `sticky`, or why not: `first-turn`, `no-hit` (no instance holds any of it), `evicted` (too little of the
    history is left), `overloaded`.

        policy = "smetric"
        [policies.smetric]
        overload = 2.0
        hit_ratio = 0.5
        overload_min = 4
    """

    name: ClassVar[str] = "smetric"

    overload: float = 2.0
    hit_ratio: float = 0.5
    overload_min: float = 4.0

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Stick to the instance with the longest hit, or balance."""
        if not request.turn:
            return least_loaded(view, "first-turn")
        if not view.hits:
            return least_loaded(view, "no-hit")
        longest = max(view.hits.values())
        holders = [instance for instance in view.instances if view.hits.get(instance.id) == longest]
        stick = next_after(view.cursor, holders)
        if longest <= self.hit_ratio * request.est_hit:
            return least_loaded(view, "evicted")
        mean = sum(instance.load for instance in view.instances) / len(view.instances)
        if stick.load > self.overload * mean and stick.load - mean >= self.overload_min:
            return least_loaded(view, "overloaded")
        return Decision(stick.id, "sticky", {stick.id: longest}, view.cursor, longest)
