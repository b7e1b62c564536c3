"""The load on a router: requests in closed loop over connections that are kept, and whole conversations.

    python -m benchmarks.programs.load

Told what to do as programs/measure.py says. The CPU time of the router's processes is read when nothing is under way, so
that it belongs to the requests that were counted.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

from benchmarks.programs.measure import obey, percentile

CHAT = "/v1/chat/completions"
POOL = 64
MESSAGES = 24
SYSTEM_SHARE = 0.5
"""So much of every prompt is the same system prompt."""
CONTROL_BYTES = 80
MS = 1e3
PATIENCE_S = 30.0
"""After the end of the load; what has not been answered by then has failed."""
_CPU_CLOCK = 2  # the scheduler's clock of a whole process; see clock_getcpuclockid(3)


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds of these processes, all threads, to the nanosecond; of one that has ended nothing."""
    used = 0.0
    for pid in pids:
        try:
            used += time.clock_gettime((~pid << 3) | _CPU_CLOCK)
        except OSError:
            continue
    return used


def busy_s(cpus: Sequence[int]) -> float:
    """Seconds for which these CPUs have done anything, whoever's work it was, to a tick of the kernel's (10 ms)."""
    wanted, ticks = {f"cpu{each}" for each in cpus}, 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *times = line.split()
        if name in wanted:
            user, nice, system, _idle, _iowait, *interrupts = map(int, times[:8])
            ticks += user + nice + system + sum(interrupts)
    return ticks / os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """The process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:  # it has just ended
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


@lru_cache(maxsize=1)
def _vocabulary() -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(4096)]


def words(draw: random.Random, count: int) -> str:
    """So many characters of text."""
    return " ".join(draw.choices(_vocabulary(), k=count // 4))[:count]


@lru_cache(maxsize=16)
def bodies(size: int, stream: bool, control: str) -> list[bytes]:
    """POOL chat requests of `size` bytes: a system prompt that all share, and a history of several turns of their own."""
    draw = random.Random(1)
    system = words(draw, int(size * SYSTEM_SHARE))
    count = MESSAGES if size > 20_000 else 3
    own = (size - len(system) - CONTROL_BYTES - 60 * count) // count
    made = []
    for _ in range(POOL):
        text = words(draw, own * count)
        roles = ("user", "assistant")
        messages = [{"role": "system", "content": system}]
        messages += [{"role": roles[at % 2], "content": text[at * own : (at + 1) * own]} for at in range(count)]
        messages[-1] = {"role": "user", "content": f"{messages[-1]['content']} {control}"}
        made.append(chat(messages, stream))
    return made


def chat(messages: Sequence[Mapping[str, str]], stream: bool) -> bytes:
    """A request."""
    asked: dict[str, Any] = {
        "model": "fake",
        "messages": messages,
        "max_tokens": 50,
        "temperature": 0,
        "stream": stream,
    }
    if stream:
        asked["stream_options"] = {"include_usage": True}
    return json.dumps(asked).encode()


@dataclass(slots=True)
class Answer:
    """What came back; times are since the request was sent."""

    status: int = 0
    engine: str = ""
    first_s: float = 0.0
    """Until the first byte of the body."""
    whole_s: float = 0.0


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, host: str) -> None:
        self._start = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n".encode()
        self._start += b"authorization: Bearer sk-x\r\n"
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it is open."""
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def ask(self, body: bytes) -> "asyncio.Future[Answer]":
        """Sends a request. The answer has status 0 if the connection broke first."""
        self._answer, self._head, self._tail = Answer(), b"", b""
        self._left: int | None = None
        self._done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._begun = time.perf_counter()
        self._transport.writelines([self._start, b"content-length: %d\r\n\r\n" % len(body), body])
        return self._done

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes."""
        if not self._answer.status:
            data = self._read_head(data)
        if not self._answer.status:
            return
        if data and not self._answer.first_s:
            self._answer.first_s = time.perf_counter() - self._begun
        if self._left is None:
            self._tail = (self._tail + data)[-7:]
            if self._tail.endswith(b"\r\n0\r\n\r\n"):
                self._over()
        else:
            self._left -= len(data)
            if self._left <= 0:
                self._over()

    def _read_head(self, data: bytes) -> bytes:
        head, end, rest = (self._head + data).partition(b"\r\n\r\n")
        if not end:
            self._head = head
            return b""
        self._answer.status = int(head[9:12])
        for line in head.lower().split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name == b"content-length":
                self._left = int(value)
            elif name == b"x-fake-engine":
                self._answer.engine = value.strip().decode()
        return rest

    def _over(self) -> None:
        self._answer.whole_s = time.perf_counter() - self._begun
        if not self._done.done():
            self._done.set_result(self._answer)

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        """asyncio: it is closed."""
        self.open = False
        if hasattr(self, "_done") and not self._done.done():
            self._answer.status = 0
            self._done.set_result(self._answer)

    def close(self) -> None:
        """No more."""
        self._transport.abort()


async def connect(url: str) -> Connection:
    """A connection to a router or an engine."""
    host = urlsplit(url)
    assert host.hostname and host.port
    _, made = await asyncio.get_running_loop().create_connection(
        lambda: Connection(host.netloc), host.hostname, host.port
    )
    return made


class Crowd:
    """So many clients, each with a connection; `asked` counts all requests."""

    def __init__(self, urls: Sequence[str], requests: Sequence[bytes]) -> None:
        self._urls = urls
        self._requests = requests
        self._connections: list[Connection] = []
        self.asked = 0

    async def grow(self, count: int) -> None:
        """Connects."""
        urls = [self._urls[at % len(self._urls)] for at in range(count)]
        self._connections = list(await asyncio.gather(*map(connect, urls)))

    async def run(self, seconds: float, most: int, spread_s: float = 0.0) -> list[Answer]:
        """All ask until the time or the number of requests is over, and have their answers; they begin within `spread_s`."""
        until, end = time.perf_counter() + seconds, self.asked + most
        answers: list[Answer] = []

        async def client(number: int, connection: Connection) -> None:
            await asyncio.sleep(spread_s * number / len(self._connections))
            while self.asked < end and time.perf_counter() < until and connection.open:
                body = self._requests[self.asked % len(self._requests)]
                self.asked += 1
                answers.append(await connection.ask(body))

        clients = [asyncio.ensure_future(client(*each)) for each in enumerate(self._connections)]
        done, stuck = await asyncio.wait(clients, timeout=None if seconds == float("inf") else seconds + PATIENCE_S)
        for each in done:
            each.result()
        for each in stuck:
            each.cancel()
        return answers + [Answer()] * len(stuck)

    def close(self) -> None:
        """Disconnects."""
        for each in self._connections:
            each.close()


async def load(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """`concurrency` clients ask `urls` with bodies of `bytes` for `seconds`, after a fifth of it as a warm-up.

    `stream`, `control`: of the requests (see programs/engine.py). `pids`: the router's processes. Optional: `requests`, at
    most so many are counted; `spread_s`, the clients begin one after the other within it; `cpus`, lists of CPUs by name. Returns
    `requests`, `failed`, `statuses` (how often each came; 0: the connection broke, or nothing came), `cpu_s`, `busy` (the share
    of the time for which each list of CPUs had anything to do), and in milliseconds `p50` and `p99` of the whole answer and
    `first_p50` of its first byte.
    """
    crowd = Crowd(told["urls"], bodies(told["bytes"], told["stream"], told["control"]))
    most = told.get("requests", 1 << 60)
    await crowd.grow(told["concurrency"])
    spread_s = told.get("spread_s", 0.0)
    await crowd.run(told["seconds"] / 5, most)
    cpus: Mapping[str, Sequence[int]] = told.get("cpus", {})
    before, begun_s, busy = (
        cpu_s(told["pids"]),
        time.perf_counter(),
        {name: busy_s(each) for name, each in cpus.items()},
    )
    answers = await crowd.run(told["seconds"] + spread_s, most, spread_s)
    used_s, taken_s = cpu_s(told["pids"]) - before, time.perf_counter() - begun_s
    busy = {name: (busy_s(each) - busy[name]) / (taken_s * len(each)) for name, each in cpus.items()}
    crowd.close()
    good = [each for each in answers if each.status == 200]
    whole, first = [each.whole_s * MS for each in good], [each.first_s * MS for each in good]
    statuses = dict(Counter(each.status for each in answers))
    if not good:
        return {"requests": len(answers), "failed": len(answers), "cpu_s": used_s, "statuses": statuses, "busy": busy}
    return {
        "requests": len(answers), "failed": len(answers) - len(good), "cpu_s": used_s, "statuses": statuses, "busy": busy,
        "p50": percentile(whole, 0.5), "p99": percentile(whole, 0.99), "first_p50": percentile(first, 0.5),
    }  # fmt: skip


async def converse(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """`sessions` conversations of `turns` turns with one system prompt, `live` of them at a time; each request goes to one of
    `urls` by chance. Returns `follow_ups`, how many of them `stuck` to the engine of the turn before, `served` requests per
    engine and `failed`.
    """
    draw = random.Random(told["seed"])
    system = words(draw, told["system_bytes"])
    served: Counter[str] = Counter()
    counted = {"follow_ups": 0, "stuck": 0, "failed": 0}
    places = asyncio.Semaphore(told["live"])

    async def session() -> None:
        connections: dict[str, Connection] = {}
        messages = [{"role": "system", "content": system}]
        previous = None
        async with places:
            for _ in range(told["turns"]):
                question = draw.randbytes(told["turn_bytes"] // 2).hex()
                messages.append({"role": "user", "content": f"{question} {told['control']}"})
                url = draw.choice(told["urls"])
                if url not in connections or not connections[url].open:
                    connections[url] = await connect(url)
                answer = await connections[url].ask(chat(messages, False))
                counted["failed"] += answer.status != 200
                served[answer.engine] += 1
                if previous is not None:
                    counted["follow_ups"] += 1
                    counted["stuck"] += answer.engine == previous
                previous = answer.engine
                messages.append({"role": "assistant", "content": "tok " * 50})
                await asyncio.sleep(draw.uniform(0, 0.05))
        for each in connections.values():
            each.close()

    await asyncio.gather(*(session() for _ in range(told["sessions"])))
    return {**counted, "served": dict(served)}


async def unique(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """`requests` prompts go to `url` over `concurrency` connections; `different` of them are, from the number `first` on,
    and then they come again. Returns `failed`.
    """
    crowd = Crowd([told["url"]], Numbered(told["bytes"], told["first"], told["different"]))
    await crowd.grow(told["concurrency"])
    answers = await crowd.run(float("inf"), told["requests"])
    crowd.close()
    return {"requests": len(answers), "failed": sum(each.status != 200 for each in answers)}


class Numbered(Sequence[bytes]):
    """So many different requests from a number on, all of one size."""

    def __init__(self, size: int, first: int, count: int) -> None:
        self._text = "x" * size
        self._first = first
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        return chat([{"role": "user", "content": f"{self._first + number} {self._text}"}], False)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(obey({"load": load, "converse": converse, "unique": unique}))
