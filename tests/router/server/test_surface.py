"""The router's own paths."""

from ..conftest import until


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
