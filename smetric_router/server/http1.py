"""HTTP/1.1 as bytes: heads that were received, heads to send, and the framing of bodies. No sockets, no clock.

Heads are parsed by llhttp (httptools), which is strict about everything that could be understood in two ways. Bodies are
framed here, because whoever forwards bytes must know where a message ends in them.
"""

import re
from collections.abc import Iterable
from http import HTTPStatus

import httptools
from msgspec import Struct

Headers = list[tuple[bytes, bytes]]
"""Names in lower case."""

HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# Headers that speak of one connection and not of the message.
HOP_BY_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
        b"trailer", b"trailers", b"transfer-encoding", b"upgrade",
    )
)  # fmt: skip
# Whatever `Connection` says of them: where the body ends is told to the next by these.
_NOT_OF_A_CONNECTION = frozenset((b"content-length", b"content-type", b"content-encoding"))
# Besides those: what is said anew to the engine.
_NOT_SENT_ON = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"http2-settings", b"x-request-id"}
_BODILESS_METHODS = frozenset((b"GET", b"HEAD", b"OPTIONS", b"DELETE", b"TRACE"))
_NO_CONTENT = 204
_BODILESS_STATUSES = frozenset((_NO_CONTENT, 304))
_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in HTTPStatus}
_has_control_character = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]").search
_breaks_line = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]").search  # in a line that ends with both
_begins_request = re.compile(rb"[A-Z-]+(?: [^\r\n]*)?(?:\r|\r\n.*)?\Z", re.S).match
_absolute = re.compile(rb"https?://[^/?#]*", re.I).match
_DIGITS_MAX = 18  # of a length; more bytes than that are in no message
_CHUNK_LINE_MAX = 4096
_SHORT_LINE = 12  # with a size of a gigabyte and no more
_LOOKED_AT_MAX = 1024  # of a head that has not come whole
_TRAILERS_MAX = 65_536
_HEX = frozenset(b"0123456789abcdefABCDEF")


class Malformed(Exception):
    """What arrived is not HTTP, or is ambiguous; the message says how. Nothing more can be read of that connection."""


class RequestHead(Struct, frozen=True):
    """A request without its body.

    Attributes:
        target: path and query as they came.
        length: of the body in bytes; None: it is chunked.
        expects: whether the client waits for "100 Continue" before it sends the body.
    """

    method: bytes
    target: bytes
    headers: Headers
    length: int | None
    keep_alive: bool
    http11: bool
    expects: bool


class AnswerHead(Struct, frozen=True):
    """An answer without its body.

    Attributes:
        headers: end to end ones only.
        length: of the body in bytes; None: see `chunked`.
        chunked: whether the body is; a body with neither ends with the connection.
    """

    status: int
    headers: Headers
    length: int | None
    chunked: bool
    keep_alive: bool


class _Collected:
    """What llhttp calls while it parses a head."""

    __slots__ = ("headers", "url")

    def __init__(self) -> None:
        self.headers: Headers = []
        self.url = b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))


def check_beginning(data: bytes | bytearray) -> None:
    """Of a request's head. Raises Malformed for what cannot become one, so that nobody waits for its end.

    As what speaks TLS, or ends its lines with a bare LF.
    """
    if data and not _begins_request(data[:_LOOKED_AT_MAX]):
        raise Malformed("it does not begin with a method and a line")


def parse_request_head(data: bytes) -> RequestHead:
    """The head that ends with `data`. Raises Malformed."""
    found = _Collected()
    parser = httptools.HttpRequestParser(found)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass  # an offer, which is not taken
    except httptools.HttpParserError as error:
        raise Malformed(_cause(error)) from None
    length: int | None = 0
    expects = hosted = says_close = False
    for name, value in found.headers:
        if name == b"content-length":
            length = _length(value)
        elif name == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                raise Malformed(f"the transfer encoding {value!r} is not known")
            length = None
        elif name == b"expect":
            expects = value.strip().lower() == b"100-continue"
        elif name == b"host":
            if hosted:
                raise Malformed("it names two hosts")
            hosted = True
        elif name == b"connection":
            says_close |= b"close" in value.lower()
    if not found.url:
        raise Malformed("it has no head")
    version = parser.get_http_version()
    if version not in ("1.0", "1.1"):
        raise Malformed(f"the version {version}")
    http11 = version == "1.1"
    if length is None and not http11:
        raise Malformed("it is chunked, which HTTP/1.0 does not know")
    return RequestHead(
        parser.get_method(),
        _origin_form(found.url),
        found.headers,
        length,
        http11 and not says_close,
        http11,
        expects and http11,
    )


def parse_answer_head(data: bytes, *, to_head: bool = False) -> AnswerHead:
    """The head that ends with `data`; `to_head`: it answers a HEAD request. Raises Malformed."""
    if bad := _has_control_character(data):
        raise Malformed(f"a control character, {bad[0]!r}, in its head")
    found = _Collected()
    parser = httptools.HttpResponseParser(found)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        raise Malformed("it switches to another protocol") from None
    except httptools.HttpParserError as error:
        raise Malformed(_cause(error)) from None
    status = parser.get_status_code()
    if not 100 <= status <= 599:
        raise Malformed(f"the status {status}")
    length: int | None = None
    chunked = says_close = False
    for name, value in found.headers:
        if name == b"content-length":
            length = _length(value)
        elif name == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                raise Malformed(f"the transfer encoding {value!r} is not known")
            chunked = True
        elif name == b"connection":
            says_close |= b"close" in value.lower()
    headers = end_to_end(found.headers)
    keep_alive = parser.get_http_version() == "1.1" and not says_close
    if status == _NO_CONTENT:  # it may not even say that it has none
        headers = [each for each in headers if each[0] != b"content-length"]
    if to_head or status in _BODILESS_STATUSES:
        # What it says of a length is of the body that a GET would have got.
        return AnswerHead(status, headers, 0, False, keep_alive)
    return AnswerHead(status, headers, length, chunked, keep_alive)


