"""Keeps the health and the model lists of the instances current: one task per instance, nothing in the request path."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec

from smetric_router.config import RouterConfig
from smetric_router.errors import OutOfResources, UpstreamDisconnected, UpstreamFailed, UpstreamUnreachable
from smetric_router.server.logs import log
from smetric_router.server.upstream import Upstream
from smetric_router.state.cluster import ClusterState, Health
from smetric_router.types import InstanceDown, InstanceUp, ModelsSeen

_T = TypeVar("_T")


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]


class _Model(msgspec.Struct):
    id: str


class Arrivals:
    """Everything that is being waited for from the engines.

    An engine may stop and leave its connections open and silent, so no wait outlives `grace_s` of an engine that is
    down. What still arrives from such an engine begins a new wait.
    """

    def __init__(self, instances: Iterable[str], grace_s: float) -> None:
        self._grace_s = grace_s
        self._limits: dict[str, set[asyncio.Timeout]] = {instance: set() for instance in instances}
        self._down: set[str] = set()

    async def wait(self, instance: str, arriving: Awaitable[_T]) -> _T:
        """Wait for something from the instance. Raises UpstreamDisconnected when the instance is down and silent."""
        limit = asyncio.timeout(self._grace_s if instance in self._down else None)
        try:
            async with limit:
                self._limits[instance].add(limit)
                return await arriving
        except TimeoutError:
            if limit.expired():
                raise UpstreamDisconnected(f"{instance} is down and silent for {self._grace_s:g} s") from None
            raise
        finally:
            self._limits[instance].discard(limit)

    def down(self, instance: str) -> None:
        """From now on what is silent is given up after the grace time."""
        if instance not in self._down:
            self._down.add(instance)
            self._reschedule(instance, asyncio.get_running_loop().time() + self._grace_s)

    def up(self, instance: str) -> None:
        """Silence means nothing any more."""
        if instance in self._down:
            self._down.discard(instance)
            self._reschedule(instance, None)

    def _reschedule(self, instance: str, when: float | None) -> None:
        for limit in self._limits[instance]:
            if not limit.expired():
                limit.reschedule(when)


class HealthMonitor:
    """Asks each instance `GET /health` again and again, and `GET /v1/models` now and then."""

    def __init__(
        self, state: ClusterState, upstream: Upstream, config: RouterConfig, clock: Callable[[], float]
    ) -> None:
        self._state = state
        self._upstream = upstream
        self._config = config
        self._clock = clock
        self.arrivals = Arrivals(config.engines, config.down_grace_s)
        self._wake = {instance: asyncio.Event() for instance in config.engines}
        self._timeouts = dict.fromkeys(config.engines, 0)
        self._models_due = dict.fromkeys(config.engines, float("-inf"))
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Check every instance once, then go on in the background."""
        await asyncio.gather(*(self._check(instance) for instance in self._config.engines))
        self._tasks = [asyncio.create_task(self._watch(instance)) for instance in self._config.engines]

    async def stop(self) -> None:
        """End the background checks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def suspect(self, instance: str, error: UpstreamFailed) -> None:
        """A request failed there. No connection at all takes it out at once; anything else only hastens a check."""
        if isinstance(error, UpstreamUnreachable):
            self._set_down(instance, error.message)
        self._wake[instance].set()

    async def _watch(self, instance: str) -> None:
        wake = self._wake[instance]
        while True:
            up = self._state.health(instance) is Health.UP
            try:
                async with asyncio.timeout(self._config.health_interval_s if up else self._config.health_recheck_s):
                    await wake.wait()
            except TimeoutError:
                pass
            wake.clear()
            await self._check(instance)

    async def _check(self, instance: str) -> None:
        try:
            await self._check_health(instance)
        except OutOfResources as error:
            log.warning("no health check", extra={"fields": {"instance": instance, "cause": error.message}})
        except Exception:
            # One odd answer must not end the checks, nor keep the router from starting.
            log.exception("health check failed", extra={"fields": {"instance": instance}})

    async def _check_health(self, instance: str) -> None:
        try:
            status, _ = await self._get(instance, "/health")
        except TimeoutError:
            self._timeouts[instance] += 1
            if self._timeouts[instance] >= self._config.health_failures_max or not self._is_up(instance):
                self._set_down(instance, f"no answer to /health within {self._config.health_timeout_s:g} s")
            return
        except UpstreamFailed as error:
            self._set_down(instance, error.message)
            return
        self._timeouts[instance] = 0
        # An engine that has no /health but answers is alive.
        if status >= 500:
            self._set_down(instance, f"/health answered {status}")
            return
        if not self._is_up(instance):
            self._models_due[instance] = float("-inf")
        if self._clock() >= self._models_due[instance]:
            await self._read_models(instance)
        if not self._is_up(instance):
            log.info("instance up", extra={"fields": {"instance": instance}})
            self._state.apply(InstanceUp(instance), self._clock())
            self.arrivals.up(instance)

    async def _read_models(self, instance: str) -> None:
        self._models_due[instance] = self._clock() + self._config.models_interval_s
        try:
            status, body = await self._get(instance, "/v1/models")
            if status == 200:
                entries = msgspec.json.decode(body, type=_ModelList).data
                models = {msgspec.json.decode(entry, type=_Model).id: bytes(entry) for entry in entries}
                self._state.apply(ModelsSeen(instance, models), self._clock())
        except (TimeoutError, UpstreamFailed, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.debug("no model list", extra={"fields": {"instance": instance, "cause": str(error)}})

    async def _get(self, instance: str, path: str) -> tuple[int, bytes]:
        return await self._upstream.get(
            instance, path, api_key=self._config.engine_api_key, timeout_s=self._config.health_timeout_s
        )

    def _is_up(self, instance: str) -> bool:
        return self._state.health(instance) is Health.UP

    def _set_down(self, instance: str, cause: str) -> None:
        if self._state.health(instance) is not Health.DOWN:
            log.warning("instance down", extra={"fields": {"instance": instance, "cause": cause}})
        self._state.apply(InstanceDown(instance, cause), self._clock())
        self.arrivals.down(instance)
