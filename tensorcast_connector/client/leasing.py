"""The leases of a session, under which it owns what it puts (TensorCast, section 3.1: Caller-Leased)."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tensorcast_connector.client.link import GatewayLink
from tensorcast_connector.client.ownership import Leased
from tensorcast_connector.errors import InvalidArgument, NotFound, TensorcastError, Unavailable
from tensorcast_connector.wire.caller_messages import EndLease, LeaseOpened, OpenLease, RenewLease
from tensorcast_connector.wire.messages import Ok

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Granted(Leased):
    """The same under a lease of its own."""

    lease_id: int


class Leases:
    """Opened when they are needed, and renewed until the session ends."""

    def __init__(self, link: GatewayLink) -> None:
        self._link = link
        self._shared: dict[int, int] = {}  # by ttl
        self._renewing: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()

    async def of(self, ownership: Leased | None) -> int:
        """The lease for what is owned like that; 0 for the system."""
        if ownership is None:
            return 0
        if isinstance(ownership, Granted):
            return ownership.lease_id
        if not isinstance(ownership, Leased):
            raise InvalidArgument(
                f"ownership={ownership!r:.64}: leased(ttl_s), or None for what stays until it is deleted"
            )
        ttl_s = ownership.ttl_s
        async with self._opening:  # puts at once share it
            if ttl_s not in self._shared:
                self._shared[ttl_s] = (await self._link.call(OpenLease(ttl_s), LeaseOpened)).lease_id
                self._begin(ttl_s, self._shared[ttl_s])
            return self._shared[ttl_s]

    async def instead(self, ownership: Leased | None, lease_id: int) -> int:
        """The lease for what is owned like that, if that one has ended while nobody renewed it; the same if it has not."""
        if ownership is None or isinstance(ownership, Granted):
            return lease_id
        try:
            await self._link.call(RenewLease(lease_id), Ok)
            return lease_id
        except NotFound:
            if self._shared.get(ownership.ttl_s) == lease_id:
                del self._shared[ownership.ttl_s]
        return await self.of(ownership)

    @contextlib.asynccontextmanager
    async def own(self, ttl_s: int) -> AsyncIterator[Granted]:
        """A lease that ends with the block, and with it what belongs to it alone."""
        lease_id = (await self._link.call(OpenLease(ttl_s), LeaseOpened)).lease_id
        renewing = self._begin(ttl_s, lease_id)
        try:
            yield Granted(ttl_s, lease_id)
        finally:
            renewing.cancel()
            with contextlib.suppress(TensorcastError):  # it ends by itself
                await self._link.call(EndLease(lease_id), Ok)

    def _begin(self, ttl_s: int, lease_id: int) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(self._renew(ttl_s, lease_id))
        self._renewing.add(task)
        task.add_done_callback(self._renewing.discard)
        return task

    async def _renew(self, ttl_s: int, lease_id: int) -> None:
        while True:
            await asyncio.sleep(ttl_s / 3)
            try:
                await self._link.call(RenewLease(lease_id), Ok)
            except Unavailable as error:
                logger.debug("lease %d: %s", lease_id, error)
            except TensorcastError as error:
                logger.warning("what was put with leased(%d) is gone: %s", ttl_s, error)
                if self._shared.get(ttl_s) == lease_id:
                    del self._shared[ttl_s]
                return

    def forsake(self) -> None:
        """Renews nothing any more, as if this process had died."""
        for task in self._renewing:
            task.cancel()

    async def close(self) -> None:
        """Ends all, and what belongs to them."""
        self.forsake()
        await asyncio.gather(*self._renewing, return_exceptions=True)
        for lease_id in self._shared.values():
            with contextlib.suppress(TensorcastError):
                await self._link.call(EndLease(lease_id), Ok)
