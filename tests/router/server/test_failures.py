"""What happens when a client goes away, or an engine does."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web

from ..conftest import until
from ..fake_engine import FakeEngine, break_stream, drop, hang, send_event, start_stream, status


async def stall(request: web.Request) -> web.StreamResponse:
    """A stream that stops after its first event."""
    response = await start_stream(request)
    await send_event(response, {"choices": [{"delta": {"content": "x"}}]})
    return await hang(request)


async def headers_only(request: web.Request) -> web.StreamResponse:
    """An engine that sends the head of the stream and then computes the prompt."""
    await start_stream(request)
    return await hang(request)


@pytest.mark.parametrize(("behaviour", "stream"), [(stall, True), (hang, True), (headers_only, True), (hang, False)])
async def test_a_client_that_goes_away_stops_the_engine(engines, route, behaviour, stream):
    (engine,) = await engines()
    router = await route(engine)
    engine.behaviour = behaviour
    before = asyncio.all_tasks()
    body = {"messages": [{"role": "user", "content": "x"}], "stream": stream}

    async def ask() -> None:
        async with router.client.post(f"{router.url}/v1/chat/completions", json=body) as answer:
            async for _ in answer.content:
                pass

    call = asyncio.create_task(ask())
    await until(lambda: engine.running == 1)
    assert router.inflight() == 1
    call.cancel()
    async with asyncio.timeout(1):
        await until(lambda: engine.running == 0)
    assert engine.aborted == 1
    await until(lambda: router.inflight() == 0)
    await until(lambda: not [task for task in asyncio.all_tasks() - before if "disconnect" in repr(task)])
    text = (await router.get("/metrics")).body.decode()
    assert 'status="499"} 1.0' in text


async def test_a_client_that_goes_away_while_sending(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    _, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    assert (await router.chat("x")).status == 200
    assert len(engine.requests) == 1


async def engine_dead(_request: web.Request) -> web.StreamResponse:
    """vLLM's web server while its engine process is gone, as recorded from version 0.32."""
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return web.json_response({"error": error}, status=500)


@pytest.mark.parametrize("behaviour", [status(502), status(503), drop, engine_dead])
async def test_one_retry_elsewhere(engines, route, behaviour):
    one, other = await engines(2)
    router = await route(one, other)
    one.behaviour = behaviour
    for _ in range(4):
        answer = await router.chat("x")
        assert answer.status == 200
        assert answer.headers["x-smetric-instance"] == other.url
    assert one.bodies
    assert set(one.bodies) == set(other.bodies)
    assert "smetric_router_retries_total" in (await router.get("/metrics")).body.decode()


