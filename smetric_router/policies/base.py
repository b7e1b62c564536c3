"""What a policy is, and the choices that policies share.

A policy is a frozen value whose fields are its parameters. `decide` is a pure function: it reads no clock, draws no
chance and keeps nothing between calls. Counters, chance and health belong to the state, instrumentation to the dispatcher.

In the formulas, per instance: c = hit length in its local tier, l = load. Of the request: L = length of its prompt.
"""

import math
from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from smetric_router.types import Decision, RequestInfo
from smetric_router.view import ClusterView, Figures, Scores

Positions: TypeAlias = NDArray[np.intp]

LoadUnit: TypeAlias = Literal["requests", "tokens"]
"""What l counts: requests in flight, or prompt tokens that are not computed yet (for engines that only prefill)."""
Serving: TypeAlias = Literal["colocated", "disaggregated"]
"""Whether the engines compute prompts and answers both, or prompts only."""


class Policy(Protocol):
    """Chooses one of the view's instances. The view holds at least one."""

    @property
    def name(self) -> str:
        """The name it is selected by."""
        ...

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Place the request. The same arguments always give the same decision."""
        ...


def next_in_turn(view: ClusterView, tied: Positions) -> int:
    """The tied instance whose turn it is: the one that was given the fewest placements, in the instances' order.

    With all of them tied this goes round. Where load keeps an instance out of a round, it is made up for later, so
    sessions stay even although the requests in flight only hint at how many sessions an instance has.

    Args:
        tied: positions in the view, ascending, at least one.
    """
    return int(tied[view.placed[tied].argmin()])


def lowest(view: ClusterView, scores: Figures, reason: str, tie_spread: float = 0.0) -> Decision:
    """Round-robin argmin of the scores, as a new placement.

    Scores up to `tie_spread` standard deviations above the least count as equal to it: a count of n requests in flight
    varies by about sqrt(n) by chance alone. Nothing is equal to an idle instance.
    """
    # Of a few numbers argmin takes a third of the time of min.
    least = float(scores[scores.argmin()])
    limit = least + tie_spread * math.sqrt(least) if tie_spread else least
    at = next_in_turn(view, (scores <= limit).nonzero()[0])
    return place_at(view, at, reason, Scores(view.members, scores))


def place_at(
    view: ClusterView, at: int, reason: str, scores: Mapping[str, float] | None = None, *, placement: bool = True
) -> Decision:
    """The decision for the instance at this position; without scores nothing was compared."""
    name = view.names[at]
    return Decision(name, reason, scores or {}, placement, int(view.hit[at]))


def least_loaded(view: ClusterView, reason: str, tie_spread: float = 0.0, unit: LoadUnit = "requests") -> Decision:
    """Round-robin argmin of the load. Chance varies a count of requests, not one of tokens, so only that has a spread."""
    if unit == "tokens":
        return lowest(view, view.pending, reason)
    return lowest(view, view.load, reason, tie_spread)


def longest_holder(view: ClusterView, load: Figures) -> int:
    """argmax c; of several longest hits the least loaded, then the next in turn."""
    holders = (view.hit == view.longest_hit).nonzero()[0]
    if len(holders) == 1:
        return int(holders[0])
    loads = load[holders]
    return next_in_turn(view, holders[loads == loads.min()])


def follow(view: ClusterView, at: int, reason: str) -> Decision:
    """The decision that goes back to where the prefix is cached: no new placement."""
    name = view.names[at]
    hit = int(view.hit[at])
    return Decision(name, reason, {name: hit}, False, hit)


def prompt_tokens(request: RequestInfo, view: ClusterView) -> float:
    """L in tokens."""
    return request.length / view.bytes_per_token


def new_tokens(request: RequestInfo, view: ClusterView) -> Figures:
    """L - c in tokens, per instance."""
    missing: Figures = np.maximum(request.length - view.hit, 0)
    return missing / view.bytes_per_token
