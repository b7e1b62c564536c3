"""The fake network: deterministic by its seed, honest about memory, and faulty only when asked."""

import asyncio
import random

import pytest

from tensorcast_connector.errors import ConfigError, ProtocolError, Unavailable
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.testing.network import UNREAD_BYTES_MAX, FakeNetwork
from tensorcast_connector.types import Address
from tests.waiting import until

HERE = Address("tcp", host="here", port=0)


class Ends:
    """A listener that hands over the streams it accepts."""

    def __init__(self, seed: int = 0) -> None:
        self.network = FakeNetwork(random.Random(seed))
        self.accepted: asyncio.Queue[Stream] = asyncio.Queue()
        self.done = asyncio.Event()

    async def on_stream(self, stream: Stream) -> None:
        self.accepted.put_nowait(stream)
        await self.done.wait()

    async def open(self) -> tuple[Stream, Stream]:
        self.listener = await self.network.listen(HERE, self.on_stream)
        return await self.pair()

    async def pair(self) -> tuple[Stream, Stream]:
        return await self.network.dial(self.listener.address, 1), await self.accepted.get()

    async def close(self, *streams: Stream) -> None:
        for stream in streams:
            stream.close()
        self.done.set()
        await self.listener.close()


async def pieces_of(seed: int) -> list[int]:
    ends = Ends(seed)
    here, there = await ends.open()
    data = bytes(300_000)
    here.write(data)
    pieces: list[int] = []
    while sum(pieces) < len(data):
        pieces.append(len(await there.receive()))
    await ends.close(here)
    return pieces


async def test_the_same_seed_gives_the_same_pieces() -> None:
    first = await pieces_of(1)
    assert len(first) > 3 and first == await pieces_of(1) != await pieces_of(2)


@pytest.mark.parametrize("seed", range(10))
async def test_bytes_arrive_in_order_both_ways(seed: int) -> None:
    chance = random.Random(seed)
    ends = Ends(seed)
    here, there = await ends.open()
    data = chance.randbytes(100_000)
    for sender, receiver in ((here, there), (there, here)):
        sending = asyncio.create_task(sender.send(data))
        got = bytearray()
        while len(got) < len(data):
            if chance.random() < 0.5:
                got += await receiver.receive()
            else:
                target = bytearray(min(chance.randint(1, 5000), len(data) - len(got)))
                await receiver.receive_into(memoryview(target))
                got += target
        await sending
        assert bytes(got) == data
    await ends.close(here)


async def test_memory_given_to_send_is_read_when_it_is_delivered() -> None:
    ends = Ends()
    here, there = await ends.open()
    memory = bytearray(b"a" * 10)
    sending = asyncio.create_task(here.send(memory))
    await asyncio.sleep(0)
    memory[:] = b"b" * 10  # too early: send has not returned
    got = bytearray(10)
    await there.receive_into(memoryview(got))
    await sending
    assert b"b" in got
    await ends.close(here)


async def test_a_receiver_that_does_not_read_stops_the_sender() -> None:
    ends = Ends()
    here, there = await ends.open()
    sending = asyncio.create_task(here.send(bytes(4 * UNREAD_BYTES_MAX)))
    for _ in range(500):
        await asyncio.sleep(0)
    assert not sending.done()
    await there.receive_into(memoryview(bytearray(4 * UNREAD_BYTES_MAX)))
    await sending
    await ends.close(here)


async def test_the_end_arrives_after_the_bytes() -> None:
    ends = Ends()
    here, there = await ends.open()
    here.write(b"bye")
    here.close()
    got = b""
    while piece := await there.receive():
        got += piece
    assert got == b"bye"
    with pytest.raises(Unavailable, match="left with 1 bytes still to come"):
        await there.receive_into(memoryview(bytearray(1)))
    with pytest.raises(Unavailable, match="closed on the other side"):
        await there.send(b"x")
    with pytest.raises(Unavailable, match="closed on this side"):
        await here.receive()
    await ends.close()


