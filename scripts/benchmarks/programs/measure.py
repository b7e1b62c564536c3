"""What every measuring program has in common, so that ours and the peers are measured by the same lines.

A program makes one connection to a server and then does what it is told: one JSON object a line on its standard input,
`{"do": NAME, ...}`, answered by one JSON object a line on its standard output. It ends when its input does. Standard
library only, since peers run it in their own environments.
"""

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

KEY_BYTES = 48  # a keyspace of 16 bytes and a block hash of 32
PAGES_PER_LOOKUP = 512
MISSING_PER_LOOKUP = 64  # of these pages nobody has any
LOOKUPS = 16  # that different lookups are made in turn, so that not everything is in the processor's cache
PAGES_PER_REPORT = 4096  # as many as a worker puts into one
HOLDERS = 3  # so many report pages
CONCURRENCY = 8  # requests under way when a server is to be saturated
NANOSECONDS = 1e9

Command = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
Call = Callable[[], Awaitable[object]]


def keys(count: int) -> list[bytes]:
    """So many keys that nobody has seen before."""
    data = os.urandom(count * KEY_BYTES)
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]


def cpu_s(pid: int) -> float:
    """CPU seconds that all threads of a process have used, to the nanosecond.

    Raises:
        OSError: there is no such process, or this kernel does not count.
    """
    used = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            used += int((task / "schedstat").read_text().split()[0])
    if not used:
        raise OSError("this kernel does not count the CPU time of threads (schedstat)")
    return used / NANOSECONDS


def resident_bytes(pid: int) -> int:
    """How much memory a process has in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def write_ready(path: str, port: int) -> None:
    """Tells who started a server that it listens, and where; the file appears as a whole."""
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps({"port": port, "pid": os.getpid()}))
    partial.rename(path)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of all values are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def latencies(call: Call, count: int) -> Mapping[str, float]:
    """p50 and p99, in microseconds, of `count` calls one after the other; as many again as a tenth come first, uncounted."""
    for _ in range(count // 10):
        await call()
    taken_us: list[float] = []
    clock = time.perf_counter
    for _ in range(count):
        before = clock()
        await call()
        taken_us.append((clock() - before) * 1e6)
    return {"p50": percentile(taken_us, 0.5), "p99": percentile(taken_us, 0.99)}


async def saturate(calls: Sequence[Call], pid: int) -> float:
    """Makes all calls, CONCURRENCY of them at a time; the CPU seconds that the server `pid` used meanwhile."""
    left = iter(calls)

    async def some() -> None:
        for call in left:
            await call()

    before = cpu_s(pid)
    await asyncio.gather(*(some() for _ in range(CONCURRENCY)))
    return cpu_s(pid) - before


def per_cpu_s(count: int, used_s: float) -> Mapping[str, float]:
    """The answer to what counts things per CPU second.

    Raises:
        ValueError: it was over before the kernel counted anything.
    """
    if not used_s:
        raise ValueError(f"{count} pages took no CPU time that can be counted: measure more of them")
    return {"per_cpu_s": count / used_s}


class Index(Protocol):
    """A client's side of what is compared: an index from page keys to who holds the page."""

    async def find(self, keys: list[bytes]) -> object:
        """One batch lookup, with its answer decoded as far as the client's library does it."""

    async def found(self, keys: list[bytes]) -> int:
        """How many of the keys somebody holds: shows that the lookups really find what was reported."""

    async def report(self, holder: int, added: list[bytes], removed: list[bytes]) -> None:
        """One holder (0 to HOLDERS - 1) has pages, and has others no longer."""


