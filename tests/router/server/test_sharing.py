"""Routers that tell each other what they know, over real sockets."""

import asyncio
import random
import socket
from pathlib import Path
from typing import Any

import pytest

from smetric_router.config import RouterConfig
from smetric_router.errors import ConfigError
from smetric_router.server import sharing
from smetric_router.server.place import Place, listen_unix
from smetric_router.server.sharing import _frame, parse
from smetric_router.types import DrainingTold, Forgotten, Recorded, Settled, Wanted

from ..conftest import Router, until
from ..workload import SESSIONS, TURNS, converse

TOKEN = "a token that nobody guesses"


def listener() -> socket.socket:
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    return made


def address(made: socket.socket) -> str:
    return "{}:{}".format(*made.getsockname())


@pytest.fixture
def replicas(engines, route):
    """Starts routers in front of the same engines, each a peer of all others."""

    async def start(count: int, four: list[Any], tokens: tuple[str, ...] = (TOKEN,), **options: Any) -> list[Router]:
        sockets = [listener() for _ in range(count)]
        routers = []
        for at, own in enumerate(sockets):
            peers = tuple(address(each) for each in sockets if each is not own)
            place = Place(peers=peers, peer_listener=own)
            routers.append(await route(*four, place=place, peer_token=tokens[at % len(tokens)], **options))
        return routers

    return start


def heard(router: Router) -> int:
    assert router.app.sharing is not None
    return len(router.app.sharing.connected)


def shared(router: Router, kind: str) -> float:
    return router.app.metrics.registry.get_sample_value("smetric_router_shared_total", {"kind": kind}) or 0.0


async def test_a_follow_up_sticks_whichever_router_it_meets(engines, replicas) -> None:
    one, other = await replicas(2, await engines(3))
    await until(lambda: heard(one) == heard(other) == 1)
    first = await one.chat("hello " * 500)
    await until(lambda: shared(other, "heard") >= 1)
    for router in (other, one, other):
        reply = await router.chat("hello " * 500, "answer", "and now")
        assert reply.headers["x-smetric-instance"] == first.headers["x-smetric-instance"]
        assert reply.headers["x-smetric-reason"] == "sticky"


async def test_a_router_that_begins_late_learns_what_there_is(engines, route) -> None:
    two = await engines(2)
    own = listener()
    one = await route(*two, place=Place(peer_listener=own), peer_token=TOKEN)
    where = {}
    for at in range(10):
        where[at] = (await one.chat(f"{at} hello " * 300)).headers["x-smetric-instance"]
    late = await route(*two, place=Place(peers=(address(own),)), peer_token=TOKEN)
    assert shared(late, "heard") >= 10, "before it takes a request"
    for at in range(10):
        reply = await late.chat(f"{at} hello " * 300, "answer", "and now")
        assert (reply.headers["x-smetric-instance"], reply.headers["x-smetric-reason"]) == (where[at], "sticky")


async def test_a_sibling_that_begins_later_is_waited_for(engines, route, tmp_path: Path) -> None:
    """It does not take what it decides, nor what it is told, for lost: that would be so until the next try to connect."""
    two = await engines(2)
    paths = [tmp_path / f"{at}.sock" for at in range(2)]
    doors = [listen_unix(path) for path in paths]
    beginning = asyncio.create_task(route(*two, place=Place(own=doors[0], siblings=(paths[1],))))
    done, _ = await asyncio.wait([beginning], timeout=0.5)
    assert not done, "it takes no request before it has heard"
    other = await route(*two, place=Place(own=doors[1], siblings=(paths[0],)))
    one = await beginning
    assert heard(one) == heard(other) == 1
    first = await other.chat("hello " * 500)
    await until(lambda: shared(one, "heard") >= 1)
    reply = await one.chat("hello " * 500, "answer", "and now")
    assert reply.headers["x-smetric-instance"] == first.headers["x-smetric-instance"]
    assert reply.headers["x-smetric-reason"] == "sticky"


def test_a_socket_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    for folder, why in ((deep, "AF_UNIX path too long"), (tmp_path / "absent", "No such file or directory")):
        with pytest.raises(ConfigError, match=rf"cannot make the socket {folder}/0.sock: {why}; set TMPDIR") as error:
            listen_unix(folder / "0.sock")
        assert "\n" not in str(error.value)


async def test_a_peer_that_says_nothing_does_not_keep_a_router_from_its_work(engines, route, monkeypatch) -> None:
    monkeypatch.setattr(sharing, "LEARN_TIMEOUT_S", 0.05)
    silent = listener()
    silent.listen()
    router = await route(*await engines(1), place=Place(peers=(address(silent),)), peer_token=TOKEN)
    assert (await router.chat("hello")).status == 200 and heard(router) == 0
    silent.close()


