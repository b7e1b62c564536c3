"""Whoever is told how a plan ended is told the same, and not before it is in the store."""

from typing import Any

from tensorcast_connector.core.plan import PlanRecord
from tensorcast_connector.errors import Conflict, NotFound
from tests.sim.invariants.base import Invariant
from tests.sim.invariants.plan_records import PlanHistory


class PlanOutcomes(Invariant):
    """See the module. Within one life of the store's database: a lost one knows of no outcome."""

    def __init__(self, history: PlanHistory) -> None:
        self._history = history
        self._told: dict[tuple[int, str], PlanRecord] = {}  # by life and key
        self._digests: dict[str, set[str]] = {}

    def told(self, world: Any, caller: Any, key: str, digest: str, record: PlanRecord) -> None:
        """It is what the store has, or had in a former life, and of the plan that was submitted."""
        self._digests.setdefault(key, set()).update((digest, record.digest))
        if not record.finished:
            return
        lives = [each.life for each in self._history.ended.get(key, []) if each.record == record]
        world.require(lives, f"{caller.name} is told that plan {key} is {record.state}, which the store does not say")
        first = self._told.setdefault((lives[-1], key), record)
        world.require(first == record, f"{caller.name} is told {record} of plan {key}, and another one {first}")
        if len({life for life, _ in self._told}) == 1 and self._history.life == lives[-1]:
            world.require(record.digest == digest, f"{caller.name} is told the outcome of another plan than its {key}")

    def refused(self, world: Any, caller: Any, key: str, digest: str, error: Any, sent_at: float) -> None:
        """There is another plan with that key, or none whose outcome could have been told."""
        self._digests.setdefault(key, set()).add(digest)
        known = self._history.current.get(key)
        if isinstance(error, Conflict):
            others = {each for k, each, *_ in self._history.owners if k == key} - {digest}
            world.require(others, f"{caller.name} is told {error}, and there is no other plan {key}")
        elif isinstance(error, NotFound) and known is not None and known.digest == digest and known.finished:
            ended = self._history.ended[key][-1]
            world.require(
                ended.at > sent_at or ended.life != self._history.life,
                f"{caller.name} is told {error}, and plan {key} had ended",
            )