class Measured:
    """What can be asked of a measuring program: the same for each index. The commands are the public methods."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._pages: list[bytes] = []
        self._lookups: Iterator[list[bytes]] = iter(())

    async def fill(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        """Puts `pages` into the index, which stay there, and chooses the lookups among them.

        A lookup is what a follow-up asks for: pages that were saved one after the other, and then some that nobody has.
        Each page is reported by one of so many `holders`, and if there are several, every eighth by one more. Returns
        `bytes_per_page`: how much the resident memory of the server `pid` has grown by each.

        Raises:
            ValueError: lookups do not find what was reported.
        """
        before = resident_bytes(told["pid"])
        holders = told["holders"]
        self._pages = []
        for number, first in enumerate(range(0, told["pages"], PAGES_PER_REPORT)):
            new = keys(min(PAGES_PER_REPORT, told["pages"] - first))
            await self._index.report(number % holders, new, [])
            if holders > 1:
                await self._index.report((number + 1) % holders, new[::8], [])
            self._pages += new
        grown = resident_bytes(told["pid"]) - before
        known = PAGES_PER_LOOKUP - MISSING_PER_LOOKUP
        chance = random.Random(1)
        lookups = []
        for _ in range(LOOKUPS):
            first = chance.randrange(len(self._pages) - known)
            lookups.append(self._pages[first : first + known] + keys(MISSING_PER_LOOKUP))
            if (count := await self._index.found(lookups[-1])) != known:
                raise ValueError(f"a lookup found {count} of {known} pages")
        self._lookups = cycle(lookups)
        return {"bytes_per_page": grown / len(self._pages)}

    async def share(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        """`holder` has all pages too; `bytes_per_page` is what that adds to each."""
        before = resident_bytes(told["pid"])
        for part in parts(self._pages, PAGES_PER_REPORT):
            await self._index.report(told["holder"], part, [])
        return {"bytes_per_page": (resident_bytes(told["pid"]) - before) / len(self._pages)}

    def next_lookup(self) -> list[bytes]:
        """The keys of the next lookup."""
        return next(self._lookups)

    async def latency(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        """`p50` and `p99` of `calls` lookups in microseconds."""
        return await latencies(lambda: self._index.find(self.next_lookup()), told["calls"])

    async def lookups(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        """`per_cpu_s`: pages looked up per CPU second of the server `pid`, while it is saturated by `calls` lookups."""
        used_s = await saturate([lambda: self._index.find(self.next_lookup())] * told["calls"], told["pid"])
        return per_cpu_s(told["calls"] * PAGES_PER_LOOKUP, used_s)

    async def registrations(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        """`per_cpu_s`: new pages registered per CPU second of the server `pid`; they are removed again, uncounted."""
        new = [keys(PAGES_PER_REPORT) for _ in range(told["reports"])]
        used_s = await saturate([self._reporting(part, []) for part in new], told["pid"])
        await saturate([self._reporting([], part) for part in new], told["pid"])
        return per_cpu_s(told["reports"] * PAGES_PER_REPORT, used_s)

    async def churn(self, told: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same, where each report also removes as many pages of an earlier one; the removals are not counted."""
        half = PAGES_PER_REPORT // 2
        new = [keys(half) for _ in range(told["reports"] + CONCURRENCY)]
        old, now = new[:CONCURRENCY], new[CONCURRENCY:]  # what is removed was registered well before
        await saturate([self._reporting(part, []) for part in old], told["pid"])
        both = [self._reporting(part, gone) for part, gone in zip(now, new, strict=False)]
        used_s = await saturate(both, told["pid"])
        await saturate([self._reporting([], part) for part in new[-CONCURRENCY:]], told["pid"])
        return per_cpu_s(told["reports"] * half, used_s)

    def _reporting(self, added: list[bytes], removed: list[bytes]) -> Call:
        return lambda: self._index.report(0, added, removed)

    def commands(self) -> Mapping[str, Command]:
        """For `obey`."""
        return {
            each.__name__: each
            for each in (self.fill, self.share, self.latency, self.lookups, self.registrations, self.churn)
        }


def parts(items: list[bytes], size: int) -> Iterator[list[bytes]]:
    """Pieces of at most `size`."""
    for at in range(0, len(items), size):
        yield items[at : at + size]


async def obey(commands: Mapping[str, Command]) -> None:
    """Says that it is ready, and does what it is told until the input ends."""
    loop = asyncio.get_running_loop()
    print("{}", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        told = json.loads(line)
        print(json.dumps(await commands[told["do"]](told)), flush=True)
