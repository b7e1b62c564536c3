"""`round-robin`: each instance in its turn."""

from dataclasses import dataclass
from typing import ClassVar

from smetric_router.policies.base import next_in_turn
from smetric_router.types import ClusterView, Decision, RequestInfo


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """argmin of the placements so far, ties in the instances' order: each in its turn, whatever its load.

    Inputs: the counter of placements alone.

        policy = "round-robin"
    """

    name: ClassVar[str] = "round-robin"

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Choose the next instance in order."""
        del request
        chosen = next_in_turn(view, view.instances)
        return Decision(chosen.id, "round-robin", {}, True, view.hits.get(chosen.id, 0))