def is_event_stream(head: AnswerHead) -> bool:
    """Whether it is a stream to whose end an event may be added: not to one that is compressed."""
    if head.length is not None:
        return False
    said = {name: value.strip().lower() for name, value in head.headers}
    return said.get(b"content-type", b"").startswith(b"text/event-stream") and said.get(
        b"content-encoding", b"identity"
    ) in (b"identity", b"")


def _origin_form(target: bytes) -> bytes:
    """A target with scheme and host, as clients of a forward proxy send it, without them."""
    if target.startswith(b"/") or not (found := _absolute(target)):
        return target
    rest = target[found.end() :]
    return rest if rest.startswith(b"/") else b"/" + rest


def _cause(error: Exception) -> str:
    return str(error) or type(error).__name__


def _length(value: bytes) -> int:
    if value.isdigit() and len(value) <= _DIGITS_MAX:  # nearly always
        return int(value)
    digits = value.strip()
    significant = digits.lstrip(b"0")  # Python converts only so many digits
    if not digits.isdigit() or len(significant) > _DIGITS_MAX:
        raise Malformed(f"the content length {value[:40]!r}")
    return int(significant or b"0")


def end_to_end(headers: Headers, dropped: frozenset[bytes] = HOP_BY_HOP) -> Headers:
    """The headers to pass on: without the hop-by-hop ones and those that `Connection` names."""
    for name, value in headers:
        if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            dropped |= {token.strip().lower() for token in value.split(b",")} - _NOT_OF_A_CONNECTION
    return [each for each in headers if each[0] not in dropped]


def request_bytes(
    method: bytes, target: bytes, host: bytes, headers: Iterable[tuple[bytes, bytes]], size: int
) -> bytes:
    """A head to send on. The length is said unless there is no body and the method has none."""
    parts = [method, b" ", target, b" HTTP/1.1\r\nhost: ", host, b"\r\n"]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    if size or method not in _BODILESS_METHODS:
        parts.append(b"content-length: %d\r\n" % size)
    parts.append(b"\r\n")
    return b"".join(parts)


def headers_to_send_on(headers: Headers) -> Headers:
    """Those of a request that an engine gets, its id excepted."""
    return end_to_end(headers, _NOT_SENT_ON)


def answer_bytes(status: int, headers: Iterable[tuple[bytes, bytes]], *, chunked: bool, close: bool) -> bytes:
    """A head for a client."""
    parts = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    if chunked:
        parts.append(b"transfer-encoding: chunked\r\n")
    if close:
        parts.append(b"connection: close\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


def chunk_bytes(data: bytes) -> bytes:
    """A piece of a chunked body; never empty, since that would end it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class ChunkedBody:
    """Takes a chunked body apart. `rest` is what followed its end, once `done`."""

    __slots__ = ("_buffer", "_left", "_state", "_trailers", "done", "rest")

    def __init__(self) -> None:
        self._buffer = b""  # the beginning of a line
        self._left = 0  # bytes of the present chunk
        self._state = "size"
        self._trailers = 0
        self.done = False
        self.rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The pieces of the body in `data`. Raises Malformed."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        pieces: list[bytes] = []
        at, end = 0, len(data)
        while not self.done:
            if self._state == "size":  # a chunk that has come whole, as nearly all do
                line_end = data.find(b"\r\n", at, at + _SHORT_LINE)
                if line_end > at and _HEX.issuperset(line := data[at:line_end]) and (size := int(line, 16)):
                    stop = line_end + 2 + size
                    if data[stop : stop + 2] == b"\r\n":
                        pieces.append(data[line_end + 2 : stop])
                        at = stop + 2
                        if at == end:
                            return pieces
                        continue
            if self._state == "data":
                stop = min(end, at + self._left)
                if stop > at:
                    pieces.append(data[at:stop])
                    self._left -= stop - at
                    at = stop
                if self._left:
                    return pieces
                self._state = "end"
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                if end - at > _CHUNK_LINE_MAX:
                    raise Malformed("a line of its chunks is too long")
                self._buffer = data[at:]
                return pieces
            self._line(data[at:line_end])
            at = line_end + 2
        self.rest = data[at:]
        return pieces

    def _line(self, line: bytes) -> None:
        if bad := _breaks_line(line):
            raise Malformed(f"a control character, {bad[0]!r}, in a line of its chunks")
        if self._state == "size":
            digits = line.partition(b";")[0].strip(b" \t")
            if not digits or len(digits) > 15 or not _HEX.issuperset(digits):
                raise Malformed(f"the chunk size {line[:40]!r}")
            self._left = int(digits, 16)
            self._state = "data" if self._left else "trailers"
        elif self._state == "end":
            if line:
                raise Malformed("a chunk is longer than it says")
            self._state = "size"
        elif line:
            self._trailers += len(line)
            if self._trailers > _TRAILERS_MAX:
                raise Malformed("its trailers are too long")
        else:
            self.done = True
