"""An event loop in a thread of its own, for callers without one."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from tensorcast_connector.client.ownership import check_process
from tensorcast_connector.errors import InvalidArgument

T = TypeVar("T")


class CallerLoop:
    """See the module."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="tensorcast-caller", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result; Ctrl-C ends it.

        Raises:
            InvalidArgument: the session is closed, or was closed meanwhile by another thread, or is of another process.
        """
        try:
            check_process(self._process)  # the thread that would do it is there only
        except InvalidArgument:
            work.close()
            raise
        with self._lock:
            if self._closed:
                work.close()
                raise InvalidArgument("the session is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise InvalidArgument("the session was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def call(self, make: Callable[[], T]) -> T:
        """What `make` returns on the loop's thread."""

        async def work() -> T:
            return make()

        return self.run(work())

    def close(self) -> None:
        """Stops it; whoever waits in another thread waits no longer."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        ended.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()
