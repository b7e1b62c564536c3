"""A fake engine that costs a router's benchmark as little as possible: HTTP/1.1 straight on asyncio, answers made in advance.

    python -m benchmarks.programs.engine READY_FILE NAME [PORT]

It does what the last message (or the prompt) says in double brackets, which every router passes on:

    [[chunks=50 first_ms=60 gap_ms=10 status=503 cut_after=5]]

tokens of the answer, milliseconds until the first and between two, another status than 200, and after how many chunks of a
stream the connection is cut. Only the first and last 4 KiB of a body are looked at. `GET /stats` tells what was received.
It holds no KV cache.
"""

import asyncio
import json
import re
import sys
from typing import Any, cast

import uvloop

from benchmarks.programs.measure import write_ready

MODEL = "fake"
ENDS_BYTES = 4096
COMPLETIONS = (b"/v1/chat/completions", b"/v1/completions")
ANSWERED = (*COMPLETIONS, b"/generate", b"/v1/embeddings", b"/v1/responses", b"/v1/messages", b"/tokenize")
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests", 503: "Service Unavailable"}
_find_told = re.compile(rb"\[\[([a-z_0-9= ]+)\]\]").search
_is_stream = re.compile(rb'"stream"\s*:\s*true').search
_wants_usage = re.compile(rb'"include_usage"\s*:\s*true').search
_names_model = re.compile(rb'"model"\s*:\s*"([^"]*)"').search

# What routers ask an engine about itself.
INFO = {
    b"/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 262144}]},
    b"/get_model_info": {"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True},
    b"/get_server_info": {"model_path": MODEL, "served_model_name": MODEL, "dp_size": 1, "tp_size": 1, "version": "0"},
    b"/version": {"version": "0"},
    b"/get_load": [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}],
}
INFO |= {b"/model_info": INFO[b"/get_model_info"], b"/server_info": INFO[b"/get_server_info"]}
GAUGES = "".join(
    f'{name}{{model_name="{MODEL}"}} 0\n'
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
).encode()


class Engine:
    """What all connections share."""

    def __init__(self, name: str) -> None:
        self.name = name.encode()
        self.reset()

    def reset(self) -> None:
        """Forgets what was received."""
        self.started = self.aborted = 0
        self.headers: dict[str, str] = {}
        self.body = b""

    def stats(self) -> dict[str, Any]:
        """Since the last reset; the headers and the first bytes of the last completion."""
        seen = {"headers": self.headers, "body": self.body.decode("latin-1")}
        return {"started": self.started, "aborted": self.aborted, **seen}

    def head(self, status: int, kind: bytes, length: int | None) -> bytes:
        """Of an answer; without a length it is chunked."""
        framing = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
        return b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\nx-fake-engine: %s\r\n%s\r\n\r\n" % (
            status, REASONS.get(status, "Other").encode(), kind, self.name, framing,
        )  # fmt: skip

    def whole(self, status: int, value: object, kind: bytes = b"application/json") -> bytes:
        """A whole answer."""
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        return self.head(status, kind, len(body)) + body


