"""Garbage, oversized and half frames on every port of real processes: one clear line each, and they go on serving."""

import random
import socket
import struct
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from demo import pool
from demo.pool import Started
from demo.processes import Supervisor

from tensorcast_connector.config import parse_address
from tensorcast_connector.wire.codec import CallerRequest, encode, failure_decoder
from tensorcast_connector.wire.frames import FRAME_BODY_BYTES_MAX, Kind, encode_frame
from tensorcast_connector.wire.messages import (
    PROTOCOL_VERSION,
    AskInventory,
    FetchBytes,
    FindKeys,
    FindPages,
    Hello,
    Message,
    ReadHeader,
    ReportKeys,
    ReportPages,
)
from tensorcast_connector.wire.plan_messages import (
    CancelOwnedPlan,
    CancelSteps,
    ReportInstance,
    RunStep,
    StepEnded,
    TakeStep,
)
from tensorcast_connector.wire.store_messages import (
    ClaimShards,
    GrantLease,
    KeepAlive,
    ReadRecords,
    RegisterWorker,
    ReleaseShards,
    WorkerRecord,
    WriteRecords,
)
from tests.faults.host import Host, fresh
from tests.strange import some

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

HELLO = encode_frame(Kind.REQUEST, 1, encode(Hello(1, PROTOCOL_VERSION, "worker", "stranger/1")))
HEADER = struct.Struct("!2sBBIQIIQ")
GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "random": random.Random(1).randbytes(4096),
    "zeros": bytes(4096),
    "another version": HEADER.pack(b"TC", 99, 1, 0, 1, 0, 0, 0),
    "larger than a hello may be": HEADER.pack(b"TC", 1, 1, FRAME_BODY_BYTES_MAX, 1, 0, 0, 0) + bytes(100_000),
    "larger than a frame may be": HEADER.pack(b"TC", 1, 1, (1 << 32) - 1, 1, 0, 0, 0),
    "a payload in a request": HEADER.pack(b"TC", 1, 1, 4, 1, 0, 0, 1 << 60) + b"abcd",
    "half a header": HEADER.pack(b"TC", 1, 1, 10, 1, 0, 0, 0)[:20],
    "a body that is no message": encode_frame(Kind.REQUEST, 1, b"\xc1" * 50),
    "lists in lists": encode_frame(Kind.REQUEST, 1, b"\x91" * 50_000),
    "an unknown message after hello": HELLO + encode_frame(Kind.REQUEST, 2, b"\x92\xa5Nooo!\x01"),
    "a huge list after hello": HELLO + encode_frame(Kind.REQUEST, 2, b"\x93\xa9FindPages\xdd\xff\xff\xff\xff"),
    "a reply out of the blue": HELLO + encode_frame(Kind.REPLY, 7, b"\x90"),
}


@pytest.fixture
def store(supervisor: Supervisor) -> Started:
    """With metrics, which are a port as well."""
    return pool.store(supervisor, options=["--data", str(supervisor.folder / "store"), "--metrics", "127.0.0.1:0"])


@pytest.fixture
def ports(store: Started, host: Callable[[str, str], Host]) -> Iterator[dict[str, str]]:
    """Every address that a store and a worker listen on, and the hosts in `hosts`."""
    a, b = host(store["store"], "a"), host(store["store"], "b")
    pages = fresh()
    a.save(pages)
    b.finds(pages)
    metrics = store["metrics"].removeprefix("http://").removesuffix("/metrics")
    yield {
        "store": store["store"], "peer": a.worker["peer"], "socket": a.worker["worker"],
        "metrics": metrics,
    }  # fmt: skip
    more = fresh()
    a.save(more)
    b.finds(more)
    b.loads([*pages, *more])
    for name, process in (("store", store.running), ("worker", a.worker.running)):
        log = process.log.read_text()
        assert "Traceback" not in log, f"{name}: {log[-3000:]}"
    with urllib.request.urlopen(f"http://{metrics}/healthz") as got:
        assert got.status == 200


def connect(address: str) -> socket.socket:
    where = parse_address(address, "port")
    if where.scheme == "unix":
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(10)
        made.connect(where.path)
    else:
        made = socket.create_connection((where.host, where.port), 10)
    return made


def test_garbage_on_every_port(ports: dict[str, str]) -> None:
    for address in ports.values():
        for data in GARBAGE.values():
            with closing(connect(address)) as connection:
                try:
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
                except OSError:
                    pass  # it was closed on us, as it should be


