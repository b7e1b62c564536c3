"""Plans as values: steps of known operations in a graph, the context they share, and the record of one in the store.

A plan orders idempotent operations, gives them one deadline and one key under which the whole can be repeated; it does not roll
back (TensorCast, section 3.3).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import blake3
import msgspec

from tensorcast_connector.config import (
    NAME_CHARS_MAX,
    PLAN_BYTES_MAX,
    PLAN_DEADLINE_MAX_S,
    PLAN_STEPS_MAX,
    PLAN_TRACE_CHARS_MAX,
)
from tensorcast_connector.core.cluster import PLAN_MARKERS, PLANS
from tensorcast_connector.errors import InvalidArgument, ProtocolError

WORKER_OPERATIONS: Mapping[str, frozenset[str]] = {
    "prefetch": frozenset({"artifact"}),
    "replicate": frozenset({"artifact", "device"}),
    "pin": frozenset({"artifact", "pin", "ttl_s"}),
    "unpin": frozenset({"artifact", "pin"}),
}
INSTANCE_OPERATIONS = frozenset({"publish", "hydrate", "evict_local", "transform_into"})


class StepSpec(msgspec.Struct, frozen=True, array_like=True):
    """One operation. Its number is its place in the plan."""

    operation: str
    target: str  # the worker or the instance that does it
    arguments: dict[str, Any] = {}
    inputs: dict[str, tuple[int, str]] = {}  # argument -> (step, the key in its result; "" is all of it)
    after: tuple[int, ...] = ()  # steps that have to be done before, besides those of `inputs`

    @property
    def on_instance(self) -> bool:
        """Whether an engine does it."""
        return self.operation in INSTANCE_OPERATIONS

    @property
    def needs(self) -> set[int]:
        """The steps that have to be done before."""
        return {*self.after, *(step for step, _ in self.inputs.values())}

    def label(self, number: int) -> str:
        """For messages to people."""
        return f"step {number} ({self.operation} on {self.target})"


class PlanSpec(msgspec.Struct, frozen=True, array_like=True):
    """The steps of a plan."""

    steps: tuple[StepSpec, ...]

    def digest(self) -> str:
        """Two plans are the same if this is. Raises InvalidArgument for arguments that have no order."""
        try:
            encoded = msgspec.msgpack.encode(self, order="deterministic")
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidArgument(f"a plan that cannot be written down: {error}") from error
        return digest_of(encoded)


def digest_of(encoded: bytes) -> str:
    """Of a plan that was encoded in deterministic order."""
    return blake3.blake3(encoded).hexdigest()[:32]


_plan_decoder = msgspec.msgpack.Decoder(PlanSpec)


def decode_plan(encoded: bytes) -> PlanSpec:
    """The plan in `encoded`, which may come from anybody.

    Raises:
        ProtocolError: it is none.
        InvalidArgument: it cannot run; names the step.
    """
    if len(encoded) > PLAN_BYTES_MAX // 2:
        raise InvalidArgument(f"a plan of {len(encoded)} bytes; the limit is {PLAN_BYTES_MAX // 2}")
    try:
        plan = _plan_decoder.decode(encoded)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"not a plan: {error}") from error
    validate(plan)
    return plan


def unencodable(value: Any) -> str | None:
    """Why a value cannot travel in a plan or as a result, if so: it is not text, bytes, number, list or mapping all through."""
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return str(error)
    return None


def check_key(key: str) -> str:
    """Raises InvalidArgument for what cannot be a caller's key of a plan."""
    if not 0 < len(key) <= 2 * NAME_CHARS_MAX or not key.isprintable():
        raise InvalidArgument(f"{key[:64]!r} is no idempotency key: 1 to {2 * NAME_CHARS_MAX} printable characters")
    return key


def check_trace(trace_id: str) -> str:
    """Raises InvalidArgument for what cannot be a caller's trace id."""
    if len(trace_id) > PLAN_TRACE_CHARS_MAX or not trace_id.isprintable():
        raise InvalidArgument(f"{trace_id[:64]!r} is no trace id: at most {PLAN_TRACE_CHARS_MAX} printable characters")
    return trace_id


def validate(plan: PlanSpec) -> None:
    """Raises InvalidArgument for a plan that cannot run; names the step."""
    if not 1 <= len(plan.steps) <= PLAN_STEPS_MAX:
        raise InvalidArgument(f"a plan has 1 to {PLAN_STEPS_MAX} steps, not {len(plan.steps)}")
    for number, step in enumerate(plan.steps):
        _validate_step(number, step, len(plan.steps))
    order(plan)


def _validate_step(number: int, step: StepSpec, count: int) -> None:
    label = step.label(number)
    if not step.on_instance and step.operation not in WORKER_OPERATIONS:
        known = ", ".join([*WORKER_OPERATIONS, *sorted(INSTANCE_OPERATIONS)])
        raise InvalidArgument(f"{label}: no such operation; known are {known}")
    if outside := [each for each in step.needs if not 0 <= each < count]:
        raise InvalidArgument(f"{label} depends on step {outside[0]}, which this plan does not have")
    given = {*step.arguments, *step.inputs} | ({"pin"} if step.operation in ("pin", "unpin") else set())
    if not step.on_instance and given != (wanted := WORKER_OPERATIONS[step.operation]):
        raise InvalidArgument(
            f"{label} takes {', '.join(sorted(wanted))}, and was given {', '.join(sorted(given)) or 'nothing'}"
        )


