"""Every error of the router: one small tree, by whose fault it is, each with its HTTP face.

`ConfigError` stops the process; every other error becomes an answer in OpenAI's error shape.
"""

import json
from typing import ClassVar


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


class UnknownModel(RequestError):
    """No instance serves the model."""

    status = 404
    code = "model_not_found"


class TooLarge(RequestError):
    """The body is over the limit."""

    status = 413
    code = "request_too_large"


class NoInstance(RouterError):
    """No instance can take the request now; a later try may succeed."""

    status = 503
    code = "no_instance"


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
