"""`least-loaded`: join the shortest queue."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from smetric_router.policies.base import LoadUnit, least_loaded, lowest
from smetric_router.types import Decision, RequestInfo
from smetric_router.view import ClusterView


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """argmin l, ties round-robin.

    Inputs: l = requests in flight per instance; with load = "tokens", prompt tokens that are not computed yet.

    variant = "vllm": argmin 4 * waiting + running, as vLLM balances its data-parallel ranks. Waiting is what the engines
    report (`report_interval_s`), running the rest of what is in flight; without reports nothing waits, and it is the same rule.

    Reason: `least-loaded`.

        policy = "least-loaded"
        [policies.least-loaded]
        load = "requests"
        variant = "shortest-queue"
    """

    name: ClassVar[str] = "least-loaded"

    load: LoadUnit = "requests"
    variant: Literal["shortest-queue", "vllm"] = "shortest-queue"

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Choose the instance with the shortest queue."""
        del request
        if self.variant == "vllm":
            # What has ended since the report no longer waits.
            waiting = view.waiting.clip(max=view.load)
            return lowest(view, 4 * waiting + (view.load - waiting), "least-loaded")
        return least_loaded(view, "least-loaded", unit=self.load)
