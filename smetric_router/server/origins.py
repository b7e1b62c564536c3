"""Which web pages may read what the router answers itself (CORS). What engines answer says so itself, and passes as it is."""

from smetric_router.server.http1 import Headers, RequestHead

MODELS_PATH = "/v1/models"
_LIFETIME_S = b"600"


class Origins:
    """See the module.

    Args:
        allowed: origins as browsers name them (`https://chat.example`), or "*" for any.
    """

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._any = "*" in allowed
        self._allowed = frozenset(each.encode() for each in allowed)

    def __repr__(self) -> str:
        return f"<Origins {'any' if self._any else sorted(self._allowed)}>"

    def headers(self, request: RequestHead | None) -> Headers:
        """For an answer to the request; none if no page has asked, or one that may not."""
        origin = _header(request, b"origin")
        if not origin:
            return []
        if self._any:
            return [(b"access-control-allow-origin", b"*")]
        allowed = [(b"access-control-allow-origin", origin)] if origin in self._allowed else []
        return [*allowed, (b"vary", b"Origin")]

    def permission(self, request: RequestHead) -> Headers:
        """For the answer to OPTIONS, by which a browser asks what a page may send."""
        headers = self.headers(request)
        if not any(name == b"access-control-allow-origin" for name, _ in headers):
            return headers
        headers += [(b"access-control-allow-methods", b"GET, HEAD"), (b"access-control-max-age", _LIFETIME_S)]
        if wanted := _header(request, b"access-control-request-headers"):
            headers.append((b"access-control-allow-headers", wanted))
        return headers


def _header(request: RequestHead | None, wanted: bytes) -> bytes:
    return next((value for name, value in request.headers if name == wanted), b"") if request is not None else b""
