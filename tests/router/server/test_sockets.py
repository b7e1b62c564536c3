"""Sockets to clients and engines send small pieces at once, whichever loop runs them."""

import asyncio
import os
import socket

import pytest
import uvloop

from smetric_router.config import RouterConfig

from ..conftest import running
from ..raw_engine import answer_to, answers, raw_engine, request

EVENT = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n3\r\nx\n\n\r\n"


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_no_piece_of_a_stream_waits_for_the_one_before_to_be_acknowledged(loop_factory) -> None:
    """Nagle's algorithm holds the second small write back by 40 ms, as clients of other routers have seen."""
    seen: list[int] = []

    async def check() -> None:
        async with raw_engine(answers(EVENT)) as engine, running(RouterConfig(engines=(engine.url,))) as router:
            asked = asyncio.create_task(answer_to(router.url, request(), until=b"never"))
            while not any(each.started for each in router.app._proxy._active):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            (client,), (link,) = router.app._connections, router.app._links._engine(engine.url).open
            seen.extend(no_delay(each._transport) for each in (client, link))
            asked.cancel()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(check(), 10))
    assert seen == [1, 1]


def no_delay(transport) -> int:
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as copy:
        return copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
