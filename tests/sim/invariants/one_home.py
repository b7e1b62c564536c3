"""No two workers would take reports for one shard at the same instant, while all clocks keep within the drift bound."""

from typing import Any

from tests.sim.invariants.base import Invariant


class OneHome(Invariant):
    """See the module. It does not wait for a report: what counts is whether a worker would take one."""

    def after_event(self, world: Any, process: Any) -> None:
        """Also of workers that are paused: they may go on at any moment."""
        metadata = getattr(process, "metadata", None)
        if metadata is None or not metadata.leases.held or world.now < world.exempt_until:
            return
        mine = metadata.leases.held.keys()
        if not metadata.leases.may_write(process.clock()):
            return
        for other in world.processes.values():
            leases = other.metadata.leases if other is not process and hasattr(other, "metadata") else None
            if leases is not None and leases.held and not mine.isdisjoint(leases.held):
                both = sorted(mine & leases.held.keys())
                world.require(
                    not leases.may_write(other.clock()), f"{process.name} and {other.name} are both the home of {both}"
                )
