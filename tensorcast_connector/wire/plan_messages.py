"""What is said about plans: callers to gateways, gateways to the workers that do a step, workers to the engines that do one.

See messages.py for the rules, and core/plan.py for what a plan is.
"""

from typing import Any

import msgspec

from tensorcast_connector.wire.messages import Message

# --- caller -> gateway ------------------------------------------------------------------------------------------------


class SubmitPlan(Message):
    """Runs a plan, or goes on with the one that has this key; answered when it has ended, or after `wait_ms`."""

    key: str  # idempotency key, within the tenant
    plan: bytes  # core/plan.py, PlanSpec
    trace_id: str
    timeout_s: float
    concurrency: int
    wait_ms: int


class WaitPlan(Message):
    """How a plan is doing; answered when it has ended, or after `wait_ms`."""

    key: str
    wait_ms: int


class CancelPlan(Message):
    """It is not wanted any more; what is done stays done. Answered when it has ended."""

    key: str


class PlanState(Message):
    """Answer to these."""

    record: bytes  # core/plan.py, PlanRecord


# --- gateway -> worker ------------------------------------------------------------------------------------------------


class RunStep(Message):
    """Has one step done, once: a repeated request gets the result of the first. Refused under a lower epoch than one seen, and
    after it was cancelled under that epoch."""

    key: str  # tenant/key of the plan
    digest: str
    epoch: int
    step: int
    operation: str
    target: str
    arguments: dict[str, Any]
    trace_id: str
    timeout_s: float = 0.0  # for so long it is wanted; 0: for as long as a plan can take


class CancelSteps(Message):
    """Steps that are not wanted any more."""

    key: str
    digest: str
    epoch: int
    steps: list[int]


class CancelOwnedPlan(Message):
    """A caller of another gateway does not want a plan any more that the receiver runs; answered with PlanState."""

    key: str  # tenant/key


class StepDone(Message):
    """Answer to RunStep."""

    result: Any


# --- engine -> worker on the same host --------------------------------------------------------------------------------


class TakeStep(Message):
    """Asks for a step that the attached instance is to do; answered after `wait_ms` with no ticket if there is none."""

    wait_ms: int


CANCEL = "cancel"


class StepTaken(Message):
    """Answer to TakeStep. The operation CANCEL says that a ticket taken before is not wanted any more."""

    ticket: int  # 0: there is none
    operation: str = ""
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    key: str = ""  # of the plan and the step, under which the same step always comes
    trace_id: str = ""


class StepEnded(Message):
    """How a step that was taken has ended."""

    ticket: int
    result: Any = None
    error: str = ""  # code of errors.py; "" if it is done
    message: str = ""


class ReportInstance(Message):
    """How the attached instance is doing (TensorCast, section 3.4)."""

    state: str  # "serving", "paused", "loading", ...
    running: int  # requests
    waiting: int  # requests
    kv_usage: float | None  # of its KV cache, 0 to 1
