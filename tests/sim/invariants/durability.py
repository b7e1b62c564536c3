"""Nothing that the store has vouched for is lost by a crash."""

from typing import Any

from tests.sim.invariants.base import Invariant


class Durability(Invariant):
    """See the module. What nobody was told of may be there or not."""

    def recovered(self, world: Any, store: Any, vouched: Any, done: Any, found: Any) -> None:
        """Every key and lease is as it was vouched for, or as the crash had changed it."""
        world.require(found.revision >= vouched.revision, f"revision {found.revision} after {vouched.revision}")
        for key, row in vouched.rows.items():
            world.require(
                found.rows.get(key) in (row, done.rows.get(key)), f"{key} was {row} and is {found.rows.get(key)}"
            )
        lost = (vouched.leases & done.leases) - found.leases
        world.require(not lost, f"leases {lost} are lost")
        for key, row in found.rows.items():
            world.require(row in (vouched.rows.get(key), done.rows.get(key)), f"{key} is {row}, which it never was")
