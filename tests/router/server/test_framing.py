"""Where messages end: engines and clients that say it in odd ways, and connections that must not be used again."""

import asyncio

import pytest

from ..raw_engine import CHAT, answer_to, answers, raw_engine, request

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CLOSE = "connection: close\r\n"


async def test_a_length_that_is_called_hop_by_hop_is_passed_on(route):
    async with raw_engine(
        answers(OK.replace(b"\r\n\r\n", b"\r\nconnection: content-length, x-hop\r\nx-hop: 1\r\n\r\n"))
    ) as engine:
        router = await route(engine.url)
        answer = await answer_to(router.url, request(), until=b"ok")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-length: 2" in head and b"x-hop" not in head and body == b"ok"


async def test_no_content_has_no_length_and_its_body_is_nobodys(route):
    async with raw_engine(answers(b"HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\nhello")) as engine:
        router = await route(engine.url)
        answer = await answer_to(router.url, request(), request(headers=CLOSE))
        assert engine.connections == 2, "what came behind the answer is no answer to the next request"
    assert answer.count(b"HTTP/1.1 204 No Content") == 2
    assert b"content-length" not in answer and b"hello" not in answer


async def test_informational_answers_are_skipped(route):
    before = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    async with raw_engine(answers(before + OK)) as engine:
        router = await route(engine.url)
        assert (await answer_to(router.url, request(headers=CLOSE))).endswith(b"\r\n\r\nok")


@pytest.mark.parametrize("close", [True, False])
async def test_an_answer_before_the_request_was_sent(route, close):
    """It reaches the client; nothing more is sent where the rest of the body may still have to go."""
    refusal = b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig"

    async def refuse(engine, reader, writer, head):
        writer.write(refusal)
        await writer.drain()
        if close:
            return True
        await reader.read(100)
        return bool(await asyncio.Event().wait())

    large = CHAT.replace(b'"x"', b'"' + b"x" * 8_000_000 + b'"')
    async with raw_engine(refuse) as engine:
        router = await route(engine.url)
        for _ in range(2):
            answer = await answer_to(router.url, request(large, headers=CLOSE))
            assert answer.startswith(b"HTTP/1.1 413 ") and answer.endswith(b"big")
        assert engine.connections == 2


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("content-type: text/event-stream", True),
        ("content-type: Text/Event-Stream; charset=utf-8", True),
        ("content-type: text/event-stream\r\ncontent-encoding: identity", True),
        ("content-type: text/event-stream\r\ncontent-encoding: gzip", False),
        ("content-type: application/x-ndjson", False),
    ],
)
async def test_only_a_plain_stream_of_events_gets_an_event_when_it_breaks(route, said, told):
    broken = f"HTTP/1.1 200 OK\r\n{said}\r\ntransfer-encoding: chunked\r\n\r\nb\r\ndata: x\r\n\r\n\r\n"
    async with raw_engine(answers(broken.encode(), close=True)) as engine:
        router = await route(engine.url)
        answer = await answer_to(router.url, request(headers=CLOSE))
    assert (b"upstream_disconnected" in answer) is told
    assert answer.endswith(b"\r\n0\r\n\r\n") is told, "what cannot be told ends without an end"
    assert b"\n\ndata: {" not in answer.replace(b"\r\n", b""), "an event that has ended is not ended again"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /v1/x HTTP/1.1\nhost: h\n\n",
        b"GET /v1/x HTTP/1.1\r\nhost: h\r\nx",
        bytes.fromhex("160301020001") + bytes(200),
        b"hello\r\nis anybody there",
        b"\x00",
        b"get / HTTP/1.1\r\n",
    ],
)
async def test_what_cannot_become_a_request_is_told_at_once(engines, route, sent):
    (engine,) = await engines()
    router = await route(engine, request_timeout_s=0.3)
    begun = asyncio.get_running_loop().time()
    answer = await answer_to(router.url, sent)
    may_go_on = sent.startswith(b"GET") and b"\r\n" in sent
    assert answer.startswith(b"HTTP/1.1 408 " if may_go_on else b"HTTP/1.1 400 ")
    assert (asyncio.get_running_loop().time() - begun < 0.25) is not may_go_on


async def test_empty_lines_behind_a_body_are_nothing(engines, route):
    (engine,) = await engines()
    router = await route(engine)
    answer = await answer_to(router.url, request() + b"\r\n", request() + b"\r\n" + request(headers=CLOSE))
    assert answer.count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH", "POST"])
