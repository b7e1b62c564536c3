"""Faults of the router's own, at every step of an exchange: an answer or a cut, one line in the log, and nothing left."""

import asyncio

import aiohttp
import pytest

from smetric_router.server.breakers import Breakers
from smetric_router.server.exchange import Exchange
from smetric_router.server.health import HealthMonitor
from smetric_router.server.links import EngineLink
from smetric_router.server.metrics import Metrics
from smetric_router.server.proxy import Proxy
from smetric_router.server.tracing import Tracing
from smetric_router.state.load import LoadBoard
from smetric_router.state.placements import Placements
from smetric_router.state.prefix_index import PrefixIndex
from smetric_router.state.telling import Telling
from smetric_router.state.usage import UsageScan

from ..conftest import Reply, Router, until
from ..fake_engine import break_stream, drop, hang, status
from .test_failures import stall


def broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError("a bug")


async def answered(router: Router) -> Reply | None:
    """The answer to a stream; None: the client was cut off, since it had some of it."""
    try:
        async with asyncio.timeout(5):
            return await router.chat("x", stream=True)
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError):
        return None


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Proxy, "request_id"),
        (Proxy, "read"),
        (Proxy, "must_wait"),
        (Proxy, "place"),
        (Proxy, "headers_for_engine"),
        (EngineLink, "begin"),
        (Exchange, "on_head"),
        (Proxy, "first_byte"),
        (Proxy, "headers_for_client"),
        (UsageScan, "__init__"),
        (UsageScan, "feed"),
        (UsageScan, "usage"),
        (Proxy, "streamed"),
        (Breakers, "sent"),
        (Breakers, "ended"),
        (Metrics, "decided"),
        (Metrics, "first_byte"),
        (Metrics, "used"),
        (Metrics, "answered"),
        (Tracing, "over"),
        (PrefixIndex, "record"),
        (PrefixIndex, "settle"),
        (LoadBoard, "dispatched"),
        (Telling, "recorded"),
        (Telling, "settled"),
        (Placements, "count"),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
async def test_a_fault_anywhere_leaves_nothing_behind(engines, route, monkeypatch, owner, name, warm):
    (engine,) = await engines()
    router = await route(engine, breaker_failures_min=0, health_interval_s=60)
    if warm:  # there is a connection to the engine already
        assert (await router.chat("x")).status == 200
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        answer = await answered(router)
        whole = answer is not None and answer.body.endswith(b"[DONE]\n\n")
        assert answer is None or whole or answer.status >= 500 or b'"error"' in answer.body
        await until(lambda: router.inflight() == 0)
        router.state.check()
        assert not router.app._proxy._active
    assert (await router.chat("x")).status == 200


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Metrics, "failed"),
        (HealthMonitor, "suspect"),
        (Proxy, "suspect"),
        (Proxy, "turned_away"),
        (Proxy, "may_retry"),
        (Proxy, "own_headers"),
        (Proxy, "error_event"),
        (Breakers, "ended"),
        (Metrics, "answered"),
    ],
)
@pytest.mark.parametrize("behaviour", [drop, status(503), break_stream, None], ids=["drop", "503", "break", "gone"])
async def test_a_fault_while_an_engine_fails_leaves_nothing_behind(engines, route, monkeypatch, owner, name, behaviour):
    (engine,) = await engines()
    router = await route(engine, breaker_failures_min=0, health_interval_s=60, health_recheck_s=60)
    engine.behaviour = behaviour
    if behaviour is None:
        await engine.stop()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        answer = await answered(router)
        assert answer is None or answer.status >= 500 or b'"error"' in answer.body
        await until(lambda: router.inflight() == 0)
        router.state.check()
        assert not router.app._proxy._active


async def test_a_client_that_leaves_while_a_connection_is_made(engines, route, monkeypatch):
    (engine,) = await engines()
    router = await route(engine)
    links = router.app._links
    connecting, make = asyncio.Event(), links.connect

    async def slow(instance: str) -> EngineLink:
        connecting.set()
        await asyncio.Event().wait()
        return await make(instance)

    monkeypatch.setattr(links, "connect", slow)
    call = asyncio.create_task(router.chat("x"))
    await connecting.wait()
    assert router.inflight() == 1
    call.cancel()
    await until(lambda: router.inflight() == 0)
    assert engine.requests == []


async def test_a_connection_that_closes_as_it_is_made(engines, route, monkeypatch):
    one, other = await engines(2)
    router = await route(one, other)
    links = router.app._links
    make = links.connect

    async def closed(instance: str) -> EngineLink:
        link = await make(instance)
        if instance == one.url:
            link.abandon()
        return link

    monkeypatch.setattr(links, "connect", closed)
    for _ in range(3):
        answer = await router.chat("x")
        assert (answer.status, answer.headers["x-smetric-instance"]) == (200, other.url)
    assert one.requests == []


async def test_a_fault_of_the_checks_does_not_end_them(engines, route, monkeypatch, caplog):
    (engine,) = await engines()
    router = await route(engine, stream_stall_timeout_s=0.1)
    engine.behaviour = stall
    with monkeypatch.context() as patch:
        patch.setattr(Proxy, "check", broken)
        await until(lambda: "internal error" in caplog.messages)
    assert b"upstream_timeout" in (await router.chat("x", stream=True)).body


async def test_stopping_ends_what_is_under_way(engines, route):
    (engine,) = await engines()
    router = await route(engine, drain_timeout_s=0)
    engine.behaviour = hang
    call = asyncio.create_task(router.chat("x"))
    await until(lambda: engine.running == 1)
    await router.app.drain(0)
    await router.app.stop()
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await call
    assert router.inflight() == 0
    await until(lambda: engine.running == 0)
