"""A committed page is never read with other bytes than were committed for it, by engines or by other workers."""

from typing import Any

from tests.sim.invariants.base import Invariant


class PageBytes(Invariant):
    """See the module. Engines may have committed different bytes for one page at different workers."""

    def read(self, world: Any, who: Any, key: bytes, data: bytes) -> None:
        """One of those it was."""
        world.require(
            data in world.committed.get(key, ()), f"{who.name} reads {data.hex()} for page {key.hex()}, never committed"
        )
