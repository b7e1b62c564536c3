"""No two workers would take reports for one shard at the same instant, while all clocks keep within the drift bound.

Except one of a life of the database that was lost, whose lease runs out within its time, and one whose grant the next life made
before anybody had asked it for what had changed since the former: a lost database looks like a new one (store/incarnation.py).
"""

from typing import Any

from tensorcast_connector.core.cluster import YOUNG
from tensorcast_connector.types import Token
from tests.sim.invariants.base import Invariant


class OneHome(Invariant):
    """See the module. It does not wait for a report: what counts is whether a worker would take one."""

    def __init__(self) -> None:
        self._unaware: set[tuple[int, Token]] = set()  # granted by a store that took its database for new
        self._seen: Any = None

    def acknowledged(self, world: Any, store: Any, message: Any, reply: Any) -> None:
        """Notes what is granted while nobody knows of a former life."""
        self._note(store.snapshot)

    def recovered(self, world: Any, store: Any, vouched: Any, done: Any, found: Any) -> None:
        """Also what was granted just before a crash."""
        self._note(found)

    def _note(self, snapshot: Any) -> None:
        if snapshot is not self._seen and YOUNG in snapshot.rows:
            self._unaware |= {(shard, token) for shard, (token, _) in snapshot.shards().items()}
        self._seen = snapshot

    def after_event(self, world: Any, process: Any) -> None:
        """Also of workers that are paused: they may go on at any moment."""
        metadata = getattr(process, "metadata", None)
        if metadata is None or not metadata.leases.held or world.now < world.exempt_until:
            return
        mine = metadata.leases.held
        if not metadata.leases.may_write(process.clock()):
            return
        for other in world.processes.values():
            leases = other.metadata.leases if other is not process and hasattr(other, "metadata") else None
            if leases is not None and leases.held and not mine.keys().isdisjoint(leases.held):
                both = [each for each in sorted(mine) if self._counts(world, each, mine[each], leases.held.get(each))]
                world.require(
                    not both or not leases.may_write(other.clock()),
                    f"{process.name} and {other.name} are both the home of {both}",
                )

    def _counts(self, world: Any, shard: int, mine: Token, others: Token | None) -> bool:
        """Whether the two must not be there together."""
        if others is None:
            return False
        newer = max(mine, others)
        excused = mine.incarnation != others.incarnation and (shard, newer) in self._unaware
        return not (excused and world.now < world.former_until)
