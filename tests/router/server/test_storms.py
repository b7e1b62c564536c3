"""Many clients that leave at once, clients that are slow on purpose, and bytes that mean nothing."""

import asyncio
import io
import json
import random
import time

import pytest
from aiohttp import web

from ..conftest import until
from ..fake_engine import hang, send_event, start_stream
from .test_failures import stall

BODY = json.dumps({"model": "fake", "messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY


async def connect(router) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))


async def endless(request: web.Request) -> web.StreamResponse:
    response = await start_stream(request)
    while True:
        await send_event(response, {"x": "y" * 100_000})


async def exchange(router, data: bytes, *, end: bool = False) -> bytes:
    """All that comes back, until the router closes."""
    reader, writer = await connect(router)
    writer.write(data)
    if end:
        writer.write_eof()
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", [hang, stall])
async def test_a_thousand_clients_leave_at_once(engines, route, behaviour):
    engine, other = await engines(2)
    router = await route(engine, other)
    engine.behaviour = other.behaviour = behaviour
    writers = []
    for _ in range(10):
        for _, writer in await asyncio.gather(*(connect(router) for _ in range(100))):
            writer.write(POST)
            writers.append(writer)
    await until(lambda: engine.running + other.running == 1000, 30)
    assert router.inflight() == 1000
    for writer in writers:
        writer.transport.abort()
    async with asyncio.timeout(5):  # a second for the router, the rest for the fakes in this process
        await until(lambda: router.inflight() == 0)
        await until(lambda: engine.running + other.running == 0)
    assert engine.aborted + other.aborted == 1000
    engine.behaviour = other.behaviour = None
    assert (await router.chat("x")).status == 200
    router.state.check()


@pytest.mark.slow
async def test_more_than_a_thousand_at_once_are_all_answered(engines, route):
    engine, other = await engines(2)
    router = await route(engine, other)
    go_on = asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return web.json_response({})

    engine.behaviour = other.behaviour = wait
    readers = []
    for _ in range(11):
        for reader, writer in await asyncio.gather(*(connect(router) for _ in range(100))):
            writer.write(POST)
            readers.append((reader, writer))
    await until(lambda: engine.running + other.running == 1100, 30)
    assert engine.running == other.running
    go_on.set()
    answers = await asyncio.wait_for(asyncio.gather(*(reader.readline() for reader, _ in readers)), 30)
    assert answers == [b"HTTP/1.1 200 OK\r\n"] * 1100
    for _, writer in readers:
        writer.transport.abort()


