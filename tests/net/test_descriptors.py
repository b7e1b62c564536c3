"""The arena's file descriptor, from a real worker, under asyncio's loop and under uvloop."""

import asyncio
import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tensorcast_connector.errors import ProtocolError, Unavailable
from tensorcast_connector.net import descriptors
from tensorcast_connector.net.descriptors import receive_arena
from tensorcast_connector.net.rpc import accept, receive_frame
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.settings import WorkerConfig
from tensorcast_connector.types import Address
from tensorcast_connector.wire.codec import (
    encode,
)
from tensorcast_connector.wire.frames import Kind, encode_frame
from tensorcast_connector.wire.messages import (
    ArenaInfo,
    Failure,
    Ok,
)
from tensorcast_connector.worker.server import Worker, start_worker


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    """Without a store."""
    config = WorkerConfig("127.0.0.1:1", "w", "127.0.0.1:0", "", str(tmp_path / "s"), 1 << 20)
    worker = await start_worker(config, SocketNetwork(), random.Random(1), time.monotonic)
    yield worker
    await worker.close()


async def test_the_same_memory_here_and_there(worker: Worker) -> None:
    descriptor, info = await receive_arena(worker.socket.path, "me")
    try:
        assert info == ArenaInfo(1 << 20, worker.worker_id) and not os.get_inheritable(descriptor)
        with mmap.mmap(descriptor, info.arena_bytes) as memory:
            worker.pages._arena.view[7:10] = b"abc"
            assert memory[7:10] == b"abc"
            memory[7] = 0
            assert worker.pages._arena.view[7] == 0
    finally:
        os.close(descriptor)


async def test_many_at_once(worker: Worker) -> None:
    got = await asyncio.gather(*(receive_arena(worker.socket.path, str(n)) for n in range(20)))
    for descriptor, _ in got:
        os.close(descriptor)


WITHOUT_DESCRIPTORS = """
import asyncio, contextlib, os, resource, sys
from tensorcast_connector.errors import Exhausted
from tensorcast_connector.net.descriptors import DescriptorChannel
from tensorcast_connector.wire.messages import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, ArenaInfo, Hello, MapArena

async def main():
    channel = DescriptorChannel(sys.argv[1], Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION, "engine", "me"))

    async def ask():
        os.close((await channel.call(MapArena(), ArenaInfo, 5))[0])

    await ask()
    taken = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))
    try:
        await ask()
    except Exhausted as error:
        print(error)
    for each in taken:
        os.close(each)
    await ask()
    print("and now it is passed")
    channel.close()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_process_without_descriptors_is_told_so(worker: Worker) -> None:
    """And not that its worker is none; it goes on once there are some again."""
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS, worker.socket.path]
    caller = await asyncio.create_subprocess_exec(*command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    said, _ = await caller.communicate()
    first, second = said.decode().splitlines()
    assert first.startswith("no file descriptor is left for the memory of unix:") and second == "and now it is passed"


async def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"cannot map the memory of unix:.*: No such file"):
        await receive_arena(str(tmp_path / "none"), "me")


async def leaves(stream: Stream) -> None:
    pass


async def leaves_after_hello(stream: Stream) -> None:
    await accept(stream, "worker", "w")
    await receive_frame(stream)


async def refuses(stream: Stream) -> None:
    await leaves_after_hello(stream)
    stream.write(encode_frame(Kind.ERROR, 2, encode(Failure("unavailable", "not today"))))
    await stream.receive()


async def passes_nothing(stream: Stream) -> None:
    await leaves_after_hello(stream)
    stream.write(encode_frame(Kind.REPLY, 2, encode(ArenaInfo(1, "w"))))
    await stream.receive()


async def passes_and_says_something_else(stream: Stream) -> None:
    await leaves_after_hello(stream)
    await stream.send_descriptor(0)
    stream.write(encode_frame(Kind.REPLY, 2, encode(Ok())))
    await stream.receive()


async def talks_http(stream: Stream) -> None:
    await stream.receive()
    stream.write(b"HTTP/1.1 400 Bad Request\r\n\r\nwhat was that, then?")
    await stream.receive()


@pytest.mark.parametrize(
    ("serve", "kind", "why"),
    [
        (leaves, Unavailable, "closed the connection|cannot map the memory"),
        (leaves_after_hello, Unavailable, "closed the connection|cannot map the memory"),
        (refuses, Unavailable, "not today"),
        (passes_nothing, ProtocolError, "did not pass its memory"),
        (passes_and_says_something_else, ProtocolError, "expected ArenaInfo, got Ok"),
        (talks_http, ProtocolError, "not a tensorcast connection"),
    ],
)
async def test_whoever_is_there_is_no_worker(
    tmp_path: Path, serve: Callable[[Stream], Awaitable[None]], kind: type[Exception], why: str
) -> None:
    first = await asyncio.get_running_loop().create_unix_server(asyncio.Protocol, str(tmp_path / "first"))
    first.close()  # uvloop opens a spare descriptor with the first stream of a loop, and keeps it
    listener = await SocketNetwork().listen(Address("unix", path=str(tmp_path / "s")), serve)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(kind, match=why):
        await receive_arena(str(tmp_path / "s"), "me")
    assert len(os.listdir("/proc/self/fd")) <= before + 1, "a descriptor that came along is closed"  # noqa: PTH208
    await listener.close()


async def test_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "CONNECT_TIMEOUT_S", 0.02)

    async def mute(stream: Stream) -> None:
        while await stream.receive():
            pass

    listener = await SocketNetwork().listen(Address("unix", path=str(tmp_path / "s")), mute)
    with pytest.raises(Unavailable, match=r"did not pass its memory within 0.02 s"):
        await receive_arena(str(tmp_path / "s"), "me")
    await listener.close()
