"""Anthropic's interface, tokenizing, and other paths, through the router."""

import asyncio
import json

import pytest
from aiohttp import web

from ..conftest import until
from ..fake_engine import start_stream, status
from .test_failures import stall

USAGE = {"input_tokens": 20, "cache_read_input_tokens": 30, "output_tokens": 7}


async def answer_messages(request: web.Request) -> web.StreamResponse:
    """As vLLM answers `/v1/messages` and `/v1/messages/count_tokens`."""
    asked = json.loads(await request.read())
    if request.path.endswith("count_tokens"):
        return web.json_response({"input_tokens": 50})
    if not asked.get("stream"):
        return web.json_response({"type": "message", "role": "assistant", "content": [], "usage": USAGE})
    response = await start_stream(request)
    for event in (
        {"type": "message_start", "message": {"usage": {**USAGE, "output_tokens": 0}}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}},
        {"type": "message_stop"},
    ):
        await response.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
    return response


async def post(router, path: str, body: object):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with router.client.post(router.url + path, data=data) as answer:
        return answer.status, answer.headers, await answer.read()


def conversation(*contents: str, **fields: object) -> dict[str, object]:
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]
    return {"model": "fake", "max_tokens": 9, "system": "s" * 3000, "messages": turns, **fields}


@pytest.mark.parametrize("stream", [False, True])
async def test_conversations_are_placed_and_their_usage_read(engines, route, stream):
    both = await engines(2)
    router = await route(*both)
    for engine in both:
        engine.behaviour = answer_messages
    _, first, _ = await post(router, "/v1/messages", conversation("a", stream=stream))
    code, second, body = await post(router, "/v1/messages", conversation("a", "b", "c", stream=stream))
    assert (code, second["x-smetric-reason"]) == (200, "sticky")
    assert second["x-smetric-instance"] == first["x-smetric-instance"]
    assert (b"message_stop" in body) == stream
    text = (await router.get("/metrics")).body.decode()
    home = first["x-smetric-instance"]
    assert f'smetric_router_prompt_tokens_total{{engine="{home}"}} 100.0' in text
    assert f'smetric_router_hit_tokens_total{{engine="{home}",kind="actual"}} 60.0' in text
    assert (f'smetric_router_tpot_seconds_count{{engine="{home}"}} 2.0' in text) == stream


async def test_count_tokens_and_others_are_passed_through(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    engine.behaviour = answer_messages
    code, headers, body = await post(router, "/v1/messages/count_tokens", conversation("a"))
    assert (code, json.loads(body), headers["x-smetric-instance"]) == (200, {"input_tokens": 50}, engine.url)
    engine.behaviour = None
    for path in ("/tokenize", "/detokenize", "/v1/embeddings", "/v1/responses", "/rerank"):
        code, headers, body = await post(router, path, {"model": "fake", "prompt": "x"})
        assert (code, json.loads(body)["path"], headers["x-smetric-instance"]) == (200, path, engine.url)
        code, _, _ = await post(router, path, {"model": "none", "prompt": "x"})
        assert code == 404, "the model decides where it may go"


async def test_the_routers_own_errors_have_anthropics_shape_there(engines, route):
    (engine,) = await engines()
    router = await route(engine, body_bytes_max=5000)
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        code, _, body = await post(router, path, conversation("x" * 9000))
        assert (code, json.loads(body)["error"]["type"]) == (413, "request_too_large")
        code, _, body = await post(router, path, {**conversation("x"), "model": "none"})
        assert (code, json.loads(body)["type"]) == (404, "error")
        assert json.loads(body)["error"]["type"] == "not_found_error"
    code, _, body = await post(router, "/v1/messages", b"{")
    assert code == 400
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    engine.behaviour = status(400)
    code, _, body = await post(router, "/v1/messages", conversation("x"))
    assert json.loads(body) == {"error": {"message": "engine says 400"}}, "and the engine's stay as they are"
    await engine.stop()
    code, _, body = await post(router, "/v1/messages", conversation("x"))
    assert code in (502, 503)
    assert json.loads(body)["error"]["type"] in ("api_error", "overloaded_error")


async def test_a_stream_that_stalls_ends_with_anthropics_error_event(engines, route):
    (engine,) = await engines()
    router = await route(engine, stream_stall_timeout_s=0.1)
    engine.behaviour = stall
    _, _, body = await post(router, "/v1/messages", conversation("x", stream=True))
    name, data = body.split(b"\n\n")[1].split(b"\n")
    assert name == b"event: error"
    error = json.loads(data.removeprefix(b"data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "timeout_error")


async def test_tokenizing_counts_as_load(engines, route):
    one, other = await engines(2)
    router = await route(one, other)
    go_on = asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return web.json_response({})

    one.behaviour = other.behaviour = wait
    calls = [asyncio.create_task(post(router, "/tokenize", {"model": "fake"})) for _ in range(6)]
    await until(lambda: (one.running, other.running) == (3, 3))
    go_on.set()
    await asyncio.gather(*calls)


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache?x=1", "/sleep?level=1"])
async def test_a_cache_that_was_cleared_holds_nothing(engines, route, path):
    (engine,) = await engines()
    router = await route(engine)
    await router.chat("x" * 5000)
    assert (await router.chat("x" * 5000, "y", "z")).headers["x-smetric-reason"] == "sticky"
    engine.behaviour = status(500)
    assert (await post(router, path, b""))[0] == 500
    engine.behaviour = None
    assert router.state.statistics(0).instances[engine.url].chunks > 5, "it was not"
    assert (await post(router, path, b""))[0] == 200
    assert router.state.statistics(0).instances[engine.url].chunks == 0
