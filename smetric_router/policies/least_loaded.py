"""`least-loaded`: join the shortest queue."""

from dataclasses import dataclass
from typing import ClassVar

from smetric_router.policies.base import least_loaded
from smetric_router.types import ClusterView, Decision, RequestInfo


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """argmin l, ties round-robin.

    Inputs: l = requests in flight per instance.

        policy = "least-loaded"
    """

    name: ClassVar[str] = "least-loaded"

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Choose the instance with the fewest requests in flight."""
        del request
        return least_loaded(view, "least-loaded")