async def test_a_client_that_ends_its_side_has_left(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    engine.behaviour = hang
    _, writer = await connect(router)
    writer.write(POST)
    await until(lambda: engine.running == 1)
    writer.write_eof()
    async with asyncio.timeout(1):
        await until(lambda: engine.running == 0)
    writer.close()


async def test_a_client_that_reads_nothing_and_ends_its_side_has_left(engines, route):
    """A mere close would wait for it to take what was sent."""
    (engine,) = await engines()
    router = await route(engine)
    engine.behaviour = endless
    _, writer = await connect(router)
    writer.transport.pause_reading()
    writer.write(POST)
    await until(lambda: any(each._full for each in router.app._connections))
    writer.write_eof()
    async with asyncio.timeout(2):
        await until(lambda: router.inflight() == 0 and engine.running == 0)
    writer.transport.abort()


async def test_a_pipelining_client_that_leaves(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    engine.behaviour = hang
    _, writer = await connect(router)
    writer.write(POST)
    await until(lambda: engine.running == 1)
    writer.write(POST * 20_000)  # more than is kept, and than sockets hold
    await until(lambda: any(each._deaf for each in router.app._connections))
    writer.transport.abort()
    async with asyncio.timeout(1):
        await until(lambda: engine.running == 0)
    assert len(engine.requests) == 1


async def test_pipelined_requests_are_all_answered(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    plain = POST.replace(b'"stream": true', b'"stream":false')
    answer = await exchange(router, plain * 300 + b"GET /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 301
    assert answer.endswith(b'{"status":"ok","healthy":1,"engines":1}')


@pytest.mark.parametrize(
    "part", [b"POST /v1", POST[:-1], b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5\r\n"]
)
async def test_slow_clients_are_told_and_cost_nothing(engines, route, part):
    (engine,) = await engines()
    router = await route(engine, request_timeout_s=0.1)
    answer = await exchange(router, part)
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"request_timeout"' in answer
    assert engine.requests == []


async def test_a_client_that_reads_nothing_is_given_up(engines, route):
    (engine,) = await engines()
    router = await route(engine, client_stall_timeout_s=0.2)
    engine.behaviour = endless
    _, writer = await connect(router)
    writer.transport.pause_reading()
    writer.write(POST)
    await until(lambda: engine.running == 1)
    await until(lambda: engine.running == 0)
    writer.transport.abort()


async def test_a_huge_body_is_refused_before_it_is_read(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    reader, writer = await connect(router)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 120000000\r\n\r\n")
    answer = await asyncio.wait_for(reader.readuntil(b"}"), 5)
    assert answer.startswith(b"HTTP/1.1 413 ")
    begun = time.monotonic()
    for _ in range(120):  # a client that does not look gets it too, not a reset
        writer.write(b"x" * 1_000_000)
        await writer.drain()
        assert time.monotonic() - begun < 10
    assert not writer.transport.is_closing()
    writer.close()
    assert engine.requests == []


async def test_what_a_head_may_carry(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    for value, good in ((b"a\x01b", False), (b"a\rb: c", False), (b"x" * 1_000_000, False), (b"a b\xff", True)):
        answer = await exchange(
            router, b"GET /v1/x HTTP/1.1\r\nhost: h\r\nconnection: close\r\nx-request-id: " + value + b"\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 200 " if good else b"HTTP/1.1 4"), value[:20]
    assert len(engine.requests) == 1
    await exchange(
        router, b"GET http://other.example/v1/y?z=1 HTTP/1.1\r\nhost: other.example\r\nconnection: close\r\n\r\n"
    )
    assert engine.requests[-1].raw_path == "/v1/y?z=1"
    assert engine.requests[-1].headers["host"] == engine.url.removeprefix("http://")


async def test_old_and_odd_clients(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    old = POST.replace(b"HTTP/1.1", b"HTTP/1.0")
    answer = await exchange(router, old)
    assert b"transfer-encoding" not in answer and answer.endswith(b"data: [DONE]\n\n"), "its end is the connection's"
    head = await exchange(router, b"HEAD /v1/x HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and head.endswith(b"\r\n\r\n")
    own = await exchange(router, b"HEAD /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
    assert own.startswith(b"HTTP/1.1 200 ") and own.endswith(b"\r\n\r\n")
    upgrade = b"GET /v1/x HTTP/1.1\r\nhost: h\r\nconnection: upgrade, close\r\nupgrade: websocket\r\n\r\n"
    assert (await exchange(router, upgrade)).startswith(b"HTTP/1.1 200 ")
    assert "upgrade" not in engine.requests[-1].headers
    chunked = (
        b"POST /v1/x HTTP/1.1\r\nhost: h\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        b"3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nx-checksum: 1\r\n\r\n"
    )
    assert (await exchange(router, chunked)).startswith(b"HTTP/1.1 200 ")
    assert engine.bodies[-1] == b"abcde"
    expects = POST.replace(b"host: h", b"connection: close\r\nexpect: 100-continue")
    assert (await exchange(router, expects)).startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


@pytest.mark.slow
async def test_large_and_deep_bodies(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    many = {"model": "fake", "messages": [{"role": "user", "content": str(n)} for n in range(100_000)]}
    bodies = [
        json.dumps(many).encode(),
        b'{"model":"fake","messages":[],"x":' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"model":"fake","messages":[],"n":1e999,"m":' + b"9" * 4000 + b"}",
        b'{"model":"none","model":"fake","messages":[],"messages":[]}',
    ]
    for body in bodies:
        async with router.client.post(f"{router.url}/v1/chat/completions", data=io.BytesIO(body)) as answer:
            assert answer.status == 200, body[:50]
        assert engine.bodies[-1] == body


def mutated(chance: random.Random, text: bytes) -> bytes:
    data = bytearray(text)
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(data) + 1)
        data[at : at + chance.randrange(4)] = chance.choice(
            (b"", chance.randbytes(3), b"\r\n", b"\n", b"{", b'"', b"[]", b"\x00", b"\xff", b"1e9999", b"\\ud800")
        )
    return bytes(data)


async def fuzz_bodies(engines, route, count: int) -> None:
    (engine,) = await engines()
    router = await route(engine)
    chance = random.Random(3)
    base = json.dumps(
        {
            "model": "fake", "stream": False, "tools": [{"type": "function"}], "cache_salt": "s",
            "messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": None}],
        }
    ).encode()  # fmt: skip

    async def one(body: bytes, path: str) -> None:
        async with router.client.post(router.url + path, data=body) as answer:
            await answer.read()
            assert answer.status in (200, 400, 404), (answer.status, body)
            if answer.status == 200:
                assert body in sent
            else:
                assert (answer.status == 400) == (not parses(body)) or answer.status == 404, body

    def parses(body: bytes) -> bool:
        try:
            json.loads(body)
        except (ValueError, RecursionError):
            return False
        return True

    sent = engine.bodies
    for _ in range(count // 50):
        bodies = [mutated(chance, base) for _ in range(50)]
        paths = chance.choices(("/v1/chat/completions", "/v1/completions", "/v1/messages", "/tokenize"), k=50)
        async with asyncio.timeout(30):
            await asyncio.gather(*map(one, bodies, paths))
        sent.clear()
        engine.requests.clear()
    assert (await router.chat("x")).status == 200


async def fuzz_streams(route, count: int) -> None:
    """Answers of an engine with wrong bytes in them: a whole answer, an error, or a cut; and never a hang."""
    chance = random.Random(4)
    events = b"".join(b'data: {"choices":[{"delta":{"content":"%d"}}],"usage":null}\n\n' % n for n in range(5))
    events += b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":3}}}\n\n'
    events += b"data: [DONE]\n\n"
    whole = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    whole += b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (events[:100], events[100:])) + b"0\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET "):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            else:
                await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                writer.write(mutated(chance, whole))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    router = await route(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", breaker_failures_min=0)
    post = POST.replace(b"host: h", b"connection: close")
    for _ in range(count // 50):
        async with asyncio.timeout(30):
            for text in await asyncio.gather(*(exchange(router, post) for _ in range(50))):
                if text:  # an answer of a kind that cannot say that it broke is cut
                    assert text.startswith(b"HTTP/1.1 ") and 200 <= int(text[9:12]) <= 599, text
    await until(lambda: router.inflight() == 0)
    router.state.check()
    server.close()


async def fuzz_requests(engines, route, count: int) -> None:
    """Heads and chunked bodies with wrong bytes in them."""
    (engine,) = await engines()
    router = await route(engine, request_timeout_s=0.5)
    chance = random.Random(6)
    chunked = b"POST /v1/x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    for _ in range(count // 50):
        texts = [mutated(chance, chance.choice((POST, chunked))) for _ in range(50)]
        async with asyncio.timeout(30):
            for text, answer in zip(
                texts, await asyncio.gather(*(exchange(router, text, end=True) for text in texts)), strict=True
            ):
                # Who has ended its side may have left before there was an answer.
                assert not answer or answer.startswith(b"HTTP/1.1 "), text
    await until(lambda: router.inflight() == 0)
    assert (await router.chat("x")).status == 200


@pytest.mark.slow
async def test_some_mutations(engines, route):
    await fuzz_bodies(engines, route, 100)
    await fuzz_streams(route, 100)
    await fuzz_requests(engines, route, 100)


@pytest.mark.slow
async def test_ten_thousand_mutations_of_bodies(engines, route):
    await fuzz_bodies(engines, route, 10_000)


@pytest.mark.slow
async def test_ten_thousand_mutations_of_streams(route):
    await fuzz_streams(route, 10_000)


@pytest.mark.slow
async def test_ten_thousand_mutations_of_requests(engines, route):
    await fuzz_requests(engines, route, 10_000)
