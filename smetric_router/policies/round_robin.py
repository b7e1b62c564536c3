"""`round-robin`: each instance in its turn."""

from dataclasses import dataclass
from typing import ClassVar

from smetric_router.policies.base import place_at
from smetric_router.types import Decision, RequestInfo
from smetric_router.view import ClusterView


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """argmin of the placements so far, ties in the instances' order: each in its turn, whatever its load.

    Inputs: the counter of placements alone.

    Reason: `round-robin`.

        policy = "round-robin"
    """

    name: ClassVar[str] = "round-robin"

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Choose the next instance in order."""
        del request
        return place_at(view, int(view.placed.argmin()), "round-robin")
