"""An expired lease is never alive again, and a lease ends late, never early.

Except those of all workers at the moment in which the store is told that its database had a former life (former_life.py).
"""

from typing import Any

from tensorcast_connector.config import MEMBER_TTL_S
from tensorcast_connector.wire.store_messages import KeepAlive, LeaseGranted, RegisterWorker, RevokeLease
from tests.sim.invariants.base import Invariant
from tests.sim.invariants.former_life import of_workers, tells_of_former_life

ROUNDING_S = 1e-6


class LeasesEnd(Invariant):
    """See the module. It keeps its own account of deadlines, by the store's clock."""

    def __init__(self) -> None:
        self._deadline: dict[int, float] = {}
        self._ended: set[int] = set()
        self._alive: frozenset[int] = frozenset()
        self._last: Any = None

    def acknowledged(self, world: Any, store: Any, message: Any, reply: Any) -> None:
        """Compares what the store has with the account."""
        now = store.clock()
        if isinstance(message, RegisterWorker) and isinstance(reply, LeaseGranted):
            self._deadline[reply.lease_id] = now + MEMBER_TTL_S
        elif isinstance(message, KeepAlive) and type(reply).__name__ == "Alive":
            deadline = self._deadline.get(message.lease_id, now)
            world.require(now < deadline + ROUNDING_S, f"lease {message.lease_id} renewed {now - deadline} s too late")
            self._deadline[message.lease_id] = now + MEMBER_TTL_S
        elif isinstance(message, RevokeLease):
            self._deadline.pop(message.lease_id, None)
        alive = store.snapshot.leases
        if alive is self._alive:
            return
        last, self._last = self._last, store.snapshot
        if last is None or store.snapshot.incarnation != last.incarnation:  # the leases of another database go with it
            last, self._alive = store.snapshot, frozenset()
        excused = of_workers(last) if tells_of_former_life(store, last, message) else frozenset()
        self._ended |= excused
        for lease_id in self._alive - alive - excused:
            deadline = self._deadline.get(lease_id, now)
            world.require(now > deadline - ROUNDING_S, f"lease {lease_id} ended {deadline - now} s too early")
            self._ended.add(lease_id)
        world.require(not alive & self._ended, f"leases {alive & self._ended} had ended and are alive")
        self._alive = alive

    def recovered(self, world: Any, store: Any, vouched: Any, done: Any, found: Any) -> None:
        """Every lease has its full time again."""
        self._deadline = dict.fromkeys(found.leases, store.clock() + MEMBER_TTL_S)
        self._alive, self._last = found.leases, found
