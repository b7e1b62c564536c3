"""Which weights are in this process: what the one who changes them and the connector of the same rank share.

    serving the weights it started with -> changing -> serving others -> changing -> ...

A rank counts its changes. The scheduler plans loads and saves under the count that it last heard from all ranks, and a
rank does nothing that was planned under another one, so that KV of one set of weights is never taken for KV of another,
whether or not the engine was paused for the change.
"""

import threading
from dataclasses import dataclass

STARTED_WITH = "started"  # the weights that the engine loaded when it started
UNKNOWN = "unknown"  # a change ended half way, or weights came from somewhere that has no identity
CHANGING = "changing"


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What a rank says of its weights: how often they have begun to change, and their identity."""

    changes: int = 0
    identity: str = STARTED_WITH


class WeightsState:
    """The weights of one rank. Changed by one thread, read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._report = WeightsReport()

    def __repr__(self) -> str:
        return f"<WeightsState {self.report}>"

    @property
    def report(self) -> WeightsReport:
        """As it is now."""
        with self._lock:
            return self._report

    def begin(self) -> None:
        """The first parameter is about to be written: from here on nothing planned before is loaded or saved."""
        with self._lock:
            self._report = WeightsReport(self._report.changes + 1, CHANGING)

    def end(self, identity: str) -> None:
        """All parameters are written, or the change ended half way (`UNKNOWN`)."""
        with self._lock:
            assert self._report.identity == CHANGING, "a change ends once"
            self._report = WeightsReport(self._report.changes, identity)

    def serves(self, changes: int) -> bool:
        """Whether the weights are still those under which something was planned."""
        report = self.report
        return report.changes == changes and report.identity != CHANGING


_states: dict[str, WeightsState] = {}
_states_lock = threading.Lock()


def weights_state(instance_id: str) -> WeightsState:
    """The state of an engine's rank in this process; `instance_id` is vLLM's own name of the engine."""
    with _states_lock:
        return _states.setdefault(instance_id, WeightsState())
