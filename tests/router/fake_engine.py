"""An engine that can be told to misbehave: OpenAI's two completion endpoints over a real socket, in this process."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeEngine:
    """Records what it receives. `behaviour` replaces the answer to everything but /health and /v1/models."""

    def __init__(self, name: str = "fake", models: tuple[str, ...] = ("fake",)) -> None:
        self.name = name
        self.models: list[dict[str, Any]] = [
            {"id": model, "object": "model", "max_model_len": 4096, "owned_by": name} for model in models
        ]
        self.behaviour: Handler | None = None
        self.health_status = 200
        self.reports_cached = True
        self.held: set[str] = set()
        self.requests: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.aborted = 0
        self.running = 0
        self.started = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; after a stop, on the same port again and with an empty cache."""
        self.held.clear()
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._any)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health_status)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def _any(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append(request)
        self.bodies.append(body)
        self.running += 1
        self.started.set()
        try:
            if self.behaviour is not None:
                return await self.behaviour(request)
            return await self.answer(request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def answer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """A short completion with the usage figures of a prefix cache of whole messages."""
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            return web.json_response({"path": request.path, "bytes": len(body)})
        if not isinstance(asked, dict) or "messages" not in asked:
            return web.json_response({"path": request.path, "engine": self.name})
        usage = self._usage(asked["messages"])
        if not asked.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
            return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})
        response = await start_stream(request)
        for word in ("hel", "lo"):
            await send_event(response, {"choices": [{"index": 0, "delta": {"content": word}}], "usage": None})
        await send_event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _usage(self, messages: list[Any]) -> dict[str, Any]:
        tokens = cached = 0
        digest = hashlib.sha256()
        for message in messages:
            raw = json.dumps(message).encode()
            digest.update(raw)
            tokens += len(raw) // 4
            if digest.hexdigest() in self.held:
                cached = tokens
            self.held.add(digest.hexdigest())
        details = {"cached_tokens": cached} if self.reports_cached else None
        return {"prompt_tokens": tokens, "completion_tokens": 2, "prompt_tokens_details": details}


async def start_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def send_event(response: web.StreamResponse, event: object) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def hang(request: web.Request) -> web.StreamResponse:
    """Never answers."""
    await asyncio.Event().wait()
    raise AssertionError


def status(code: int, **headers: str) -> Handler:
    """Answers everything with an error of the engine's own."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": f"engine says {code}"}}, status=code, headers=headers)

    return answer


async def break_stream(request: web.Request) -> web.StreamResponse:
    """Sends one event and a half, and drops the connection."""
    response = await start_stream(request)
    await send_event(response, {"choices": [{"delta": {"content": "x"}}]})
    assert request.transport is not None
    request.transport.close()
    return response


async def drop(request: web.Request) -> web.StreamResponse:
    """Closes the connection without a byte."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()
