"""All invariants that are checked after every event."""

from tests.sim.invariants.base import Invariant
from tests.sim.invariants.cores import Cores
from tests.sim.invariants.durability import Durability
from tests.sim.invariants.fencing import Fencing
from tests.sim.invariants.former_life import FormerLife
from tests.sim.invariants.grants_last import GrantsLast
from tests.sim.invariants.leases_end import LeasesEnd
from tests.sim.invariants.one_home import OneHome
from tests.sim.invariants.page_bytes import PageBytes
from tests.sim.invariants.plan_outcomes import PlanOutcomes
from tests.sim.invariants.plan_records import PlanHistory, PlanRecords
from tests.sim.invariants.plan_steps import PlanSteps
from tests.sim.invariants.slots import Slots
from tests.sim.invariants.tokens import TokensIncrease


def every_invariant() -> list[Invariant]:
    """Fresh ones, for one world."""
    history = PlanHistory()
    return [
        PlanRecords(history), PlanOutcomes(history), PlanSteps(history),
        TokensIncrease(), GrantsLast(), FormerLife(), Fencing(), OneHome(), PageBytes(), Durability(),
        LeasesEnd(), Slots(), Cores(),
    ]  # fmt: skip
