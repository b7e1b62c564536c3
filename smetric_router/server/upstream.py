"""HTTP to the engines. The only file that knows the HTTP client: its exceptions end here."""

import asyncio
import contextlib
import errno
import re
from collections.abc import Iterable, Iterator
from io import BytesIO

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from smetric_router.errors import OutOfResources, UpstreamDisconnected, UpstreamFailed, UpstreamUnreachable
from smetric_router.server.asgi import Headers

# Headers that speak of one connection and not of the message.
HOP_BY_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
        b"trailer", b"trailers", b"transfer-encoding", b"upgrade",
    )
)  # fmt: skip
# Beyond this the client library copies in pieces instead of at once.
ONE_WRITE_BYTES_MAX = 1 << 20
_NOT_SENT = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_OWN_FAULTS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EADDRNOTAVAIL))
# What the router's web server refuses to send.
_is_odd_name = re.compile(rb'[\x00-\x20\x7f()<>@,;:\[\]={}\\"]').search
_is_odd_value = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]").search
_NO_AUTOMATIC_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class Answer:
    """An engine's answer: its head at once, its body as it arrives."""

    def __init__(self, response: aiohttp.ClientResponse, instance: str) -> None:
        self._response = response
        self._instance = instance
        self.status = response.status
        self.headers: Headers = end_to_end((name.lower(), value) for name, value in response.raw_headers)

    async def next_chunk(self) -> bytes:
        """What has arrived, waiting for something if nothing has; empty at the end. Raises UpstreamDisconnected."""
        with _mapped(self._instance):
            return await self._response.content.readany()

    @property
    def at_end(self) -> bool:
        """Whether the body has been read to its end."""
        return self._response.content.at_eof()

    def close(self) -> None:
        """Done with it. Before the end of the body this closes the connection, and the engine stops its work."""
        self._response.close()


class Upstream:
    """A pool of connections to all engines."""

    def __init__(self, *, connect_timeout_s: float, keepalive_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Must run in the event loop that will use it."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_s),
            # An answer may take hours. Only a connection that does not come about is given up.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_NO_AUTOMATIC_HEADERS,
            max_line_size=65_536,
            max_field_size=65_536,
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def send(self, instance: str, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        """Send a request and wait for the head of the answer.

        Raises UpstreamUnreachable if the engine cannot have seen the request, else UpstreamDisconnected; and
        OutOfResources if that is the router's own fault.
        """
        assert self._session is not None
        data: bytes | BytesIO | None = body if len(body) <= ONE_WRITE_BYTES_MAX else BytesIO(body)
        if not body and method in ("GET", "HEAD", "OPTIONS", "DELETE"):
            data = None
        with _mapped(instance):
            response = await self._session.request(
                method,
                URL(instance + target, encoded=True),
                data=data,
                headers=_outgoing(headers),
                allow_redirects=False,
            )
        answer = Answer(response, instance)
        if odd := _oddity(answer):
            answer.close()
            raise UpstreamDisconnected(f"{instance} answered with {odd}")
        return answer

    async def get(self, instance: str, path: str, *, api_key: str, timeout_s: float) -> tuple[int, bytes]:
        """A small call of the router's own. Raises UpstreamFailed, or TimeoutError."""
        headers = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []
        async with asyncio.timeout(timeout_s):
            answer = await self.send(instance, "GET", path, headers, b"")
            try:
                chunks = []
                while chunk := await answer.next_chunk():
                    chunks.append(chunk)
                return answer.status, b"".join(chunks)
            finally:
                answer.close()


def end_to_end(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes] = HOP_BY_HOP) -> Headers:
    """The headers to pass on: without the hop-by-hop ones and those that `Connection` names."""
    kept = list(headers)
    for name, value in kept:
        if name == b"connection":
            dropped |= {token.strip().lower() for token in value.split(b",")}
    return [(name, value) for name, value in kept if name not in dropped]


def _oddity(answer: Answer) -> str | None:
    """What keeps the answer from being passed on, if anything does."""
    if not 200 <= answer.status <= 599:
        return f"the status {answer.status}"
    for name, value in answer.headers:
        if not name or _is_odd_name(name) or _is_odd_value(value):
            return f"the header {name + b': ' + value!r}"
    return None


def _outgoing(headers: Headers) -> CIMultiDict[str]:
    return CIMultiDict((name.decode("latin-1"), _text(value)) for name, value in end_to_end(headers, _NOT_SENT))


def _text(value: bytes) -> str:
    """The client library writes header values as UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


@contextlib.contextmanager
def _mapped(instance: str) -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        if isinstance(error, OSError) and error.errno in _OWN_FAULTS:
            message = f"the router cannot open another connection: {error.strerror}"
            raise OutOfResources(message, retry_after_s=1) from error
        raise UpstreamUnreachable(f"no connection to {instance}: {error or type(error).__name__}") from error
    except aiohttp.InvalidURL as error:
        raise UpstreamFailed(f"cannot ask {instance} for that: {error}") from error
    except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as error:
        raise UpstreamDisconnected(f"the connection to {instance} broke: {error or type(error).__name__}") from error
