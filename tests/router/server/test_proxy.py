"""The proxy path over real sockets: what is passed on, unchanged, and what is added."""

import asyncio
import io
import json

import aiohttp
import pytest
from aiohttp import web

from smetric_router.policies.registry import POLICIES

from ..conftest import until
from ..fake_engine import send_event, start_stream, status

ODD_BODY = (
    b'{ "model" : "x", "model":"fake",\r\n\t"messages" : [ {"role":"user","content":"\\u00e9 \xc3\xa9",'
    b'"reasoning":"r","reasoning_content":"c"} ], "chat_template_kwargs":{"a":1}, "unknown_field" : 1e400 , "n":1.0 } '
)


async def test_body_and_headers_are_passed_on_as_they_are(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    headers = {
        "content-type": "application/json", "authorization": "Bearer k", "traceparent": "00-1", "x-own": "J\u00fcrgen",
        "cookie": "a=b", "accept": "text/x", "user-agent": "me", "x-request-id": "id-1",
        "connection": "keep-alive, x-hop", "x-hop": "1", "te": "trailers", "keep-alive": "1",
        "proxy-authorization": "secret",
    }  # fmt: skip
    url = f"{router.url}/v1/chat/completions?a=%2F&b=c%20d"
    async with router.client.post(aiohttp.client.URL(url, encoded=True), data=ODD_BODY, headers=headers) as answer:
        assert answer.status == 200
        assert answer.headers["x-request-id"] == "id-1"
        assert answer.headers["x-smetric-instance"] == engine.url
        assert answer.headers["x-smetric-reason"] == "first-turn"
    assert engine.bodies == [ODD_BODY]
    request = engine.requests[0]
    assert request.raw_path == "/v1/chat/completions?a=%2F&b=c%20d"
    got = {name.lower(): value for name, value in request.raw_headers}
    for name in ("content-type", "authorization", "traceparent", "cookie", "accept", "user-agent", "x-request-id"):
        assert got[name.encode()].decode() == headers[name]
    assert got[b"x-own"] == "J\u00fcrgen".encode()
    assert got[b"host"] == engine.url.removeprefix("http://").encode()
    assert not {b"x-hop", b"te", b"keep-alive", b"proxy-authorization", b"transfer-encoding"} & got.keys()


async def test_whatever_an_engine_understands_is_passed_on_and_its_conversation_stays(engines, route):
    both = await engines(2)
    router = await route(*both)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBOR" * 600}}
    messages = [
        {"role": "latest_reminder", "content": "x" * 2000},
        {"role": "user", "content": [{"type": "text", "text": "what is it"}, image]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a cat"}]},
    ]
    more = {
        "logprobs": True, "top_logprobs": 3, "stream_options": {"include_usage": True}, "chat_template_kwargs": {"a": 1},
        "top_k": 3, "guided_json": {"type": "object"}, "kv_transfer_params": {"x": [1.0]}, "tools": [{"type": "function"}],
    }  # fmt: skip
    seen = []
    for count in (2, 4):
        body = json.dumps({"model": "fake", "messages": messages[:count], "stream": True, **more}, indent=1).encode()
        async with router.client.post(f"{router.url}/v1/chat/completions", data=io.BytesIO(body)) as answer:
            assert answer.status == 200
            seen.append((answer.headers["x-smetric-instance"], answer.headers["x-smetric-reason"]))
        assert body in [sent for engine in both for sent in engine.bodies], "to the byte"
    assert seen == [(seen[0][0], "first-turn"), (seen[0][0], "sticky")]


async def test_an_engine_cannot_say_that_another_one_answered(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    forged = {"x-smetric-instance": "http://other:1", "x-smetric-reason": "magic", "x-request-id": "7"}
    engine.behaviour = status(200, **forged)
    answer = await router.chat("x", headers={"x-request-id": "mine"})
    got = [(name.lower(), value) for name, value in answer.headers.items() if name.lower() in forged]
    assert sorted(got) == [
        ("x-request-id", "mine"), ("x-smetric-instance", engine.url), ("x-smetric-reason", "first-turn"),
    ]  # fmt: skip


async def test_a_request_id_is_made_where_there_is_none(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    answer = await router.chat("x")
    assert len(answer.headers["x-request-id"]) == 32
    assert engine.requests[0].headers["x-request-id"] == answer.headers["x-request-id"]
    assert answer.headers.getall("x-request-id") == [answer.headers["x-request-id"]]


async def test_nothing_is_added_to_a_bare_request(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    host = router.url.removeprefix("http://")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    writer.write(b"GET /version HTTP/1.1\r\nHost: h\r\n\r\n")
    assert b"200" in await reader.readline()
    writer.close()
    assert sorted(name.lower() for name in engine.requests[0].headers) == ["host", "x-request-id"]


async def test_chunks_are_passed_on_as_they_arrive(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    go_on = asyncio.Event()

    async def behave(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        for word in ("one", "two", "three"):
            await send_event(response, {"word": word})
            await go_on.wait()
            go_on.clear()
        await response.write(b"data: [DONE]\n\n")
        return response

    engine.behaviour = behave
    body = {"messages": [], "stream": True}
    async with router.client.post(f"{router.url}/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        for word in ("one", "two", "three"):
            chunk, _ = await answer.content.readchunk()
            assert chunk == b'data: {"word": "%s"}\n\n' % word.encode()
            go_on.set()
        assert await answer.read() == b"data: [DONE]\n\n"


async def test_compressed_answers_and_cookies_stay_as_they_are(engines, route):
    (engine,) = await engines()
    router = await route(engine)

    async def behave(request: web.Request) -> web.StreamResponse:
        headers = {
            "content-encoding": "gzip",
            "set-cookie": "a=b; Path=/",
            "x-odd": "kept",
            "connection": "x-odd2",
            "x-odd2": "1",
        }
        return web.Response(body=b"\x1f\x8bnot really", headers=headers, content_type="application/json")

    engine.behaviour = behave
    for _ in range(2):
        async with router.client.post(f"{router.url}/v1/other", data=b"x") as answer:
            assert await answer.read() == b"\x1f\x8bnot really"
            assert answer.headers["content-encoding"] == "gzip"
            assert answer.headers["set-cookie"] == "a=b; Path=/"
            assert answer.headers["x-odd"] == "kept"
            assert "x-odd2" not in answer.headers
    assert "cookie" not in engine.requests[1].headers


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"])
async def test_other_paths_and_methods_are_passed_through(engines, route, method):
    (engine,) = await engines()
    router = await route(engine)
    body = b"--not json--" if method in ("POST", "PUT", "PATCH") else None
    async with router.client.request(method, f"{router.url}/some/where?q=1", data=body) as answer:
        assert answer.status == 200
        assert answer.headers["x-smetric-instance"] == engine.url
    assert (engine.requests[0].method, engine.requests[0].path_qs) == (method, "/some/where?q=1")
    assert engine.bodies == [body or b""]


async def test_other_paths_count_as_load(engines, route):
    one, other = await engines(2)
    router = await route(one, other)
    release = asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.Response()

    one.behaviour = other.behaviour = wait
    calls = [asyncio.create_task(router.get(f"/v1/audio?n={n}")) for n in range(10)]
    await until(lambda: one.running + other.running == 10)
    assert (one.running, other.running) == (5, 5)
    assert router.inflight() == 10
    release.set()
    await asyncio.gather(*calls)


@pytest.mark.parametrize("code", [400, 401, 404, 422, 500, 504])
async def test_engine_errors_are_passed_on_and_not_retried(engines, route, code):
    one, other = await engines(2)
    router = await route(one, other)
    one.behaviour = other.behaviour = status(code, **{"retry-after": "7"})
    for _ in range(5):
        answer = await router.chat("x")
        assert answer.status == code
        assert answer.json() == {"error": {"message": f"engine says {code}"}}
        assert answer.headers["retry-after"] == "7"
    assert len(one.requests) + len(other.requests) == 5
    assert router.healthy() == 2, "an engine that answers is alive"
    chunks = [each.chunks for each in router.state.statistics(0).instances.values()]
    assert chunks == [0, 0], "a refused prompt is cached nowhere"


async def test_a_full_engine_is_replaced_while_another_has_capacity(engines, route):
    one, other = await engines(2)
    router = await route(one, other, breaker_failures_min=1)
    one.behaviour = status(429, **{"retry-after": "7"})
    for _ in range(4):
        answer = await router.chat("x")
        assert (answer.status, answer.headers["x-smetric-instance"]) == (200, other.url)
    assert one.requests
    one.requests.clear()
    other.requests.clear()  # from here on each of them has to say so once
    other.behaviour = one.behaviour
    for _ in range(5):
        answer = await router.chat("x")
        assert (answer.status, answer.headers["retry-after"]) == (429, "7")
        assert answer.json() == {"error": {"message": "engine says 429"}}
    sent = len(one.requests) + len(other.requests)
    assert 5 <= sent <= 6, "nobody is asked instead who has said that it is full"
    assert router.healthy() == 2
    statistics = router.state.statistics(0).instances.values()
    assert not any(each.breaker_open for each in statistics), "a 4xx never counts against an instance"
    text = (await router.get("/metrics")).body.decode()
    assert f'smetric_router_retries_total{{cause="status_429",engine="{other.url}"}}' in text


@pytest.mark.parametrize(("headers", "asked"), [({"retry-after": "7"}, 1), ({}, 2)])
async def test_an_engine_out_of_order_is_replaced_whatever_others_said_and_a_full_one_is_not(
    engines, route, headers, asked
):
    one, other = await engines(2)
    router = await route(one, other, breaker_failures_min=0, health_interval_s=60)
    one.behaviour = other.behaviour = status(429, **{"retry-after": "7"})
    await router.chat("x")
    assert len(one.requests) == len(other.requests) == 1
    one.behaviour = other.behaviour = status(503, **headers)
    answer = await router.chat("x")
    assert (answer.status, answer.headers.get("retry-after")) == (503, headers.get("retry-after"))
    assert len(one.requests) + len(other.requests) == 2 + asked


async def test_large_bodies(engines, route):
    (engine,) = await engines()
    router = await route(engine, body_bytes_max=5_000_000)
    text = "x" * 4_000_000
    assert (await router.chat(text)).status == 200
    assert text.encode() in engine.bodies[0]
    answer = await router.chat("x" * 5_000_000)
    assert answer.status == 413
    assert answer.json()["error"]["code"] == "request_too_large"

    async def pieces():
        for _ in range(6):
            yield b"x" * 1_000_000

    async with router.client.post(f"{router.url}/v1/completions", data=pieces()) as answer:
        assert answer.status == 413
    assert len(engine.requests) == 1


async def test_malformed_json_is_refused_with_its_position(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    for path in ("/v1/chat/completions", "/v1/completions"):
        async with router.client.post(router.url + path, data=b'{"model": "fake", x') as answer:
            assert answer.status == 400
            error = (await answer.json())["error"]
        assert error == {
            "message": "the body is not valid JSON: JSON is malformed: object keys must be strings (byte 18)",
            "type": "invalid_request_error", "param": None, "code": "bad_request",
        }  # fmt: skip
    assert engine.requests == []


async def test_compressed_request_bodies_are_the_engines_to_read(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    engine.behaviour = status(200)
    headers = {"content-encoding": "x-own"}
    async with router.client.post(f"{router.url}/v1/chat/completions", data=b"\x00\x01", headers=headers) as answer:
        assert answer.status == 200
    assert engine.bodies == [b"\x00\x01"]


async def test_policy_and_turn_of_one_request(engines, route):
    one, other = await engines(2)
    router = await route(one, other)
    chosen = [
        (await router.chat("q" * 2000, headers={"x-smetric-policy": "round-robin"})).headers["x-smetric-instance"]
        for _ in range(4)
    ]
    assert chosen == [one.url, other.url, one.url, other.url]
    answer = await router.chat("q" * 2000, headers={"x-smetric-turn": "1"})
    assert answer.headers["x-smetric-reason"] == "sticky"
    for headers, message in (
        ({"x-smetric-policy": "best"}, f"unknown policy 'best'; known: {', '.join(POLICIES)}"),
        ({"x-smetric-turn": "one"}, "the turn must be a whole number from 0 on, not 'one'"),
    ):
        answer = await router.chat("x", headers=headers)
        assert answer.status == 400
        assert answer.json()["error"]["message"] == message


async def test_a_session_is_sticky_and_metrics_say_so(engines, route):
    both = await engines(2)
    router = await route(*both)
    first = await router.chat("question " * 300)
    home = first.headers["x-smetric-instance"]
    follow_up = await router.chat("question " * 300, "answer", "next", stream=True)
    assert follow_up.headers["x-smetric-instance"] == home
    assert follow_up.headers["x-smetric-reason"] == "sticky"
    assert follow_up.headers["x-request-id"]
    body = follow_up.body
    assert body.endswith(b"data: [DONE]\n\n") and b'"cached_tokens"' in body
    text = (await router.get("/metrics")).body.decode()
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert figures[f'smetric_router_requests_total{{engine="{home}",policy="smetric",status="200"}}'] == "2.0"
    assert figures['smetric_router_decisions_total{policy="smetric",reason="sticky"}'] == "1.0"
    predicted = float(figures[f'smetric_router_hit_tokens_total{{engine="{home}",kind="predicted"}}'])
    actual = float(figures[f'smetric_router_hit_tokens_total{{engine="{home}",kind="actual"}}'])
    assert actual > 600 and abs(predicted - actual) < 30
    assert figures[f'smetric_router_ttft_seconds_count{{engine="{home}"}}'] == "2.0"
    assert figures[f'smetric_router_inflight_requests{{engine="{home}"}}'] == "0.0"
    assert all("request_id" not in name for name in figures)
