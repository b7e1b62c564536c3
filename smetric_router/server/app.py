"""The application: builds the parts, owns their lifetime, and parts the router's own paths from the proxy path."""

import time
from collections.abc import Callable

from smetric_router.config import RouterConfig
from smetric_router.dispatch import Dispatcher
from smetric_router.errors import ConfigError
from smetric_router.policies.registry import build_policies
from smetric_router.server.asgi import Receive, Scope, Send
from smetric_router.server.control import build_control, is_own_path
from smetric_router.server.health import HealthMonitor
from smetric_router.server.metrics import Metrics
from smetric_router.server.openai import Proxy
from smetric_router.server.upstream import Upstream
from smetric_router.state.cluster import ClusterState


class RouterApp:
    """A plain ASGI application. Only the router's own paths pay for a framework."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        if not config.engines:
            raise ConfigError("no engine is configured: give --engine URL, or engines = [...] in the file")
        policies = build_policies(config.policies)
        if config.policy not in policies:
            raise ConfigError(f"policy = {config.policy!r} is not one of {', '.join(policies)}")
        self.config = config
        self.state = ClusterState(
            config.engines, chunk_bytes=config.chunk_bytes, index_chunks_max=config.index_chunks_max
        )
        self.metrics = Metrics(lambda: self.state.statistics(clock()))
        self._upstream = Upstream(connect_timeout_s=config.connect_timeout_s, keepalive_s=config.upstream_keepalive_s)
        self._health = HealthMonitor(self.state, self._upstream, config, clock)
        self._control = build_control(self.state, self.metrics, clock)
        dispatcher = Dispatcher(self.state, policies[config.policy])
        self._proxy = Proxy(config, dispatcher, policies, self._upstream, self._health, self.metrics, clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the lifetime of the server."""
        if scope["type"] == "http":
            await (self._control if is_own_path(scope["path"]) else self._proxy)(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def start(self) -> None:
        """Open the connections and check every engine once."""
        await self._upstream.open()
        await self._health.start()

    async def stop(self) -> None:
        """End all background work."""
        await self._health.stop()
        await self._upstream.close()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})
