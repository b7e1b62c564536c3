"""Runs the router's own paths, a FastAPI application, on client connections: the small part of ASGI that it needs."""

import asyncio
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI

from smetric_router.errors import RouterError
from smetric_router.server.connection import ClientConnection
from smetric_router.server.http1 import Headers, RequestHead
from smetric_router.server.logs import log


class OwnAnswer:
    """One request to the application, as a task. `more`: headers for the answer."""

    def __init__(
        self, app: FastAPI, request: RequestHead, body: bytes, client: ClientConnection, more: Headers
    ) -> None:
        self._request = request
        self._body = body
        self._client = client
        self._more = more
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._received = False
        self._task = asyncio.get_running_loop().create_task(self._run(app))

    async def _run(self, app: FastAPI) -> None:
        path, _, query = self._request.target.partition(b"?")
        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
            "method": _method(self._request), "path": unquote(path.decode("latin-1")), "raw_path": path,
            "query_string": query, "headers": self._request.headers, "client": None, "server": None,
        }  # fmt: skip
        try:
            await app(scope, self._receive, self._send)
        except Exception:
            log.exception("internal error", extra={"fields": {"path": scope["path"]}})
            error = RouterError("the router failed to answer")
            self._status, self._headers = error.status, [(b"content-type", b"application/json")]
            self._parts = [error.body()]
        headers = [each for each in self._headers if each[0] != b"content-length"] + self._more
        self._client.answer(self._status, headers, b"".join(self._parts))

    async def _receive(self) -> dict[str, Any]:
        if self._received:
            await asyncio.get_running_loop().create_future()  # there is nothing more to come
        self._received = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = [(bytes(name).lower(), bytes(value)) for name, value in message.get("headers", ())]
        else:
            self._parts.append(bytes(message.get("body", b"")))

    def client_gone(self) -> None:
        """See Work."""
        self._task.cancel()

    def pause(self) -> None:
        """See Work: the answer is one piece."""

    def resume(self) -> None:
        """See Work."""


def _method(request: RequestHead) -> str:
    """HEAD is GET; the connection leaves the body out."""
    return "GET" if request.method == b"HEAD" else request.method.decode("latin-1")
