"""A peer: the same index behind grpc.aio, in the peers' environment. Unary calls over loopback TCP.

    python -m benchmarks.programs.grpc_peer serve READY_FILE
    python -m benchmarks.programs.grpc_peer measure PORT

It is given every advantage that keeps it gRPC: the messages are raw bytes, not protobuf, since keys of one length need no
parsing; the index is one dictionary; and a page has one holder at most.
"""
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-call"

import asyncio
import sys
from array import array
from itertools import repeat
from typing import Any

import grpc

from benchmarks.programs.measure import KEY_BYTES, Measured, obey, write_ready

SERVICE = "benchmark.Index"
LIMITS = [("grpc.max_receive_message_length", 16 << 20), ("grpc.max_send_message_length", 16 << 20)]
NUMBER_BYTES = 4


def cut(data: bytes, start: int, end: int) -> list[bytes]:
    """The keys in a part of a message."""
    return [data[at : at + KEY_BYTES] for at in range(start, end, KEY_BYTES)]


class Server:
    """The index and its two methods."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}

    async def find(self, request: bytes, _context: object) -> bytes:
        """Keys in, a 32-bit number of a holder for each out; 0 is nobody."""
        return array("I", map(self._holders.get, cut(request, 0, len(request)), repeat(0))).tobytes()

    async def report(self, request: bytes, _context: object) -> bytes:
        """The number of keys that are new, these, and those that are gone."""
        border = NUMBER_BYTES + KEY_BYTES * int.from_bytes(request[:NUMBER_BYTES], "big")
        holders = self._holders
        for key in cut(request, border, len(request)):
            holders.pop(key, None)
        for key in cut(request, NUMBER_BYTES, border):
            holders[key] = 1
        return b""


async def serve(ready_file: str) -> None:
    """Until it is stopped."""
    index = Server()
    server = grpc.aio.server(options=LIMITS)
    handlers = {"Find": grpc.unary_unary_rpc_method_handler(index.find),
                "Report": grpc.unary_unary_rpc_method_handler(index.report)}  # fmt: skip
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    write_ready(ready_file, port)
    await server.wait_for_termination()


class Client:
    """An Index."""

    def __init__(self, channel: Any) -> None:
        self._find = channel.unary_unary(f"/{SERVICE}/Find")
        self._report = channel.unary_unary(f"/{SERVICE}/Report")

    async def find(self, keys: list[bytes]) -> object:
        """See Index."""
        return await self._find(b"".join(keys))

    async def found(self, keys: list[bytes]) -> int:
        """See Index."""
        return sum(map(bool, array("I", await self._find(b"".join(keys)))))

    async def report(self, holder: int, added: list[bytes], removed: list[bytes]) -> None:  # noqa: ARG002 - see the module
        """See Index."""
        await self._report(len(added).to_bytes(NUMBER_BYTES, "big") + b"".join(added) + b"".join(removed))


async def measure(port: str) -> None:
    """Until the input ends."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=LIMITS) as channel:
        await obey(Measured(Client(channel)).commands())


def main() -> None:
    """See the module."""
    what, argument = sys.argv[1:]
    asyncio.run(serve(argument) if what == "serve" else measure(argument))


if __name__ == "__main__":
    main()
