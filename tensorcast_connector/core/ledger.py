"""What an executor does and has done for plans, so that a step that is dispatched again is not done again.

    standing = ledger.begin(...)        Known: the result; UnderWay: to be done now if `fresh`, else to be waited for
    ledger.ended(number, done, result)
    for number in ledger.stops(now): end it, nobody wants it any more

A dispatch carries the plan's key and its owner's epoch. Once an epoch was seen nothing is taken under a lower one, so a gateway
that has lost a plan cannot act for it any more; and nothing is begun that was cancelled under the same epoch or a higher one,
since a dispatch may come late. Results are kept as long as a plan's record is. No I/O and no clock.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tensorcast_connector.config import LEDGER_PLANS_MAX, PLAN_DEADLINE_MAX_S, PLAN_RECORD_TTL_S
from tensorcast_connector.errors import Conflict


@dataclass(frozen=True, slots=True)
class Known:
    """The step was done already."""

    result: object


@dataclass(frozen=True, slots=True)
class UnderWay:
    """It is being done, under this number."""

    number: int
    fresh: bool  # since now


@dataclass(slots=True)
class _Plan:
    digest: str
    epoch: int
    used_at: float
    results: dict[int, object] = field(default_factory=dict)
    under_way: dict[int, int] = field(default_factory=dict)  # step -> number
    cancelled: dict[int, int] = field(default_factory=dict)  # step -> the highest epoch under which it was


@dataclass(slots=True)
class _Work:
    key: str
    step: int
    until: float  # whoever wants it does not wait longer


class Ledger:
    """See the module."""

    def __init__(self) -> None:
        self._plans: OrderedDict[str, _Plan] = OrderedDict()  # by key, longest unused first
        self._works: dict[int, _Work] = {}  # what is under way, by number
        self._unwanted: list[int] = []
        self._numbers = 0

    def __repr__(self) -> str:
        return f"<Ledger of {len(self._plans)} plans, {len(self._works)} steps under way>"

    def begin(
        self, key: str, digest: str, epoch: int, step: int, timeout_s: float, now: float
    ) -> Known | UnderWay:  # fmt: skip
        """A step is dispatched, and waited for `timeout_s`; 0 is as long as a plan can take.

        Raises:
            Conflict: another owner has the plan by now, or it is another plan under the same key, or it was cancelled.
        """
        plan = self._plan(key, digest, epoch, now)
        if step in plan.results:
            return Known(plan.results[step])
        if epoch <= plan.cancelled.get(step, epoch - 1):
            raise Conflict(f"step {step} of plan {key!r} was cancelled")
        until = now + (timeout_s or PLAN_DEADLINE_MAX_S)
        number = plan.under_way.get(step)
        if number is not None:
            self._works[number].until = max(self._works[number].until, until)
            return UnderWay(number, fresh=False)
        self._numbers += 1
        self._works[self._numbers] = _Work(key, step, until)
        plan.under_way[step] = self._numbers
        return UnderWay(self._numbers, fresh=True)

    def is_under_way(self, key: str, step: int) -> bool:
        """Whether somebody does it just now."""
        plan = self._plans.get(key)
        return plan is not None and step in plan.under_way

    def cancel(self, key: str, digest: str, epoch: int, steps: Iterable[int], now: float) -> None:
        """They are not wanted any more; `stops` tells which of them are under way.

        Raises:
            Conflict: as `begin`.
        """
        plan = self._plan(key, digest, epoch, now)
        for step in steps:
            plan.cancelled[step] = epoch
            if step in plan.under_way:
                self._stop(plan, step)

    def _plan(self, key: str, digest: str, epoch: int, now: float) -> _Plan:
        self._expire(now)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = _Plan(digest, epoch, now)
        if plan.digest != digest and epoch <= plan.epoch:
            raise Conflict(f"plan {key!r} is another one here")
        if epoch < plan.epoch:
            raise Conflict(f"plan {key!r} has another owner since")
        if plan.digest != digest:  # the record of the former has run out
            self._stop_all(plan)
            plan = self._plans[key] = _Plan(digest, epoch, now)
        self._plans.move_to_end(key)
        plan.epoch, plan.used_at = epoch, now
        return plan

    def ended(self, number: int, done: bool, result: object = None) -> None:
        """So has what was under way; fine if it was stopped before."""
        work = self._works.pop(number, None)
        if work is not None:
            plan = self._plans[work.key]
            del plan.under_way[work.step]
            if done:
                plan.results[work.step] = result

    def stops(self, now: float) -> list[int]:
        """What is to be ended now, since it was cancelled, or nobody waits for it any longer."""
        for work in [each for each in self._works.values() if each.until <= now]:
            self._stop(self._plans[work.key], work.step)
        unwanted, self._unwanted = self._unwanted, []
        return unwanted

    def wake_at(self) -> float:
        """When to ask for `stops`, if nothing else happens."""
        return min((each.until for each in self._works.values()), default=float("inf"))

    def _stop(self, plan: _Plan, step: int) -> None:
        number = plan.under_way.pop(step)
        del self._works[number]
        self._unwanted.append(number)

    def _stop_all(self, plan: _Plan) -> None:
        for step in list(plan.under_way):
            self._stop(plan, step)

    def _expire(self, now: float) -> None:
        while self._plans:
            key, plan = next(iter(self._plans.items()))
            if plan.used_at + PLAN_RECORD_TTL_S > now and len(self._plans) < LEDGER_PLANS_MAX:
                return
            if plan.under_way:  # a step may take longer than that
                self._plans.move_to_end(key)
                if all(each.under_way for each in self._plans.values()):
                    return
                continue
            del self._plans[key]
