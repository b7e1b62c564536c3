"""Fair shares of an event loop: connections that have more to be served than one share take turns, one in each turn of the loop.

Whatever many or large clients ask for at once, timers, heartbeats and the requests of everybody else come in between.
"""

import asyncio
import time
from collections import deque
from weakref import WeakKeyDictionary

from tensorcast_connector.config import SHARE_REQUESTS, SHARE_S


class Share:
    """What may be done in one go after a first request; ask `left` before each further one."""

    __slots__ = ("_requests", "_until")

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._until = 0.0  # not yet begun

    def left(self) -> bool:
        """Whether one more may be served, which is counted."""
        self._requests -= 1
        if self._requests < 0:
            return False
        now = time.monotonic()
        if not self._until:
            self._until = now + SHARE_S
        return now < self._until


class Turns:
    """Who waits for a turn of one event loop, in order."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    def __repr__(self) -> str:
        return f"<Turns: {len(self._waiting)} wait>"

    def share(self) -> Share:
        """For what has just arrived: nothing more while others wait for their turn."""
        return Share(0 if self._waiting else SHARE_REQUESTS - 1)

    async def turn(self) -> Share:
        """Waits for its turn, which comes when the loop has been round once for everybody who waits already."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._next)
        await mine
        return Share(SHARE_REQUESTS - 1)

    def _next(self) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # else it was cancelled
                first.set_result(None)
                break
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._next)


_all: "WeakKeyDictionary[asyncio.AbstractEventLoop, Turns]" = WeakKeyDictionary()


def turns() -> Turns:
    """Those of the running loop."""
    loop = asyncio.get_running_loop()
    found = _all.get(loop)
    if found is None:
        found = _all[loop] = Turns()
    return found
