"""Reads the usage figures out of an answer that passes by, without touching it.

Only what is needed is kept: the whole of a JSON answer up to a limit, the tail of a stream, and the head of one in
Anthropic's form, which begins with the figures of the prompt (`message_start`) and ends with those of the answer.
"""

from collections import deque
from collections.abc import Iterable

import msgspec

from smetric_router.types import Usage

# The event with the usage is a few hundred bytes and followed by nothing but [DONE].
TAIL_BYTES = 8192
# No prompt is longer: a figure beyond it is no figure.
TOKENS_MAX = 1_000_000_000
_DONE = (b"data: [DONE]", b"data:[DONE]")
_STOP = b'"message_stop"'
_START = b"event: message_start"
_HEAD_BYTES = 4096


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Figures(msgspec.Struct):
    """OpenAI's, and Anthropic's, where `input_tokens` are those that were in no cache."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Message(msgspec.Struct):
    usage: _Figures | None = None


class _Answer(msgspec.Struct):
    usage: _Figures | None = None
    message: _Message | None = None
    """Of the event `message_start`."""


_decode = msgspec.json.Decoder(_Answer).decode


class UsageScan:
    """Is fed the chunks of one answer in order, and asked at the end."""

    def __init__(self, *, stream: bool, limit: int) -> None:
        self._stream = stream
        self._limit = TAIL_BYTES if stream else limit
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._head: bytes | None = b"" if stream else None  # of a stream that may be in Anthropic's form

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return self._stream

    def feed(self, chunk: bytes) -> None:
        """One more chunk."""
        if self._head is not None and len(self._head) < _HEAD_BYTES:
            head = self._head + chunk[:_HEAD_BYTES]
            self._head = head if head.startswith(_START[: len(head)]) else None
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
        last = _usage_among(reversed(b"".join(self._parts).splitlines()))
        if not self._head:
            return last
        # The end may tell all, or the tokens of the answer alone.
        first = _usage_among(self._head.splitlines())
        return Usage(
            max(last.prompt_tokens or 0, first.prompt_tokens or 0) or None,
            first.cached_tokens if last.cached_tokens is None else last.cached_tokens,
            last.completion_tokens or first.completion_tokens,
        )

    def at_event_end(self) -> bool:
        """Whether the stream so far ends between two events."""
        tail = self._tail()
        return not tail or tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r"))

    def is_done(self) -> bool:
        """Whether the stream has said that it is complete."""
        tail = self._tail().rstrip()
        return tail.endswith(_DONE) or (bool(self._head) and _STOP in tail.rpartition(b"data:")[2])

    def _tail(self) -> bytes:
        tail = b""
        for part in reversed(self._parts):
            tail = part + tail
            if len(tail) >= 64:
                break
        return tail


def _usage_among(lines: Iterable[bytes]) -> Usage:
    """Of the first event that has any."""
    for line in lines:
        if line.startswith(b"data:") and b'"usage"' in line:
            usage = _usage(line[5:])
            if usage != Usage():
                return usage
    return Usage()


def _usage(text: bytes) -> Usage:
    try:
        answer = _decode(text)
        figures = answer.usage or (answer.message.usage if answer.message else None)
    # UnicodeDecodeError is a ValueError, as is what Python says of a number with too many digits.
    except (msgspec.DecodeError, ValueError, RecursionError):
        return Usage()
    if figures is None:
        return Usage()
    if figures.prompt_tokens is None and figures.output_tokens is not None:
        return _of_anthropic(figures)
    prompt = _count(figures.prompt_tokens)
    if prompt is None:
        return Usage()
    details = figures.prompt_tokens_details
    cached = _count(details.cached_tokens) if details else None
    return Usage(prompt, None if cached is None else min(cached, prompt), _count(figures.completion_tokens))


def _of_anthropic(figures: _Figures) -> Usage:
    fresh, read = _count(figures.input_tokens), _count(figures.cache_read_input_tokens)
    prompt = None if fresh is None else fresh + (read or 0) + (_count(figures.cache_creation_input_tokens) or 0)
    return Usage(prompt, None if prompt is None else read, _count(figures.output_tokens))


def _count(value: int | None) -> int | None:
    """None for what is no count."""
    return value if value is not None and 0 <= value <= TOKENS_MAX else None
