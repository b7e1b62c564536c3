"""`bailian`: hit ratio and load in one weighted sum."""

from dataclasses import dataclass
from typing import ClassVar

from smetric_router.policies.base import least_loaded, lowest
from smetric_router.types import Decision, RequestInfo
from smetric_router.view import ClusterView


@dataclass(frozen=True, slots=True)
class Bailian:
    """argmin (1 - hit_weight) * l / max(l) + hit_weight * (1 - c / L), ties round-robin (SMetric, "Existing schedulers").

    `hit_weight` is the paper's lambda: 0 is balance alone, 1 is the hit alone. Doubling every load, or the prompt with
    all hits, changes nothing.

    Inputs: per instance the hit length c and the requests in flight l (its batch); L. A request without a prompt goes to the
    least loaded.

    Reasons: `bailian`, `no-prompt`.

        policy = "bailian"
        [policies.bailian]
        hit_weight = 0.7
    """

    name: ClassVar[str] = "bailian"

    hit_weight: float = 0.7

    def __post_init__(self) -> None:
        if not 0 <= self.hit_weight <= 1:
            raise ValueError(f"hit_weight = {self.hit_weight!r} is not between 0 and 1")

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Choose the least weighted sum."""
        length = request.length
        if not length:
            return least_loaded(view, "no-prompt")
        most = view.load.max() or 1.0
        missed = 1 - view.hit / length
        return lowest(view, (1 - self.hit_weight) * (view.load / most) + self.hit_weight * missed, "bailian")
