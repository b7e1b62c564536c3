"""The router as a whole: builds the parts, owns their lifetime, and parts its own paths from those it passes on."""

import asyncio
import resource
import secrets
import sys
import time
from collections.abc import Callable
from urllib.parse import unquote

from smetric_router.config import RouterConfig
from smetric_router.dispatch import Dispatcher
from smetric_router.errors import ConfigError, RouterError
from smetric_router.policies.registry import build_policies
from smetric_router.server.access import log_refused
from smetric_router.server.breakers import Breakers
from smetric_router.server.calls import EngineCalls
from smetric_router.server.client_limits import HeldBytes, Limits, Unwelcome
from smetric_router.server.connection import ClientConnection, Work
from smetric_router.server.control import build_control, is_own_path
from smetric_router.server.exact import ExactPrompts
from smetric_router.server.feeds import Feeds
from smetric_router.server.guard import Guard
from smetric_router.server.health import HealthMonitor
from smetric_router.server.http1 import RequestHead
from smetric_router.server.links import EngineLinks
from smetric_router.server.logs import log
from smetric_router.server.metrics import Metrics, Present
from smetric_router.server.origins import MODELS_PATH, Origins
from smetric_router.server.place import Place
from smetric_router.server.proxy import Proxy
from smetric_router.server.reports import LoadReports
from smetric_router.server.sharing import Sharing
from smetric_router.server.surface import OwnAnswer
from smetric_router.state.cluster import ClusterState
from smetric_router.state.exact_index import ExactIndex
from smetric_router.types import PrefillCost

CHECK_INTERVAL_S = 0.1
"""How often it is looked for who stands still."""


