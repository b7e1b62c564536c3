"""`power-of-two`: the less loaded of two instances at random."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from smetric_router.policies.base import LoadUnit, next_in_turn, place_at
from smetric_router.types import Decision, RequestInfo
from smetric_router.view import ClusterView


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """argmin l over two different instances drawn at random; equal ones go round.

    Inputs: the view's draw; l = requests in flight, or with load = "tokens" prompt tokens that are not computed yet.

    Reason: `power-of-two`.

        policy = "power-of-two"
        [policies.power-of-two]
        load = "requests"
    """

    name: ClassVar[str] = "power-of-two"

    load: LoadUnit = "requests"

    def decide(self, request: RequestInfo, view: ClusterView) -> Decision:
        """Choose the less loaded of the two that were drawn."""
        del request
        count = len(view.names)
        if count == 1:
            return place_at(view, 0, "power-of-two")
        rest, first = divmod(view.draw, count)
        second = rest % (count - 1)
        second += second >= first
        pair = np.array(sorted((first, second)), dtype=np.intp)
        loads = (view.pending if self.load == "tokens" else view.load)[pair]
        scores = {view.names[at]: load for at, load in zip(pair.tolist(), loads.tolist(), strict=True)}
        return place_at(view, next_in_turn(view, pair[loads == loads.min()]), "power-of-two", scores)
