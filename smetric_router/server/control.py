"""The router's own surface: health, metrics, models and the state in figures."""

from collections.abc import Callable

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from smetric_router.errors import UnknownInstance, UnknownModel
from smetric_router.server.logs import log
from smetric_router.server.metrics import Metrics
from smetric_router.state.cluster import ClusterState
from smetric_router.types import DrainingChanged

OWN_PATHS = frozenset(("/health", "/metrics", "/v1/models", "/docs", "/docs/oauth2-redirect", "/openapi.json"))
OWN_PREFIXES = ("/v1/models/", "/admin/")


def is_own_path(path: str) -> bool:
    """Whether the router answers itself."""
    return path in OWN_PATHS or path.startswith(OWN_PREFIXES)


def build_control(state: ClusterState, metrics: Metrics, clock: Callable[[], float]) -> FastAPI:
    """The application behind the router's own paths."""
    app = FastAPI(title="smetric-router", docs_url="/docs", redoc_url=None)

    @app.exception_handler(HTTPException)
    async def in_openai_shape(request: Request, error: HTTPException) -> Response:
        body = {"message": f"{request.url.path}: {error.detail}", "type": "invalid_request_error"}
        return _json({"error": {**body, "param": None, "code": None}}, error.status_code)

    @app.get("/health")
    async def health() -> Response:
        """200 while at least one engine can take requests."""
        instances = state.statistics(clock()).instances.values()
        healthy = sum(instance.health == "up" and not instance.draining for instance in instances)
        return _json(
            {"status": "ok" if healthy else "no healthy engine", "healthy": healthy, "engines": len(instances)},
            200 if healthy else 503,
        )

    @app.get("/metrics")
    async def prometheus() -> Response:
        """For a Prometheus scraper."""
        return Response(await metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> Response:
        """The models of all engines, each as the first engine describes it."""
        return _json({"object": "list", "data": [msgspec.Raw(entry) for entry in state.models().values()]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """One model."""
        entry = state.models().get(model)
        if entry is None:
            error = UnknownModel(f"no instance serves the model {model!r}", param="model")
            return Response(error.body(), error.status, media_type="application/json")
        return Response(entry, media_type="application/json")

    @app.get("/admin/state")
    async def admin_state() -> Response:
        """What the router knows, in figures."""
        return _json(state.statistics(clock()).as_dict())

    @app.post("/admin/drain")
    async def drain(engine: str) -> Response:
        """Gives the engine no new requests; those under way go on."""
        return _set_draining(engine, True)

    @app.post("/admin/resume")
    async def resume(engine: str) -> Response:
        """Gives the engine requests again."""
        return _set_draining(engine, False)

    def _set_draining(engine: str, draining: bool) -> Response:
        engine = engine.rstrip("/")
        known = state.statistics(clock()).instances
        if engine not in known:
            error = UnknownInstance(f"no engine {engine!r}; known: {', '.join(known)}", param="engine")
            return Response(error.body(), error.status, media_type="application/json")
        state.apply(DrainingChanged(engine, draining), clock())
        log.info("instance draining" if draining else "instance resumed", extra={"fields": {"instance": engine}})
        return _json({"engine": engine, "draining": draining, "inflight": known[engine].inflight})

    return app


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
