"""The router's own paths."""

import pytest

from ..conftest import until
from ..raw_engine import answer_to, request


async def body_of(router, path):
    return (await router.get(path)).json()


async def test_models_are_merged_with_all_fields(engines, route):
    (one,) = await engines(models=("fake", "one"))
    (other,) = await engines(models=("fake", "other/with-slash"))
    one.models[0]["odd"] = {"kept": [1.0, None]}
    router = await route(one, other)
    listed = await body_of(router, "/v1/models")
    assert listed == {"object": "list", "data": [*one.models, other.models[1]]}
    assert await body_of(router, "/v1/models/other/with-slash") == other.models[1]
    answer = await router.get("/v1/models/none")
    assert answer.status == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_models_decide_where_a_request_may_go(engines, route):
    (one,) = await engines(models=("a", "b"))
    (other,) = await engines(models=("b",))
    router = await route(one, other, models_interval_s=0.05, health_interval_s=0.05)
    for _ in range(4):
        assert (await router.chat("x", model="a")).headers["x-smetric-instance"] == one.url
    answer = await router.chat("x", model="c")
    assert answer.status == 404
    assert answer.json() == {
        "error": {
            "message": "no instance serves the model 'c'; known models: a, b", "type": "invalid_request_error",
            "param": "model", "code": "model_not_found",
        }
    }  # fmt: skip
    other.models.append({"id": "c"})
    await until(lambda: "c" in router.state.models())
    assert (await router.chat("x", model="c")).headers["x-smetric-instance"] == other.url


async def test_an_engine_without_a_model_list_may_serve_any(engines, route):
    (engine,) = await engines()
    engine.models = None  # type: ignore[assignment]
    router = await route(engine)
    assert (await router.chat("x", model="whatever")).status == 200
    assert await body_of(router, "/v1/models") == {"object": "list", "data": []}


async def test_health_state_docs_and_unknown_paths(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    assert await body_of(router, "/health") == {"status": "ok", "healthy": 1, "engines": 1}
    state = await body_of(router, "/admin/state")
    assert state["instances"][engine.url]["inflight"] == 0
    assert state["instances"][engine.url]["models"] == ["fake"]
    assert (await router.get("/docs")).status == 200
    assert "/admin/state" in (await body_of(router, "/openapi.json"))["paths"]
    answer = await router.get("/admin/nothing")
    assert answer.status == 404
    assert answer.json()["error"]["message"] == "/admin/nothing: Not Found"
    assert engine.requests == [], "the router's own paths never reach an engine"


PAGE = "origin: https://page.example\r\nconnection: close\r\n"


@pytest.mark.parametrize(
    ("allowed", "named"),
    [
        (("*",), b"*"),
        (("https://a", "https://page.example"), b"https://page.example"),
        (("https://a",), b""),
        ((), b""),
    ],
)
async def test_web_pages_read_the_list_of_models_and_errors(engines, route, allowed, named):
    (engine,) = await engines()
    router = await route(engine, cors_origins=allowed, api_keys=("k",))
    key = "authorization: Bearer k\r\n"
    line = b"access-control-allow-origin: " + named + b"\r\n"

    async def answered(method: str, path: str, headers: str) -> bytes:
        return await answer_to(router.url, request(b"", method=method, path=path, headers=headers))

    asking = "access-control-request-method: GET\r\naccess-control-request-headers: authorization, x-y\r\n"
    permission = await answered("OPTIONS", "/v1/models", PAGE + asking)
    assert permission.startswith(b"HTTP/1.1 204 ")
    assert (b"access-control-allow-headers: authorization, x-y\r\n" in permission) is bool(named)
    for answer in (
        permission,
        await answered("GET", "/v1/models", PAGE + key),
        await answered("GET", "/v1/models/fake", PAGE + key),
        await answered("GET", "/v1/models", PAGE),
        await answered("POST", "/v1/chat/completions", PAGE + key),
    ):
        assert (line in answer) is bool(named)
        assert (b"vary: Origin\r\n" in answer) is (named != b"*")
    assert b"access-control" not in await answered("GET", "/v1/models", key + "connection: close\r\n")
    assert b"access-control" not in await answered("GET", "/health", PAGE)


async def test_an_unknown_model_is_told_of_some_that_are_known(engines, route):
    (engine,) = await engines(models=tuple(f"model-{at:03}" for at in range(500)))
    router = await route(engine)
    answer = await router.chat("x", model="none")
    assert (answer.status, len(answer.body) < 1000) == (404, True)
    assert "known models: model-000, model-001" in answer.json()["error"]["message"]
    assert answer.json()["error"]["message"].endswith("model-019 and 480 more")
