"""The one thread that a SQLite database is used on: it does what it is given, in order.

Not an executor of the standard library: each of its results takes several locks and two wake-ups of the event loop, which is as
long as a small transaction.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    done: Callable[[], None]
    future: "asyncio.Future[Any]"
    loop: asyncio.AbstractEventLoop

    def hand_over(self, result: Any, error: BaseException | None) -> None:
        """On the event loop, also if nobody waits for the result any more."""
        if not self.future.done():
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)
        self.done()


class SqliteThread:
    """See the module. It ends with the process, if it is not shut down before."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-sqlite", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[], T], done: Callable[[], None]) -> T:
        """The result of `work`; what is cancelled before it has begun is not done. `done` follows on the event loop."""
        loop = asyncio.get_running_loop()
        job = _Job(work, done, loop.create_future(), loop)
        self._jobs.put(job)
        result: T = await job.future
        return result

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.future.cancelled():
                continue
            result: Any = None
            error: BaseException | None = None
            try:
                result = job.work()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
                job.loop.call_soon_threadsafe(job.hand_over, result, error)
            del job, result, error  # what they hold is not kept until the next one comes

    def shutdown(self) -> None:
        """Waits until everything that was given is done."""
        self._jobs.put(None)
        self._thread.join()
