"""The limit of a router in Python on the usual parts: a bare ASGI function on uvicorn (uvloop, httptools) in front of aiohttp.

    python -m benchmarks.programs.asgi_proxy PORT ENGINE_URL...

It passes bodies on as they are, to one engine after the other. Nothing is parsed, decided, counted or retried.
"""

import itertools
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import uvicorn

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
DROPPED = (b"connection", b"transfer-encoding")


class Proxy:
    """The application."""

    def __init__(self, engines: list[str]) -> None:
        self._engines = itertools.cycle(engines)
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        assert self._session is not None
        asked = self._session.request(
            scope["method"], next(self._engines) + scope["path"], data=b"".join(parts),
            headers={"content-type": "application/json"},
        )  # fmt: skip
        async with asked as answer:
            kept = [(name.lower(), value) for name, value in answer.raw_headers if name.lower() not in DROPPED]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _live(self, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] == "lifespan.startup":
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
            )
            await send({"type": f"{message['type']}.complete"})
        if self._session is not None:
            await self._session.close()
        await send({"type": "lifespan.shutdown.complete"})


if __name__ == "__main__":
    uvicorn.run(
        Proxy(sys.argv[2:]), host="127.0.0.1", port=int(sys.argv[1]), http="httptools", loop="uvloop",
        log_level="warning", access_log=False,
    )  # fmt: skip
