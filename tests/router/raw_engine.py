"""An engine that answers in bytes of the test's own choosing, over a real socket; and a client that speaks in bytes."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Handler = Callable[["RawEngine", asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[bool | None]]
"""Called with each request's head; True: the connection is closed."""

HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
CHAT = json.dumps({"model": "fake", "messages": [{"role": "user", "content": "x"}]}).encode()


def request(
    body: bytes = CHAT, *, path: str = "/v1/chat/completions", method: str = "POST", headers: str = ""
) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: h\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


def body_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


class RawEngine:
    """Healthy; everything else is the handler's."""

    def __init__(self, handler: Handler, models: bool) -> None:
        self._handler = handler
        self._own_paths = (b"GET /health ",) if models else (b"GET /health ", b"GET /v1/models ")
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.url = ""
        self._serving: dict[asyncio.Task[None] | None, asyncio.StreamWriter] = {}

    async def take(self, reader: asyncio.StreamReader, head: bytes) -> None:
        """Reads the body."""
        self.bodies.append(await reader.readexactly(body_length(head)))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = False
        self._serving[asyncio.current_task()] = writer
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(self._own_paths):
                    writer.write(HEALTHY)
                    return
                self.connections += not asked
                asked = True
                self.heads.append(head)
                if await self._handler(self, reader, writer, head):
                    return
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            del self._serving[asyncio.current_task()]

    async def stop(self) -> None:
        serving = dict(self._serving)
        for task, writer in serving.items():
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await asyncio.sleep(0)


def answers(data: bytes, *, close: bool = False) -> Handler:
    """Takes each request and answers so."""

    async def handler(
        engine: RawEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> bool:
        await engine.take(reader, head)
        writer.write(data)
        return close

    return handler


@asynccontextmanager
async def raw_engine(
    handler: Handler, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", *, models: bool = False
) -> AsyncIterator[RawEngine]:
    """`models`: the handler answers for the list of models as well."""
    engine = RawEngine(handler, models)
    server = await asyncio.start_server(engine.serve, host, 0, ssl=tls)
    engine.url = (
        f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{server.sockets[0].getsockname()[1]}"
    )
    try:
        yield engine
    finally:
        server.close()
        await engine.stop()


async def answer_to(url: str, *sent: bytes, until: bytes = b"", timeout_s: float = 5.0) -> bytes:
    """What comes back until the connection ends, or until these bytes have come."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    try:
        async with asyncio.timeout(timeout_s):
            for each in sent:
                writer.write(each)
                await writer.drain()
            while not until or until not in answer:
                data = await reader.read(65536)
                if not data:
                    break
                answer += data
        return answer
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)
