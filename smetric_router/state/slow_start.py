"""Slow start: an instance that has just come gets a growing share of the placements, so that it is not swamped while cold.

Its share of the placements made since it came may be at most `ramp` times an even one, where ramp grows from RAMP_MIN to 1
over `slow_start_s`. Follow-ups whose history it holds are no placements and go there at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from smetric_router.view import Figures

RAMP_MIN = 0.1


@dataclass(slots=True)
class _Newcomer:
    since_s: float
    before: int
    """Placements that all instances together had been given when it came."""
    placed: int = 0
    """Placements it was given since."""


class SlowStart:
    """Who is new, by ordinal. It is false, and so without cost, once nobody is."""

    def __init__(self, slow_start_s: float) -> None:
        self._slow_start_s = slow_start_s
        self._newcomers: dict[int, _Newcomer] = {}  # who came first is first
        self._placements = 0

    def __repr__(self) -> str:
        return f"<SlowStart of {list(self._newcomers)}>"

    def __bool__(self) -> bool:
        return bool(self._newcomers)

    def welcome(self, ordinal: int, now: float) -> None:
        """An instance has come."""
        self._newcomers.pop(ordinal, None)
        if self._slow_start_s:
            self._newcomers[ordinal] = _Newcomer(now, self._placements)

    def placed(self, ordinal: int) -> None:
        """A placement was made there."""
        self._placements += 1
        if newcomer := self._newcomers.get(ordinal):
            newcomer.placed += 1

    def waiting(self, usable: Sequence[int], hit: Figures, now: float) -> set[int]:
        """Those of the usable ones whose share is used up, unless all are new, or they hold some of the prompt.

        `hit` is by ordinal, of all instances.
        """
        while self._newcomers and now - next(iter(self._newcomers.values())).since_s >= self._slow_start_s:
            del self._newcomers[next(iter(self._newcomers))]
        new = [each for each in usable if each in self._newcomers]
        if len(new) == len(usable):
            return set()
        return {each for each in new if not hit[each] and not self._may_be_placed(each, len(usable), now)}

    def _may_be_placed(self, ordinal: int, instances: int, now: float) -> bool:
        """Whether one more placement keeps it within its share, among so many instances."""
        newcomer = self._newcomers[ordinal]
        ramp = max(RAMP_MIN, (now - newcomer.since_s) / self._slow_start_s)
        return (newcomer.placed + 1) * instances <= ramp * (self._placements - newcomer.before + 1)
