"""Steps at those who do them: once, in order, for the owner only, and not after the plan is over."""

from dataclasses import dataclass, field
from typing import Any

from tensorcast_connector.core.ledger import Known
from tests.sim.invariants.base import Invariant
from tests.sim.invariants.plan_records import PlanHistory

ROUNDING_S = 1e-5
At = tuple[str, str, int]
"""A step: key of the plan, its digest, number."""


@dataclass
class _Executor:
    """One worker, as long as it lives."""

    epochs: dict[str, int] = field(default_factory=dict)  # by key: the highest seen
    until: dict[At, float] = field(default_factory=dict)  # so long whoever wants it waits, by this worker's clock
    results: dict[At, Any] = field(default_factory=dict)
    cancelled: dict[At, int] = field(default_factory=dict)  # under which epoch


class PlanSteps(Invariant):
    """See the module."""

    def __init__(self, history: PlanHistory) -> None:
        self._history = history
        self._executors: dict[str, _Executor] = {}
        self._results: dict[At, list[Any]] = {}  # of whoever has done it

    def _at(self, message: Any) -> At:
        return message.key, message.digest, message.step

    def _executor(self, worker: Any) -> _Executor:
        return self._executors.setdefault(worker.name, _Executor())

    def _seen(self, world: Any, worker: Any, message: Any) -> None:
        epochs = self._executor(worker).epochs
        highest = epochs.get(message.key, message.epoch)
        world.require(message.epoch >= highest, f"{worker.name} accepts {message} after the epoch {highest}")
        epochs[message.key] = message.epoch

    def step_taken(self, world: Any, worker: Any, message: Any, standing: Any) -> None:
        """What was done is not done again, nor what is being done, nor what was cancelled."""
        self._seen(world, worker, message)
        executor, at = self._executor(worker), self._at(message)
        if isinstance(standing, Known):
            known = executor.results.get(at)
            world.require(standing.result == known, f"{worker.name} says {standing.result} of {at}, which was {known}")
            return
        what = f"{worker.name} begins {message}"
        before = executor.until.get(at, 0.0) if not standing.fresh else 0.0
        executor.until[at] = max(before, worker.clock() + message.timeout_s)
        if not standing.fresh:
            return
        world.require(at not in executor.results, f"{what}, which it has done")
        going_on = any(self._at(each) == at for number, each in worker.plans.doing.items() if number != standing.number)
        world.require(not going_on, f"{what}, which it is doing")
        cancelled = executor.cancelled.get(at, message.epoch - 1)
        world.require(message.epoch > cancelled, f"{what}, which was cancelled under {cancelled}")
        self._check_needs(world, message, what)

    def _check_needs(self, world: Any, message: Any, what: str) -> None:
        step = self._history.plans[message.digest].steps[message.step]
        for need in step.needs:
            world.require((message.key, message.digest, need) in self._results, f"{what} before step {need}")
        for name, (source, item) in step.inputs.items():
            results = [each[item] for each in self._results[message.key, message.digest, source]]
            world.require(message.arguments[name] in results, f"{what}, and {name} is none of {results}")
        for name, value in step.arguments.items():
            world.require(message.arguments[name] == value, f"{what} with another {name} than {value}")

    def step_done(self, world: Any, worker: Any, message: Any, result: Any) -> None:
        """Its effect is there, once; and somebody still waits for it."""
        executor, at = self._executor(worker), self._at(message)
        world.require(at not in executor.results, f"{worker.name} has done {message} twice")
        late_s = worker.clock() - executor.until[at]
        world.require(late_s <= ROUNDING_S, f"{worker.name} has done {message} {late_s} s after nobody waits any more")
        executor.results[at] = result
        self._results.setdefault(at, []).append(result)

    def steps_cancelled(self, world: Any, worker: Any, message: Any) -> None:
        """The gateway owned the plan."""
        self._seen(world, worker, message)
        executor = self._executor(worker)
        for step in message.steps:
            executor.cancelled[message.key, message.digest, step] = message.epoch
