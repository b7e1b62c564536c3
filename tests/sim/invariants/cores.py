"""Every core keeps its own invariants, as its `check` states them."""

from typing import Any

from tests.sim.invariants.base import Invariant, Violation


class Cores(Invariant):
    """See the module."""

    def after_event(self, world: Any, process: Any) -> None:
        """Of the worker in which something happened."""
        metadata = getattr(process, "metadata", None)
        if metadata is None:
            return
        try:
            metadata.check()
            if process.touched:
                process.touched = False
                process.pages.check()
        except AssertionError as error:
            raise Violation(f"{process.name}: check failed: {error or 'see the traceback'}") from error