def test_many_connections_that_say_nothing(ports: dict[str, str]) -> None:
    """They cost a descriptor each, and neither engines nor workers notice them."""
    silent = [connect(address) for address in ports.values() for _ in range(100)]
    for each in silent[::2]:
        each.sendall(b"TC")
    for each in silent:
        each.close()


def test_what_a_stranger_may_not_do(ports: dict[str, str]) -> None:
    """Well-formed requests that make no sense: an error each, and nothing changes."""
    far = 1 << 60
    attempts = {
        "peer": [
            ReportPages("a/other", 1, [(0, 1, 1)], [0], [b"k" * 32], []),
            ReportPages("stranger/1", 1, [(far, far, far)], [far], [b""], [b""]),
            AskInventory("stranger/1", [(far, 1, 1), (-1, 1, 1)]),
            FindPages([far, -5], [b"k" * 32]),
            FindPages([], [b""] * 10),
            FindKeys([far, -5], 32, b"k" * 32),
            FindKeys([], 7, b"k" * 32),
            FindKeys([], -1, b"k" * 32),
            ReportKeys("stranger/1", 1, [(far, far, far)], [far], 0, b"k", b"k"),
        ],
        "store": [
            KeepAlive(-1), ClaimShards("stranger/1", 7, [0]), ClaimShards("stranger/1", 0, [far]),
            ReleaseShards(far, [0]), RegisterWorker(WorkerRecord("x\ny", "n", "h:1", 1), 6),
            RegisterWorker(WorkerRecord("x/1", "n", "unix:/tmp/x", 1), 6),
        ],
    }  # fmt: skip
    for port, messages in attempts.items():
        for message in messages:
            with closing(connect(ports[port])) as connection:
                connection.sendall(HELLO)
                connection.recv(65536)
                connection.sendall(encode_frame(Kind.REQUEST, 2, encode(message), 2000))
                answer = connection.recv(65536)
                assert answer[:2] == b"TC" and answer[3] in (Kind.REPLY, Kind.ERROR), (message, answer)


CALLER_HELLO = encode_frame(Kind.REQUEST, 1, encode(Hello(1, PROTOCOL_VERSION, "caller", "stranger", "t")))
SERVICE: dict[str, tuple[bytes, list[type[Message]]]] = {
    "socket": (CALLER_HELLO, [*CallerRequest.__args__, TakeStep, StepEnded, ReportInstance]),
    "peer": (CALLER_HELLO, list(CallerRequest.__args__)),
    "peer as a worker": (HELLO, [RunStep, CancelSteps, CancelOwnedPlan, ReadHeader]),
    "socket as an engine": (HELLO, [TakeStep, StepEnded, ReportInstance]),
    "peer in bulk": (
        encode_frame(Kind.REQUEST, 1, encode(Hello(1, PROTOCOL_VERSION, "bulk", "stranger", "t"))), [FetchBytes]),
    "store": (HELLO, [ReadRecords, WriteRecords, GrantLease]),
}  # fmt: skip


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """The kind and the body of the next frame, behind the byte that carries a descriptor; (0, b"") if it was closed."""
    data = b""
    while len(data) < HEADER.size or len(data) < HEADER.size + HEADER.unpack(data[: HEADER.size])[3]:
        part = connection.recv(1 << 20)
        if not part:
            return 0, b""
        data = (data + part).lstrip(b"\0")
    return data[3], data[HEADER.size :]


@pytest.mark.parametrize("where", SERVICE)
def test_requests_for_artifacts_and_plans_that_make_no_sense(ports: dict[str, str], where: str) -> None:
    """With any values, and damaged: a typed answer each, or the connection is closed."""
    hello, kinds = SERVICE[where]
    chance = random.Random(where)
    for kind in kinds:
        connection: socket.socket | None = None
        for number, message in enumerate(some(kind, chance, 8)):
            body = bytearray(encode(message))
            if number % 2:
                body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
            if connection is None:
                connection = connect(ports[where.partition(" ")[0]])
                connection.sendall(hello)
                assert answer(connection)[0] == Kind.REPLY
            try:
                connection.sendall(encode_frame(Kind.REQUEST, 2, bytes(body), 200))
                kind_, reply = answer(connection)
            except ConnectionError:
                kind_ = 0
            if not kind_:  # it was closed on us
                connection = connection.close()
                continue
            assert kind_ in (Kind.REPLY, Kind.ERROR)
            if kind_ == Kind.ERROR:
                failure = failure_decoder.decode(reply)
                assert failure.code != "internal" and "\n" not in failure.message, (message, failure)
        if connection is not None:
            connection.close()
