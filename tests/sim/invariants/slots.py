"""What an engine was promised lasts as long as its connection: its reserved slots are its own, its held pages stay."""

from typing import Any

from tests.sim.invariants.base import Invariant


class Slots(Invariant):
    """See the module. However long the engine takes."""

    def after_event(self, world: Any, process: Any) -> None:
        """Every promise of this worker still holds."""
        for number, session in getattr(process, "sessions", {}).items():
            segments = process.segments
            for key in session.reserved:
                owner = segments.owner(key)
                world.require(owner == number, f"{process.name} gave the slot of {key.hex()} away, to {owner}")
            for pages in session.held.values():
                for key, offset in pages.items():
                    there = segments.resident(key) and segments.range(key).offset == offset
                    world.require(there, f"{process.name} evicted {key.hex()}, which connection {number} holds")

    def wrote(self, world: Any, connection: Any, key: bytes) -> None:
        """The slot was still this connection's, if anybody looks at that memory any more."""
        owner = connection.worker.segments.owner(key)
        world.require(
            owner == connection.session or not connection.worker.alive,
            f"{connection.engine.name} writes {key.hex()} into a slot that is not reserved for it any more",
        )
