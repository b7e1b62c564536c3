"""What a policy is, and the two choices that policies share.

A policy is a frozen value whose fields are its parameters. `decide` is a pure function: it reads no clock, draws no
chance and keeps nothing between calls. Counters and health belong to the state, instrumentation to the dispatcher.
"""

from collections.abc import Mapping
from typing import Protocol

from smetric_router.types import ClusterView, Decision, InstanceView, RequestInfo


class Policy(Protocol):
    """Chooses one of the view's instances. The view holds at least one."""

    @property
    def name(self) -> str:
        """The name it is selected by."""
        ...

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Place the request. The same arguments always give the same decision."""
        ...


def next_after(cursor: int, tied: list[InstanceView]) -> InstanceView:
    """The first of the tied instances, given in order, whose ordinal lies after the cursor; round to the first one."""
    for instance in tied:
        if instance.ordinal > cursor:
            return instance
    return tied[0]


def least_loaded(view: ClusterView, reason: str) -> Decision:
    """Round-robin argmin of the load: of several least loaded instances, the next one after the last so chosen."""
    scores: Mapping[str, float] = {instance.id: instance.load for instance in view.instances}
    least = min(scores.values())
    chosen = next_after(view.cursor, [instance for instance in view.instances if instance.load == least])
    return Decision(chosen.id, reason, scores, chosen.ordinal, view.hits.get(chosen.id, 0))
