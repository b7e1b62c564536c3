"""For how long pages are kept that hold what users have said, and whose they are."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from tensorcast_connector.worker.pages import Pages

logger = logging.getLogger(__name__)
CHECKS_PER_AGE = 20  # a page is gone at most so much of the age late
CHECK_INTERVAL_MAX_S = 60.0


class Retention:
    """See the module.

    Args:
        age_max_s: of a page, from when it was saved or fetched here; 0: no limit.
        now: this worker's clock in seconds.
    """

    def __init__(self, pages: Pages, age_max_s: float, now: Callable[[], float]) -> None:
        self._pages = pages
        self._age_max_s = age_max_s
        self._now = now
        self._marks: deque[tuple[float, int]] = deque()  # when, and how many pages there had ever been by then
        self._keyspaces: dict[str, set[bytes]] = {}  # of tenants, as their engines have named them
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Looks at an interval."""
        if self._age_max_s:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stops."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(min(self._age_max_s / CHECKS_PER_AGE, CHECK_INTERVAL_MAX_S))
            self.look()

    def look(self) -> None:
        """Evicts what is too old; a page that is in use goes the next time."""
        now = self._now()
        self._marks.append((now, self._pages.born))
        born = -1
        while self._marks and self._marks[0][0] <= now - self._age_max_s:
            born = self._marks.popleft()[1]
        if born >= 0:
            self._marks.appendleft((now - self._age_max_s, born))  # for pages that are in use now
            self._pages.evict_older(born)

    def names(self, tenant: str, keyspaces: list[bytes]) -> None:
        """An engine of that tenant works with these."""
        known = self._keyspaces.setdefault(tenant, set())
        known.update(keyspaces)

    def forget(self, tenant: str) -> tuple[int, int]:
        """Evicts the pages of a tenant; how many, and how many stay because they are in use."""
        return self._pages.evict_of(self._keyspaces.get(tenant, frozenset()))
