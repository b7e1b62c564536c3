"""`round-robin`: each instance in its turn."""

from dataclasses import dataclass
from typing import ClassVar

from smetric_router.policies.base import next_after
from smetric_router.types import ClusterView, Decision, RequestInfo


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """The next instance after the last one chosen, whatever its load.

    Inputs: the cursor alone.

        policy = "round-robin"
    """

    name: ClassVar[str] = "round-robin"

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Choose the next instance in order."""
        del request
        chosen = next_after(view.cursor, list(view.instances))
        return Decision(chosen.id, "round-robin", {}, chosen.ordinal, view.hits.get(chosen.id, 0))