async def test_who_does_not_know_the_token_hears_nothing(engines, replicas) -> None:
    one, other = await replicas(2, await engines(1), (TOKEN, TOKEN[::-1]))
    await one.chat("hello " * 500)
    own = one.app._place.peer_listener
    reader, writer = await asyncio.open_connection(*own.getsockname())
    assert len(await reader.readexactly(16)) == 16
    writer.write(bytes(48))
    assert await reader.read() == b"", "not a byte more"
    writer.close()
    assert heard(one) == heard(other) == 0
    assert shared(other, "heard") == 0


async def test_who_is_in_front_of_other_engines_hears_nothing(engines, route) -> None:
    a, b = await engines(2)
    own = listener()
    one = await route(a, b, place=Place(peer_listener=own), peer_token=TOKEN)
    other = await route(b, a, place=Place(peers=(address(own),)), peer_token=TOKEN)
    with pytest.raises(ValueError, match="other engines"):
        await other.app.sharing._connect(address(own), replica=True)
    assert heard(other) == 0
    assert not one.app.sharing._listeners


async def test_garbage_from_a_peer_ends_its_connection_and_nothing_else(engines, route, monkeypatch) -> None:
    monkeypatch.setattr(sharing, "RECONNECT_S", (0.01, 0.05))
    draw = random.Random(2)
    greeted = 0

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal greeted
        ours = draw.randbytes(16)
        writer.write(ours)
        theirs = (await reader.readexactly(48))[:16]
        key = sharing.hmac.digest(TOKEN.encode(), f"{engine.url}\n1024".encode(), "sha256")
        proof = sharing.hmac.digest(key, b"teller" + ours + theirs, "sha256")
        writer.write(
            proof + draw.choice((b"\xff" * 8, b"\0\0\0\5hello", _frame([])[:-1] + b"\xc1", draw.randbytes(64)))
        )
        greeted += 1
        writer.close()

    (engine,) = await engines(1)
    server = await asyncio.start_server(lie, "127.0.0.1", 0)
    async with server:
        peer = "{}:{}".format(*server.sockets[0].getsockname())
        router = await route(engine, place=Place(peers=(peer,)), peer_token=TOKEN)
        await until(lambda: shared(router, "garbage") >= 4)
        assert (await router.chat("hello")).status == 200


def test_frames_say_what_was_said_and_ten_thousand_mutations_are_told() -> None:
    said = [
        Recorded(1 << 40, 2, 3, (4, (1 << 64) - 1)),
        Settled(5, -1),
        Forgotten(6),
        DrainingTold(7, True),
        Wanted(1, 2),
    ]
    frame = _frame(said)
    assert parse(frame[4:]) == said
    draw = random.Random(1)
    for _ in range(10_000):
        body = bytearray(frame[4:])
        for _ in range(draw.randrange(1, 5)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        try:
            parse(bytes(body))
        except ValueError:
            continue


async def test_a_listener_that_does_not_read_is_left_out(engines, route, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sharing, "BEHIND_BYTES_MAX", 1000)
    (engine,) = await engines(1)
    router = await route(engine, place=Place(own=listen_unix(tmp_path / "own.sock")))
    _, writer = await asyncio.open_unix_connection(tmp_path / "own.sock", limit=1)
    await until(lambda: bool(router.app.sharing._listeners))
    async with asyncio.timeout(30):
        at = 0
        while not shared(router, "left_out"):
            at += 1
            assert (await router.chat(f"{at} hello " * 20_000)).status == 200
    writer.close()


@pytest.mark.slow
async def test_stickiness_with_two_replicas_behind_a_random_balancer(engines, replicas) -> None:
    four = await engines(4)
    for engine in four:
        answer = engine.answer

        async def delayed(request, answer=answer):
            await asyncio.sleep(0.03)
            return await answer(request, await request.read())

        engine.behaviour = delayed
    one, other = await replicas(2, four)
    await until(lambda: heard(one) == heard(other) == 1)
    tally = await converse(one.client, [one.url, other.url], 1)
    print(f"two replicas: sticky {tally.sticky:.1%}, max/mean {tally.imbalance(4):.2f}")
    assert sum(tally.served.values()) == SESSIONS * TURNS
    assert tally.sticky >= 0.98
    assert tally.imbalance(4) <= 1.5


def test_what_is_wrong_with_peers_is_told() -> None:
    with pytest.raises(ConfigError, match="peer_token"):
        RouterConfig(peers=("a:1",), peer_token="short")
    with pytest.raises(ConfigError, match="not HOST:PORT"):
        RouterConfig(peers=("a",), peer_token=TOKEN)
    assert TOKEN not in repr(RouterConfig(peers=("a:1",), peer_token=TOKEN))
