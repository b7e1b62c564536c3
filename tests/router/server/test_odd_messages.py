"""Requests and answers that nobody should send, and faults of the router's own."""

import asyncio
import errno

import pytest

from ..conftest import until

RAW = [
    b'{"model": 5, oops',
    b'{"model": 5, "x": "\xff"}',
    b'{"model": ' + b"1" + b"0" * 5000 + b"}",
    b'{"messages": ' + b"[" * 100_000,
    b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("body", RAW, ids=range(len(RAW)))
async def test_odd_bodies_are_refused_or_passed_on(engines, route, path, body):
    (engine,) = await engines()
    router = await route(engine)
    async with router.client.post(router.url + path, data=body) as answer:
        if answer.status != 200:
            assert (answer.status, (await answer.json())["error"]["code"]) == (400, "bad_request")
        else:
            assert engine.bodies == [body]


async def raw_answer(router, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def test_odd_heads_of_requests(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    answer = await raw_answer(router, b"OPTIONS * HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and b'"bad_request"' in answer
    head = b"POST /v1/x HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: " + b"0" * 5000 + b"3\r\n\r\n"
    answer = await raw_answer(router, head + b"abc")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert engine.bodies == [b"abc"]


async def test_a_fault_of_the_router_itself_is_an_answer_and_one_line(engines, route, monkeypatch, caplog):
    (engine,) = await engines()
    router = await route(engine)

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("smetric_router.state.requests.RequestReader.read", broken)
    answer = await router.chat("x", headers={"x-request-id": "id-7"})
    assert (answer.status, answer.headers["x-request-id"]) == (500, "id-7")
    assert answer.json()["error"]["code"] == "internal_error"
    assert "a bug" not in answer.body.decode()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == ["internal error"]


ODD_ANSWERS = [
    b"HTTP/1.1 600 Odd\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx-odd: a\x01b\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx-odd: a\x7fb\r\ncontent-length: 0\r\n\r\n",
]


@pytest.mark.parametrize("odd", ODD_ANSWERS, ids=range(len(ODD_ANSWERS)))
async def test_an_odd_answer_is_a_bad_gateway(route, odd):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        healthy = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        writer.write(healthy if head.startswith(b"GET ") else odd)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    router = await route(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    got = await router.chat("x")
    assert (got.status, got.json()["error"]["code"]) == (502, "upstream_disconnected")
    server.close()
    await server.wait_closed()


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EADDRNOTAVAIL])
async def test_out_of_descriptors_is_nobody_elses_fault(engines, route, monkeypatch, number):
    (engine,) = await engines()
    router = await route(engine, upstream_keepalive_s=0.1, models_interval_s=0.05)
    loop = asyncio.get_running_loop()
    connect = loop.create_connection
    failed = []

    async def create_connection(protocol, host=None, port=None, **options):
        if port != engine.port:
            return await connect(protocol, host, port, **options)
        failed.append(number)
        raise OSError(number, "none left")

    monkeypatch.setattr(loop, "create_connection", create_connection)
    # By then the idle connections are closed.
    await until(lambda: len(failed) > 2)
    answer = await router.chat("x")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "out_of_resources"
    assert router.healthy() == 1
    monkeypatch.undo()
    assert (await router.chat("x")).status == 200
