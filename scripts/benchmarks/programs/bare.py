"""A dictionary from keys to numbers, with messages that list the keys, on the bare frames of echo.py and nothing around them.

    python -m benchmarks.programs.bare serve READY_FILE
    python -m benchmarks.programs.bare measure PORT

No deadlines, no cancelling, no back-pressure, no errors, no shards and no fencing: what it is faster than ours is the price of
these. What it is slower than the echo is the price of decoding 512 keys and looking them up one by one.
"""

import asyncio
import sys
from itertools import repeat

import msgspec

from benchmarks.programs.echo import Client as FrameClient
from benchmarks.programs.echo import Frames
from benchmarks.programs.measure import Measured, obey, write_ready
from tensorcast_connector.wire.codec import encode, reply_decoder, unpack_indexes
from tensorcast_connector.wire.messages import FindPages, Ok, PagesFound, ReportPages

HOLDER = "member/00000000"


class Server(Frames):
    """Serves the index of this process. A page has one holder at most."""

    pages: dict[bytes, int] = {}  # noqa: RUF012 - the same for all connections
    decode = msgspec.msgpack.Decoder(FindPages | ReportPages).decode

    def arrived(self, number: int, body: bytes) -> None:
        """See Frames."""
        message = Server.decode(body)
        pages = Server.pages
        if isinstance(message, FindPages):
            which = bytearray(4 * len(message.keys))
            which[::4] = bytes(map(pages.get, message.keys, repeat(0)))  # the lowest byte of each
            self.send(number, encode(PagesFound([[], [HOLDER]], bytes(which), [])))
            return
        for key in message.removed:
            pages.pop(key, None)
        for key in message.added:
            pages[key] = 1
        self.send(number, encode(Ok()))


class Client:
    """An Index."""

    def __init__(self, frames: FrameClient) -> None:
        self._frames = frames

    async def find(self, keys: list[bytes]) -> PagesFound:
        """See Index."""
        reply = reply_decoder.decode(await self._frames.call(encode(FindPages([], keys))))
        assert isinstance(reply, PagesFound)
        return reply

    async def found(self, keys: list[bytes]) -> int:
        """See Index."""
        return sum(unpack_indexes((await self.find(keys)).which))

    async def report(self, holder: int, added: list[bytes], removed: list[bytes]) -> None:  # noqa: ARG002 - see Server
        """See Index."""
        await self._frames.call(encode(ReportPages(HOLDER, 1, [], [], added, removed)))


async def serve(ready_file: str) -> None:
    """Until it is stopped."""
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    write_ready(ready_file, server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def measure(port: int) -> None:
    """Until the input ends."""
    _, frames = await asyncio.get_running_loop().create_connection(FrameClient, "127.0.0.1", port)
    await obey(Measured(Client(frames)).commands())


def main() -> None:
    """See the module."""
    what, argument = sys.argv[1:]
    asyncio.run(serve(argument) if what == "serve" else measure(int(argument)))


if __name__ == "__main__":
    main()
