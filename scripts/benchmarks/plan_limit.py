"""What a plan of one step cannot do without, and nothing else: the limit beside which `scripts/bench service` shows it.

Three exchanges (caller and gateway; gateway and store before the step and after it) as bare frames over loopback TCP, and two
commits of SQLite, each of one record, on the disk that the store of the benchmark is on.
"""

import asyncio
import sqlite3
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from demo.processes import Supervisor, read_ready, ready_file

from benchmarks.driver import python_path
from benchmarks.programs.echo import Client

FRAME_BYTES = 400  # of a plan of one step, of its record, of what is answered
EXCHANGES, COMMITS = 3, 2
MS = 1e3


class PlanLimit:
    """See the module; made by `plan_limit`."""

    def __init__(self, client: Client, database: sqlite3.Connection) -> None:
        self._client = client
        self._database = database
        self._commits = 0

    async def measure(self, calls: int) -> float:
        """Milliseconds, the median of so many."""
        seconds = []
        for _ in range(calls):
            before = time.perf_counter()
            await self._once()
            seconds.append(time.perf_counter() - before)
        return statistics.median(seconds) * MS

    async def _once(self) -> None:
        for _ in range(EXCHANGES):
            await self._client.call(bytes(FRAME_BYTES))
        for _ in range(COMMITS):
            self._commits += 1
            self._database.execute(
                "INSERT OR REPLACE INTO record VALUES (?, ?)", (self._commits // COMMITS, bytes(FRAME_BYTES))
            )


@asynccontextmanager
async def plan_limit(supervisor: Supervisor) -> AsyncIterator[PlanLimit]:
    """With an echo server of its own, and a database in the supervisor's folder."""
    ready = supervisor.folder / "echo.ready.json"
    command = [sys.executable, "-m", "benchmarks.programs.echo", "serve", str(ready), str(FRAME_BYTES)]
    running = supervisor.start("echo", command, env=python_path())
    await asyncio.to_thread(running.wait, ready_file(ready), 60.0)
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_connection(Client, "127.0.0.1", int(read_ready(ready)["port"]))
    try:
        with closing(_database(supervisor.folder / "limit.db")) as database:
            yield PlanLimit(client, database)
    finally:
        transport.close()


def _database(path: Path) -> sqlite3.Connection:
    """As durable as the store's: a write-ahead log that is on the disk when a commit returns."""
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE record (key INTEGER PRIMARY KEY, value BLOB)")
    return database
