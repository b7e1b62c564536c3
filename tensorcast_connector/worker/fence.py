"""What makes a write that was not answered impossible, so that it cannot be done after its outcome was told.

A store that stood still, or a member of etcd, hands on what it had taken, seconds later. Every record that a worker writes for
its callers therefore comes with a key under a lease of this worker, which is never renewed. When an answer was lost the lease
is ended: what still names it fails as a whole, for ever, in any life of the database (TensorCast, section 4.2: leases are
never revived). Nothing else is written before that is certain, so what was written later stays.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from tensorcast_connector.config import (
    COMMIT_FOLLOW_INTERVAL_S,
    FENCE_LEASE_AHEAD_S,
    FENCE_LEASE_S,
    FENCE_LEASE_USED_S,
    STORE_TIMEOUT_S,
)
from tensorcast_connector.core.cluster import fence_key
from tensorcast_connector.errors import TensorcastError, Unavailable
from tensorcast_connector.types import WorkerId

logger = logging.getLogger(__name__)
Put = tuple[str, bytes, int]


class Fence:
    """See the module. A worker that dies leaves writes that can be done for FENCE_LEASE_S more, and not later.

    Args:
        me: this worker.
        grant: gets a lease of so many seconds from the store.
        revoke: ends one there; that it has ended already is fine.
        now: this worker's clock in seconds.
    """

    def __init__(
        self, me: WorkerId, grant: Callable[[int], Awaitable[int]], revoke: Callable[[int], Awaitable[None]],
        now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._key = fence_key(me)
        self._grant = grant
        self._revoke = revoke
        self._now = now
        self._lease_id = 0
        self._until = 0.0
        self._granting = asyncio.Lock()
        self._preparing: set[asyncio.Task[None]] = set()
        self._ending: dict[int, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<Fence {self._lease_id}, {len(self._ending)} to be ended>"

    async def put(self) -> Put:
        """What the next write is to come with.

        Raises:
            Unavailable: an earlier write can still be done, since the store does not answer.
        """
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await self.settled()
        except TimeoutError:
            raise Unavailable("the store does not answer, and an earlier write may still be done there") from None
        async with self._granting:
            if not self._lease_id or self._now() >= self._until:
                await self._take()
            return self._key, b"", self._lease_id

    def prepare(self) -> None:
        """A write is going to come: the lease for it is got meanwhile, if the one that there is will soon be too old."""
        if not self._preparing and not self._ending and self._now() >= self._until - FENCE_LEASE_AHEAD_S:
            task = asyncio.get_running_loop().create_task(self._renew())
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)

    async def _renew(self) -> None:
        async with self._granting:
            if self._now() >= self._until - FENCE_LEASE_AHEAD_S:  # nobody who writes has got one meanwhile
                with contextlib.suppress(TensorcastError):  # whoever writes asks again, and is told
                    await self._take()

    async def _take(self) -> None:
        began = self._now()
        self._lease_id = await self._grant(FENCE_LEASE_S)
        self._until = began + FENCE_LEASE_USED_S

    def ended(self, lease_id: int) -> None:
        """The store says that this lease is none (any more)."""
        if self._lease_id == lease_id:
            self._lease_id = 0

    def unsure(self, lease_id: int) -> None:
        """Whether a write with this lease was done is not known: it is done by now, or never will be."""
        self.ended(lease_id)
        if lease_id not in self._ending:
            self._ending[lease_id] = asyncio.get_running_loop().create_task(self._end(lease_id))

    async def settled(self) -> None:
        """Until no write can be done any more whose outcome is not known."""
        while self._ending:
            await asyncio.wait(list(self._ending.values()))

    async def _end(self, lease_id: int) -> None:
        while True:
            try:
                await self._revoke(lease_id)
            except TensorcastError as error:
                logger.debug("lease %d of writes is not ended yet: %s", lease_id, error)
                await asyncio.sleep(COMMIT_FOLLOW_INTERVAL_S)
            else:
                del self._ending[lease_id]
                return

    async def close(self) -> None:
        """Ends nothing any more: leases run out."""
        tasks = [*self._ending.values(), *self._preparing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._ending.clear()
