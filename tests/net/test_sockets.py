"""Streams and listeners on real sockets, under asyncio's loop and under uvloop."""

import asyncio
import contextlib
import os
import random
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tensorcast_connector.errors import ConfigError, ProtocolError, Unavailable
from tensorcast_connector.net import sockets
from tensorcast_connector.net.private import private_directory
from tensorcast_connector.net.socket_stream import RECEIVE_BUFFER_BYTES, SocketStream
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.net.transport import Listener, Stream
from tensorcast_connector.types import Address
from tests.waiting import until

ANY = Address("tcp", host="127.0.0.1", port=0)


async def nothing(stream: Stream) -> None:
    """An OnStream that closes at once."""


async def is_served(address: Address) -> None:
    """Somebody accepts at `address`, and closes."""
    stream = await SocketNetwork().dial(address, 1)
    assert await stream.receive() == b""
    stream.close()


class Ends:
    """Both ends of one connection."""

    def __init__(self, network: SocketNetwork, address: Address) -> None:
        self.network = network
        self.address = address
        self.accepted: asyncio.Queue[Stream] = asyncio.Queue()
        self.done = asyncio.Event()

    async def on_stream(self, stream: Stream) -> None:
        self.accepted.put_nowait(stream)
        await self.done.wait()


@pytest.fixture(params=["unix", "tcp"])
async def ends(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Stream, Stream]]:
    """(the dialler's end, the listener's end)."""
    address = ANY if request.param == "tcp" else Address("unix", path=str(tmp_path / "s"))
    both = Ends(SocketNetwork(), address)
    listener = await both.network.listen(address, both.on_stream)
    dialled = await both.network.dial(listener.address, 5)
    yield dialled, await both.accepted.get()
    dialled.close()
    both.done.set()
    await listener.close()


async def send_in_pieces(stream: Stream, data: bytes, chance: random.Random) -> None:
    view = memoryview(data)
    while view:
        count = 1 + int(len(view) * chance.random() ** 3)
        await stream.send(view[:count])
        view = view[count:]
        for _ in range(chance.randint(0, 2)):
            await asyncio.sleep(0)


async def test_a_host_that_vanished_is_noticed_by_the_kernel(ends: tuple[Stream, Stream]) -> None:
    for each in ends:
        sock = each._transport.get_extra_info("socket")  # type: ignore[attr-defined]
        if sock.family == socket.AF_INET:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


@pytest.mark.parametrize("seed", range(4))
async def test_any_mix_of_reads_sees_the_bytes_that_were_sent(ends: tuple[Stream, Stream], seed: int) -> None:
    chance = random.Random(seed)
    here, there = ends
    data = chance.randbytes(900_000)  # several times the receive buffer
    sending = asyncio.create_task(send_in_pieces(here, data, chance))
    got = bytearray()
    while len(got) < len(data):
        if chance.random() < 0.3:
            piece = await there.receive()
            assert piece
            got += piece
        else:
            target = bytearray(min(len(data) - len(got), chance.choice([1, 32, 5000, 300_000])))
            await there.receive_into(memoryview(target))
            got += target
    await sending
    assert bytes(got) == data


