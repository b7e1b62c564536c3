"""Keeps the health and the model lists of the instances current: one task per instance, nothing in the request path."""

import asyncio
from collections.abc import Callable

import msgspec

from smetric_router.config import RouterConfig
from smetric_router.errors import UpstreamFailed, UpstreamUnreachable
from smetric_router.server.logs import log
from smetric_router.server.upstream import Upstream
from smetric_router.state.cluster import ClusterState, Health
from smetric_router.types import InstanceDown, InstanceUp, ModelsSeen


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]


class _Model(msgspec.Struct):
    id: str


class HealthMonitor:
    """Asks each instance `GET /health` again and again, and `GET /v1/models` now and then."""

    def __init__(
        self, state: ClusterState, upstream: Upstream, config: RouterConfig, clock: Callable[[], float]
    ) -> None:
        self._state = state
        self._upstream = upstream
        self._config = config
        self._clock = clock
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
