"""Connections to engines, on a transport that records."""

import asyncio
import random

import pytest

from smetric_router.errors import UpstreamFailed, UpstreamUnreachable
from smetric_router.server.links import STALE_S, Collected, EngineLink, EngineLinks

from .test_connection import Transport

ENGINE = "http://engine:1"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
    b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
)
SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\nhello world"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED


class Listener:
    """Records; `on_data_do` runs at each piece."""

    def __init__(self, on_data_do=None) -> None:
        self.status = 0
        self.data = b""
        self.ended = 0
        self.broken: list[tuple[UpstreamFailed, bool]] = []
        self.on_data_do = on_data_do

    def on_head(self, head):
        assert not self.status
        self.status = head.status

    def on_data(self, data):
        assert data and not self.ended
        self.data += data
        if self.on_data_do:
            self.on_data_do()

    def on_end(self):
        self.ended += 1

    def on_broken(self, error, *, stale):
        self.broken.append((error, stale))


class Engine:
    """Links whose clock is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.links = EngineLinks(connect_timeout_s=1, keepalive_s=3, clock=lambda: self.now)

    def link(self) -> tuple[EngineLink, Transport]:
        link, transport = EngineLink(self.links, ENGINE), Transport()
        link.connection_made(transport)  # type: ignore[arg-type]
        return link, transport

    def asked(self) -> tuple[EngineLink, Transport, Listener]:
        link, transport = self.link()
        listener = Listener()
        link.begin(listener, b"HEAD", b"BODY")
        assert transport.sent == b"HEADBODY"
        return link, transport, listener


@pytest.mark.parametrize("answer", [CHUNKED, SIZED, CONTINUED])
def test_an_answer_cut_at_every_byte(answer):
    for cut in range(len(answer) + 1):
        engine = Engine()
        link, transport, listener = engine.asked()
        for part in (answer[:cut], answer[cut:]):
            if part:
                link.data_received(part)
        assert (listener.status, listener.data, listener.ended, listener.broken) == (200, b"hello world", 1, [])
        assert not transport.closed
        assert engine.links.take(ENGINE) is link


@pytest.mark.parametrize("answer", [CHUNKED, SIZED])
def test_an_answer_that_breaks_at_every_byte(answer):
    for cut in range(len(answer)):
        link, _, listener = Engine().asked()
        if cut:
            link.data_received(answer[:cut])
        link.connection_lost(None)
        assert listener.ended == 0
        assert [stale for _, stale in listener.broken] == [False]


def test_a_body_that_ends_with_the_connection():
    link, transport, listener = Engine().asked()
    link.data_received(b"HTTP/1.1 200 OK\r\n\r\nhello")
    link.data_received(b" world")
    link.eof_received()
    link.connection_lost(None)
    assert (listener.data, listener.ended, listener.broken) == (b"hello world", 1, [])
    assert transport.closed, "it is not used again"


def test_more_than_was_asked_for_ends_the_connection():
    for extra in (SIZED + b"X", CHUNKED + b"HTTP/1.1 200 OK\r\n"):
        engine = Engine()
        link, transport, listener = engine.asked()
        link.data_received(extra)
        assert listener.ended == 1
        assert transport.aborted
        assert engine.links.take(ENGINE) is None
    engine = Engine()
    link, transport, _ = engine.asked()
    link.data_received(SIZED)
    link.data_received(b"unasked")
    assert transport.aborted
    assert engine.links.take(ENGINE) is None


def test_a_link_that_was_paused_at_its_last_byte_is_read_again():
    for answer in (SIZED, CHUNKED):
        engine = Engine()
        link, transport = engine.link()
        listener = Listener(link.pause)
        link.begin(listener, b"x", b"")
        link.data_received(answer[:-1])
        assert not transport.reading
        link.resume()
        link.data_received(answer[-1:])
        assert listener.ended == 1
        assert transport.reading, "or the next exchange on it would never hear a word"
        assert engine.links.take(ENGINE) is link


def test_only_a_connection_that_breaks_at_once_is_stale():
    for after_s, stale in ((0.1, True), (STALE_S + 0.1, False)):
        engine = Engine()
        link, _, _ = engine.asked()
        link.data_received(SIZED)
        again = Listener()
        link.begin(again, b"x", b"")
        engine.now += after_s
        link.connection_lost(None)
        assert [flag for _, flag in again.broken] == [stale], "the engine may have had the prompt"


def test_a_listener_that_fails_does_not_leave_the_exchange_hanging(caplog):
    def fail():
        raise ZeroDivisionError

    link, transport = Engine().link()
    listener = Listener(fail)
    link.begin(listener, b"x", b"")
    link.data_received(SIZED)
    assert transport.aborted
    assert len(listener.broken) == 1
    assert "internal error" in caplog.messages


def test_abandoned_links_say_nothing_more():
    link, transport, listener = Engine().asked()
    link.data_received(SIZED[:-2])
    link.abandon()
    assert transport.aborted
    link.data_received(SIZED[-2:])
    link.connection_lost(None)
    assert (listener.ended, listener.broken) == (0, [])


def test_idle_links_age():
    engine = Engine()
    both = [engine.asked() for _ in range(2)]
    for at, (link, _, _) in enumerate(both):
        engine.now = float(at * 2)
        link.data_received(SIZED)
    engine.now = 4.5
    assert engine.links.take(ENGINE) is both[1][0], "the one used last first"
    engine.links.give_back(both[1][0])
    engine.links.sweep()
    assert [transport.aborted for _, transport, _ in both] == [True, False]
    engine.now = 10
    assert engine.links.take(ENGINE) is None
    assert both[1][1].aborted


def test_mutated_answers_end_or_break():
    chance = random.Random(7)
    for _ in range(3000):
        text = bytearray(chance.choice((SIZED, CHUNKED, CONTINUED)))
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(text))
            text[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
        link, _, listener = Engine().asked()
        cut = chance.randrange(len(text))
        for part in (bytes(text[:cut]), bytes(text[cut:])):
            if part:
                link.data_received(part)
        link.eof_received()
        link.connection_lost(None)
        assert listener.ended + len(listener.broken) == 1, bytes(text)


async def test_no_connection_is_one_error():
    links = EngineLinks(connect_timeout_s=1, keepalive_s=3, clock=lambda: 0.0)
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    for url in (f"http://127.0.0.1:{port}", "http://no-such-host.invalid:1", f"http://{'x' * 70}.invalid:1"):
        with pytest.raises(UpstreamUnreachable, match="no connection to"):
            await links.connect(url)


async def test_an_answer_that_is_wanted_whole_has_a_limit():
    link, _ = Engine().link()
    answer = Collected(5)
    link.begin(answer, b"x", b"")
    link.data_received(SIZED)
    with pytest.raises(UpstreamFailed, match="too long"):
        await answer.done
