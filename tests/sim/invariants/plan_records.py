"""Plans in the store: their records are made before anything is dispatched, and once they are finished never change."""

from dataclasses import dataclass
from typing import Any

from tensorcast_connector.core.plan import PlanRecord, PlanSpec, decode_record
from tests.sim.invariants.base import Invariant

PLANS = "plans/t/"


@dataclass(frozen=True)
class Ended:
    """An outcome that everybody may rely on."""

    record: PlanRecord
    life: int  # of the database
    at: float


class PlanHistory:
    """What the store has vouched for; the other invariants of plans ask it. A lost database begins anew."""

    def __init__(self) -> None:
        self.life = 0
        self.current: dict[str, PlanRecord] = {}  # by key
        self.owners: set[tuple[str, str, str, int]] = set()  # (key, digest, owner, epoch) that ever were
        self.ended: dict[str, list[Ended]] = {}
        self.plans: dict[str, PlanSpec] = {}  # by digest
        self._rows: dict[str, tuple[int, int]] = {}

    def look(self, world: Any, store: Any) -> list[tuple[str, PlanRecord | None, PlanRecord]]:
        """The records that have changed: key, before, now."""
        snapshot = store.snapshot
        if snapshot.incarnation != self.life:
            self.life, self.current = snapshot.incarnation, {}
        changed = []
        for row, (value, revision, _) in snapshot.rows.items():
            if not row.startswith(PLANS) or self._rows.get(row) == (self.life, revision):
                continue
            self._rows[row] = self.life, revision
            quoted, record = row.removeprefix(PLANS).removesuffix("/"), decode_record(value)
            key = quoted.replace("%2F", "/").replace("%25", "%")
            changed.append((key, self.current.get(key), record))
            self.current[key] = record
            self.plans[record.digest] = record.plan
            self.owners.add((key, record.digest, record.owner, record.epoch))
            if record.finished:
                self.ended.setdefault(key, []).append(Ended(record, self.life, world.now))
        return changed


class PlanRecords(Invariant):
    """See the module."""

    def __init__(self, history: PlanHistory) -> None:
        self._history = history
        self._seen: Any = None

    def acknowledged(self, world: Any, store: Any, message: Any, reply: Any) -> None:
        """What has changed, has changed as it may."""
        if store.snapshot is self._seen:
            return
        self._seen = store.snapshot
        for key, before, now in self._history.look(world, store):
            if now.finished:
                world.counts["plan record finished"] += 1
            if before is None:
                continue
            world.require(not before.finished, f"the record of plan {key} was {before.state} and changes to {now}")
            world.require(before.digest == now.digest, f"plan {key} becomes another one")
            world.require(
                now.epoch > before.epoch or (now.epoch, now.owner) == (before.epoch, before.owner),
                f"plan {key} goes from {before.owner} under {before.epoch} to {now.owner} under {now.epoch}",
            )
            world.counts["plan taken over"] += now.epoch > before.epoch

    def dispatched(self, world: Any, gateway: Any, message: Any) -> None:
        """The gateway is in the record as its owner, as everybody may see."""
        owner = message.key.partition("/")[2], message.digest, gateway.name, message.epoch
        world.require(owner in self._history.owners, f"{gateway.name} dispatches {message} before its record is there")
