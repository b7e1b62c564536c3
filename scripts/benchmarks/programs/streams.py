"""The second limit: the echo of echo.py through our own frames and streams. No messages, no deadlines, and nothing is looked up.

    python -m benchmarks.programs.streams serve READY_FILE REPLY_BYTES
    python -m benchmarks.programs.streams measure PORT REQUEST_BYTES

What it is slower than echo.py is the price of the transport; what ours is slower than this is the price of what is said.
"""

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.programs.measure import PAGES_PER_LOOKUP, latencies, obey, per_cpu_s, saturate, write_ready
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.types import Address
from tensorcast_connector.wire.frames import FrameDecoder, Kind, encode_frame

ANYWHERE = Address("tcp", host="127.0.0.1", port=0)
TIMEOUT_S = 10.0


async def serve(ready_file: str, reply_bytes: int) -> None:
    """Until it is stopped."""
    reply = bytes(reply_bytes)

    async def on_stream(stream: Stream) -> None:
        decoder = FrameDecoder()

        def take(data: memoryview) -> bool:
            for frame in decoder.feed(data):
                stream.write(encode_frame(Kind.REPLY, frame.request_id, reply))
            return True

        await stream.deliver(take)

    listener = await SocketNetwork().listen(ANYWHERE, on_stream)
    write_ready(ready_file, listener.address.port)
    await asyncio.Event().wait()


class Client:
    """Sends frames and waits for their answers."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0

    async def read(self) -> None:
        """Until the connection ends."""
        decoder = FrameDecoder()

        def take(data: memoryview) -> bool:
            for frame in decoder.feed(data):
                self._waiting.pop(frame.request_id).set_result(frame.body)
            return True

        await self._stream.deliver(take)

    async def call(self, body: bytes) -> bytes:
        """One frame there and one back."""
        self._number += 1
        self._stream.write(encode_frame(Kind.REQUEST, self._number, body))
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = waiting
        return await waiting


async def measure(port: int, request_bytes: int) -> None:
    """Until the input ends."""
    stream = await SocketNetwork().dial(Address("tcp", host="127.0.0.1", port=port), TIMEOUT_S)
    client = Client(stream)
    reading = asyncio.get_running_loop().create_task(client.read())
    body = bytes(request_bytes)

    async def call() -> None:
        await client.call(body)

    async def latency(told: Mapping[str, Any]) -> Mapping[str, Any]:
        return await latencies(call, told["calls"])

    async def lookups(told: Mapping[str, Any]) -> Mapping[str, Any]:
        used_s = await saturate([call] * told["calls"], told["pid"])
        return per_cpu_s(told["calls"] * PAGES_PER_LOOKUP, used_s)

    await obey({"latency": latency, "lookups": lookups})
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    stream.close()


def main() -> None:
    """See the module."""
    what, first, second = sys.argv[1:]
    asyncio.run(serve(first, int(second)) if what == "serve" else measure(int(first), int(second)))


if __name__ == "__main__":
    main()
