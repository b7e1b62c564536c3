"""A small service for the RPC tests: it answers at once, later, never, or wrongly, as it is told."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tensorcast_connector.errors import NotFound
from tensorcast_connector.net.rpc import serve_stream
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.wire.codec import (
    EngineRequest,
)
from tensorcast_connector.wire.messages import (
    GetStatistics,
    Hello,
    Lookup,
    LookupResult,
    Message,
    Ok,
    Release,
    Reserve,
    Reserved,
    Statistics,
)


class Scripted:
    """A Service and its own Session. `Lookup` waits for `open(lookup_id)`; its result is the length of the id."""

    server = "worker"
    server_id = "scripted"
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(EngineRequest)

    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Event] = {}
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.sessions = 0
        self.closed = 0
        self.running = self.running_at_close = 0
        self.hellos: list[Hello] = []
        self.streams: list[Stream] = []
        self.on_statistics: Callable[[], Message | Awaitable[Message]] = lambda: Statistics({})

    def open_session(self, stream: Stream, hello: Hello) -> "Scripted":
        self.sessions += 1
        self.hellos.append(hello)
        self.streams.append(stream)
        return self

    def close(self) -> None:
        self.closed += 1
        self.running_at_close = max(self.running_at_close, self.running)

    def open(self, lookup_id: str) -> None:
        self.gates.setdefault(lookup_id, asyncio.Event()).set()

    def handle(self, message: Any) -> Message | Awaitable[Message]:
        if isinstance(message, Lookup):
            return self._lookup(message)
        if isinstance(message, Release):
            raise NotFound(f"no hold {message.hold_ids}")
        if isinstance(message, Reserve):
            return Reserved([7] * message.page_bytes)
        if isinstance(message, GetStatistics):
            return self.on_statistics()
        return Ok()

    async def _lookup(self, message: Lookup) -> Message:
        self.started.append(message.lookup_id)
        self.running += 1
        try:
            await self.gates.setdefault(message.lookup_id, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(message.lookup_id)
            await asyncio.sleep(0)  # tidying up takes a moment
            raise
        finally:
            self.running -= 1
        return LookupResult(len(message.lookup_id), 0)

    async def on_stream(self, stream: Stream) -> None:
        await serve_stream(stream, self)


def lookup(name: str) -> Lookup:
    """A request that waits for `open(name)`."""
    return Lookup(name, [], [])
