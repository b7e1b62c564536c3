"""`random`: any instance."""

from dataclasses import dataclass
from typing import ClassVar

from smetric_router.policies.base import place_at
from smetric_router.types import Decision, RequestInfo
from smetric_router.view import ClusterView


@dataclass(frozen=True, slots=True)
class Random:
    """draw mod n: any of the n instances with the same chance.

    Inputs: the view's draw, so that the same arguments give the same decision.

    Reason: `random`.

        policy = "random"
    """

    name: ClassVar[str] = "random"

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Choose the instance that was drawn."""
        del request
        return place_at(view, view.draw % len(view.names), "random")
