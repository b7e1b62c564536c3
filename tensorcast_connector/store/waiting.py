"""Who waits for changes of a database in this process, and which changes wake whom."""

import asyncio


class Waiting:
    """Changes by the first part of their keys, up to a `/`, of which there are few.

    Args:
        revision: of the database now; what changed before it is not known.
    """

    def __init__(self, revision: int) -> None:
        self._floor = revision
        self._last = revision
        self._last_of: dict[str, int] = {}  # by the first part: the revision of the last change
        self._touched: set[str] = set()  # since the last revision, if that is not rolled back
        self._waiters: dict[asyncio.Future[None], tuple[str, int]] = {}

    def touch(self, key: str) -> None:
        """A transaction that is under way changes a key."""
        self._touched.add(key.partition("/")[0])

    def reached(self, revision: int) -> None:
        """What was touched has been written, the last of it at `revision`."""
        self._last = revision
        self._last_of.update(dict.fromkeys(self._touched, revision))
        self._touched.clear()

    def everything(self, revision: int) -> None:
        """All keys are others now."""
        self._floor = revision
        self._last_of.clear()

    def changed(self, prefix: str, after_revision: int) -> bool:
        """Whether a key under `prefix` may have changed after that revision."""
        first, part, _ = prefix.partition("/")
        return (self._last_of.get(first, self._floor) if part else self._last) > after_revision

    def wake(self, closed: bool) -> None:
        """Those who have something to see; all if it is `closed`. On the event loop."""
        for waiter, wanted in self._waiters.items():
            if not waiter.done() and (closed or self.changed(*wanted)):
                waiter.set_result(None)

    async def wait(self, prefix: str, after_revision: int, timeout_s: float) -> None:
        """Until `wake` has something to show, or `timeout_s` is over."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = prefix, after_revision
        try:
            await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            del self._waiters[waiter]
