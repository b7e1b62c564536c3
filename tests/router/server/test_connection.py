"""One client connection, on a transport that records."""

import asyncio
import re

import pytest

from smetric_router.errors import RouterError
from smetric_router.server.client_limits import HeldBytes, Limits
from smetric_router.server.connection import ClientConnection

GET = b"GET /a HTTP/1.1\r\nhost: h\r\n\r\n"
POST = b"POST /b HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"POST /c HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\nx-t: 1\r\n\r\n"


class Transport:
    """What a connection does to its socket."""

    def __init__(self) -> None:
        self.sent = b""
        self.closed = self.aborted = self.ended = False
        self.reading = True

    def write(self, data: bytes) -> None:
        assert data, "an empty write is a mistake"
        self.sent += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True


class Work:
    """Records what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def client_gone(self) -> None:
        self.told.append("gone")

    def pause(self) -> None:
        self.told.append("pause")

    def resume(self) -> None:
        self.told.append("resume")


class Client:
    """A connection, what it asked for, and the clock."""

    def __init__(self, held_bytes_max: int = 10_000_000, **limits: object) -> None:
        self.now = 0.0
        self.begun: list[tuple[bytes, bytes, bytes]] = []
        self.works: list[Work] = []
        self.refused: list[RouterError] = []
        self.connections: set[ClientConnection] = set()
        self.at_once = False
        values = {"head_bytes_max": 1024, "body_bytes_max": 1000, "request_timeout_s": 10, "keepalive_s": 75}
        limits = Limits(**{**values, **limits})  # type: ignore[arg-type, assignment]
        self.held = HeldBytes(held_bytes_max)
        self.transport = Transport()
        self.protocol = ClientConnection(
            limits, lambda head: None, self._begin, self._refuse, self.connections, lambda: self.now, self.held
        )  # type: ignore[arg-type]
        self.protocol.connection_made(self.transport)  # type: ignore[arg-type]

    def _begin(self, head, body, client):
        self.begun.append((head.method, head.target, body))
        if self.at_once:
            client.answer(200, [], b"done")
            return None
        self.works.append(Work())
        return self.works[-1]

    def _refuse(self, client, head, error):
        self.refused.append(error)
        client.answer(error.status, [], error.body())

    def get(self, data: bytes) -> None:
        self.protocol.data_received(data)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.protocol.check(self.now)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("request_bytes", [GET, POST, CHUNKED])
async def test_a_request_cut_at_every_byte(request_bytes):
    whole = Client()
    whole.get(request_bytes)
    assert len(whole.begun) == 1
    for cut in range(1, len(request_bytes)):
        client = Client()
        client.get(request_bytes[:cut])
        assert client.begun == []
        assert client.protocol.reading
        client.get(request_bytes[cut:])
        assert client.begun == whole.begun
        assert client.protocol.busy


async def test_a_request_byte_by_byte():
    client = Client()
    for at in range(len(CHUNKED)):
        client.get(CHUNKED[at : at + 1])
    assert client.begun == [(b"POST", b"/c", b"hello")]


@pytest.mark.parametrize("at_once", [True, False])
async def test_pipelined_requests_are_answered_in_order(at_once):
    row = GET + POST + CHUNKED + GET
    for cut in (len(row), 1, 30, 50, 100, len(row) - 3):
        client = Client()
        client.at_once = at_once
        for part in (row[:cut], row[cut:]):
            if part:
                client.get(part)
        while not at_once and len(client.works) < 5 and client.protocol.busy:
            client.protocol.answer(200, [], b"done")
            await turns()
        await turns()
        assert [target for _, target, _ in client.begun] == [b"/a", b"/b", b"/c", b"/a"]
        assert client.transport.sent == b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ndone" * 4


async def test_a_long_row_of_early_requests_is_not_recursion():
    client = Client(early_bytes_max=10**9)
    client.at_once = True
    client.get(GET * 5000)
    assert len(client.begun) == 5000


async def test_early_requests_are_kept_up_to_a_limit_and_the_socket_is_read_on():
    client = Client(early_bytes_max=100)
    for _ in range(3):
        client.get(GET)
    client.protocol.answer(200, [], b"")
    await turns()
    client.protocol.answer(200, [], b"")
    await turns()
    client.protocol.answer(200, [], b"")
    assert (len(client.begun), client.transport.closed) == (3, False)
    for _ in range(6):
        client.get(GET)
    client.protocol.start(200, [], b"x", end=True)
    await turns()
    assert len(client.begun) == 4
    assert client.transport.closed, "so that the client sends the others again elsewhere"
    assert b"connection: close" in client.transport.sent.rpartition(b"HTTP/1.1")[2]
    assert client.transport.reading


async def test_a_client_that_ends_its_side_is_gone():
    client = Client()
    client.get(GET)
    client.protocol.eof_received()
    assert client.transport.aborted
    client.protocol.connection_lost(None)
    assert client.works[0].told == ["gone"]
    assert client.connections == set()
    idle = Client()
    assert not idle.protocol.eof_received(), "asyncio closes it then"
    assert not idle.transport.aborted


async def test_a_client_that_leaves_is_told_once_and_sent_nothing():
    client = Client()
    client.get(GET)
    client.protocol.connection_lost(ConnectionResetError())
    client.protocol.start(200, [], b"x", end=False)
    client.protocol.send(b"x", end=True)
    client.protocol.cut()
    client.protocol.connection_lost(None)
    assert (client.works[0].told, client.transport.sent) == (["gone"], b"")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01 nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 2000, 431),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 2000 + b"\r\n\r\n", 431),
        (b"POST / HTTP/1.1\r\ncontent-length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\ncontent-length: 1001\r\nexpect: 100-continue\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n400\r\n" + b"x" * 1001, 413),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
async def test_what_is_refused_is_answered_first_and_read_to_its_end(data, status):
    client = Client()
    client.get(data)
    assert [error.status for error in client.refused] == [status]
    assert client.transport.sent.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close\r\n" in client.transport.sent
    assert client.transport.ended and not client.transport.closed, "closing on unread bytes would reset the connection"
    sent = client.transport.sent
    client.get(GET * 10)
    assert (client.begun, client.transport.sent) == ([], sent)
    client.pass_time(4)
    assert not client.transport.aborted
    client.get(b"still")
    client.pass_time(2)
    assert client.transport.aborted


async def test_continue_is_sent_when_the_body_is_wanted():
    client = Client()
    client.get(POST.replace(b"host: h", b"expect: 100-continue")[:-5])
    assert client.transport.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.get(b"hello")
    assert client.begun == [(b"POST", b"/b", b"hello")]


@pytest.mark.parametrize("part", [GET[:-1], POST[:-1], CHUNKED[:-1], b"G"])
async def test_half_a_request_is_given_up(part):
    client = Client()
    client.get(part)
    client.pass_time(9)
    assert client.refused == []
    client.pass_time(2)
    assert [error.status for error in client.refused] == [408]


async def test_a_request_that_trickles_is_given_up():
    client = Client(body_bytes_max=10**9)
    client.get(b"POST / HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n")
    for _ in range(30):
        client.get(b"x")
        client.pass_time(1)
    assert [error.status for error in client.refused] == [408]
    fast = Client(body_bytes_max=10**9)
    fast.get(b"POST / HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n")
    for _ in range(30):
        fast.get(b"x" * 2048)
        fast.pass_time(1)
    assert fast.refused == []


async def test_idle_connections_are_closed():
    client = Client()
    client.pass_time(74)
    assert not client.transport.closed
    client.pass_time(2)
    assert client.transport.closed
    busy = Client()
    busy.get(GET)
    busy.pass_time(10_000)
    assert not busy.transport.closed, "there is no limit on an answer"


async def test_empty_lines_keep_no_connection_open():
    client = Client()
    for _ in range(80):
        client.get(b"\r\n")
        client.pass_time(1)
    assert client.transport.closed
    before = Client()
    before.get(b"\r\n\r\n" + GET)
    assert len(before.begun) == 1


async def test_a_client_that_takes_nothing_is_given_up():
    client = Client(stall_s=5)
    client.get(GET)
    client.protocol.start(200, [], b"x", end=False)
    client.protocol.pause_writing()
    client.pass_time(4)
    client.protocol.resume_writing()
    client.protocol.pause_writing()
    client.pass_time(4)
    assert client.works[0].told == ["pause", "resume", "pause"]
    assert not client.transport.aborted
    client.pass_time(2)
    assert client.transport.aborted
    closing = Client(stall_s=5)
    closing.get(GET.replace(b"host: h", b"connection: close"))
    closing.protocol.answer(200, [], b"x")
    assert closing.transport.closed
    closing.pass_time(6)
    assert closing.transport.aborted, "its last answer was never taken"


async def test_nothing_is_begun_for_a_client_that_takes_no_answers():
    client = Client()
    client.get(GET)
    client.protocol.pause_writing()
    client.protocol.answer(200, [], b"x")
    client.get(GET)
    await turns()
    assert len(client.begun) == 1
    client.protocol.resume_writing()
    await turns()
    assert len(client.begun) == 2


async def test_framing_of_answers():
    def answered(request: bytes, *pieces: bytes, length: int | None = None) -> bytes:
        client = Client()
        client.get(request)
        headers = [] if length is None else [(b"content-length", b"%d" % length)]
        client.protocol.start(200, headers, pieces[0], end=len(pieces) == 1, length_known=length is not None)
        for at, piece in enumerate(pieces[1:], 2):
            client.protocol.send(piece, end=at == len(pieces))
        assert client.protocol.busy == client.transport.closed
        return client.transport.sent.split(b"\r\n", 1)[1]

    assert answered(GET, b"ab", b"c", b"") == (b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")
    assert answered(GET, b"ab", b"c", length=3) == b"content-length: 3\r\n\r\nabc"
    assert answered(GET, b"ab") == b"content-length: 2\r\n\r\nab"
    old = GET.replace(b"1.1", b"1.0")
    assert answered(old, b"ab", b"c", b"") == b"connection: close\r\n\r\nabc"
    head = GET.replace(b"GET", b"HEAD")
    assert answered(head, b"", length=3) == b"content-length: 3\r\n\r\n"
    assert answered(head, b"body") == b"\r\n"


async def test_draining():
    idle, reading, busy = Client(), Client(), Client()
    reading.get(POST[:-1])
    busy.get(GET)
    for client in (idle, reading, busy):
        client.protocol.drain()
    assert [client.transport.closed for client in (idle, reading, busy)] == [True, False, False]
    reading.get(POST[-1:])
    for client in (reading, busy):
        client.protocol.answer(200, [], b"x")
        assert re.search(rb"connection: close\r\n", client.transport.sent)
        assert client.transport.closed


async def test_what_is_held_is_counted_until_the_answer_begins():
    client = Client()
    client.protocol.data_received(POST[:-2])
    assert client.held.count == 3
    client.protocol.data_received(POST[-2:] + CHUNKED)
    assert client.held.count == 5 + len(CHUNKED), "what came early as well"
    client.protocol.start(200, [], b"a", end=False)
    assert client.held.count == len(CHUNKED)
    client.protocol.send(b"b", end=True)
    await asyncio.sleep(0)
    assert [each[1] for each in client.begun] == [b"/b", b"/c"]
    assert client.held.count == 5
    client.protocol.connection_lost(None)
    assert client.held.count == 0


@pytest.mark.parametrize("data", [POST, CHUNKED], ids=["length", "chunks"])
async def test_more_than_all_may_hold_is_refused(data):
    client = Client(held_bytes_max=104)
    client.held.count = 100  # others'
    client.protocol.data_received(data[:-8])
    client.protocol.data_received(data[-8:])
    assert [(error.status, error.retry_after_s) for error in client.refused] == [(503, 1)]
    assert client.held.count == 100
    client = Client(held_bytes_max=105)
    client.held.count = 100
    client.protocol.data_received(data[:-8])
    client.protocol.data_received(data[-8:])
    assert client.refused == [] and len(client.begun) == 1


async def test_early_requests_are_not_held_beyond_what_all_may_hold():
    client = Client(held_bytes_max=20)
    client.protocol.data_received(POST)
    client.protocol.data_received(POST)
    assert client.held.count == 5, "dropped"
    client.protocol.answer(200, [], b"")
    assert client.transport.closed and client.held.count == 0
