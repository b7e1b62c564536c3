"""How long something took, counted in classes: plain numbers, read when somebody asks."""

from bisect import bisect_left
from collections.abc import Sequence

from tensorcast_connector.config import LATENCY_BUCKETS_S


class Histogram:
    """Counts of values by the least bound that is not below them.

    Args:
        bounds: upper bounds of the classes, ascending; what is above the last is counted too.
    """

    def __init__(self, bounds: Sequence[float] = LATENCY_BUCKETS_S) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def __repr__(self) -> str:
        return f"<Histogram of {sum(self._counts)} values>"

    def observe(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus wants it: each bound as text, "+Inf" at the end, and how many values were at most that."""
        result, total = [], 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            result.append((bound, float(total)))
        return result
