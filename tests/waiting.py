"""Waiting for a condition instead of for a time."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Until `condition()` is true; other tasks run meanwhile."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the conditions are plain values, not events
            await asyncio.sleep(0.001)


def until_blocking(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """The same for tests without an event loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)
