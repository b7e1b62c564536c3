"""What an invariant is told, and how it complains."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorcast_connector.core.ledger import Known, UnderWay
    from tensorcast_connector.core.plan import PlanRecord
    from tensorcast_connector.errors import TensorcastError
    from tensorcast_connector.types import Token
    from tensorcast_connector.wire.messages import Message
    from tensorcast_connector.wire.plan_messages import CancelSteps, RunStep
    from tests.sim.caller_process import CallerProcess
    from tests.sim.engine_process import Connection
    from tests.sim.store_process import Snapshot, StoreProcess
    from tests.sim.worker_process import WorkerProcess
    from tests.sim.world import Process, World


class Violation(AssertionError):
    """An invariant does not hold."""


class Invariant:
    """One rule. An object lives as long as one world and may remember what it was told; it changes nothing there."""

    def after_event(self, world: "World", process: "Process") -> None:
        """Something happened in `process`."""

    def acknowledged(self, world: "World", store: "StoreProcess", message: "Message", reply: Any) -> None:
        """The store answers `message`, and from now on vouches for all it has done so far."""

    def recovered(
        self, world: "World", store: "StoreProcess", vouched: "Snapshot", done: "Snapshot", found: "Snapshot"
    ) -> None:
        """The store has crashed and was started again from its file.

        Args:
            vouched: what it had when it last answered anybody.
            done: what it had done when it crashed.
            found: what it has now.
        """

    def effect(self, world: "World", worker: "WorkerProcess", what: str, shard: int, token: "Token") -> None:
        """`worker` did what was asked for under `token`."""

    def learned(self, world: "World", worker: "WorkerProcess", shard: int, token: "Token") -> None:
        """`worker` was told of `token`, and did not refuse it."""

    def read(self, world: "World", who: "Process", key: bytes, data: bytes) -> None:
        """`who` has read these bytes of a committed page."""

    def wrote(self, world: "World", connection: "Connection", key: bytes) -> None:
        """An engine has written a part of a page into the slot that it had reserved over `connection`."""

    def dispatched(self, world: "World", gateway: "WorkerProcess", message: "RunStep") -> None:
        """`gateway` sends a step of a plan to whoever does it."""

    def step_taken(
        self, world: "World", worker: "WorkerProcess", message: "RunStep", standing: "Known | UnderWay"
    ) -> None:  # fmt: skip
        """`worker` has accepted a step: it is begun now, joined, or known."""

    def step_done(self, world: "World", worker: "WorkerProcess", message: "RunStep", result: Any) -> None:
        """`worker` has done a step, with that result."""

    def steps_cancelled(self, world: "World", worker: "WorkerProcess", message: "CancelSteps") -> None:
        """`worker` has accepted that they are not wanted any more."""

    def told(self, world: "World", caller: "CallerProcess", key: str, digest: str, record: "PlanRecord") -> None:
        """`caller`, who submitted the plan `digest` under `key`, is told how it is doing."""

    def refused(
        self, world: "World", caller: "CallerProcess", key: str, digest: str, error: "TensorcastError", sent_at: float
    ) -> None:  # fmt: skip
        """It is told instead that the plan cannot be run, or is another one."""


HOOKS = (
    "after_event", "acknowledged", "recovered", "effect", "learned", "read", "wrote", "dispatched", "step_taken", "step_done",
    "steps_cancelled", "told", "refused",
)  # fmt: skip