class RouterApp:
    """See the module."""

    def __init__(
        self, config: RouterConfig, clock: Callable[[], float] = time.monotonic, place: Place | None = None
    ) -> None:
        if not config.engines:
            raise ConfigError("no engine is configured: give --engine URL, or engines = [...] in the file")
        policies = build_policies(config.policies)
        if config.policy not in policies:
            raise ConfigError(f"policy = {config.policy!r} is not one of {', '.join(policies)}")
        self.config = config
        self._place = place = place or Place.alone(config)
        self.state = _cluster_state(config, place)
        present = Present(
            lambda: self.state.statistics(clock()),
            lambda: self._proxy.waiting,
            lambda: len(self._connections),
            lambda: self._held.count,
        )
        self.metrics = Metrics(present, multiprocess=place.counts is not None)
        self._guard = Guard(config)
        self._origins = Origins(config.cors_origins)
        self.sharing = self._make_sharing(clock) if place.shares else None
        self._clock = clock
        self._links = EngineLinks(
            connect_timeout_s=config.connect_timeout_s,
            keepalive_s=config.upstream_keepalive_s,
            clock=clock,
            tls_ca=config.engine_tls_ca,
        )
        calls = EngineCalls(self._links, config)
        self._health = HealthMonitor(self.state, self._links, calls, config, clock)
        self._reports = LoadReports(self.state, calls, config, clock)
        self._control = build_control(self.state, self.metrics, clock)
        self._prompts: ExactPrompts | None = None
        self._feeds: Feeds | None = None
        if config.index == "exact":
            self._prompts = ExactPrompts(config, lambda name: self.state.models().get(name), self.metrics.tokenised)
            self._feeds = Feeds(self.state, config.engines, config.kv_events, calls, clock, self.metrics.kv_events)
        dispatcher = Dispatcher(self.state, policies[config.policy], seed=secrets.randbits(64))
        breakers = Breakers(self.state, config, config.engines, clock)
        self._proxy = Proxy(
            config,
            dispatcher,
            policies,
            self._links,
            self._health,
            breakers,
            self._guard,
            self.metrics,
            clock,
            self._prompts,
        )
        self._limits = Limits(
            head_bytes_max=config.head_bytes_max,
            body_bytes_max=config.body_bytes_max,
            request_timeout_s=config.request_timeout_s,
            keepalive_s=config.client_keepalive_s,
            stall_s=config.client_stall_timeout_s,
        )
        self._held = HeldBytes(config.requests_bytes_max)
        self._connections: set[ClientConnection] = set()
        self._checking: asyncio.Task[None] | None = None
        self._draining = False

    def _make_sharing(self, clock: Callable[[], float]) -> Sharing:
        return Sharing(
            self.state,
            clock,
            snapshot_chunks_max=self.config.share_snapshot_chunks_max,
            token=self.config.peer_token,
            setting="\n".join((*self.config.engines, str(self.config.chunk_bytes))),
            count=self.metrics.shared,
        )

    def __repr__(self) -> str:
        return f"<RouterApp {len(self._connections)} connections, {self._proxy!r}>"

    def connection(self) -> asyncio.Protocol:
        """The protocol of a connection that was accepted."""
        if len(self._connections) >= (self.config.connections_max or _descriptors() // 2):
            self.metrics.refused_connection()
            return Unwelcome()
        made = ClientConnection(
            self._limits, self._guard.check, self._begin, self._refuse, self._connections, self._clock, self._held
        )
        made.draining = self._draining
        return made

    def _begin(self, request: RequestHead, body: bytes, client: ClientConnection) -> Work | None:
        path = request.target.partition(b"?")[0].decode("latin-1")
        if is_own_path(unquote(path) if "%" in path else path):
            return self._answer_itself(path, request, body, client)
        return self._proxy.begin(request, body, client)

    def _answer_itself(self, path: str, request: RequestHead, body: bytes, client: ClientConnection) -> Work | None:
        about_models = path.startswith(MODELS_PATH)  # which engines show to web pages, too
        if about_models and request.method == b"OPTIONS":
            client.answer(204, self._origins.permission(request), b"")
            return None
        return OwnAnswer(self._control, request, body, client, self._origins.headers(request) if about_models else [])

    def _refuse(self, client: ClientConnection, request: RequestHead | None, error: RouterError) -> None:
        request_id = self._proxy.request_id(request.headers if request is not None else [])
        self._proxy.answer_error(client, error, [(b"x-request-id", request_id)])
        self.metrics.answered("none", "none", error.status)
        log_refused(client, request, request_id, error)

    def read_keys(self) -> None:
        """Reads the file of API keys again. Raises ConfigError, and then the former ones count."""
        self._guard.read_keys()

    async def start(self) -> None:
        """Checks every engine once, and goes on in the background."""
        if self.sharing is not None:
            await self._place.begin(self.sharing)
        await self._health.start()
        self._reports.start()
        if self._feeds is not None:
            await self._feeds.start()
        self._checking = asyncio.create_task(self._check())

    async def drain(self, timeout_s: float) -> None:
        """Takes no more requests, and gives those under way so long to end."""
        self._draining = True
        for each in list(self._connections):
            each.drain()
        end_s = self._clock() + timeout_s
        while self._connections and self._clock() < end_s:
            await asyncio.sleep(CHECK_INTERVAL_S / 4)
            if self._clock() > end_s - timeout_s + 1:
                for each in list(self._connections):
                    each.drain()  # those that were accepted since, and have asked for nothing

    async def stop(self) -> None:
        """Ends all, what is under way too."""
        for each in list(self._connections):
            each.cut()
        if self._checking is not None:
            self._checking.cancel()
        await self._reports.stop()
        if self._feeds is not None:
            await self._feeds.stop()
        if self._prompts is not None:
            self._prompts.stop()
        if self.sharing is not None:
            await self.sharing.stop()
        await self._health.stop()
        self._links.close()
        while self._connections:  # noqa: ASYNC110 - each leaves in the transport's callback
            await asyncio.sleep(0)

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                self._check_once(self._clock())
            except Exception:
                log.exception("internal error")  # and the next check may do what this one has not

    def _check_once(self, now: float) -> None:
        self._proxy.check(now)
        self._links.sweep()
        for each in list(self._connections):
            each.check(now)


def _descriptors() -> int:
    """That the process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def _cluster_state(config: RouterConfig, place: Place) -> ClusterState:
    blocks_max = max(1, config.exact_blocks_max // len(config.engines))
    return ClusterState(
        config.engines,
        chunk_bytes=config.chunk_bytes,
        index_chunks_max=config.index_chunks_max,
        prefill_cost=PrefillCost(config.prefill_cost_linear, config.prefill_cost_attention),
        report_stale_s=config.report_stale_s,
        inflight_max=config.engine_inflight_max,
        slow_start_s=config.slow_start_s,
        exact=ExactIndex(blocks_max, config.kv_media) if config.index == "exact" else None,
        shared=place.counts,
        process=secrets.randbits(31),
    )
