"""Plans as files and as tables, for `tensorcast plan`: see docs/commands.md for the format."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import RenderableType

from tensorcast_connector.cli_callers import add_row, new_table, show, write_json, write_note
from tensorcast_connector.client.plan import CallContext, Plan, ResultOf, Step
from tensorcast_connector.client.session import Session
from tensorcast_connector.config import DEAD_WORKER_LOOK_S
from tensorcast_connector.core.plan import PlanRecord, PlanSpec, StepSpec
from tensorcast_connector.errors import ConfigError, InvalidArgument, TensorcastError
from tensorcast_connector.wire.caller_messages import InstanceListed, WorkerListed

RESULT_CHARS_SHOWN = 200
EXECUTORS_LOOK_MAX_S = 10.0  # between two looks at who is there


class FileStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step in a file. Its number is its place, from 0."""

    operation: str
    target: str
    arguments: dict[str, Any] = {}
    inputs: dict[str, tuple[int, str]] = {}
    after: tuple[int, ...] = ()


class PlanFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in a file."""

    steps: tuple[FileStep, ...]


def read_plan(path: str) -> tuple[FileStep, ...]:
    """The steps in a file.

    Raises:
        ConfigError: it cannot be read, or is no plan; says where.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=PlanFile).steps
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a plan: {error}") from error


def build(plan: Plan, steps: Sequence[FileStep]) -> None:
    """Adds the steps to a plan.

    Raises:
        InvalidArgument: one depends on a step that is not there, or has an argument twice; names it.
    """
    arguments: list[dict[str, Any]] = [dict(each.arguments) for each in steps]
    made = [plan.add(each.operation, each.target, given) for each, given in zip(steps, arguments, strict=True)]

    def step(number: int, by: int) -> Step:
        if not 0 <= number < len(made):
            label = f"step {by} ({steps[by].operation} on {steps[by].target})"
            raise InvalidArgument(f"{label} depends on step {number}, which this plan does not have")
        return made[number]

    for number, each in enumerate(steps):
        for name, (source, key) in each.inputs.items():
            if name in arguments[number]:
                raise InvalidArgument(f"step {number} ({each.operation} on {each.target}) has {name!r} twice")
            arguments[number][name] = ResultOf(step(source, number), key)
        made[number].after(*(step(before, number) for before in each.after))


async def run_plan(session: Session, steps: Sequence[FileStep], context: CallContext, as_json: bool) -> None:
    """Runs it, and shows how it went. Meanwhile it is told once who is to do a step and is not there.

    Raises:
        TensorcastError: it has failed; names the step.
    """
    plan = session.plan(context)
    build(plan, steps)
    spec = plan.spec()
    digest, key = spec.digest(), context.idempotency_key
    looking = asyncio.get_running_loop().create_task(_look_for_executors(session, key, spec))
    try:
        await plan.run().result()
    except asyncio.CancelledError:
        write_note(f"plan {key} goes on; `tensorcast plan cancel {key}` ends it")
        raise
    except TensorcastError:
        await _show_failed(session, key, digest, as_json)
        raise
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    show_plan(key, await session.plan_record(key), as_json)


async def _look_for_executors(session: Session, key: str, spec: PlanSpec) -> None:
    """Tells who is missing. A plan goes on trying, since who has gone may come back; people would rather know."""
    missing: set[str] = set()
    told: set[str] = set()
    pause_s = DEAD_WORKER_LOOK_S
    while True:
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, EXECUTORS_LOOK_MAX_S)
        with contextlib.suppress(TensorcastError):
            workers, instances = await session.list_workers(), await session.list_instances()
            ended = (await session.plan_record(key)).outcomes
            before, missing = missing, set()
            for number, step in enumerate(spec.steps):
                why = "" if number in ended else _why_missing(step, workers, instances)
                if why:
                    missing.add(step.target)
                if why and step.target in before - told:  # twice in a row
                    told.add(step.target)
                    write_note(
                        f"{step.label(number)}: {why}; it is tried until the plan's deadline, and `tensorcast plan "
                        f"cancel {key}` ends it"
                    )


def _why_missing(step: StepSpec, workers: Sequence[WorkerListed], instances: Sequence[InstanceListed]) -> str:
    """Why nobody can do it now; empty if somebody can."""
    target = step.target
    if step.on_instance:
        found = [each.worker_id for each in instances if each.instance_id == target]
        if not found:
            return f"there is no instance {target!r}"
        target = found[0]
    here = [each for each in workers if target in (each.worker_id, each.name)]
    if not here:
        return f"there is no worker {target!r}"
    return f"worker {target!r} does not answer ({here[0].error})" if all(each.error for each in here) else ""


async def _show_failed(session: Session, key: str, digest: str, as_json: bool) -> None:
    """As far as it came, if it was begun at all."""
    try:
        record = await session.plan_record(key)
    except TensorcastError:
        return
    if record.digest == digest:
        show_plan(key, record, as_json)


def show_plan(key: str, record: PlanRecord, as_json: bool) -> None:
    """A plan as it is in the store."""
    if as_json:
        write_json(plan_as_json(key, record))
    else:
        show(plan_as_table(key, record))


def plan_as_json(key: str, record: PlanRecord) -> dict[str, Any]:
    """The object that docs/commands.md describes."""
    steps = []
    for number, step in enumerate(record.plan.steps):
        outcome = record.outcomes.get(number)
        steps.append({
            "step": number, "operation": step.operation, "target": step.target,
            "state": outcome.state if outcome else None, "attempts": outcome.attempts if outcome else 0,
            "seconds": outcome.seconds if outcome else None, "result": outcome.result if outcome else None,
            "error": outcome.error if outcome else "", "message": outcome.message if outcome else "",
        })  # fmt: skip
    return {
        "key": key, "state": record.state, "error": record.error, "message": record.message, "owner": record.owner,
        "trace_id": record.trace_id, "deadline_unix_s": record.deadline_unix_s, "steps": steps,
    }  # fmt: skip


def plan_as_table(key: str, record: PlanRecord) -> RenderableType:
    """For people."""
    table = new_table("", "step", "operation", "target", "state", "attempts", "seconds", "result")
    table.title = None
    table.caption_justify = "left"
    for number, step in enumerate(record.plan.steps):
        outcome = record.outcomes.get(number)
        what = (str(number), step.operation, step.target)
        if outcome is None:
            add_row(table, *what, "not ended", "-", "-", "")
            continue
        result = outcome.message or ("" if outcome.result is None else msgspec.json.encode(outcome.result).decode())
        if len(result) > RESULT_CHARS_SHOWN:
            result = f"{result[:RESULT_CHARS_SHOWN]}..."
        style = "red" if outcome.error else None
        add_row(table, *what, outcome.state, str(outcome.attempts), f"{outcome.seconds:.3f}", result, style=style)
    table.caption = f"plan {key}: {record.state}".replace("[", r"\[")
    return table
