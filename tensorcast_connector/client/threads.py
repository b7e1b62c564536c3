"""Work on a thread for a coroutine that may be cancelled meanwhile."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(
    work: Callable[[], T], *, stop: Callable[[], object] = lambda: None, drop: Callable[[T], Any] = lambda _: None
) -> T:
    """The result of `work`.

    A thread is not cancelled: whoever is cancelled waits until it has ended, so what it works on may be closed or given back
    then.

    Args:
        stop: asks the thread to end soon; called if nobody wants its result any more.
        drop: gets that result, to let go of it.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        stop()
        while not working.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([working])
        if not working.cancelled() and working.exception() is None:
            drop(working.result())
        raise
