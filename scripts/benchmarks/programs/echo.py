"""The limit: whole frames back and forth, as tightly as asyncio allows. A header, a body, and nothing that looks into it.

    python -m benchmarks.programs.echo serve READY_FILE REPLY_BYTES
    python -m benchmarks.programs.echo measure PORT REQUEST_BYTES

Both sides are protocols that are called with the bytes as they arrive: no task, no queue, no deadline, no messages.
"""

import asyncio
import struct
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.programs.measure import PAGES_PER_LOOKUP, latencies, obey, per_cpu_s, saturate, write_ready

HEADER = struct.Struct("!2sBBIQIIQ")  # as in tensorcast_connector/wire/frames.py
BUFFER_BYTES = 1 << 20


class Frames(asyncio.BufferedProtocol):
    """One end of a connection: calls `arrived` with the body of every whole frame."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._end = 0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection is up."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's signature
        """asyncio: where the next bytes go."""
        return self._buffer[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """asyncio: so many bytes went there."""
        buffer, start, end = self._buffer, 0, self._end + nbytes
        while end - start >= HEADER.size:
            _, _, _, size, number, _, _, _ = HEADER.unpack_from(buffer, start)
            if end - start < HEADER.size + size:
                break
            self.arrived(number, bytes(buffer[start + HEADER.size : start + HEADER.size + size]))
            start += HEADER.size + size
        if start and start < end:
            buffer[: end - start] = bytes(buffer[start:end])
        self._end = end - start

    def send(self, number: int, body: bytes) -> None:
        """One frame."""
        self.transport.write(HEADER.pack(b"TC", 1, 1, len(body), number, 0, 0, 0) + body)

    def arrived(self, number: int, body: bytes) -> None:
        """A frame is complete."""
        raise NotImplementedError


class Server(Frames):
    """Answers every frame with the same body."""

    def __init__(self, reply: bytes) -> None:
        super().__init__()
        self._reply = reply

    def arrived(self, number: int, body: bytes) -> None:  # noqa: ARG002 - an echo does not look at it
        """See Frames."""
        self.send(number, self._reply)


class Client(Frames):
    """Sends frames and waits for their answers, which come in order."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0

    async def call(self, body: bytes) -> bytes:
        """One frame there and one back."""
        self._number += 1
        self.send(self._number, body)
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = waiting
        return await waiting

    def arrived(self, number: int, body: bytes) -> None:
        """See Frames."""
        self._waiting.pop(number).set_result(body)


async def serve(ready_file: str, reply_bytes: int) -> None:
    """Until it is stopped."""
    reply = bytes(reply_bytes)
    server = await asyncio.get_running_loop().create_server(lambda: Server(reply), "127.0.0.1", 0)
    write_ready(ready_file, server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def measure(port: int, request_bytes: int) -> None:
    """Until the input ends."""
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    body = bytes(request_bytes)

    async def call() -> None:
        await client.call(body)

    async def latency(told: Mapping[str, Any]) -> Mapping[str, Any]:
        return await latencies(call, told["calls"])

    async def lookups(told: Mapping[str, Any]) -> Mapping[str, Any]:
        used_s = await saturate([call] * told["calls"], told["pid"])
        return per_cpu_s(told["calls"] * PAGES_PER_LOOKUP, used_s)

    await obey({"latency": latency, "lookups": lookups})


def main() -> None:
    """See the module."""
    what, first, second = sys.argv[1:]
    asyncio.run(serve(first, int(second)) if what == "serve" else measure(int(first), int(second)))


if __name__ == "__main__":
    main()
