"""The few pieces of plain ASGI that the proxy path needs."""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from smetric_router.errors import RouterError, TooLarge

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


async def read_body(receive: Receive, limit: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The whole request body; None when the client went away meanwhile. Raises TooLarge beyond the limit."""
    for name, value in headers:
        # Any number of digits is allowed there, but Python converts no more than so many.
        if name == b"content-length" and value.isdigit() and (length := int(value.lstrip(b"0")[:20] or b"0")) > limit:
            raise TooLarge(f"the body has {length} bytes; the limit is {limit}")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise TooLarge(f"the body has more than {limit} bytes, which is the limit")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def send_error(send: Send, error: RouterError, headers: Headers) -> None:
    """Answer with the error in OpenAI's shape."""
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
