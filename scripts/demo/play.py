"""Play sessions against an OpenAI-compatible endpoint, all at the same time, and record what each request met."""

import asyncio
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from demo.sessions import Message, Session

REQUEST_TIMEOUT_S = 240.0
LINE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how to send the requests."""

    url: str
    model: str
    cache_salt: str
    # More fields of every request's body, and more headers.
    body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Record:
    """What one request met."""

    session: str
    turn: int
    status: int = 0
    error: str = ""
    ttft_s: float | None = None
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    instance: str = ""
    text: str = ""

    @property
    def failed(self) -> bool:
        """Whether the user saw an error, or a stream that never finished."""
        return self.status != 200 or bool(self.error)


@dataclass(slots=True)
class Played:
    """All records of one play."""

    records: list[Record] = field(default_factory=list)

    def ttft_ms(self, *, first: bool) -> float | None:
        """Median time to the first token of the first turns or of the follow-ups; None without one."""
        times = [r.ttft_s for r in self.records if r.ttft_s is not None and not r.failed and (r.turn == 0) is first]
        return statistics.median(times) * 1000 if times else None

    def failures(self) -> list[Record]:
        """The requests that failed."""
        return [record for record in self.records if record.failed]


class Display(AbstractContextManager["Display"]):
    """A progress bar on a terminal; elsewhere a plain line every few seconds and at the end."""

    def __init__(self, label: str, total: int, console: Console | None = None) -> None:
        self.label, self.total, self.done, self.failed = label, total, 0, 0
        self.console = console or Console(stderr=True)
        self._started = self._printed = time.monotonic()
        self._progress: Progress | None = None
        if self.console.is_terminal:
            label_column = TextColumn("{task.description}", markup=False)
            failed_column = TextColumn("{task.fields[failed]}", style="red", markup=False)
            columns = (SpinnerColumn(), label_column, failed_column, BarColumn(), MofNCompleteColumn())
            self._progress = Progress(*columns, TimeElapsedColumn(), console=self.console)
            self._task = self._progress.add_task(label, total=total, failed="")

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()
        elif kind is None:
            self._line()

    def finished(self, record: Record) -> None:
        """Count a finished request."""
        self.done += 1
        self.failed += record.failed
        if self._progress:
            failed = f"{self.failed} failed" if self.failed else ""
            self._progress.update(self._task, advance=1, failed=failed)
        elif time.monotonic() - self._printed > LINE_EVERY_S:
            self._line()

    def _line(self) -> None:
        self._printed = time.monotonic()
        failed = f", {self.failed} failed" if self.failed else ""
        print(
            f"  {self.label}: {self.done}/{self.total} requests, {self._printed - self._started:.0f} s{failed}",
            file=sys.stderr,
        )


async def play(sessions: Sequence[Session], target: Target, display: Display | None = None) -> Played:
    """Play all sessions at once; a session whose request failed ends there."""
    played = Played()
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client, asyncio.TaskGroup() as tasks:
        for session in sessions:
            tasks.create_task(_play_one(client, session, target, played, display))
    played.records.sort(key=lambda record: (record.session, record.turn))
    return played


async def _play_one(
    client: aiohttp.ClientSession, session: Session, target: Target, played: Played, display: Display | None
) -> None:
    history = list(session.opening)
    for number, turn in enumerate(session.turns):
        await asyncio.sleep(turn.think_s)
        record = await ask(client, session, number, history, target)
        played.records.append(record)
        if display:
            display.finished(record)
        if record.failed:
            return
        session.extend(history, turn, record.text)


async def ask(
    client: aiohttp.ClientSession, session: Session, turn: int, history: Sequence[Message], target: Target
) -> Record:
    """Send one turn as a stream and read it to its end."""
    body: dict[str, Any] = {
        "model": target.model,
        "messages": history,
        "tools": session.tools,
        "temperature": 0,
        "max_tokens": session.reply_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": target.cache_salt,
        **target.body,
    }
    headers = {"content-type": "application/json", **target.headers}
    record = Record(session.name, turn)
    started = time.monotonic()
    try:
        url = f"{target.url}/v1/chat/completions"
        async with client.post(url, data=msgspec.json.encode(body), headers=headers) as response:
            record.status = response.status
            record.instance = response.headers.get("x-smetric-instance", "")
            if response.status == 200:
                await _read_stream(response, record, started)
            else:
                record.error = (await response.text())[:500]
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.total_s = time.monotonic() - started
    return record


async def _read_stream(response: aiohttp.ClientResponse, record: Record, started: float) -> None:
    done = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            record.error = str(chunk["error"])[:500]
            continue
        for choice in chunk.get("choices", ()):
            _read_choice(choice, record, started)
        if usage := chunk.get("usage"):
            record.prompt_tokens = usage["prompt_tokens"]
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not done and not record.error:
        record.error = "the stream ended without [DONE]"


def _read_choice(choice: Mapping[str, Any], record: Record, started: float) -> None:
    delta = choice.get("delta", {})
    text = delta.get("content") or ""
    # The first chunk only opens the message; the first token is the first chunk with text or the one that finishes.
    if record.ttft_s is None and (text or delta.get("tool_calls") or choice.get("finish_reason")):
        record.ttft_s = time.monotonic() - started
    record.text += text
