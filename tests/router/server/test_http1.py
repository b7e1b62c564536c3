"""HTTP/1.1 as bytes: what is understood, what is refused, and bodies cut at every byte."""

import random

import pytest

from smetric_router.server.http1 import (
    AnswerHead,
    ChunkedBody,
    Malformed,
    answer_bytes,
    chunk_bytes,
    headers_to_send_on,
    parse_answer_head,
    parse_request_head,
    request_bytes,
)

REFUSED_REQUESTS = {
    "control character": b"GET / HTTP/1.1\r\nx: a\x01b\r\n\r\n",
    "nul": b"GET / HTTP/1.1\r\nx: a\x00b\r\n\r\n",
    "bare CR": b"GET / HTTP/1.1\r\nx: a\rb: c\r\n\r\n",
    "bare LF": b"GET / HTTP/1.1\r\nx: a\nb: c\r\n\r\n",
    "folded line": b"GET / HTTP/1.1\r\nx: a\r\n b\r\n\r\n",
    "space before the colon": b"GET / HTTP/1.1\r\nx : a\r\n\r\n",
    "control character in the target": b"GET /\x01 HTTP/1.1\r\n\r\n",
    "byte over 127 in the target": b"GET /\xff HTTP/1.1\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    "length and chunks": b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    "chunks and length": b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 1\r\n\r\n",
    "twice chunked": b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",
    "another coding": b"POST / HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
    "signed length": b"POST / HTTP/1.1\r\ncontent-length: +5\r\n\r\n",
    "length that is none": b"POST / HTTP/1.1\r\ncontent-length: 5x\r\n\r\n",
    "length over 18 digits": b"POST / HTTP/1.1\r\ncontent-length: 1" + b"0" * 18 + b"\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "chunks in HTTP/1.0": b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\n",
    "HTTP/0.9": b"GET /a\r\n\r\n",
    "nothing": b"\r\n\r\n",
}


@pytest.mark.parametrize("head", REFUSED_REQUESTS.values(), ids=REFUSED_REQUESTS)
def test_what_could_be_understood_in_two_ways_is_refused(head):
    with pytest.raises(Malformed):
        parse_request_head(head)


def test_a_request():
    head = parse_request_head(b"POST /a?b=%20 HTTP/1.1\r\nHost: h\r\nX-Odd:  a b \r\ncontent-length: 003\r\n\r\n")
    assert (head.method, head.target, head.length, head.keep_alive) == (b"POST", b"/a?b=%20", 3, True)
    assert (b"host", b"h") in head.headers
    assert not head.expects


@pytest.mark.parametrize(
    ("line", "keep_alive", "length", "expects"),
    [
        (b"connection: close", False, 0, False),
        (b"connection: Keep-Alive", True, 0, False),
        (b"transfer-encoding: Chunked", True, None, False),
        (b"expect: 100-Continue", True, 0, True),
        (b"expect: 200-ok", True, 0, False),
        (b"upgrade: websocket\r\nconnection: upgrade", True, 0, False),
        (b"upgrade: h2c\r\nhttp2-settings: AAA\r\nconnection: upgrade, http2-settings", True, 0, False),
    ],
)
def test_what_a_head_says_of_its_connection(line, keep_alive, length, expects):
    head = parse_request_head(b"POST /a HTTP/1.1\r\n" + line + b"\r\n\r\n")
    assert (head.keep_alive, head.length, head.expects) == (keep_alive, length, expects)
    assert headers_to_send_on(head.headers) == [], "hop by hop"


def test_http_1_0_is_answered_and_closed():
    head = parse_request_head(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\nexpect: 100-continue\r\n\r\n")
    assert (head.http11, head.keep_alive, head.expects) == (False, False, False)


@pytest.mark.parametrize(
    ("sent", "target"),
    [
        (b"http://h:1/v1/x?y=1", b"/v1/x?y=1"),
        (b"HTTPS://h", b"/"),
        (b"http://h?y=1", b"/?y=1"),
        (b"//h/x", b"//h/x"),
        (b"/http://h/", b"/http://h/"),
        (b"*", b"*"),
    ],
)
def test_absolute_targets_are_paths(sent, target):
    method = b"OPTIONS" if sent == b"*" else b"GET"
    assert parse_request_head(method + b" " + sent + b" HTTP/1.1\r\n\r\n").target == target


def test_headers_named_by_connection_stay_behind():
    headers = [(b"connection", b"x-hop, X-Other"), (b"x-hop", b"1"), (b"x-other", b"2"), (b"x-kept", b"3")]
    assert headers_to_send_on(headers) == [(b"x-kept", b"3")]


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 600 Odd\r\n\r\n",
        b"HTTP/1.1 099 Odd\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\x01b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\nb: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"SSH-2.0 nonsense\r\n\r\n",
    ],
)
def test_odd_answers_are_refused(head):
    with pytest.raises(Malformed):
        parse_answer_head(head)


