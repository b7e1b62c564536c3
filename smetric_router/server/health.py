"""Keeps the health and the model lists of the instances current: one task per instance, nothing in the request path."""

import asyncio
from collections.abc import Callable

import msgspec

from smetric_router.config import RouterConfig
from smetric_router.errors import OutOfResources, UpstreamFailed, UpstreamUnreachable
from smetric_router.server.calls import EngineCalls
from smetric_router.server.links import EngineLinks
from smetric_router.server.logs import log
from smetric_router.state.cluster import ClusterState, Health
from smetric_router.types import InstanceDown, InstanceUp, ModelsSeen

AT_ONCE_MAX = 256
"""Checks at the start, which waits for all of them."""


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]


class _Model(msgspec.Struct):
    id: str


class HealthMonitor:
    """Asks each instance `GET /health` again and again, and `GET /v1/models` now and then."""

    def __init__(
        self,
        state: ClusterState,
        links: EngineLinks,
        calls: EngineCalls,
        config: RouterConfig,
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._links = links
        self._calls = calls
        self._config = config
        self._clock = clock
        self._down_since_s: dict[str, float] = {}
        self._wake = {instance: asyncio.Event() for instance in config.engines}
        self._timeouts = dict.fromkeys(config.engines, 0)
        self._models_due = dict.fromkeys(config.engines, float("-inf"))
        self._locked: set[str] = set()  # want a key of which the operator has been told
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Check every instance once, then go on in the background, each in its own time."""
        engines = self._config.engines
        room = asyncio.Semaphore(AT_ONCE_MAX)

        async def check(instance: str) -> None:
            async with room:
                await self._check(instance)

        await asyncio.gather(*map(check, engines))
        self._tasks = [
            asyncio.create_task(self._watch(instance, at / len(engines))) for at, instance in enumerate(engines)
        ]

    async def stop(self) -> None:
        """End the background checks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def any_down(self) -> bool:
        """Whether an instance is."""
        return bool(self._down_since_s)

    def down_since_s(self, instance: str) -> float | None:
        """Since when an instance is down; None if it is not."""
        return self._down_since_s.get(instance)

    def suspect(self, instance: str, error: UpstreamFailed) -> None:
        """A request failed there. No connection at all takes it out at once; anything else only hastens a check."""
        if isinstance(error, UpstreamUnreachable):
            self._set_down(instance, error.message)
        self._wake[instance].set()

    def models_changed(self, instance: str) -> None:
        """It lists other models from now on."""
        self._models_due[instance] = float("-inf")
        self._wake[instance].set()

    async def _watch(self, instance: str, share: float) -> None:
        """`share`: of an interval, when the first check is due. A thousand checks at once would time each other out."""
        wake = self._wake[instance]
        while True:
            up = self._state.health(instance) is Health.UP
            interval_s = self._config.health_interval_s if up else self._config.health_recheck_s
            try:
                async with asyncio.timeout(interval_s * share):
                    await wake.wait()
            except TimeoutError:
                pass
            share = 1.0
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
            status, _ = await self._calls.get(instance, "/health")
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
            self._down_since_s.pop(instance, None)

    async def _read_models(self, instance: str) -> None:
        self._models_due[instance] = self._clock() + self._config.models_interval_s
        try:
            status, body = await self._calls.get(instance, "/v1/models")
            if status == 200:
                entries = msgspec.json.decode(body, type=_ModelList).data
                models = {msgspec.json.decode(entry, type=_Model).id: bytes(entry) for entry in entries}
                self._state.apply(ModelsSeen(instance, models), self._clock())
            elif status in (401, 403) and instance not in self._locked:
                self._locked.add(instance)
                cause = f"/v1/models answered {status}: set engine_api_key; until then it is taken to serve every model"
                log.warning("no model list", extra={"fields": {"instance": instance, "cause": cause}})
        except (TimeoutError, UpstreamFailed, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.debug("no model list", extra={"fields": {"instance": instance, "cause": str(error)}})

    def _is_up(self, instance: str) -> bool:
        return self._state.health(instance) is Health.UP

    def _set_down(self, instance: str, cause: str) -> None:
        if self._state.health(instance) is not Health.DOWN:
            log.warning("instance down", extra={"fields": {"instance": instance, "cause": cause}})
        self._state.apply(InstanceDown(instance, cause), self._clock())
        self._down_since_s.setdefault(instance, self._clock())
        self._links.close_idle(instance)
