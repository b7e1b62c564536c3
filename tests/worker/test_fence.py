"""The lease that a worker's writes for callers come with: got ahead of them, taken anew in time, and never renewed."""

import asyncio

import pytest

from tensorcast_connector.config import FENCE_LEASE_AHEAD_S, FENCE_LEASE_S, FENCE_LEASE_USED_S
from tensorcast_connector.errors import Unavailable
from tensorcast_connector.testing.clock import SettableClock
from tensorcast_connector.types import WorkerId
from tensorcast_connector.worker.fence import Fence


class Store:
    """Grants leases, or does not answer."""

    def __init__(self) -> None:
        self.granted = 0
        self.away = False

    async def grant(self, ttl_s: int) -> int:
        await asyncio.sleep(0)
        if self.away:
            raise Unavailable("away")
        assert ttl_s == FENCE_LEASE_S
        self.granted += 1
        return self.granted

    async def revoke(self, lease_id: int) -> None:
        assert 0 < lease_id <= self.granted


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_write_that_was_told_of_finds_its_lease_there() -> None:
    store, clock = Store(), SettableClock()
    fence = Fence(WorkerId("w"), store.grant, store.revoke, clock)
    fence.prepare()
    fence.prepare()
    await settle()
    assert store.granted == 1, "one lease for all who are going to write"
    assert (await fence.put())[2] == 1
    clock.advance(FENCE_LEASE_USED_S - FENCE_LEASE_AHEAD_S)
    assert (await fence.put())[2] == 1, "it is still good"
    fence.prepare()
    await settle()
    clock.advance(FENCE_LEASE_AHEAD_S)
    assert (await fence.put())[2] == 2 and store.granted == 2, (
        "and would not have been while something large was copied"
    )
    fence.prepare()
    await settle()
    assert store.granted == 2
    await fence.close()


async def test_a_store_that_is_away_is_told_to_who_writes_and_not_to_who_prepares() -> None:
    store, clock = Store(), SettableClock()
    fence = Fence(WorkerId("w"), store.grant, store.revoke, clock)
    store.away = True
    fence.prepare()
    await settle()
    with pytest.raises(Unavailable):
        await fence.put()
    store.away = False
    assert (await fence.put())[2] == 1
    await fence.close()


async def test_a_lease_that_was_got_ahead_is_not_used_while_an_earlier_write_may_still_be_done() -> None:
    store, clock = Store(), SettableClock()
    fence = Fence(WorkerId("w"), store.grant, store.revoke, clock)
    assert (await fence.put())[2] == 1
    clock.advance(FENCE_LEASE_USED_S)
    fence.unsure(1)
    fence.prepare()
    assert store.granted == 1
    await fence.settled()
    assert (await fence.put())[2] == 2
    await fence.close()
