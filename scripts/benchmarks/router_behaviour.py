"""What a router does with one request after the other, beside the fast path: 32 results, each right or wrong.

Right is what keeps a client's program working: everything of a request reaches the engine, everything of the answer the
client, errors are the engine's own, nobody waits for what has died, and nothing is computed for nobody.
"""

import asyncio
import contextlib
import io
import json
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.programs.engine import MODEL
from benchmarks.programs.load import CHAT
from benchmarks.router_systems import Engine, Machine, Router

ABORTED_WITHIN_S = 4.0
BACK_WITHIN_S = 10.0
NEVER_S = 6000
SENT = {
    "authorization": "Bearer sk-user", "x-request-id": "request-1", "x-custom": "c", "x-session-id": "s1",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "user-agent": "probe",
}  # fmt: skip
SYSTEM, USER = {"role": "system", "content": "sys"}, {"role": "user", "content": "hi"}
OWN_PATHS = ("/v1/models", "/health", "/metrics")
PASSED_ON = {  # and what the engine answers
    "GET /readiness": 404, "GET /workers": 404, "GET /version": 200, "POST /v1/completions": 200,
    "POST /v1/responses": 200, "POST /v1/messages": 200, "POST /v1/embeddings": 200, "POST /tokenize": 200,
    "POST /v1/tokenize": 404, "POST /v1/rerank": 404, "POST /v1/score": 404, "POST /generate": 200,
    "POST /v1/audio/transcriptions": 404,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """One of the 32."""

    name: str
    right: bool
    seen: str


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that has been read."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Probe:
    """One router in front of two engines; `results` grows."""

    def __init__(
        self, machine: Machine, engines: Sequence[Engine], router: Router, http: aiohttp.ClientSession
    ) -> None:
        self._machine = machine
        self._engines = list(engines)
        self._router = router
        self._http = http
        self.results: list[Result] = []

    def _note(self, name: str, right: bool, seen: object) -> None:
        self.results.append(Result(name, right, str(seen)[:200]))

    # --- asking ---

    async def _chat(
        self, control: str = "", headers: Mapping[str, str] | None = None, more: Sequence[Mapping[str, Any]] = (),
        **fields: Any,
    ) -> Reply:  # fmt: skip
        last = {"role": "user", "content": f"hi {control}"} if control else USER
        body = {"model": MODEL, "messages": [SYSTEM, last, *more], "max_tokens": 5, **fields}
        return await self._post(json.dumps(body).encode(), headers or {})

    async def _post(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        given = {"content-type": "application/json", **headers}
        async with self._http.post(self._router.url + CHAT, data=io.BytesIO(body), headers=given) as answer:
            return Reply(answer.status, answer.headers, await answer.read())

    async def _seen(self) -> list[dict[str, Any]]:
        seen = []
        for engine in self._engines:
            async with self._http.get(engine.url + "/stats") as answer:
                seen.append(await answer.json())
        return seen

    async def _attempts(self) -> int:
        return sum(each["started"] for each in await self._seen())

    async def _reset(self) -> None:
        for engine in self._engines:
            async with self._http.post(engine.url + "/reset"):
                pass

    async def _arrived(self) -> dict[str, Any]:
        """What the engine that was asked last has seen."""
        return next((each for each in await self._seen() if each["started"]), {"headers": {}, "body": ""})

    # --- what is passed on ---

    async def passed_on(self) -> None:
        """Headers and bodies, both ways."""
        await self._reset()
        plain = await self._chat()
        names = {name.lower() for name in plain.headers}
        self._note("an answer", plain.status == 200, plain.status)
        self._note("the engine's headers", {"content-type", "x-fake-engine"} <= names, sorted(names))
        await self._reset()
        reply = await self._chat(headers=SENT)
        got = (await self._arrived())["headers"]
        self._note("the client's headers", all(got.get(name) == SENT[name] for name in SENT), got)
        self._note("x-request-id comes back", reply.headers.get("x-request-id") == "request-1", reply.headers)
        await self._reset()
        unknown = {"chat_template_kwargs": {"a": False}, "vllm_xargs": {"b": 1}, "x_unknown": "yes"}
        body = json.dumps({"model": MODEL, "messages": [SYSTEM, USER], "max_tokens": 5, **unknown}, indent=1).encode()
        await self._post(body, {})
        arrived = (await self._arrived())["body"]
        self._note("fields nobody knows", all(f'"{name}"' in arrived for name in unknown), arrived)
        self._note("the body byte for byte", arrived.encode("latin-1") == body, arrived)

    async def messages(self) -> None:
        """Messages of unusual kinds."""
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        tools: list[dict[str, Any]] = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "result"}]},
        ]
        self._ok("tool calls, null and lists", await self._chat(more=tools))
        for role in ("developer", "latest_reminder"):
            self._ok(f"the role {role}", await self._chat(more=[{"role": role, "content": "x"}]))
        await self._reset()
        thought = {"role": "assistant", "content": "a", "reasoning_content": "think", "reasoning": "r2"}
        reply = await self._chat(more=[thought])
        arrived = (await self._arrived())["body"]
        kept = "reasoning_content" in arrived and '"reasoning"' in arrived
        self._note("reasoning in messages", reply.status == 200 and kept, arrived)

    def _ok(self, name: str, reply: Reply) -> None:
        self._note(name, reply.status == 200, (reply.status, reply.body[:100]))

    async def errors(self) -> None:
        """The engine's own errors reach the client, and do not take the engine away from others."""
        for status, attempts_max in ((400, 1), (429, 2), (500, 2), (503, 2)):
            await self._reset()
            reply = await self._chat(f"[[status={status}]]")
            attempts = await self._attempts()
            right = reply.status == status and 1 <= attempts <= attempts_max
            self._note(f"an engine's {status}", right, (reply.status, f"{attempts} attempts", reply.body[:100]))
        statuses = [(await self._chat()).status for _ in range(6)]
        self._note("six requests after those", statuses == [200] * 6, statuses)
        malformed = await self._post(b"{not json", {})
        self._note("malformed JSON", malformed.status == 400, malformed.status)
        unknown = await self._chat(model="other-model")
        self._note("an unknown model", unknown.status == 404, unknown.status)

    async def streams(self) -> None:
        """A stream comes as it is made, and has no false end."""
        begun, arrivals, raw = time.perf_counter(), [], b""
        async with self._stream("[[chunks=10 gap_ms=30]]") as answer:
            kind = answer.headers.get("content-type", "")
            async for piece in answer.content.iter_any():
                arrivals.append(time.perf_counter() - begun)
                raw += piece
        self._note("a stream's content type", kind.startswith("text/event-stream"), kind)
        whole = raw.count(b"data: ") == 13 and b'"usage"' in raw and b"[DONE]" in raw
        self._note("a stream's events", whole, raw[-200:])
        self._note("a stream piece by piece", arrivals[-1] - arrivals[0] > 0.15 and len(arrivals) >= 3, arrivals)
        error, raw = "", b""
        try:
            async with self._stream("[[chunks=20 gap_ms=5 cut_after=5]]") as answer:
                async for piece in answer.content.iter_any():
                    raw += piece
        except aiohttp.ClientError as problem:
            error = type(problem).__name__
        told = b"[DONE]" not in raw and raw.count(b'"tok ') == 5 and (bool(error) or b'"error"' in raw)
        self._note("an engine that dies in a stream", told, (error, raw[-150:]))

    @contextlib.asynccontextmanager
    async def _stream(self, control: str) -> AsyncIterator[aiohttp.ClientResponse]:
        messages = [SYSTEM, {"role": "user", "content": control}]
        asked = {"model": MODEL, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        async with self._http.post(self._router.url + CHAT, json=asked) as answer:
            yield answer

    async def disconnects(self) -> None:
        """A client that leaves takes its request along."""
        for name, stream, control in (
            ("in a stream", True, "[[chunks=500 gap_ms=20]]"),
            ("before the first token", True, f"[[first_ms={NEVER_S}]]"),
            ("without a stream", False, f"[[first_ms={NEVER_S}]]"),
        ):
            await self._reset()
            asking = asyncio.create_task(self._chat(control, stream=stream))
            await self._until(self._attempts)
            await asyncio.sleep(0.1)
            asking.cancel()
            await asyncio.wait([asking])

            async def aborted() -> bool:
                return any(each["aborted"] for each in await self._seen())

            took_s = await self._until(aborted, ABORTED_WITHIN_S)
            self._note(f"a client leaves {name}", took_s is not None, took_s)

    async def _until(self, condition: Callable[[], Awaitable[object]], within_s: float = 5.0) -> float | None:
        begun = time.perf_counter()
        while not await condition():
            if time.perf_counter() - begun > within_s:
                return None
            await asyncio.sleep(0.02)
        return time.perf_counter() - begun

    # --- paths, sizes, deaths ---

    async def paths(self) -> None:
        """16 paths: the router's own, and all others as the engine answers them."""
        wrong = {}
        body = {"model": MODEL, "prompt": "x", "input": "x", "text": "x", "messages": [USER], "max_tokens": 5}
        for what, expected in {**{f"GET {path}": 200 for path in OWN_PATHS}, **PASSED_ON}.items():
            method, path = what.split()
            asked = body if method == "POST" else None
            async with self._http.request(method, self._router.url + path, json=asked) as answer:
                if answer.status != expected:
                    wrong[path] = answer.status
        self._note("16 paths", not wrong, wrong)

    async def sizes(self) -> None:
        """Large bodies are served, and absurd ones refused instead of held in memory."""
        for mib, expected in ((2, 200), (20, 200), (120, 413)):
            seen: object
            try:
                seen = (await self._chat(more=[{"role": "user", "content": "a" * (mib << 20)}])).status
            except (aiohttp.ClientError, ConnectionError) as error:
                # Who is refused while still sending may find the connection closed before the answer is read.
                seen = type(error).__name__
            right = seen == expected or (expected == 413 and isinstance(seen, str))
            self._note(f"a body of {mib} MiB", right, seen)

    async def deaths(self) -> None:
        """Nobody notices that one of two engines dies, and it is used again once it is back."""
        self._machine.stop(self._engines[1])
        statuses: list[object] = []
        for number in range(20):
            try:
                statuses.append((await self._chat(f"question {number}")).status)
            except aiohttp.ClientError as error:
                statuses.append(type(error).__name__)
        self._note("20 requests after an engine's death", statuses == [200] * 20, statuses)
        self._engines[1] = self._machine.engine(self._engines[1].name, self._engines[1].port)

        async def used() -> bool:
            asked = (self._chat(f"question {time.time()} {number}") for number in range(4))
            await asyncio.gather(*asked, return_exceptions=True)
            return bool((await self._seen())[1]["started"])

        took_s = await self._until(used, BACK_WITHIN_S)
        self._note("an engine comes back", took_s is not None, took_s)

    async def leaving(self) -> None:
        """A router that is told to end finishes what it has begun."""
        raw, error = b"", ""

        async def read() -> None:
            nonlocal raw, error
            try:
                async with self._stream("[[chunks=40 gap_ms=50]]") as answer:
                    async for piece in answer.content.iter_any():
                        raw += piece
            except aiohttp.ClientError as problem:
                error = type(problem).__name__

        reading = asyncio.create_task(read())

        async def begun() -> bool:
            return bool(raw)

        await self._until(begun)
        process = self._router.running.process
        process.send_signal(signal.SIGTERM)
        await asyncio.wait([reading], timeout=12)
        self._note("a stream while it is told to end", b"[DONE]" in raw and not error, (error, raw[-100:]))

        async def ended() -> bool:
            return process.poll() is not None

        await self._until(ended, 10.0)
        self._note("it ends", process.poll() == 0, process.poll())
        reading.cancel()
        await asyncio.wait([reading])


STEPS = (
    Probe.passed_on, Probe.messages, Probe.errors, Probe.streams, Probe.disconnects,
    Probe.paths, Probe.sizes, Probe.deaths, Probe.leaving,
)  # fmt: skip


async def probe(
    machine: Machine, name: str, steps: Sequence[Callable[[Probe], Awaitable[None]]] = STEPS
) -> list[Result]:
    """The 32 results of one router, with engines of its own.

    Raises:
        BenchError: it does not start.
    """
    engines = machine.engines(2)
    router = machine.router(name, engines)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
        probing = Probe(machine, engines, router, http)
        for step in steps:
            await step(probing)
    machine.supervisor.stop(router.running, engines[0].running)
    return probing.results
