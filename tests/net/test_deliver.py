"""`Stream.deliver`: bytes in the moment they arrive, none while replies wait for a peer that does not read them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tensorcast_connector.errors import ProtocolError, Unavailable
from tensorcast_connector.net.transport import Listener, Stream
from tests.net.conftest import Place
from tests.waiting import until

T = 5.0
LARGE = 24 << 20  # more than the kernel takes off our hands


class Ends:
    """Both ends of a connection: `near` dialled, `far` was accepted and belongs to the test until `close`."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._over = asyncio.Event()
        self.listener: Listener
        self.near: Stream
        self.far: Stream

    async def open(self) -> None:
        accepted: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()

        async def on_stream(stream: Stream) -> None:
            accepted.set_result(stream)
            await self._over.wait()

        self.listener = await self._place.network.listen(self._place.address, on_stream)
        self.near = await self._place.network.dial(self.listener.address, T)
        self.near.write(b"!")
        self.far = await accepted
        assert await self.far.receive() == b"!"

    async def close(self) -> None:
        self.near.close()
        self._over.set()
        await self.listener.close()


@pytest.fixture
async def ends(place: Place) -> AsyncIterator[Ends]:
    ends = Ends(place)
    await ends.open()
    yield ends
    await ends.close()


async def test_everything_arrives_until_the_peer_has_finished(ends: Ends) -> None:
    got = bytearray()

    def take(data: memoryview) -> bool:
        got.extend(data)
        return True

    sent = bytes(range(256)) * 4096  # more than a buffer
    delivering = asyncio.create_task(ends.far.deliver(take))
    for at in range(0, len(sent), 100_000):
        ends.near.write(sent[at : at + 100_000])
    await until(lambda: len(got) == len(sent))
    assert got == sent and not delivering.done()
    ends.near.close()
    async with asyncio.timeout(T):
        await delivering


async def test_what_came_before_is_handed_first(ends: Ends) -> None:
    got: list[bytes] = []

    def take(data: memoryview) -> bool:
        got.append(bytes(data))
        return True

    ends.near.write(b"early later ")
    early = bytearray(6)
    await ends.far.receive_into(memoryview(early))
    delivering = asyncio.create_task(ends.far.deliver(take))
    ends.near.write(b"last")
    await until(lambda: b"".join(got) == b"later last")
    assert early == b"early "
    ends.near.close()
    await delivering


async def test_nothing_more_is_taken_while_what_was_written_waits(ends: Ends) -> None:
    """As a server: an answer of megabytes to a peer that does not read for a while, and goes on asking."""
    taken = bytearray()
    calls: list[int] = []

    def take(data: memoryview) -> bool:
        calls.append(len(data))
        taken.extend(data)
        if len(taken) == 1 and len(data):
            ends.far.write(bytes(LARGE - 1))
            ends.far.write(b"\0")  # TLS takes one write of any size
        return ends.far.flushed

    delivering = asyncio.create_task(ends.far.deliver(take))
    ends.near.write(b"1")
    await until(lambda: calls)
    assert not ends.far.flushed
    for _ in range(50):
        ends.near.write(b"2")
        await asyncio.sleep(0.001)
    assert (len(calls), bytes(taken)) == (1, b"1"), "it was not called again, and not given more"
    reading = asyncio.create_task(ends.near.receive_into(memoryview(bytearray(LARGE))))
    await until(lambda: len(taken) == 51)
    assert calls[1] == 0, "it was called with nothing once the answer had gone out"
    await reading
    ends.near.close()
    await delivering


async def test_what_it_raises_is_raised_and_it_is_not_called_again(ends: Ends) -> None:
    calls = 0

    def take(data: memoryview) -> bool:
        nonlocal calls
        calls += 1
        raise ProtocolError("nonsense")

    delivering = asyncio.create_task(ends.far.deliver(take))
    ends.near.write(b"x")
    with pytest.raises(ProtocolError, match="nonsense"):
        await delivering
    ends.near.write(b"y")
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert calls == 1


async def test_what_came_before_may_be_nonsense_too(ends: Ends) -> None:
    def take(data: memoryview) -> bool:
        raise ProtocolError("nonsense")

    ends.near.write(b"xy")
    await ends.far.receive_into(memoryview(bytearray(1)))
    with pytest.raises(ProtocolError, match="nonsense"):
        await ends.far.deliver(take)


async def test_a_stream_that_is_closed_on_this_side_ends_it(ends: Ends) -> None:
    delivering = asyncio.create_task(ends.far.deliver(lambda _: True))
    await asyncio.sleep(0)
    ends.far.close()
    with pytest.raises(Unavailable, match="closed on this side"):
        await delivering


async def test_closed_while_it_waits_for_a_peer_that_does_not_read(ends: Ends) -> None:
    def take(data: memoryview) -> bool:
        ends.far.write(bytes(LARGE))
        return False

    delivering = asyncio.create_task(ends.far.deliver(take))
    ends.near.write(b"1")
    await until(lambda: not ends.far.flushed)
    ends.far.close()
    with pytest.raises(Unavailable):
        async with asyncio.timeout(T):
            await delivering


async def test_cancelled(ends: Ends) -> None:
    got: list[bytes] = []

    def take(data: memoryview) -> bool:
        got.append(bytes(data))
        return True

    delivering = asyncio.create_task(ends.far.deliver(take))
    ends.near.write(b"1")
    await until(lambda: got)
    delivering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivering
    ends.near.write(b"2")
    assert await ends.far.receive() == b"2", "it can be read as before"


async def test_cancelled_while_it_waits_for_a_peer_that_does_not_read(ends: Ends) -> None:
    def take(data: memoryview) -> bool:
        ends.far.write(bytes(LARGE))
        return False

    delivering = asyncio.create_task(ends.far.deliver(take))
    ends.near.write(b"1")
    await until(lambda: not ends.far.flushed)
    delivering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivering
    ends.near.write(b"2")
    assert await ends.far.receive() == b"2", "it can be read as before"