def test_answers():
    text = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nkeep-alive: x\r\nx: y\r\n\r\n"
    assert parse_answer_head(text) == AnswerHead(200, [(b"content-length", b"5"), (b"x", b"y")], 5, False, True)
    assert parse_answer_head(text, to_head=True).length == 0
    assert parse_answer_head(b"HTTP/1.1 204 No\r\n\r\n").length == 0
    assert parse_answer_head(b"HTTP/1.1 304 Not\r\ncontent-length: 9\r\n\r\n").length == 0
    chunked = parse_answer_head(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n")
    assert (chunked.length, chunked.chunked, chunked.keep_alive, chunked.headers) == (None, True, False, [])
    until_close = parse_answer_head(b"HTTP/1.0 200 OK\r\n\r\n")
    assert (until_close.length, until_close.chunked, until_close.keep_alive) == (None, False, False)


def test_heads_to_send():
    assert request_bytes(b"GET", b"/a", b"h", [(b"x", b"y")], 0) == b"GET /a HTTP/1.1\r\nhost: h\r\nx: y\r\n\r\n"
    assert request_bytes(b"POST", b"/", b"h", [], 0).endswith(b"content-length: 0\r\n\r\n")
    assert request_bytes(b"DELETE", b"/", b"h", [], 2).endswith(b"content-length: 2\r\n\r\n")
    assert answer_bytes(200, [(b"x", b"y")], chunked=True, close=True) == (
        b"HTTP/1.1 200 OK\r\nx: y\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    )
    assert answer_bytes(299, [], chunked=False, close=False).startswith(b"HTTP/1.1 299 \r\n")


BODY = b"5\r\nhello\r\n3;ext=1\r\n\r\nx\r\n0a\r\n0123456789\r\n0\r\nx-trailer: 1\r\nx-other: 2\r\n\r\nNEXT"
CONTENT = b"hello\r\nx0123456789"


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7])
def test_a_chunked_body_in_pieces(step):
    body, content = ChunkedBody(), b""
    for at in range(0, len(BODY), step):
        content += b"".join(body.feed(BODY[at : at + step]))
        if body.done:
            assert BODY.startswith(BODY[: at + step].removesuffix(body.rest))
            break
    assert content == CONTENT
    assert body.done


def test_a_chunked_body_cut_at_every_byte():
    for cut in range(len(BODY) + 1):
        body = ChunkedBody()
        pieces = body.feed(BODY[:cut])
        if not body.done:
            pieces += body.feed(BODY[cut:])
            assert body.rest == b"NEXT"
        else:
            assert body.rest == BODY[len(BODY) - 4 : cut]
        assert b"".join(pieces) == CONTENT


@pytest.mark.parametrize(
    "text",
    [
        b"x\r\n",
        b"-1\r\n",
        b"+1\r\na\r\n",
        b"0x1\r\na\r\n",
        b"1_0\r\n",
        b"\r\n",
        b";ext\r\n",
        b"1" + b"0" * 15 + b"\r\n",
        b"3\r\nabcd\r\n",
        b"3\r\nabcX\r\n",
        b"1" * 5000,
        b"1;" + b"x" * 5000,
        b"3;a\nb\r\nabc\r\n",
        b"3;a\rb\r\nabc\r\n",
        b"3;\x00\r\nabc\r\n",
        b"3\x0b\r\nabc\r\n",
        b"0\r\nx: a\nGET /smuggled HTTP/1.1\r\n\r\n",
        b"0\r\n" + b"x: " + b"y" * 4000 + b"\r\n" + (b"x: " + b"y" * 4000 + b"\r\n") * 20,
    ],
)
def test_a_chunked_body_that_is_none(text):
    with pytest.raises(Malformed):
        ChunkedBody().feed(text)


def test_mutations_of_a_chunked_body_are_read_or_refused():
    chance = random.Random(5)
    for _ in range(3000):
        text = bytearray(BODY)
        for _ in range(chance.randrange(1, 5)):
            at = chance.randrange(len(text))
            text[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
        cut = chance.randrange(len(text) + 1)
        outcomes = []
        for parts in ([bytes(text)], [bytes(text[:cut]), bytes(text[cut:])]):
            body, content = ChunkedBody(), b""
            try:
                for part in parts:
                    content += part if body.done else b"".join(body.feed(part))
                outcomes.append((body.done, content) if not body.done else (True, None))
            except Malformed:
                outcomes.append((False, None))
        assert outcomes[0][0] == outcomes[1][0], text


def test_chunks_that_come_whole_are_read_like_those_that_come_byte_by_byte():
    chance = random.Random(6)
    base = b"".join(chunk_bytes(b"data: %d\n\n" % n) for n in range(4)) + b"0\r\n\r\nNEXT"
    kinds = set()
    for _ in range(3000):
        text = bytearray(base)
        for _ in range(chance.randrange(3)):
            at = chance.randrange(len(text))
            text[at : at + chance.randrange(3)] = chance.choice(
                (b"", b"\r", b"\n", b"0", b"f", b" ", b"+", b"_", b"1\r\n")
            )
        outcomes = []
        for size in (len(text), 1):
            body, content, used = ChunkedBody(), b"", 0
            try:
                while used < len(text) and not body.done:
                    content += b"".join(body.feed(bytes(text[used : used + size])))
                    used += size
                outcomes.append((body.done, content, used - len(body.rest) if body.done else len(text)))
            except Malformed:
                outcomes.append((None, b"", 0))
        assert outcomes[0] == outcomes[1], bytes(text)
        kinds.add(outcomes[0][0])
    assert kinds == {True, False, None}


def test_chunks_that_were_made_are_read():
    body = ChunkedBody()
    assert body.feed(chunk_bytes(b"abc") + chunk_bytes(b"d" * 300) + b"0\r\n\r\n") == [b"abc", b"d" * 300]
    assert body.done and body.rest == b""
