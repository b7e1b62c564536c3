"""Reads the usage figures out of an answer that passes by, without touching it.

Only what is needed is kept: the whole of a JSON answer up to a limit, the tail of a stream.
"""

from collections import deque

import msgspec

from smetric_router.types import Usage

# The event with the usage is a few hundred bytes and followed by nothing but [DONE].
TAIL_BYTES = 8192
# No prompt is longer: a figure beyond it is no figure.
TOKENS_MAX = 1_000_000_000
_DONE = b"data: [DONE]"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Figures(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Figures | None = None


_decode = msgspec.json.Decoder(_Answer).decode


class UsageScan:
    """Is fed the chunks of one answer in order, and asked at the end."""

    def __init__(self, *, stream: bool, limit: int) -> None:
        self._stream = stream
        self._limit = TAIL_BYTES if stream else limit
        self._parts: deque[bytes] = deque()
        self._size = 0

    def feed(self, chunk: bytes) -> None:
        """One more chunk."""
        self._parts.append(chunk)
        self._size += len(chunk)
        if self._stream:
            while self._size - len(self._parts[0]) >= self._limit:
                self._size -= len(self._parts.popleft())
        elif self._size > self._limit:
            self._parts.clear()

    def usage(self) -> Usage:
        """The last figures of the answer; empty if it has none."""
        if not self._stream:
            return _usage(b"".join(self._parts)) if self._size <= self._limit else Usage()
        for line in reversed(b"".join(self._parts).splitlines()):
            if line.startswith(b"data:") and b'"usage"' in line:
                usage = _usage(line[5:])
                if usage.prompt_tokens is not None:
                    return usage
        return Usage()

    def at_event_end(self) -> bool:
        """Whether the stream so far ends between two events."""
        tail = self._tail()
        return not tail or tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))

    def is_done(self) -> bool:
        """Whether the stream has said that it is complete."""
        return self._tail().rstrip().endswith(_DONE)

    def _tail(self) -> bytes:
        tail = b""
        for part in reversed(self._parts):
            tail = part + tail
            if len(tail) >= 64:
                break
        return tail


def _usage(text: bytes) -> Usage:
    try:
        figures = _decode(text).usage
    # UnicodeDecodeError is a ValueError, as is what Python says of a number with too many digits.
    except (msgspec.DecodeError, ValueError, RecursionError):
        return Usage()
    if figures is None or figures.prompt_tokens is None or not 0 <= figures.prompt_tokens <= TOKENS_MAX:
        return Usage()
    cached = figures.prompt_tokens_details.cached_tokens if figures.prompt_tokens_details else None
    if cached is not None:
        cached = min(cached, figures.prompt_tokens) if cached >= 0 else None
    return Usage(figures.prompt_tokens, cached)