async def test_closing_in_the_middle_of_a_transfer_breaks_it() -> None:
    ends = Ends()
    here, there = await ends.open()
    sending = asyncio.create_task(here.send(bytes(4 * UNREAD_BYTES_MAX)))
    await there.receive()
    here.close()
    with pytest.raises(Unavailable):
        await sending
    with pytest.raises(Unavailable, match="in the middle of a transfer"):
        await there.receive_into(memoryview(bytearray(4 * UNREAD_BYTES_MAX)))
    await ends.close()


async def test_cut_one_or_all() -> None:
    ends = Ends()
    here, there = await ends.open()
    second, _ = await ends.pair()
    assert len(ends.network.connections(ends.listener.address)) == 2
    ends.network.connections(ends.listener.address)[0].cut("a cable")
    for end in (here, there):
        with pytest.raises(Unavailable, match="a cable"):
            await end.receive()
    ends.network.cut(ends.listener.address)
    with pytest.raises(Unavailable, match="cut"):
        await second.receive()
    third, fourth = await ends.pair()
    third.write(b"x")
    assert await fourth.receive() == b"x"
    await ends.close(here, second, third)


async def test_refuse_and_heal() -> None:
    ends = Ends()
    here, there = await ends.open()
    ends.network.refuse(ends.listener.address)
    with pytest.raises(Unavailable, match="cannot connect to here:1: refused"):
        await ends.network.dial(ends.listener.address, 1)
    here.write(b"x")
    assert await there.receive() == b"x", "what is open stays"
    ends.network.heal(ends.listener.address)
    again, _ = await ends.pair()
    await ends.close(here, again)


async def test_silence_and_heal() -> None:
    ends = Ends()
    here, _ = await ends.open()
    ends.network.silence(ends.listener.address)
    mute, there = await ends.pair()
    mute.write(b"held back")
    reading = asyncio.create_task(there.receive_into(memoryview(bytearray(9))))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not reading.done()
    ends.network.heal(ends.listener.address)
    await reading
    await ends.close(here, mute)


async def test_flip_one_byte() -> None:
    ends = Ends()
    here, there = await ends.open()
    ends.network.flip_byte(ends.listener.address, 5)
    got = bytearray(10)
    there.write(bytes(10))
    await here.receive_into(memoryview(got))
    assert got == bytes([0, 0, 0, 0, 0, 0xFF, 0, 0, 0, 0])
    there.write(bytes(10))
    await here.receive_into(memoryview(got))
    assert got == bytes(10), "only one"
    await ends.close(here)


async def test_an_address_is_taken_until_its_listener_closes() -> None:
    ends = Ends()
    here, _ = await ends.open()
    address = ends.listener.address
    assert address == Address("tcp", host="here", port=1)
    with pytest.raises(ConfigError, match="address already in use"):
        await ends.network.listen(address, ends.on_stream)
    await ends.close(here)
    with pytest.raises(Unavailable):
        await ends.network.dial(address, 1)
    await (await ends.network.listen(address, ends.on_stream)).close()


async def test_no_descriptors() -> None:
    ends = Ends()
    here, _ = await ends.open()
    with pytest.raises(Unavailable, match="only be passed over a Unix socket"):
        await here.send_descriptor(0)
    await ends.close(here)


async def test_whoever_serves_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    network = FakeNetwork(random.Random(0))

    async def fails(stream: Stream) -> None:
        if (await stream.receive()) == b"p":
            raise ProtocolError("not like that")
        raise RuntimeError("a bug")

    listener = await network.listen(HERE, fails)
    for byte in (b"p", b"q"):
        stream = await network.dial(listener.address, 1)
        stream.write(byte)
        await until(lambda: not network.connections(listener.address))
        stream.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    await listener.close()
    assert repr(network) == "<FakeNetwork []>"
