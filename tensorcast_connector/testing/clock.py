"""A clock that stands still until it is told otherwise, for everything that takes `now` as an argument."""


class SettableClock:
    """Call it for the time in seconds. It never moves by itself."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def __repr__(self) -> str:
        return f"<SettableClock {self._now:g} s>"

    def advance(self, seconds: float) -> None:
        """Time goes by."""
        assert seconds >= 0, "this clock does not go back; use set() for a jump"
        self._now += seconds

    def set(self, now: float) -> None:
        """A jump, also back."""
        self._now = now
