"""A store process's Prometheus metrics: its requests, its database, what the cluster lists. Documented in docs/metrics.md."""

import asyncio
from collections.abc import Iterator, Sequence

from tensorcast_connector.config import STORE_TIMEOUT_S
from tensorcast_connector.core.cluster import ClusterView
from tensorcast_connector.errors import TensorcastError
from tensorcast_connector.net.metrics_server import Family, Value
from tensorcast_connector.store.measured_kv import MeasuredKv
from tensorcast_connector.store.server import Store

_COUNTER, _GAUGE, _HISTOGRAM = "counter", "gauge", "histogram"
_PREFIX = "tensorcast_store_"
_TABLE = (
    (
        _COUNTER,
        "requests_total",
        "Requests by message and by outcome: ok, or the code of the error.",
        "kind",
        "outcome",
    ),
    (_GAUGE, "watchers", "Watches that wait for something to happen."),
    (_HISTOGRAM, "kv_seconds", "Time of operations on the database.", "operation"),
    (_COUNTER, "kv_errors_total", "Operations that the database did not answer.", "operation"),
    (_GAUGE, "backend_up", "1 while the database answers."),
    (_GAUGE, "revision", "Revision of the cluster's metadata."),
    (_GAUGE, "incarnation", "Life of the database; a restored backup has a higher one."),
    (_GAUGE, "workers", "Workers listed."),
    (_GAUGE, "instances", "Engines listed."),
    (_GAUGE, "shards", "Shards with a home (held) and without one (homeless).", "state"),
    (_GAUGE, "replicas", "Copies of artifacts listed."),
)
FAMILIES = tuple(Family(kind, _PREFIX + name, text, tuple(labels)) for kind, name, text, *labels in _TABLE)


class StoreMetrics:
    """A `Source`. What the cluster lists is read at each scrape, from where the one before had come to."""

    families: Sequence[Family] = FAMILIES

    def __init__(self, store: Store, kv: MeasuredKv) -> None:
        self._store = store
        self._kv = kv
        self._view = ClusterView()
        self._error = ""

    async def refresh(self) -> None:
        """Reads what has changed; the last known numbers stay if the database does not answer."""
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await self._read()
            self._error = ""
        except TimeoutError:
            self._error = f"the database does not answer within {STORE_TIMEOUT_S:g} s"
        except TensorcastError as error:
            self._error = str(error)

    async def _read(self) -> None:
        while True:
            changes = await self._store.watch(self._view.ask(0))
            if changes.incarnation < self._view.incarnation:
                self._view = ClusterView()  # another database was put in place
                continue
            self._view.apply(changes)
            if not self._view.listing:
                return

    def ill(self) -> str:
        """Without its database a store can do nothing."""
        return self._error

    def values(self) -> Iterator[tuple[str, Sequence[str], Value]]:
        """See Source."""
        for (kind, outcome), count in self._store.outcomes.items():
            yield _PREFIX + "requests_total", (kind, outcome), count
        for operation, histogram in self._kv.seconds.items():
            yield _PREFIX + "kv_seconds", (operation,), histogram
            yield _PREFIX + "kv_errors_total", (operation,), self._kv.errors[operation]
        view = self._view
        values = {
            "watchers": self._store.watchers,
            "backend_up": int(not self._error),
            "revision": view.revision,
            "incarnation": view.incarnation,
            "workers": len(view.workers),
            "instances": len(view.instances),
            "replicas": sum(map(len, view.replicas.values())),
        }
        for name, value in values.items():
            yield _PREFIX + name, (), value
        yield _PREFIX + "shards", ("held",), len(view.shards)
        yield _PREFIX + "shards", ("homeless",), view.shard_count - len(view.shards)
