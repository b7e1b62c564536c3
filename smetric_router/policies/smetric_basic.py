"""`smetric-basic`: the rule of `smetric` without its guards."""

from dataclasses import dataclass
from typing import ClassVar

from smetric_router.policies.base import LoadUnit, follow, least_loaded, longest_holder
from smetric_router.types import Decision, RequestInfo
from smetric_router.view import ClusterView


@dataclass(frozen=True, slots=True)
class SMetricBasic:
    """Follow-ups go to the longest hit, however loaded it is and however little of the history it holds.

        argmax c if turn > 0 and any c > 0
        otherwise the round-robin argmin of l

    Inputs: turn of the request; per instance the hit length c and the load l, as in `smetric`.

    Reasons: `sticky`, `first-turn`, `no-hit`.

        policy = "smetric-basic"
        [policies.smetric-basic]
        tie_spread = 1.0
        load = "requests"
    """

    name: ClassVar[str] = "smetric-basic"

    tie_spread: float = 1.0
    load: LoadUnit = "requests"

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Stick to the instance with the longest hit, or balance."""
        if not request.turn or not view.longest_hit:
            reason = "no-hit" if request.turn else "first-turn"
            return least_loaded(view, reason, self.tie_spread, self.load)
        load = view.pending if self.load == "tokens" else view.load
        return follow(view, longest_holder(view, load), "sticky")
