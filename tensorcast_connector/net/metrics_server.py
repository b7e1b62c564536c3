"""What Prometheus reads: `/metrics` and `/healthz` of a process over HTTP, and how our counts become metric families.

It is served on the process's own event loop: what is read is not changed meanwhile, and a loop that stands still is seen.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tensorcast_connector.errors import ConfigError
from tensorcast_connector.net.accepting import Acceptor, listen_tcp
from tensorcast_connector.net.histogram import Histogram
from tensorcast_connector.types import Address

logger = logging.getLogger(__name__)
SHUTDOWN_TIMEOUT_S = 0.5

Value = float | Histogram


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: how it is documented and exported.

    Attributes:
        kind: counter, gauge or histogram.
        name: as it is exported, a counter's with its `_total`.
        text: what it means, in one sentence.
        labels: names of its labels.
    """

    kind: str
    name: str
    text: str
    labels: tuple[str, ...] = ()

    def metric(self, values: Iterable[tuple[Sequence[str], Value]]) -> Metric:
        """The family with a value per tuple of label values."""
        made: Metric
        if self.kind == "histogram":
            made = histogram = HistogramMetricFamily(self.name, self.text, labels=self.labels)
            for labels, value in values:
                assert isinstance(value, Histogram)
                histogram.add_metric(labels, value.cumulative(), value.sum)
            return made
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        made = family = kind(self.name, self.text, labels=self.labels)
        for labels, value in values:
            assert not isinstance(value, Histogram)
            family.add_metric(labels, value)
        return made


class Source(Protocol):
    """A part of a process that has metrics."""

    families: Sequence[Family]

    async def refresh(self) -> None:
        """Brings up to date what has to be asked for; called before each reading."""

    def values(self) -> Iterator[tuple[str, Sequence[str], Value]]:
        """(name of the family, label values, value) of everything that there is now."""

    def ill(self) -> str:
        """Why the process cannot do its work now; empty if it can. Called after `refresh`."""


class _Collected(Collector):
    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def describe(self) -> Iterator[Metric]:
        """There may be more sources later."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        for source in self._sources:
            found: dict[str, list[tuple[Sequence[str], Value]]] = {family.name: [] for family in source.families}
            for name, labels, value in source.values():
                found[name].append((labels, value))
            for family in source.families:
                yield family.metric(found[family.name])


def registry_of(*sources: Sequence[Source]) -> CollectorRegistry:
    """All metrics of a process: those of `sources` and what the kernel says of the process."""
    registry = CollectorRegistry()
    for each in sources:
        registry.register(_Collected(each))
    ProcessCollector(registry=registry)
    return registry


@dataclass
class MetricsListener:
    """An open HTTP listener."""

    address: Address
    _runner: web.AppRunner
    _acceptors: Sequence[Acceptor]

    async def close(self) -> None:
        """Stops listening."""
        for acceptor in self._acceptors:
            await acceptor.close()
        await self._runner.cleanup()


async def serve_metrics(address: Address, sources: Sequence[Source], besides: Sequence[Source] = ()) -> MetricsListener:
    """Serves `/metrics` and `/healthz` at `address` (port 0 = any) until the listener is closed.

    `/healthz` answers 200, or 503 and the reason while a source is ill, or while there is none: it starts, or stops.

    Args:
        address: where.
        sources: of what the process does; may change meanwhile.
        besides: metrics that say nothing of that, and need no refreshing.

    Raises:
        ConfigError: the address cannot be listened on; says why.
    """
    registry = registry_of(sources, besides)

    async def metrics(request: web.Request) -> web.Response:
        for source in sources:
            await source.refresh()
        encoder, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encoder(registry), headers={"Content-Type": content_type})

    async def health(_: web.Request) -> web.Response:
        for source in sources:
            await source.refresh()
        reasons = [reason for source in sources if (reason := source.ill())] if sources else ["it does not serve"]
        return web.Response(text="\n".join([*reasons, ""]) if reasons else "ok\n", status=503 if reasons else 200)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", health)])
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    try:
        bound = await listen_tcp(address.host, address.port)
    except (OSError, UnicodeError) as error:
        await runner.cleanup()
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"metrics={str(address)!r}: cannot listen there: {reason}") from error
    here = Address("tcp", host=address.host, port=bound[0].getsockname()[1])
    factory = runner.server
    assert factory is not None  # after its setup
    acceptors = [Acceptor(each, factory, f"metrics at {here}") for each in bound]
    listener = MetricsListener(here, runner, acceptors)
    logger.info("metrics at http://%s/metrics", listener.address, extra={"metrics": str(listener.address)})
    return listener
