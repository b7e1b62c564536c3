"""For how long pages are kept that hold what users have said, and whose they are."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from tensorcast_connector.config import TENANT
from tensorcast_connector.worker.pages import Pages

logger = logging.getLogger(__name__)
CHECKS_PER_AGE = 20  # a page is gone at most so much of the age late
CHECK_INTERVAL_MAX_S = 60.0


class Retention:
    """See the module.

    Args:
        age_max_s: of a page, from when it was first saved, at any worker that has a limit as well; 0: no limit.
        now: this worker's clock in seconds.
    """

    def __init__(self, pages: Pages, age_max_s: float, now: Callable[[], float]) -> None:
        self._pages = pages
        self._age_max_s = age_max_s
        self._now = now
        self._marks: deque[tuple[float, int]] = deque()  # when, and how many pages there had ever been by then
        self._keyspaces: dict[str, set[bytes]] = {}  # of tenants, as their engines have named them
        self._carried: dict[
            bytes, tuple[float, int]
        ] = {}  # of pages from elsewhere: when they were first saved, and `born`
        self._task: asyncio.Task[None] | None = None
        if age_max_s:
            pages.ages = self

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
        self._marks.append((now, self._pages.segments.born))
        born = -1
        while self._marks and self._marks[0][0] <= now - self._age_max_s:
            born = self._marks.popleft()[1]
        if born >= 0:
            self._marks.appendleft((now - self._age_max_s, born))  # for pages that are in use now
            self._pages.evict_older(born)
        for key, (saved_at, which) in list(self._carried.items()):
            here = self._pages.segments.born_of(key) == which
            if not here or (saved_at <= now - self._age_max_s and self._pages.evict_page(key)):
                del self._carried[key]

    def age_of(self, key: bytes) -> float:
        """See worker/pages.Ages. What is not known exactly makes it older, by one interval at most."""
        now, born = self._now(), self._pages.segments.born_of(key)
        saved_at, which = self._carried.get(key, (0.0, 0))
        if which == born:
            return max(0.0, now - saved_at)
        before = 0.0  # the last time that this page was not yet there
        for at, count in self._marks:
            if count >= born:
                return max(0.0, now - before) if before else self._age_max_s
            before = at
        return max(0.0, now - before) if before else 0.0

    def arrived(self, key: bytes, age_s: float) -> None:
        """See worker/pages.Ages."""
        self._carried[key] = self._now() - age_s, self._pages.segments.born_of(key)

    def names(self, tenant: str, keyspaces: list[bytes]) -> None:
        """An engine of that tenant works with these."""
        known = self._keyspaces.setdefault(tenant, set())
        known.update(keyspaces)

    def forget(self, tenant: str) -> tuple[int, int]:
        """Evicts the pages of a tenant; how many, and how many stay because they are in use.

        Engines that name no tenant are of the default one.
        """
        names = ("", TENANT) if tenant in ("", TENANT) else (tenant,)
        return self._pages.evict_of(set().union(*(self._keyspaces.get(each, ()) for each in names)))

    def nobodys(self) -> int:
        """How many pages are here of which no engine has said whose they are."""
        named = [spaces for tenant, spaces in self._keyspaces.items() if tenant]
        return self._pages.outside(set().union(*named))
