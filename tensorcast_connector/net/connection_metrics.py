"""Prometheus metrics of a process's listening sockets, whatever it serves there. Documented in docs/metrics.md."""

from collections import Counter
from collections.abc import Iterator, Sequence

from tensorcast_connector.net.metrics_server import Family, Value
from tensorcast_connector.net.refusals import KINDS

_NAME = "tensorcast_connections_refused_total"
FAMILIES = (
    Family("counter", _NAME, "Connections that were closed: no room, no right, or not our protocol.", ("reason",)),
)


class ConnectionMetrics:
    """A `Source`.

    Args:
        refused: as SocketNetwork counts it.
    """

    families: Sequence[Family] = FAMILIES

    def __init__(self, refused: Counter[str]) -> None:
        self._refused = refused

    async def refresh(self) -> None:
        """Everything is at hand."""

    def ill(self) -> str:
        """What is refused makes nobody ill."""
        return ""

    def values(self) -> Iterator[tuple[str, Sequence[str], Value]]:
        """See Source."""
        for kind in KINDS:
            yield _NAME, (kind,), self._refused[kind]