async def test_a_body_that_had_no_end_in_sight_is_sent_on_with_its_length(route, method):
    """Chunks, their extensions and trailers end here: the engine gets one length, which cannot be misread."""
    chunks = b"3;a=b\r\nabc\r\n1\r\nd\r\n0\r\nx-trailer: 1\r\ncontent-length: 99\r\n\r\n"
    head = f"{method} /v1/files HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n{CLOSE}\r\n".encode()
    async with raw_engine(answers(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")) as engine:
        router = await route(engine.url)
        assert (await answer_to(router.url, head + chunks)).startswith(b"HTTP/1.1 200 OK")
        assert engine.bodies == [b"abcd"]
        assert engine.heads[0].lower().count(b"content-length") == 1 and b"chunked" not in engine.heads[0]


async def test_pipelined_requests_of_which_one_is_refused(engines, route):
    """What was answered before stays answered, and what follows what could not be read is not guessed at."""
    (engine,) = await engines()
    router = await route(engine)
    smuggled = request(b"x", headers="transfer-encoding: chunked\r\n")
    answer = await answer_to(router.url, request() + smuggled + request(path="/v1/smuggled"))
    assert answer.count(b"HTTP/1.1 200 OK") == 1 and answer.count(b"HTTP/1.1 400 ") == 1
    assert [each.path for each in engine.requests] == ["/v1/chat/completions"]


# --- what may be done twice ---


@pytest.mark.parametrize(
    ("method", "path", "asked"),
    [
        ("POST", "/v1/chat/completions", 2),
        ("POST", "/v1/embeddings", 2),
        ("POST", "/tokenize?x=1", 2),
        ("GET", "/v1/lora", 2),
        ("POST", "/v1/load_lora_adapter", 1),
        ("DELETE", "/v1/files/1", 1),
        ("PUT", "/v1/chat/completions", 2),
    ],
)
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n"])
async def test_what_may_change_something_is_not_given_to_another_engine(route, method, path, asked, answer):
    handler = answers(answer, close=True)
    async with raw_engine(handler) as one, raw_engine(handler) as two:
        router = await route(one.url, two.url)
        got = await answer_to(router.url, request(method=method, path=path, headers=CLOSE))
        assert got.startswith(b"HTTP/1.1 502 ")
        assert len(one.heads) + len(two.heads) == asked


async def test_what_was_refused_or_never_arrived_may_be_asked_of_another(engines, route):
    refused = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
    async with raw_engine(answers(refused)) as one, raw_engine(answers(OK)) as two:
        router = await route(one.url, two.url)
        for _ in range(2):
            got = await answer_to(router.url, request(path="/v1/load_lora_adapter", headers=CLOSE))
            assert got.startswith(b"HTTP/1.1 200 OK")
    (engine, dead) = await engines(2)
    router = await route(engine, dead, health_interval_s=60)
    await dead.stop()
    for _ in range(2):
        got = await answer_to(router.url, request(path="/v1/load_lora_adapter", headers=CLOSE))
        assert got.startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(("path", "status"), [("/v1/chat/completions", b"200"), ("/v1/load_lora_adapter", b"502")])
async def test_an_engine_that_closes_a_connection_as_it_is_used_again(route, path, status):
    """What only computes is sent again. Anything else is never sent on a connection that may just have been closed."""
    count = 0

    async def close_on_second(engine, reader, writer, head):
        nonlocal count
        await engine.take(reader, head)
        count += 1
        if count != 2:
            writer.write(OK)
        return count == 2

    async with raw_engine(close_on_second) as engine:
        router = await route(engine.url)
        first = await answer_to(router.url, request(path=path, headers=CLOSE))
        second = await answer_to(router.url, request(path=path, headers=CLOSE))
        assert (first[9:12], second[9:12]) == (b"200", status)
        assert len(engine.heads) == (3 if status == b"200" else 2)
        assert engine.connections == 2


STREAMS = {
    "as engines write it": b'data: {"x":1}\n\ndata: {"choices":[],"usage":USAGE}\n\ndata: [DONE]\n\n',
    "CRLF": b'data: {"x":1}\r\n\r\ndata: {"choices":[],"usage":USAGE}\r\n\r\ndata: [DONE]\r\n\r\n',
    "comments, names, numbers": b': hello\n\nid: 7\nevent: x\nretry: 5\ndata: {"usage":USAGE}\n\n: bye\n\ndata: [DONE]\n\n',
    "no spaces, no last line end": b'data:{"usage":USAGE}\n\ndata:[DONE]',
    "letters in pieces": 'data: {"x":"ü名"}\n\n'.encode() + b'data: {"usage":USAGE}\n\ndata: [DONE]\n\n',
    "no end": b'data: {"usage":USAGE}\n\n',
}


@pytest.mark.parametrize("text", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("http10", [False, True])
async def test_streams_pass_byte_for_byte_however_they_are_written_and_cut(route, text, size, http10):
    whole = text.replace(
        b"USAGE", b'{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":3}}'
    )
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    if http10:
        sent = head.replace(b"1.1", b"1.0") + b"\r\n" + whole
    else:
        framed = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces)
        sent = head + b"transfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"
    async with raw_engine(answers(sent, close=http10)) as engine:
        router = await route(engine.url)
        async with router.client.post(router.url + "/v1/chat/completions", data=CHAT) as answer:
            assert await answer.read() == whole
        assert (
            router.app.metrics.registry.get_sample_value("smetric_router_prompt_tokens_total", {"engine": engine.url})
            == 9
        )


@pytest.mark.parametrize("last", [b"data: [DONE]\n\n", b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n"])
async def test_a_stream_that_breaks_after_its_end_gets_no_error(route, last):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    async with raw_engine(answers(head + b"%x\r\n%b\r\n" % (len(last), last), close=True)) as engine:
        router = await route(engine.url)
        answer = await answer_to(router.url, request(headers=CLOSE))
    assert b"[DONE]" in answer and b"error" not in answer


async def test_an_engine_on_ipv6(route):
    async with raw_engine(answers(OK), host="::1") as engine:
        assert engine.url.startswith("http://[::1]:")
        router = await route(engine.url)
        answer = await router.chat("x")
        assert (answer.status, answer.headers["x-smetric-instance"]) == (200, engine.url)
        assert f"\r\nhost: {engine.url.removeprefix('http://')}\r\n".encode() in engine.heads[0]
