"""Asks the engines how loaded they are, for those whose load is not this router's alone: one task per instance."""

import asyncio
from collections.abc import Callable

from smetric_router.config import RouterConfig
from smetric_router.errors import OutOfResources, UpstreamFailed
from smetric_router.server.calls import EngineCalls
from smetric_router.server.logs import log
from smetric_router.state.cluster import ClusterState, Health
from smetric_router.state.engine_reports import read_loads, read_metrics
from smetric_router.types import EngineReport, EngineReported

# vLLM has the first; SGLang has it when it was started with --enable-metrics, and the second in any case.
_SOURCES: tuple[tuple[str, Callable[[bytes], EngineReport | None]], ...] = (
    ("/metrics", read_metrics),
    ("/v1/loads?include=core", read_loads),
)


class LoadReports:
    """Applies `EngineReported` for each instance in use, every `report_interval_s`; nothing where that is 0."""

    def __init__(
        self, state: ClusterState, calls: EngineCalls, config: RouterConfig, clock: Callable[[], float]
    ) -> None:
        self._state = state
        self._calls = calls
        self._config = config
        self._clock = clock
        self._sources = dict.fromkeys(config.engines, 0)
        self._silent: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to ask."""
        if self._config.report_interval_s:
            self._tasks = [asyncio.create_task(self._watch(instance)) for instance in self._config.engines]

    async def stop(self) -> None:
        """End it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, instance: str) -> None:
        while True:
            if self._state.health(instance) is Health.UP:
                await self._ask(instance)
            await asyncio.sleep(self._config.report_interval_s)

    async def _ask(self, instance: str) -> None:
        """One report; where one source has none the other is asked the next time."""
        path, read = _SOURCES[self._sources[instance]]
        own = self._state.inflight_at(instance)
        try:
            status, body = await self._calls.get(instance, path)
            report = read(body) if status == 200 else None
            cause = f"{path} answered {status}" if status != 200 else f"{path} says nothing of requests"
        except (TimeoutError, UpstreamFailed, OutOfResources) as error:
            self._note(instance, str(error) or f"no answer to {path}")
            return
        except Exception:
            # One odd answer must not end the reports.
            log.exception("load report failed", extra={"fields": {"instance": instance}})
            return
        if report is not None:
            self._silent.discard(instance)
            self._state.apply(EngineReported(instance, report, own), self._clock())
            return
        self._sources[instance] = (self._sources[instance] + 1) % len(_SOURCES)
        self._note(instance, cause)

    def _note(self, instance: str, cause: str) -> None:
        level = log.debug if instance in self._silent else log.info
        self._silent.add(instance)
        level("no load report", extra={"fields": {"instance": instance, "cause": cause}})
