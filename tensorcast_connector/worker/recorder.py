"""How the parts of a worker record what happens, for its stories."""

from collections.abc import Callable, Sequence
from typing import Protocol

from tensorcast_connector.core.story import Stories


class Record(Protocol):
    """Records that something happened now; see Stories.record for the arguments."""

    def __call__(
        self, what: str, about: str = "", keys: Sequence[bytes] = (), each: Sequence[object] = (),
        shards: Sequence[int] = (), cause: str = "", names: Sequence[str] = (),
    ) -> None: ...  # fmt: skip


def unrecorded(*_: object, **__: object) -> None:
    """A Record for those who want no stories."""


class Recorder:
    """Stories with the clock of this worker. Its `record` is a Record.

    Args:
        now: the worker's clock in seconds.
        wall: seconds since 1970, for people.
    """

    def __init__(self, now: Callable[[], float], wall: Callable[[], float]) -> None:
        self._now = now
        self._wall = wall
        self.stories = Stories()

    def record(
        self, what: str, about: str = "", keys: Sequence[bytes] = (), each: Sequence[object] = (),
        shards: Sequence[int] = (), cause: str = "", names: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """See Stories.record."""
        self.stories.record(self._now(), what, about, keys, each, shards, cause, names)

    def lines(self, text: str) -> list[str]:
        """See Stories.lines; with wall time."""
        return self.stories.lines(text, self._wall() - self._now())
