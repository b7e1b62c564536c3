"""What a policy is, and the two choices that policies share.

A policy is a frozen value whose fields are its parameters. `decide` is a pure function: it reads no clock, draws no
chance and keeps nothing between calls. Counters and health belong to the state, instrumentation to the dispatcher.
"""

import math
from collections.abc import Iterable
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


def next_in_turn(view: ClusterView, tied: Iterable[InstanceView]) -> InstanceView:
    """The tied instance whose turn it is: the one that was given the fewest placements, in the instances' order.

    With all of them tied this goes round. Where load keeps an instance out of a round, it is made up for later, so
    sessions stay even although the requests in flight only hint at how many sessions an instance has.
    """
    return min(tied, key=lambda instance: (view.placed.get(instance.id, 0), instance.ordinal))


def least_loaded(view: ClusterView, reason: str, tie_spread: float = 0.0) -> Decision:
    """Round-robin argmin of the load. Loads up to `tie_spread` standard deviations above the least count as equal to it.

    A count of n requests in flight varies by about sqrt(n) by chance alone. Nothing is equal to an idle instance.
    """
    least = min(instance.load for instance in view.instances)
    limit = least + tie_spread * math.sqrt(least)
    chosen = next_in_turn(view, (instance for instance in view.instances if instance.load <= limit))
    scores = {instance.id: instance.load for instance in view.instances}
    return Decision(chosen.id, reason, scores, True, view.hits.get(chosen.id, 0))
