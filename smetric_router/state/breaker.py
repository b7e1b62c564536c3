"""One instance's circuit breaker: what became of its last requests decides whether it is given more. Time is an argument.

    closed --- failures_min failures in window_s, at least half of all ---> open --- open_s ---> half-open
    half-open --- one request ---> probing --- its answer begins ---> closed
                                      '------- it fails ------------> open

The share keeps a busy instance in use whose rare failures add up. The beginning of an answer is enough, for its end may be
minutes away; a stream that breaks afterwards is a failure like others. A request that says nothing of the instance, because its
client left, gives the probe back.
"""

from collections import deque
from enum import StrEnum

OUTCOMES_MAX = 1000


class BreakerState(StrEnum):
    """See the module."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"
    PROBING = "probing"


class Breaker:
    """See the module.

    Args:
        failures_min: so many failures open it; 0: it never opens.
        window_s: seconds for which an outcome counts.
        open_s: seconds for which it stays open.
    """

    def __init__(self, *, failures_min: int, window_s: float, open_s: float) -> None:
        self._failures_min = failures_min
        self._window_s = window_s
        self._open_s = open_s
        self._outcomes: deque[tuple[float, bool]] = deque()
        self._failures = 0
        self._due_s = 0.0
        self.state = BreakerState.CLOSED

    def __repr__(self) -> str:
        return f"<Breaker {self.state}, {self._failures}/{len(self._outcomes)} failed>"

    @property
    def admits(self) -> bool:
        """Whether a request may be sent there."""
        return self.state in (BreakerState.CLOSED, BreakerState.HALF_OPEN)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self.state is BreakerState.OPEN and now >= self._due_s:
            self.state = BreakerState.HALF_OPEN

    def sent(self) -> None:
        """A request is sent there."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.PROBING

    def began(self) -> None:
        """An answer has begun there that is no failure."""
        if self.state is BreakerState.PROBING:
            self.state = BreakerState.CLOSED

    def ended(self, *, failed: bool | None, now: float) -> None:
        """A request has succeeded or failed there; None: it ended without saying anything of the instance."""
        if self.state is BreakerState.CLOSED:
            if failed is not None and self._failures_min:
                self._count(failed, now)
        elif self.state is BreakerState.PROBING:
            if failed:
                self._open(now)
            else:
                self.state = BreakerState.HALF_OPEN if failed is None else BreakerState.CLOSED

    def _count(self, failed: bool, now: float) -> None:
        outcomes = self._outcomes
        outcomes.append((now, failed))
        self._failures += failed
        while len(outcomes) > OUTCOMES_MAX or now - outcomes[0][0] > self._window_s:
            self._failures -= outcomes.popleft()[1]
        if failed and self._failures >= self._failures_min and 2 * self._failures >= len(outcomes):
            self._open(now)

    def _open(self, now: float) -> None:
        self.state, self._due_s = BreakerState.OPEN, now + self._open_s
        self._outcomes.clear()
        self._failures = 0