class Connection(asyncio.Protocol):
    """One connection, and the one request that is at work on it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parts: list[bytes] = []
        self._bytes = 0
        self._needed = 0  # so many until the request is whole, or its head
        self._head = b""
        self._busy = False
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it is open."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """asyncio: the router has left."""
        self._engine.aborted += self._busy
        self._busy = False
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes. Requests come one at a time."""
        self._parts.append(data)
        self._bytes += len(data)
        if self._busy or self._bytes < self._needed:
            return
        data = b"".join(self._parts)
        if not self._head:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._parts, self._needed = [data], 0
                return
            if not data[:end].split(b"\r\n", 1)[0].endswith(b" HTTP/1.1"):
                self._transport.close()  # for example an attempt at another protocol
                return
            self._head, data = data[:end], data[end + 4 :]
            length = re.search(rb"(?i)\ncontent-length: *(\d+)", self._head)
            self._needed = int(length[1]) if length else -1 if b"chunked" in self._head.lower() else 0
        if self._needed < 0:
            if not data.endswith(b"0\r\n\r\n"):  # good enough: bodies are JSON
                self._parts, self._bytes = [data], 0
                return
            data = unchunked(data)
        elif len(data) < self._needed:
            self._parts, self._bytes = [data], len(data)
            return
        head, self._head = self._head, b""
        self._parts, self._bytes, self._needed = [], 0, 0
        self._request(head, data)

    def _request(self, head: bytes, body: bytes) -> None:
        method, target, _ = head.split(b"\r\n", 1)[0].split(b" ")
        path, engine, write = target.partition(b"?")[0], self._engine, self._transport.write
        if method == b"GET" and path in (b"/health", b"/health_generate"):
            write(engine.whole(200, b""))
        elif method == b"GET" and path in INFO:
            write(engine.whole(200, INFO[path]))
        elif path == b"/metrics":
            write(engine.whole(200, GAUGES, b"text/plain; version=0.0.4"))
        elif path == b"/stats":
            write(engine.whole(200, engine.stats()))
        elif path == b"/reset":
            engine.reset()
            write(engine.whole(200, {}))
        elif method != b"POST" or path not in ANSWERED:
            write(engine.whole(404, {"error": {"message": "not found", "code": 404}}))
        else:
            self._complete(path, head, body)

    def _complete(self, path: bytes, head: bytes, body: bytes) -> None:
        engine, size = self._engine, len(body)
        engine.started += 1
        lines = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
        engine.headers = {name.decode("latin-1").lower(): value.strip().decode("latin-1") for name, _, value in lines}
        engine.body = body[:ENDS_BYTES]
        self._busy = True
        ends = body if size <= 2 * ENDS_BYTES else body[:ENDS_BYTES] + body[-ENDS_BYTES:]
        found = _find_told(ends)
        told = dict(word.split("=") for word in found[1].decode().split()) if found else {}
        status, chunks = int(told.get("status", 200)), int(told.get("chunks", 5))
        first_s, gap_s = (float(told.get(name, 0)) / 1e3 for name in ("first_ms", "gap_ms"))
        named = _names_model(ends)
        if named is not None and named[1] != MODEL.encode():
            status = 404
        if status != 200:
            self._end(engine.whole(status, {"error": {"message": f"engine says {status}", "code": status}}))
            return
        usage = {"prompt_tokens": size // 4, "completion_tokens": chunks, "total_tokens": size // 4 + chunks}
        if path in COMPLETIONS and _is_stream(ends):
            last = usage if _wants_usage(ends) else None
            streaming = self._stream(chunks, first_s, gap_s, int(told.get("cut_after", -1)), last)
            self._task = asyncio.get_running_loop().create_task(streaming)
            return
        text = "tok " * chunks
        message = {"message": {"role": "assistant", "content": text}} if b"chat" in path else {"text": text}
        choice = {"index": 0, **message, "logprobs": None, "finish_reason": "stop"}
        answer = {"id": "a", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice]}
        whole = engine.whole(200, {**answer, "usage": usage})
        if wait_s := first_s + gap_s * chunks:
            asyncio.get_running_loop().call_later(wait_s, self._end, whole)
        else:
            self._end(whole)

    def _end(self, data: bytes) -> None:
        if self._busy:
            self._busy, self._task = False, None
            self._transport.write(data)

    async def _stream(
        self, chunks: int, first_s: float, gap_s: float, cut_after: int, usage: dict[str, int] | None
    ) -> None:
        event = chunk(event_bytes({"index": 0, "delta": {"content": "tok "}, "logprobs": None, "finish_reason": None}))
        await asyncio.sleep(first_s)
        self._transport.write(self._engine.head(200, b"text/event-stream; charset=utf-8", None))
        due_s = asyncio.get_running_loop().time()
        for number in range(chunks):
            if number == cut_after:
                self._busy = False
                self._transport.abort()
                return
            self._transport.write(event)
            due_s += gap_s
            await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()) if gap_s else 0)
        last = event_bytes({"index": 0, "delta": {}, "finish_reason": "stop"})
        if usage is not None:
            last += event_bytes(None, usage=usage)
        self._end(chunk(last + b"data: [DONE]\n\n") + b"0\r\n\r\n")


def event_bytes(choice: object, **more: object) -> bytes:
    """One event of a stream."""
    event = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return b"data: " + json.dumps({**event, "choices": [choice] if choice else [], **more}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    """A chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def unchunked(data: bytes) -> bytes:
    """A whole chunked body, without its framing."""
    parts: list[bytes] = []
    at = 0
    while True:
        line_end = data.index(b"\r\n", at)
        size = int(data[at:line_end].partition(b";")[0], 16)
        if not size:
            return b"".join(parts)
        parts.append(data[line_end + 2 : line_end + 2 + size])
        at = line_end + size + 4


async def serve(ready_file: str, name: str, port: int) -> None:
    """Until it is stopped."""
    engine = Engine(name)
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(engine), "127.0.0.1", port, backlog=2048, reuse_address=True
    )
    write_ready(ready_file, server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0))