def order(plan: PlanSpec) -> list[int]:
    """The steps in an order in which they can be done.

    Raises:
        InvalidArgument: there is none; names a cycle.
    """
    left = {number: set(step.needs) for number, step in enumerate(plan.steps)}
    found: list[int] = []
    while left:
        ready = [number for number, needs in left.items() if not needs]
        if not ready:
            raise InvalidArgument(f"the plan has a cycle: {_cycle(plan, left)}")
        for number in ready:
            del left[number]
        for needs in left.values():
            needs.difference_update(ready)
        found += ready
    return found


def _cycle(plan: PlanSpec, left: Mapping[int, set[int]]) -> str:
    path = [next(iter(left))]
    while (following := next(iter(left[path[-1]]))) not in path:
        path.append(following)
    return " waits for ".join(plan.steps[each].label(each) for each in [*path[path.index(following) :], following])


# --- what is known of a running plan ----------------------------------------------------------------------------------

DONE = "done"
FAILED = "failed"
CANCELLED = "cancelled"
RUNNING = "running"
SKIPPED = "skipped"


class StepOutcome(msgspec.Struct, frozen=True, array_like=True):
    """How a step ended."""

    state: str  # done, failed, cancelled, skipped
    result: Any = None
    error: str = ""  # code of errors.py
    message: str = ""
    attempts: int = 1
    seconds: float = 0.0


class PlanRecord(msgspec.Struct, frozen=True):
    """A plan in the store: made before anything is dispatched, changed only by its owner, by compare-and-swap."""

    plan: PlanSpec
    digest: str
    owner: str  # the gateway's worker id
    epoch: int  # rises with every change of owner, see next_epoch
    trace_id: str
    deadline_unix_s: float
    concurrency: int
    state: str = RUNNING
    outcomes: dict[int, StepOutcome] = {}
    error: str = ""
    message: str = ""
    timeout_s: float = float(
        PLAN_DEADLINE_MAX_S
    )  # from its beginning; no gateway waits longer, whatever its clock says

    @property
    def finished(self) -> bool:
        """Whether nothing will change any more."""
        return self.state != RUNNING


encode_record = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(PlanRecord).decode


def check_size(record: PlanRecord) -> None:
    """Raises InvalidArgument for a record, as it is to be written first, that leaves too little room for results."""
    try:
        size = len(encode_record(record))  # which can be more than what the caller sent
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidArgument(f"a plan that cannot be written down: {error}") from error
    if size > PLAN_BYTES_MAX // 2:
        raise InvalidArgument(f"a plan that makes a record of {size} bytes; the limit is {PLAN_BYTES_MAX // 2}")


def same_record(found: PlanRecord, known: PlanRecord) -> bool:
    """Whether the record that was found in the store is what is known here, where it may have tuples and other numbers."""
    return found == known or encode_record(found) == encode_record(decode_record(encode_record(known)))


EPOCHS_PER_INCARNATION = 1 << 20


def next_epoch(former: int, incarnation: int) -> int:
    """The epoch of a plan's next owner, which rises also if the store's database has lost what there was.

    Args:
        former: of the owner before; 0 if there was none.
        incarnation: the life of that database, as far as is known.
    """
    return max(former, incarnation * EPOCHS_PER_INCARNATION) + 1


class Marker(msgspec.Struct, frozen=True, array_like=True):
    """Says that a plan has not ended. In the store beside its record, much smaller."""

    owner: str
    key: str


encode_marker = encode_record
decode_marker = msgspec.msgpack.Decoder(Marker).decode


def plan_key(key: str) -> str:
    """Where the record of the plan TENANT/KEY is. No such key is the beginning of another one."""
    tenant, _, own = key.partition("/")
    return f"{PLANS}{tenant}/{own.replace('%', '%25').replace('/', '%2F')}/"


def marker_key(key: str) -> str:
    """Where its Marker is."""
    return PLAN_MARKERS + blake3.blake3(key.encode()).hexdigest()[:32]


def check_deadline(timeout_s: float) -> None:
    """Raises InvalidArgument for a time that no plan can have."""
    if not 0 < timeout_s <= PLAN_DEADLINE_MAX_S:
        raise InvalidArgument(f"a plan's deadline is within {PLAN_DEADLINE_MAX_S} s from now, not {timeout_s:g} s")


def resolve(step: StepSpec, outcomes: Mapping[int, StepOutcome], number: int) -> dict[str, Any]:
    """The arguments of a step whose needs are done.

    Raises:
        InvalidArgument: a result does not have what the step wants of it.
    """
    arguments = dict(step.arguments)
    for name, (source, key) in step.inputs.items():
        result = outcomes[source].result
        if key:
            if not isinstance(result, Mapping) or key not in result:
                raise InvalidArgument(f"{step.label(number)} wants {key!r} of step {source}, whose result has none")
            result = result[key]
        arguments[name] = result
    return arguments


def ready(plan: PlanSpec, outcomes: Mapping[int, StepOutcome]) -> Sequence[int]:
    """The steps that have not ended and wait for nothing."""
    done = {number for number, each in outcomes.items() if each.state == DONE}
    return [number for number, step in enumerate(plan.steps) if number not in outcomes and step.needs <= done]
