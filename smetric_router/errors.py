"""Every error of the router: one small tree, by whose fault it is, each with its HTTP face.

`ConfigError` stops the process; every other error becomes an answer in OpenAI's error shape.
"""

import json
from typing import ClassVar

_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class RouterError(Exception):
    """Base of all errors. A subclass fixes the status, the type and the code; an instance adds the sentence."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def anthropic_body(self) -> bytes:
        """The error as Anthropic's clients expect it."""
        error = {"type": _ANTHROPIC_TYPES.get(self.status, "api_error"), "message": self.message}
        return json.dumps({"type": "error", "error": error}, ensure_ascii=False, separators=(",", ":")).encode()

    def body(self) -> bytes:
        """The error as OpenAI clients expect it."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False, separators=(",", ":")).encode()


class ConfigError(RouterError):
    """The operator's configuration is wrong; the message names the key and where it was given."""

    code = "config_error"


class RequestError(RouterError):
    """The client's fault; repeating the same request cannot help."""

    status = 400
    type = "invalid_request_error"
    code = "bad_request"


class BadRequest(RequestError):
    """The request cannot be understood."""


class Unauthorized(RequestError):
    """The caller gave no key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    """Nobody may do this here."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class UnknownInstance(RequestError):
    """No instance has that address."""

    status = 404
    code = "engine_not_found"


class UnknownPath(RequestError):
    """Nobody may call that path of an engine through the router."""

    status = 404
    code = "path_not_found"


class UnknownModel(RequestError):
    """No instance serves the model."""

    status = 404
    code = "model_not_found"


class TooLarge(RequestError):
    """The body is over the limit."""

    status = 413
    code = "request_too_large"


class HeadTooLarge(RequestError):
    """The headers are over the limit."""

    status = 431
    code = "headers_too_large"


class TimedOut(RequestError):
    """The client did not send its request in time."""

    status = 408
    code = "request_timeout"


class NoInstance(RouterError):
    """No instance can take the request now; a later try may succeed."""

    status = 503
    code = "no_instance"


class Overloaded(RouterError):
    """Every instance has as many requests as it may have, and the queue is full or took too long."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class OutOfResources(RouterError):
    """The router itself is out of descriptors, ports or memory; no instance is to blame."""

    status = 503
    code = "out_of_resources"


class UpstreamFailed(RouterError):
    """An instance broke the exchange; the client did nothing wrong."""

    status = 502
    code = "upstream_failed"


class UpstreamUnreachable(UpstreamFailed):
    """No connection came about, so the instance never saw the request."""

    code = "upstream_unreachable"


class UpstreamDisconnected(UpstreamFailed):
    """The connection broke, or what came back was not HTTP, after the request was sent."""

    code = "upstream_disconnected"


class UpstreamTimedOut(UpstreamFailed):
    """It was given the request and fell silent. It may still be at work on it, so nobody else is asked."""

    status = 504
    code = "upstream_timeout"
