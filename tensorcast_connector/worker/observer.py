"""What people and callers may ask of a worker on any of its listeners: counts, signals, the story of a page."""

from collections.abc import Callable
from typing import Any

import msgspec

from tensorcast_connector.wire.messages import (
    GetSignals,
    GetStatistics,
    GetStory,
    InstanceReport,
    Message,
    Signals,
    Statistics,
    Story,
)
from tensorcast_connector.worker.recorder import Recorder
from tensorcast_connector.worker.signals import Sampler

Question = GetStatistics | GetSignals | GetStory
"""The requests that an Observer answers."""


class Observer:
    """See the module.

    Args:
        now: the worker's clock in seconds.
        statistics: what the worker counts.
        reports: what its engines say.
    """

    def __init__(
        self, recorder: Recorder, sampler: Sampler, now: Callable[[], float], statistics: Callable[[], dict[str, Any]],
        reports: Callable[[], list[InstanceReport]],
    ) -> None:  # fmt: skip
        self._recorder = recorder
        self._sampler = sampler
        self._now = now
        self._statistics = statistics
        self._reports = reports

    def signals(self) -> Signals:
        """How the worker is doing, with its age now."""
        return msgspec.structs.replace(self._sampler.signals(self._now()), instances=self._reports())

    def answer(self, question: Question) -> Message:
        """The answer to `question`."""
        if isinstance(question, GetSignals):
            return self.signals()
        if isinstance(question, GetStory):
            return Story(self._recorder.lines(question.text))
        return Statistics(self._statistics())
