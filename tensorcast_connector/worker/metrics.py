"""A worker's Prometheus metrics: read from its plain counters when somebody asks. Documented in docs/metrics.md."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensorcast_connector.net.metrics_server import Family, Value
from tensorcast_connector.wire.messages import PROTOCOL_VERSION
from tensorcast_connector.worker.server import Worker

_COUNTER, _GAUGE, _HISTOGRAM = "counter", "gauge", "histogram"
_PREFIX = "tensorcast_worker_"
_TABLE = (
    (_GAUGE, "info", "Always 1; says who this is.", "worker_id", "roles", "protocol"),
    # what is here
    (_GAUGE, "pages", "Pages that can be read here."),
    (_GAUGE, "pages_held", "Of these, pages that somebody uses and that stay."),
    (_GAUGE, "pages_reserved", "Pages that are being written."),
    (_GAUGE, "arena_bytes", "The arena: total, used, and pinned (used and not to be evicted).", "state"),
    (_COUNTER, "evictions_total", "Pages evicted because room was needed."),
    (
        _COUNTER,
        "page_operations_total",
        "Pages saved and loaded by engines, fetched from and sent to other workers.",
        "action",
    ),
    (_COUNTER, "page_bytes_total", "Bytes of pages fetched from and sent to other workers.", "action"),
    (_COUNTER, "digest_mismatches_total", "Pages that arrived with wrong bytes and were dropped."),
    # lookups
    (_COUNTER, "lookups_total", "Lookups by engines: all blocks can be had, the first ones, or none.", "outcome"),
    (
        _COUNTER,
        "lookup_blocks_total",
        "Blocks looked up by engines: in this arena, at other workers, or nowhere.",
        "where",
    ),
    (_HISTOGRAM, "find_seconds", "Time to locate the pages of one lookup, at all homes together."),
    (_COUNTER, "finds_failed_total", "Questions to homes that were not answered in time; their pages are a miss."),
    (_COUNTER, "redirects_total", "Lookups in shards that had moved: redirects given to others, and followed.", "side"),
    # the cluster
    (_GAUGE, "store_reachable", "1 while the store answers."),
    (_COUNTER, "store_losses_total", "Times the store stopped answering."),
    (_GAUGE, "store_revision", "Revision of the cluster's metadata that is known here."),
    (_GAUGE, "lease_valid", "1 while this worker is listed and nobody else can have its shards."),
    (_COUNTER, "leases_lost_total", "Times the lease ended although the worker lives."),
    (_GAUGE, "workers", "Other workers listed: connected, connecting, unreachable.", "state"),
    (_GAUGE, "engines", "Engines attached here."),
    # shards
    (_GAUGE, "shards", "Shards as known here: all, held (this worker is the home), homeless.", "state"),
    (_COUNTER, "shard_takeovers_total", "Shards that this worker became the home of."),
    (_COUNTER, "shard_losses_total", "Shards that it stopped being the home of."),
    (_GAUGE, "catalog_pages", "Pages listed in the shards held."),
    (_GAUGE, "catalog_workers", "Workers that have reported pages of the shards held."),
    (_COUNTER, "reports_total", "Reports to homes: applied, refused for some shard, failed (made again).", "outcome"),
    # artifacts and plans
    (_GAUGE, "artifacts", "Artifacts that are resident here."),
    (_GAUGE, "artifact_bytes", "Their memory, and what they may have.", "state"),
    (_GAUGE, "artifacts_lost", "Of these, artifacts whose record the store has lost; they go when room is needed."),
    (_GAUGE, "artifacts_without_copy", "Artifacts in the store, as known here, whose last copy has gone."),
    (_GAUGE, "uploads", "Artifacts that callers are putting."),
    (_COUNTER, "artifact_operations_total", "Artifacts put here, fetched from other workers, and evicted.", "action"),
    (_COUNTER, "artifact_fetched_bytes_total", "Bytes of artifacts fetched from other workers."),
    (_COUNTER, "artifact_put_bytes_total", "Bytes of artifacts that callers have put here."),
    (_COUNTER, "artifact_sent_bytes_total", "Bytes of artifacts sent to other workers and to callers on other hosts."),
    (
        _GAUGE,
        "device_replicas",
        "Copies of artifacts in the memory of a device that engines can open, and that they have open.",
        "state",
        "device",
    ),
    (
        _GAUGE,
        "device_replica_bytes",
        "Memory of a device that such copies have, and that they may have.",
        "state",
        "device",
    ),
    (_COUNTER, "device_restarts_total", "Times the process that owns the devices' memory was started again."),
    (_COUNTER, "plans_total", "Plans that have ended at this gateway.", "state"),
    # load
    (_GAUGE, "requests_in_flight", "Requests being served to engines and to workers.", "listener"),
    (_GAUGE, "connections", "Connections of engines and of workers, those for page bytes apart.", "listener"),
    (_GAUGE, "sends_in_flight", "Requests for page bytes being served."),
    (_GAUGE, "fetches_waiting", "Pages being fetched from other workers."),
    (_GAUGE, "pressure", "Signals from 0 (idle) to 1 (full): memory, network, queue; absent if unknown.", "resource"),
)
FAMILIES = tuple(Family(kind, _PREFIX + name, text, tuple(labels)) for kind, name, text, *labels in _TABLE)


class WorkerMetrics:
    """A `Source`."""

    families: Sequence[Family] = FAMILIES

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def refresh(self) -> None:
        """Everything is at hand."""

    def ill(self) -> str:
        """A worker serves its engines whether or not there is a store, so one that answers is well."""
        return ""

    def values(self) -> Iterator[tuple[str, Sequence[str], Value]]:
        """See Source."""
        worker = self._worker
        peers = worker.peers
        counters: dict[str, Any] = peers.statistics()
        yield from _prefixed(
            {
                "info": {(worker.worker_id, ",".join(worker.roles), str(PROTOCOL_VERSION)): 1},
                "finds_failed_total": counters["finds_failed"],
                "find_seconds": peers.traffic.find_seconds,
                "redirects_total": {"given": counters["redirects_given"], "followed": counters["redirects_followed"]},
                "store_reachable": counters["store_connected"],
                "store_losses_total": counters["store_losses"],
                "store_revision": counters["store_revision"],
                "lease_valid": int(peers.metadata.leases.may_write(peers.now())),
                "leases_lost_total": counters["leases_lost"],
                "workers": peers.states(),
                "engines": peers.metadata.member.engines,
                "shards": {
                    "all": counters["shards"],
                    "held": counters["shards_held"],
                    "homeless": counters["shards_without_home"],
                },
                "shard_takeovers_total": counters["shards_gained"],
                "shard_losses_total": counters["shards_lost"],
                "catalog_pages": counters["catalog_pages"],
                "catalog_workers": counters["catalog_workers"],
                "reports_total": {each: counters[f"reports_{each}"] for each in ("applied", "refused", "failed")},
            }
        )
        yield from _prefixed(self._pages())
        yield from _prefixed(self._service())
        yield from _prefixed(self._load())

    def _pages(self) -> "_Values":
        usage, counters = self._worker.probe.segments.usage(), self._worker.pages.counters
        return {
            "pages": usage.pages,
            "pages_held": usage.pages_held,
            "pages_reserved": usage.pages_reserved,
            "arena_bytes": {"total": usage.bytes_total, "used": usage.bytes_used, "pinned": usage.bytes_pinned},
            "evictions_total": usage.evictions,
            "page_operations_total": {
                each: counters[f"pages_{each}"] for each in ("saved", "loaded", "fetched", "sent")
            },
            "page_bytes_total": {each: counters[f"bytes_{each}"] for each in ("fetched", "sent")},
            "digest_mismatches_total": counters["digest_mismatches"],
            "lookups_total": {each: counters[f"lookups_{each}"] for each in ("full", "partial", "missed")},
            "lookup_blocks_total": {
                each: counters[f"lookup_blocks_{each}"] for each in ("local", "elsewhere", "missed")
            },
        }

    def _service(self) -> "_Values":
        counters, view = self._worker.artifacts.statistics(), self._worker.peers.metadata.view
        devices = self._worker.devices.table.statistics()
        return {
            "artifacts": counters["artifacts"],
            "artifact_bytes": {"used": counters["artifact_bytes_used"], "limit": counters["artifact_bytes_max"]},
            "artifacts_lost": counters["artifacts_lost"],
            "artifacts_without_copy": len(view.artifact_ids.keys() - view.replicas.keys()),
            "uploads": counters["uploads"],
            "artifact_operations_total": {
                each: counters[f"artifacts_{each}"] for each in ("put", "fetched", "evicted")
            },
            "artifact_fetched_bytes_total": counters["artifact_bytes_fetched"],
            "artifact_put_bytes_total": counters["artifact_bytes_put"],
            "artifact_sent_bytes_total": counters["artifact_bytes_sent"],
            "device_replicas": {
                (state, name): counts[key]
                for name, counts in devices.items()
                for state, key in (("whole", "replicas"), ("open", "open"))
            },
            "device_replica_bytes": {
                (state, name): counts[key]
                for name, counts in devices.items()
                for state, key in (("used", "bytes_used"), ("limit", "bytes_max"))
            },
            "device_restarts_total": self._worker.devices.counters["restarts"],
            "plans_total": self._worker.gateway.plans.counters,
        }

    def _load(self) -> "_Values":
        probe, signals = self._worker.probe, self._worker.observer.signals()
        pressures = {"memory": signals.memory, "network": signals.network, "queue": signals.queue}
        return {
            "requests_in_flight": {"engines": probe.engines.in_flight, "workers": probe.workers.in_flight},
            "connections": {"engines": probe.engines.connections, "workers": probe.workers.connections},
            "sends_in_flight": probe.pages.sends,
            "fetches_waiting": probe.pages.fetches,
            "pressure": {resource: value for resource, value in pressures.items() if value is not None},
        }


_Values = Mapping[str, Any]
"""By name without its prefix: a value, or one per label value, or one per tuple of them."""


def _prefixed(values: _Values) -> Iterator[tuple[str, Sequence[str], Value]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            for label, one in value.items():
                yield _PREFIX + name, (label,) if isinstance(label, str) else label, one
        else:
            yield _PREFIX + name, (), value
