"""A shard that was granted stays granted while the lease lives, unless its home has stopped being it before."""

from typing import Any

from tests.sim.invariants.base import Invariant


class GrantsLast(Invariant):
    """See the module. Otherwise a home would go on that is none any more."""

    def __init__(self) -> None:
        self._last: Any = None

    def acknowledged(self, world: Any, store: Any, message: Any, reply: Any) -> None:
        """Compares with the state before."""
        last, now = self._last, store.snapshot
        if now is last:
            return
        self._last = now
        if last is None or last.incarnation != now.incarnation:
            return
        left = now.shards()
        for shard, (token, holder) in last.shards().items():
            lease_id = last.rows[f"cluster/shards/{shard}"][2]
            if left.get(shard) == (token, holder) or lease_id not in now.leases or holder not in world.processes:
                continue
            held = world.processes[holder].metadata.leases.held
            world.require(
                held.get(shard) != token, f"{message} takes shard {shard} from {holder}, which holds it under {token}"
            )

    def recovered(self, world: Any, store: Any, vouched: Any, done: Any, found: Any) -> None:
        """What nobody was told of may have gone."""
        self._last = found
