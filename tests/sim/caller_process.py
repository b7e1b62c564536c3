"""Callers of plans: each submits plans to any gateway and asks until it knows how they ended, as client/plan.py does.

One key may be submitted by several callers, to several gateways at once, and sometimes with another plan, which is a conflict.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tensorcast_connector.config import STORE_TIMEOUT_S
from tensorcast_connector.core.plan import PlanRecord, PlanSpec, StepSpec, decode_record
from tensorcast_connector.errors import Conflict, NotFound, TensorcastError
from tensorcast_connector.wire.messages import Message
from tensorcast_connector.wire.plan_messages import CancelPlan, PlanState, SubmitPlan, WaitPlan
from tests.sim.network import Network
from tests.sim.plan_service import BROKEN, FLAKY, SLOW
from tests.sim.world import Clock, Process, World

WAIT_S = 1.0  # for how long a gateway may keep a question open
RETRY_S = 0.1
STEPS_MAX = 5
TIMEOUTS_S = (1.5, 4.0, 10.0)


@dataclass
class Job:
    """What was ever submitted under one key: more than one plan is a conflict for all but one of them."""

    key: str
    plans: list[PlanSpec]
    timeout_s: float
    digests: set[str] = field(default_factory=set)


def draw_plan(chance: random.Random, hosts: Sequence[str], instances: Sequence[str]) -> PlanSpec:
    """Some steps on workers, by name, and on engines; what each needs comes before it."""
    steps: list[StepSpec] = []
    for number in range(chance.randint(1, STEPS_MAX)):
        earlier = chance.sample(range(number), min(number, chance.choice((0, 1, 1, 2))))
        arguments: dict[str, Any] = {"artifact": chance.choice(("a", "b", "c", "a", "b", "c", FLAKY, SLOW))}
        if chance.random() < 0.05:
            arguments["artifact"] = BROKEN
        inputs = {}
        if earlier and chance.random() < 0.6:
            inputs = {"artifact": (earlier.pop(), "artifact")}
            del arguments["artifact"]
        if instances and chance.random() < 0.4:
            operation, target = chance.choice(("publish", "hydrate")), chance.choice(instances)
        else:
            operation, target = chance.choice(("prefetch", "pin")), chance.choice(hosts)
            if operation == "pin":
                arguments |= {"pin": "p", "ttl_s": 60}
        steps.append(StepSpec(operation, target, arguments, inputs, tuple(earlier)))
    return PlanSpec(tuple(steps))


class Conversation:
    """One caller about one plan, until it knows."""

    def __init__(self, caller: "CallerProcess", job: Job, plan: PlanSpec, gateway: str = "") -> None:
        self._caller = caller
        self._job = job
        self._plan = plan
        self._encoded = msgspec.msgpack.encode(plan)
        self._gateway = gateway
        self._submitted = False
        self._began_at = caller.world.now
        self.over = False
        job.digests.add(plan.digest())
        self.ask()

    def ask(self) -> None:
        """Submits it, or asks how it is doing."""
        caller, key = self._caller, self._job.key
        message: Message = WaitPlan(key, int(WAIT_S * 1000))
        if not self._submitted:
            message = SubmitPlan(key, self._encoded, "", self._job.timeout_s, 2, int(WAIT_S * 1000))
        gateway = self._gateway or caller.find_gateway()
        if not gateway:
            self._later()
            return
        sent_at = caller.world.now
        caller.network.call(
            caller, gateway, message, WAIT_S + STORE_TIMEOUT_S, lambda result, _: self._came(result, sent_at)
        )  # fmt: skip

    def cancel(self) -> object:
        """Changes its mind."""
        gateway = self._caller.find_gateway()
        if self.over or not gateway:
            return False
        self._caller.world.counts["plan cancelled"] += 1
        self._caller.network.call(self._caller, gateway, CancelPlan(self._job.key), 4.0, lambda *_: None)
        return True

    def _later(self) -> None:
        self._gateway = ""
        self._caller.after(RETRY_S * (0.5 + self._caller.world.random.random()), self.ask)

    def _came(self, result: Message | TensorcastError, sent_at: float) -> None:
        world, key, digest = self._caller.world, self._job.key, self._plan.digest()
        if isinstance(result, PlanState):
            record = decode_record(result.record)
            if record.digest != digest:  # as client/plan.py: it was lost, and another one has been begun
                other = Conflict("that key belongs to another plan by now")
                world.tell("refused", self._caller, key, digest, other, sent_at)
                self._end(other)
                return
            world.tell("told", self._caller, key, digest, record)
            self._submitted = True
            if record.finished:
                self._end(record)
            else:
                self.ask()
        elif isinstance(result, Conflict) or (isinstance(result, NotFound) and not self._submitted):
            world.tell("refused", self._caller, key, digest, result, sent_at)
            self._end(result)
        else:
            self._submitted = self._submitted and not isinstance(result, NotFound)  # the store's database was lost
            self._later()

    def _end(self, how: PlanRecord | object) -> None:
        self.over = True
        what = how.state if isinstance(how, PlanRecord) else type(how).__name__
        self._caller.world.counts[f"plan {what}"] += 1
        self._caller.world.note(self._caller.name, "knows of", self._job.key, what)


class CallerProcess(Process):
    """See the module.

    Args:
        jobs: of all callers.
        gateways: those that run now.
        targets: hosts with workers, and engines.
        interval_s: about how long it waits between two plans.
    """

    def __init__(
        self, world: World, network: Network, host: str, number: int, clock: Clock, jobs: list[Job],
        gateways: Callable[[], Sequence[str]], targets: Callable[[], tuple[Sequence[str], Sequence[str]]],
        interval_s: float,
    ) -> None:  # fmt: skip
        super().__init__(world, f"{host}/caller{number}", host, clock)
        self.network = network
        self.idle = False
        self.conversations: list[Conversation] = []
        self._jobs = jobs
        self._gateways = gateways
        self._targets = targets
        self._interval_s = interval_s
        self.after(1.0 + world.random.random(), self._step)

    def find_gateway(self) -> str:
        """Any of them."""
        gateways = self._gateways()
        return self.world.random.choice(gateways) if gateways else ""

    def _step(self) -> object:
        chance = self.world.random
        self.after(self._interval_s * (0.2 + 1.6 * chance.random()), self._step)
        self.conversations = [each for each in self.conversations if not each.over]
        if self.idle:
            return False
        plan = draw_plan(chance, *self._targets())
        if self._jobs and chance.random() < 0.25:
            job = chance.choice(self._jobs[-4:])
            if chance.random() < 0.3:
                job.plans.append(plan)
            self.begin(job, chance.choice(job.plans))
        else:
            job = Job(f"k{len(self._jobs)}", [plan], chance.choice(TIMEOUTS_S))
            self._jobs.append(job)
            for _ in range(chance.choice((1, 1, 2))):  # to two gateways at once
                self.begin(job, plan)
        if chance.random() < 0.15:
            self.after(chance.random() * 2.0, self.conversations[-1].cancel)
        return True

    def begin(self, job: Job, plan: PlanSpec, gateway: str = "") -> Conversation:
        """Submits a plan, first to that gateway."""
        self.conversations.append(Conversation(self, job, plan, gateway))
        return self.conversations[-1]