async def test_a_stream_that_breaks_before_its_first_byte_is_retried(engines, route):
    one, other = await engines(2)
    router = await route(one, other)

    async def behave(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        assert request.transport is not None
        request.transport.close()
        return response

    one.behaviour = behave
    answer = await router.chat("x", stream=True)
    assert answer.headers["x-smetric-instance"] == other.url
    assert answer.body.endswith(b"[DONE]\n\n")


async def test_retries_end(engines, route):
    three = await engines(3)
    router = await route(*three)
    for engine in three:
        engine.behaviour = status(503)
    answer = await router.chat("x")
    assert answer.status == 503
    assert answer.json() == {"error": {"message": "engine says 503"}}
    assert sorted(len(engine.requests) for engine in three) == [0, 1, 1]
    for engine in three:
        engine.behaviour = drop
    answer = await router.chat("x")
    assert answer.status == 502
    assert answer.json()["error"]["code"] == "upstream_disconnected"
    assert sum(len(engine.requests) for engine in three) == 4


async def test_an_error_of_the_engine_itself_is_passed_on(engines, route):
    one, other = await engines(2)
    router = await route(one, other)
    one.behaviour = other.behaviour = status(500)
    answer = await router.chat("x")
    assert answer.status == 500
    assert len(one.requests) + len(other.requests) == 1


async def test_never_twice_on_one_instance(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    engine.behaviour = status(503, **{"x-its": "own"})
    answer = await router.chat("x")
    assert (answer.status, answer.headers["x-its"]) == (503, "own")
    assert len(engine.requests) == 1


@pytest.mark.parametrize("code", [429, 502, 503])
async def test_not_even_a_session_is_tried_twice_where_it_is_at_home(engines, route, code):
    """All that a policy knows speaks for the instance that has just failed."""
    one, other = await engines(2)
    router = await route(one, other, health_interval_s=60, breaker_failures_min=0)
    home = (await router.chat("question " * 500)).headers["x-smetric-instance"]
    failing, spare = (one, other) if home == one.url else (other, one)
    failing.behaviour = status(code)
    failing.requests.clear()
    answer = await router.chat("question " * 500, "answer", "next")
    assert (answer.status, answer.headers["x-smetric-instance"]) == (200, spare.url)
    assert len(failing.requests) == 1


async def test_a_broken_stream_ends_with_an_error_event(engines, route):
    one, other = await engines(2)
    router = await route(one, other)
    one.behaviour = other.behaviour = break_stream
    answer = await router.chat("x", stream=True)
    events = answer.body.split(b"\n\n")
    assert json.loads(events[0].removeprefix(b"data: ")) == {"choices": [{"delta": {"content": "x"}}]}
    error = json.loads(events[1].removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == ("upstream_disconnected", "server_error")
    assert events[2:] == [b""], "and no [DONE]"
    await until(lambda: router.inflight() == 0)
    assert len(one.requests) + len(other.requests) == 1, "no retry after the first byte"


async def test_a_stream_that_breaks_within_an_event(engines, route):
    (engine,) = await engines()
    router = await route(engine)

    async def behave(request: web.Request) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(b'data: {"half')
        assert request.transport is not None
        request.transport.close()
        return response

    engine.behaviour = behave
    events = (await router.chat("x", stream=True)).body.split(b"\n\n")
    assert events[0] == b'data: {"half'
    assert "error" in json.loads(events[1].removeprefix(b"data: "))


async def test_a_broken_answer_of_another_kind_is_cut_off(engines, route):
    (engine,) = await engines()
    router = await route(engine)

    async def behave(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": "100"})
        await response.prepare(request)
        await response.write(b"{")
        assert request.transport is not None
        request.transport.close()
        return response

    engine.behaviour = behave
    with pytest.raises(aiohttp.ClientPayloadError):
        await router.chat("x")


@pytest.mark.slow
async def test_a_dead_engine_is_left_out_and_comes_back_within_two_seconds(engines, route):
    one, other = await engines(2)
    router = await route(one, other, health_interval_s=1.0, health_recheck_s=0.5)
    long = "question " * 500
    assert {(await router.chat(long)).headers["x-smetric-instance"] for _ in range(2)} == {one.url, other.url}
    await one.stop()
    for _ in range(4):
        answer = await router.chat(long)
        assert (answer.status, answer.headers["x-smetric-instance"]) == (200, other.url)
    assert router.healthy() == 1
    statistics = (await router.get("/admin/state")).json()
    assert statistics["instances"][one.url]["health"] == "down"
    assert "no connection" in statistics["instances"][one.url]["cause"]
    await one.start()
    async with asyncio.timeout(2):
        await until(lambda: router.healthy() == 2)
    statistics = (await router.get("/admin/state")).json()
    assert statistics["instances"][one.url]["chunks"] == 0, "its cache is gone"
    assert {(await router.chat("x")).headers["x-smetric-instance"] for _ in range(2)} == {one.url, other.url}


async def test_sessions_of_a_dead_engine_move_and_stay_moved(engines, route):
    one, other = await engines(2)
    router = await route(one, other)
    conversation = ["question " * 500]
    home = (await router.chat(*conversation)).headers["x-smetric-instance"]
    dead = one if home == one.url else other
    await dead.stop()
    conversation += ["answer", "next"]
    moved = (await router.chat(*conversation)).headers["x-smetric-instance"]
    assert moved != home
    await dead.start()
    await until(lambda: router.healthy() == 2)
    conversation += ["answer", "next"]
    answer = await router.chat(*conversation)
    assert (answer.headers["x-smetric-instance"], answer.headers["x-smetric-reason"]) == (moved, "sticky")


async def test_no_healthy_engine(engines, route, caplog):
    (engine,) = await engines()
    await engine.stop()
    router = await route(engine)
    answer = await router.chat("x")
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "no_instance"
    assert (await router.get("/health")).status == 503
    warnings = [record for record in caplog.records if record.getMessage() == "instance down"]
    assert [record.fields["instance"] for record in warnings] == [engine.url]  # type: ignore[attr-defined]
    await engine.start()
    await until(lambda: router.healthy() == 1)
    assert (await router.chat("x")).status == 200
    assert (await router.get("/health")).status == 200


@pytest.mark.slow
async def test_an_engine_that_says_it_is_ill(engines, route):
    one, other = await engines(2)
    router = await route(one, other)
    one.health_status = 503
    await until(lambda: router.healthy() == 1)
    assert {(await router.chat("x")).headers["x-smetric-instance"] for _ in range(3)} == {other.url}
    one.health_status = 200
    await until(lambda: router.healthy() == 2)


@pytest.mark.slow
async def test_an_engine_that_does_not_answer_its_health_check(engines, route, caplog):
    (engine,) = await engines()
    router = await route(engine, health_timeout_s=0.1, health_interval_s=0.05, health_failures_max=3)
    checks = 0
    answering = engine._health

    async def slow(request: web.Request) -> web.Response:
        nonlocal checks
        checks += 1
        if checks == 1:
            await asyncio.Event().wait()
        return await answering(request)

    await engine.stop()
    engine._health = slow  # type: ignore[method-assign]
    await until(lambda: router.healthy() == 0)
    await engine.start()
    await until(lambda: router.healthy() == 1)
    caplog.clear()
    checks = 0
    await until(lambda: checks >= 3)
    assert "instance down" not in caplog.messages, "one late answer is no death"


async def test_garbage_from_an_engine(engines, route):
    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"\x00\xffSSH-2.0 nonsense\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(garbage, "127.0.0.1", 0)
    (engine,) = await engines()
    router = await route(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", engine)
    assert router.healthy() == 1
    assert (await router.chat("x")).status == 200
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    "garbage", [b"\x00\x01\x02\x03\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n"]
)
async def test_garbage_from_a_client(engines, route, garbage):
    (engine,) = await engines()
    router = await route(engine)
    _, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
    writer.write(garbage)
    await writer.drain()
    writer.close()
    assert (await router.chat("x")).status == 200


async def test_a_connection_that_dies_is_no_reason_to_leave_an_engine(engines, route):
    one, other = await engines(2)
    router = await route(one, other)
    conversation = ["question " * 500]
    home = (await router.chat(*conversation)).headers["x-smetric-instance"]
    engine: FakeEngine = one if home == one.url else other
    engine.behaviour = drop
    conversation += ["answer", "next"]
    assert (await router.chat(*conversation)).status == 200
    assert router.healthy() == 2
