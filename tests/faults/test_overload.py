"""Real workers under a caller who asks for everything at once, and without descriptors: engines and lease are served."""

import asyncio
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from demo import pool
from demo.processes import Supervisor

from tensorcast_connector.config import parse_address
from tensorcast_connector.net.rpc import receive_frame
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.wire.caller_messages import ListArtifacts
from tensorcast_connector.wire.codec import encode
from tensorcast_connector.wire.frames import Kind, encode_frame
from tensorcast_connector.wire.messages import CALLER_ROLE, PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Hello
from tests.faults.host import Host, fresh
from tests.waiting import until_blocking

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
REQUESTS = 12_000
DESCRIPTORS = 64
STRANGERS = 120  # more than descriptors, and fewer than that and the kernel's queue


class Flood(threading.Thread):
    """A caller that sends REQUESTS in one go, reads the answers, and counts them."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self.answered = 0
        self.begun = threading.Event()

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        stream = await SocketNetwork().dial(parse_address(self._address, "worker"), 5.0)
        greeting = Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION, CALLER_ROLE, "flood", "default")
        stream.write(encode_frame(Kind.REQUEST, 1, encode(greeting)))
        await receive_frame(stream)
        body = encode(ListArtifacts())
        stream.write(b"".join(encode_frame(Kind.REQUEST, number, body) for number in range(2, REQUESTS + 2)))
        self.begun.set()
        for _ in range(REQUESTS):
            await receive_frame(stream)
            self.answered += 1
        stream.close()


def test_an_engine_is_served_while_a_caller_asks_for_thousands_of_things_at_once(
    supervisor: Supervisor, host: Callable[[str, str], Host]
) -> None:
    store = pool.store(supervisor)
    a = host(store["store"], "a")
    pages = fresh(4)
    a.save(pages)
    a.finds(pages)
    flood = Flood(a.worker["worker"])
    flood.start()
    assert flood.begun.wait(30)
    served = 0
    while flood.answered < REQUESTS // 2:
        assert a.found(pages) == len(pages)
        served += 1
    flood.join(60)
    assert flood.answered == REQUESTS
    print(f"lookups of an engine while half of {REQUESTS} requests of a caller were answered: {served}")
    assert served > 20
    assert a.joins == 1, "the worker was not too busy for its lease"


@contextmanager
def strangers(address: str) -> Iterator[None]:
    """Connections that say hello, and do not wait for the answer, which some will not get."""
    where = parse_address(address, "peer")
    said = encode_frame(Kind.REQUEST, 1, encode(Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION, "client", "stranger")))
    made = []
    try:
        for _ in range(STRANGERS):
            sock = socket.create_connection((where.host, where.port), 10)
            made.append(sock)
            sock.sendall(said)
        yield
    finally:
        for sock in made:
            sock.close()


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="prlimit is not installed (Debian: util-linux)")
def test_a_worker_without_descriptors_goes_on_and_says_so_once(
    supervisor: Supervisor, host: Callable[[str, str], Host]
) -> None:
    store = pool.store(supervisor)
    few = ["prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}"]
    a = Host(pool.worker(supervisor, store["store"], "a", arena="64MiB", prefix=few))
    pages = fresh()
    a.save(pages)
    a.finds(pages)

    def said(what: str) -> int:
        return a.worker.running.log.read_text().count(what)

    with strangers(a.worker["peer"]):
        until_blocking(lambda: said("accepts no connections for now"), 30.0)
        for _ in range(20):
            assert a.found(pages) == len(pages)
        assert said("accepts no connections for now") == 1
    until_blocking(lambda: said("accepts connections again"), 30.0)
    b = host(store["store"], "b")
    b.finds(pages, 60.0)
    b.loads(pages)
    log = a.worker.running.log.read_text()
    assert a.joins == 1 and "Traceback" not in log and "out of system resource" not in log
    a.close()
