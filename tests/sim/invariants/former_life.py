"""Once a store that took its database for new is told of a former life, nothing that was granted counts any more.

All workers have to register anew, so that a home that does not hear of it by its watch cannot renew its lease either; and
nothing is granted while anybody may believe in what was granted before.
"""

from typing import Any

from tensorcast_connector.config import MEMBER_TTL_S
from tensorcast_connector.core.cluster import RESTORED, SHARDS, WORKERS, YOUNG
from tensorcast_connector.wire.messages import Message
from tensorcast_connector.wire.store_messages import Watch
from tests.sim.invariants.base import Invariant


def tells_of_former_life(store: Any, before: Any, message: Message) -> bool:
    """Whether `message` comes from somebody who knows an earlier life, and the store has taken its database for new till now."""
    young = YOUNG in before.rows and store.clock() < store.started_at + MEMBER_TTL_S
    return isinstance(message, Watch) and 0 < message.incarnation < before.incarnation and young


def of_workers(snapshot: Any) -> frozenset[int]:
    """The leases on which workers and grants hang."""
    return frozenset(row[2] for key, row in snapshot.rows.items() if key.startswith((WORKERS, SHARDS)))


class FormerLife(Invariant):
    """See the module."""

    def __init__(self) -> None:
        self._last: Any = None

    def acknowledged(self, world: Any, store: Any, message: Any, reply: Any) -> None:
        """Compares with the state before."""
        last, now = self._last, store.snapshot
        self._last = now
        if RESTORED in now.rows:
            world.require(not now.shards(), f"shards {sorted(now.shards())} are granted while nobody is to be a home")
            lease_id = now.rows[RESTORED][2]
            world.require(lease_id in now.leases, "that nobody is to be a home has no end")
        if last is None or last.incarnation != now.incarnation or not tells_of_former_life(store, last, message):
            return
        world.counts["told of a former life"] += 1
        world.require(RESTORED in now.rows, "the store is told of a former life, and goes on as if there had been none")
        left = of_workers(last) & now.leases
        world.require(not left, f"leases {sorted(left)} can be renewed after the store was told of a former life")

    def recovered(self, world: Any, store: Any, vouched: Any, done: Any, found: Any) -> None:
        """What nobody was told of may have gone."""
        self._last = found