async def test_nothing_is_read_into_nothing(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    await there.receive_into(memoryview(bytearray()))
    here.write(b"ab")
    assert await there.receive() == b"ab"


async def test_reading_pauses_at_a_full_buffer_and_goes_on(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    data = bytes(range(256)) * (64 << 10)  # 16 MiB: more than the kernel takes
    sending = asyncio.create_task(here.send(data))
    await until(lambda: there._read_paused)  # type: ignore[attr-defined]
    for _ in range(5):
        await asyncio.sleep(0)
    assert not sending.done()
    first = await there.receive()
    assert len(first) == RECEIVE_BUFFER_BYTES
    rest = bytearray(len(data) - len(first))
    await there.receive_into(memoryview(rest))
    await sending
    assert first + rest == data


async def test_send_returns_only_when_the_memory_is_no_longer_needed(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    memory = bytearray(b"a" * (16 << 20))
    total = len(memory)

    async def send_and_reuse() -> None:
        await here.send(memoryview(memory))
        assert here._transport.get_write_buffer_size() == 0  # type: ignore[attr-defined]
        memory[:] = b"b" * total

    sending = asyncio.create_task(send_and_reuse())
    got = bytearray(total)
    await there.receive_into(memoryview(got))
    await sending
    assert got == b"a" * total


async def test_send_leaves_nothing_queued_however_little(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    sent = 0
    while True:
        sending = asyncio.create_task(here.send(bytes(10_000)))
        for _ in range(20):
            await asyncio.sleep(0)
        sent += 10_000
        if not sending.done():
            break  # neither side's kernel takes any more
        assert here._transport.get_write_buffer_size() == 0  # type: ignore[attr-defined]
    await there.receive_into(memoryview(bytearray(sent)))
    await sending


async def test_several_tasks_may_send(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    senders = [asyncio.create_task(here.send(bytes([n]) * 1_000_000)) for n in range(4)]
    got = bytearray(4_000_000)
    await there.receive_into(memoryview(got))
    await asyncio.gather(*senders)
    assert got == b"".join(bytes([n]) * 1_000_000 for n in range(4))


async def test_the_peer_finishes(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    here.write(b"bye")
    here.close()
    assert await there.receive() == b"bye"
    assert await there.receive() == b""
    assert await there.receive() == b""


async def test_the_peer_leaves_in_the_middle_of_a_transfer(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    target = memoryview(bytearray(10))
    reading = asyncio.create_task(there.receive_into(target))
    here.write(b"12345")
    await until(lambda: bytes(target[:5]) == b"12345")
    here.close()
    with pytest.raises(Unavailable, match="left with 5 bytes still to come"):
        await reading
    with pytest.raises(Unavailable, match="left with 3 bytes still to come"):
        await there.receive_into(memoryview(bytearray(3)))


async def test_all_of_a_transfer_and_then_the_end_is_all_of_it(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    target = bytearray(5)
    reading = asyncio.create_task(there.receive_into(memoryview(target)))
    await asyncio.sleep(0)
    here.write(b"12345")
    here.close()
    await reading
    assert target == b"12345"


async def test_closing_wakes_everybody(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    reading = asyncio.create_task(here.receive())
    sending = asyncio.create_task(here.send(bytes(32 << 20)))
    await asyncio.sleep(0.001)
    here.close()
    here.close()
    for task in (reading, sending):
        with pytest.raises(Unavailable, match="closed on this side"):
            await task
    for again in (here.receive(), here.receive_into(memoryview(bytearray(1))), here.send(b"x")):
        with pytest.raises(Unavailable, match="closed on this side"):
            await again
    here.write(b"ignored")
    arrived = 0
    with contextlib.suppress(Unavailable):
        while piece := await there.receive():
            arrived += len(piece)
    assert arrived < 32 << 20, "what waits for a peer that does not read is dropped"


async def test_a_read_that_is_cancelled_leaves_the_stream_alone(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    reading = asyncio.create_task(there.receive())
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    here.write(b"later")
    assert await there.receive() == b"later"


async def test_nobody_there(tmp_path: Path) -> None:
    network = SocketNetwork()
    with pytest.raises(Unavailable, match=r"cannot connect to unix:.*: No such file"):
        await network.dial(Address("unix", path=str(tmp_path / "none")), 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        with pytest.raises(Unavailable, match=r"cannot connect to 127.0.0.1:\d+: "):
            await network.dial(Address("tcp", host="127.0.0.1", port=taken.getsockname()[1]), 1)


@pytest.mark.parametrize("host", ["a..b", "x" * 300])
async def test_a_host_that_is_no_name(host: str) -> None:
    with pytest.raises(Unavailable, match="cannot connect"):
        await SocketNetwork().dial(Address("tcp", host=host, port=1), 5)
    with pytest.raises(ConfigError, match="cannot listen"):
        await SocketNetwork().listen(Address("tcp", host=host, port=1), nothing)


# --- listening ---


async def test_port_0_is_any_port_and_a_taken_one_is_one_line() -> None:
    first = await SocketNetwork().listen(ANY, nothing)
    assert first.address.port > 0
    with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1:\d+: .*in use"):
        await SocketNetwork().listen(first.address, nothing)
    await first.close()


async def test_a_unix_socket_is_private_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "s"
    old = os.umask(0)
    try:
        listener = await SocketNetwork().listen(Address("unix", path=str(path)), nothing)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path.parent.parent)] == [0o700, 0o700]
    await listener.close()
    assert not path.exists()


def leave_a_stale_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


async def test_a_stale_socket_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    leave_a_stale_socket(path)
    listener = await SocketNetwork().listen(Address("unix", path=str(path)), nothing)
    await is_served(listener.address)
    await listener.close()


async def test_a_live_socket_is_refused_in_one_line(tmp_path: Path) -> None:
    address = Address("unix", path=str(tmp_path / "s"))
    first = await SocketNetwork().listen(address, nothing)
    with pytest.raises(ConfigError, match="another process serves there; stop it or choose another socket") as error:
        await SocketNetwork().listen(address, nothing)
    assert "\n" not in str(error.value)
    await is_served(address)
    await first.close()


async def test_a_live_socket_too_busy_to_answer_is_not_taken_for_stale(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(path)
        busy.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            waiting.connect_ex(path)
        with pytest.raises(ConfigError, match="another process serves there"):
            await SocketNetwork().listen(Address("unix", path=path), nothing)
        assert Path(path).exists()


@pytest.mark.parametrize(
    "make", [lambda path: path.write_text("data"), lambda path: path.mkdir(), lambda path: path.symlink_to("x")]
)
async def test_what_is_no_socket_is_left_alone(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    path = tmp_path / "s"
    make(path)
    with pytest.raises(ConfigError, match="a file that is no socket is in the way"):
        await SocketNetwork().listen(Address("unix", path=str(path)), nothing)
    assert os.path.lexists(path)


async def test_a_listener_removes_only_its_own_socket_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = await SocketNetwork().listen(Address("unix", path=str(path)), nothing)
    path.rename(tmp_path / "moved")
    second = await SocketNetwork().listen(Address("unix", path=str(path)), nothing)
    await first.close()
    await is_served(second.address)
    await second.close()
    assert not path.exists()


async def test_too_many_connections(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sockets, "CONNECTIONS_MAX", 2)
    both = Ends(SocketNetwork(), ANY)
    listener = await both.network.listen(ANY, both.on_stream)
    streams = [await both.network.dial(listener.address, 5) for _ in range(3)]
    assert await streams[2].receive() == b""
    assert [record.getMessage().endswith("2 are open already") for record in caplog.records] == [True]
    for stream in streams:
        stream.close()
    both.done.set()
    await listener.close()


async def raises(stream: Stream) -> None:
    raise RuntimeError("a bug")


async def refuses(stream: Stream) -> None:
    raise ProtocolError("not like that")


@pytest.mark.parametrize(
    ("serve", "line"), [(raises, "serving .* failed"), (refuses, "closed: not like that"), (nothing, None)]
)
async def test_whoever_serves_fails_alone(
    serve: Callable[[Stream], Awaitable[None]], line: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    listener: Listener = await SocketNetwork().listen(ANY, serve)
    for _ in range(2):
        stream = await SocketNetwork().dial(listener.address, 5)
        assert await stream.receive() == b""
        stream.close()
    await listener.close()
    assert len(caplog.records) == (2 if line else 0)


# --- passing a descriptor ---


async def test_a_descriptor_is_passed_over_a_unix_socket_only(ends: tuple[Stream, Stream]) -> None:
    here, there = ends
    end, other = os.pipe()
    try:
        sock = here._transport.get_extra_info("socket")  # type: ignore[attr-defined]
        if sock.family != socket.AF_UNIX:
            with pytest.raises(Unavailable, match="only be passed over a Unix socket"):
                await there.send_descriptor(other)
            return
        here._transport.pause_reading()  # type: ignore[attr-defined]
        await there.send_descriptor(other)
        with socket.socket(fileno=os.dup(sock.fileno())) as raw:
            data, descriptors, _, _ = socket.recv_fds(raw, 1, 1)
        assert data == b"\0" and len(descriptors) == 1
        os.write(descriptors[0], b"x")
        os.close(descriptors[0])
        assert os.read(end, 1) == b"x"
    finally:
        os.close(end)
        os.close(other)


async def test_what_is_passed_is_what_it_was_when_that_was_asked(tmp_path: Path) -> None:
    """A slow peer makes it wait; meanwhile the descriptor is closed, and its number is another one's."""
    accepted: list[SocketStream] = []
    done = asyncio.Event()

    async def serve(stream: Stream) -> None:
        assert isinstance(stream, SocketStream)
        accepted.append(stream)
        await done.wait()

    listener = await SocketNetwork().listen(Address("unix", path=str(tmp_path / "s")), serve)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(tmp_path / "s"))
        raw.setblocking(False)
        await until(lambda: accepted)
        accepted[0].write(bytes(4 << 20))
        descriptor = os.memfd_create("right")
        passing = asyncio.create_task(accepted[0].send_descriptor(descriptor))
        await asyncio.sleep(0)
        wrong = os.memfd_create("wrong")
        os.dup2(wrong, descriptor)
        got: list[int] = []
        while not got:
            with contextlib.suppress(BlockingIOError):
                got = list(socket.recv_fds(raw, 1 << 16, 1)[1])
            await asyncio.sleep(0)
        await passing
        assert "right" in os.readlink(f"/proc/self/fd/{got[0]}")  # noqa: PTH115
    for each in (descriptor, wrong, *got):
        os.close(each)
    done.set()
    await listener.close()


# --- folders ---


def test_a_folder_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private_directory(tmp_path / "new")
    private_directory(tmp_path / "new")
    shared = tmp_path / "shared"
    shared.mkdir()
    for mode in (0o777, 0o1777, 0o770, 0o702):
        shared.chmod(mode)
        with pytest.raises(ConfigError, match="is writable by others, who could replace what is in it") as error:
            private_directory(shared)
        assert "\n" not in str(error.value)
    shared.chmod(0o755)
    private_directory(shared)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        private_directory(shared)


def test_a_sub_folder_of_a_shared_one_is_fine(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    private_directory(shared / "mine")
    assert stat.S_IMODE((shared / "mine").stat().st_mode) == 0o700


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a file of that name is in the way"):
        private_directory(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"cannot make the folder .*: Not a directory"):
        private_directory(tmp_path / "file" / "x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        private_directory(tmp_path / "dangling")
