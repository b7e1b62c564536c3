"""What callers ask of the pool on the command line: put, get, ls, pin, unpin, prefetch, rm and plan. See docs/commands.md."""

import argparse
import asyncio
import contextlib
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from tensorcast_connector.cli_callers import (
    OFTEN,
    add_row,
    as_age,
    as_size,
    call,
    caller_flags,
    delete_each,
    new_table,
    parse_seconds,
    plan_timeout,
    show,
    timeout_flag,
    write_json,
    write_line,
    write_note,
)
from tensorcast_connector.cli_doctor import doctor_flags, run_doctor
from tensorcast_connector.cli_plan import read_plan, run_plan, show_plan
from tensorcast_connector.cli_weights import progress_bar, weights_flags, with_progress
from tensorcast_connector.client.artifact import Artifact
from tensorcast_connector.client.files import write_file
from tensorcast_connector.client.ownership import SYSTEM, leased
from tensorcast_connector.client.plan import CallContext
from tensorcast_connector.client.session import Session
from tensorcast_connector.config import TENANT, parse_devices
from tensorcast_connector.core.artifact import is_artifact_id
from tensorcast_connector.core.weights import LINEAGE
from tensorcast_connector.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    TensorcastError,
    Unavailable,
)
from tensorcast_connector.wire.caller_messages import ArtifactListed

Work = Callable[[Session, argparse.Namespace], Awaitable[None]]


# --- put, get, ls -----------------------------------------------------------------------------------------------------


def _in_time(timeout: str | None, what: str) -> contextlib.AbstractAsyncContextManager[Any]:
    """For what has no deadline of its own: `timeout` as it was given, None for none."""
    return _deadline(None if timeout is None else parse_seconds(timeout, "timeout"), what)


@contextlib.asynccontextmanager
async def _deadline(seconds: float | None, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{what} has not ended within {seconds:g} s") from None


def _run_put(args: argparse.Namespace) -> None:
    if args.lease is not None:
        seconds = parse_seconds(args.lease, "lease")
        args.lease = int(seconds)
        try:
            if args.lease != seconds:
                raise InvalidArgument(f"{seconds:g} s are no whole seconds")
            leased(args.lease)
        except InvalidArgument as error:
            raise ConfigError(f"--lease: {error}") from None
    call(args, _put)


async def _put(session: Session, args: argparse.Namespace) -> None:
    ownership = SYSTEM if args.lease is None else leased(args.lease)
    with progress_bar() as progress:
        async with _in_time(args.timeout, f"the put of {args.path}"):
            artifact = await session.put(args.path, name=args.name, ownership=ownership, progress=progress)
    described = await artifact.describe()
    stopped = asyncio.Event()
    if args.lease is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    if args.json:
        tensors = len(described.tensors)
        write_json({"artifact_id": described.artifact_id, "bytes": described.bytes, "tensors": tensors,
                    "names": described.names})  # fmt: skip
    else:
        write_line(described.artifact_id)
    if args.lease is not None:
        write_note("it stays until this ends; Ctrl-C ends it")
        await _until_gone(artifact, stopped, args.lease / 3)


async def _until_gone(artifact: Artifact, stopped: asyncio.Event, interval_s: float) -> None:
    """Until somebody stops this; raises NotFound if the artifact goes before."""
    while not stopped.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await stopped.wait()
                return
        with contextlib.suppress(Unavailable):  # the lease may still be renewed
            await artifact.describe()


async def _get(session: Session, args: argparse.Namespace) -> None:
    with progress_bar() as progress:
        async with _in_time(args.timeout, f"getting {args.reference}"):
            await write_file(session.artifact(args.reference), args.out, args.tensor or (), progress)


async def _list(session: Session, args: argparse.Namespace, wall: Callable[[], float] = time.time) -> None:
    found = await session.list_artifacts(args.prefix)
    if args.json:
        write_json({"tenant": args.tenant or TENANT, "artifacts": [_as_json(each) for each in found]})
        return
    if not found:
        write_note("no artifacts")
        return
    table = new_table("Artifacts", "id", "names", "size", "tensors", "owner", "age", "workers")
    for each in found:
        age = as_age(max(0.0, wall() - each.created_unix_s))
        add_row(table, each.artifact_id, ", ".join(each.names) or "-", as_size(each.bytes), str(each.tensors),
                _owner(each), age, ", ".join(each.workers) or "none: its bytes are gone")  # fmt: skip
    show(table)


def _owner(listed: ArtifactListed) -> str:
    return f"lease {listed.lease_id}" if listed.lease_id else "system"


def _as_json(listed: ArtifactListed) -> dict[str, Any]:
    return {name: msgspec.to_builtins(getattr(listed, name)) for name in listed.__struct_fields__}


# --- pin, unpin, prefetch ---------------------------------------------------------------------------------------------


def _run_pin(args: argparse.Namespace) -> None:
    args.ttl = parse_seconds(args.ttl, "ttl")
    plan_timeout(args)
    call(args, _pin)


def _run_unpin(args: argparse.Namespace) -> None:
    plan_timeout(args)
    call(args, _unpin)


def _run_prefetch(args: argparse.Namespace) -> None:
    parse_devices(args.device, "device")
    plan_timeout(args)
    call(args, _prefetch)


async def _pin(session: Session, args: argparse.Namespace) -> None:
    await session.artifact(args.reference).pin(args.ttl, args.on, args.timeout)


async def _unpin(session: Session, args: argparse.Namespace) -> None:
    await session.artifact(args.reference).unpin(args.on, args.timeout)


async def _prefetch(session: Session, args: argparse.Namespace) -> None:
    found = await session.stored(args.reference)
    if not args.device:
        work = found.prefetch(args.to, args.timeout)
    elif isinstance(found, Artifact):
        work = found.replicate(args.device, args.to, args.timeout)
    else:
        raise InvalidArgument(
            f"{args.reference} is a published version, which is in parts; on a device can be parameters that an engine has "
            "loaded (`tensorcast weights ls`), or an artifact"
        )
    with progress_bar() as told:
        await with_progress(work, found, args.to, told)


# --- rm ---------------------------------------------------------------------------------------------------------------


def _run_rm(args: argparse.Namespace) -> None:
    if bool(args.references) + args.all + (args.older_than is not None) != 1:
        raise ConfigError("say what to delete: names or ids, or --all, or --older-than AGE")
    if args.references:
        call(args, _delete_named)
        return
    if args.all and args.tenant is None:
        raise ConfigError("--all deletes everything of a tenant: say whose with --tenant")
    if args.older_than is not None:
        args.older_than = parse_seconds(args.older_than, "older-than")
    if not args.yes and not sys.stdin.isatty():
        raise ConfigError("this deletes what is not named one by one, and nobody is there to be asked: say --yes")
    call(args, _delete_many)


async def _delete_named(session: Session, args: argparse.Namespace) -> None:
    await delete_each(session, args.references, _delete_one)


async def _delete_one(session: Session, reference: str) -> None:
    """A name of several goes alone; with its last name, or by its id, the artifact goes."""
    names = (await session.artifact(reference).describe()).names
    others = [each for each in names if each != reference and not each.startswith(LINEAGE)]
    if others and not is_artifact_id(reference):
        await session.unname(reference)
        write_note(f"{reference}: this name is gone; the artifact stays under {', '.join(others)}")
    else:
        await session.delete(reference)


async def _delete_many(session: Session, args: argparse.Namespace) -> None:
    found = await session.list_artifacts()
    if args.older_than is not None:
        oldest = await _now_of_gateway(session) - args.older_than
        found = [each for each in found if each.created_unix_s < oldest]
    if not found and not args.all:
        write_note("nothing to delete")
        return
    what = f"{len(found)} artifact(s) of tenant {args.tenant or TENANT!r}, {as_size(sum(each.bytes for each in found))}"
    what += " and all pages of KV cache" if args.all else ""
    if not args.yes and not await asyncio.to_thread(_agrees, f"delete {what}? [y/N] "):
        raise TensorcastError("nothing was deleted")
    for each in found:
        with contextlib.suppress(NotFound):  # somebody else has deleted it meanwhile
            await session.delete(each.artifact_id)
    write_note(f"deleted {what}")
    if args.all:
        gone = await session.forget_pages()
        write_note(f"{gone.evicted} page(s) evicted, {gone.in_use} in use just now and still there")
        if gone.nobodys:
            write_note(f"{gone.nobodys} page(s) stay of which no engine has said whose they are")
        if gone.in_use or gone.unreachable:
            raise TensorcastError(f"not all pages are gone, run it again (not reached: {gone.unreachable or 'nobody'})")


async def _now_of_gateway(session: Session) -> float:
    """Seconds since 1970 where artifacts get their dates, since the clock here may be another."""
    for each in await session.list_workers():
        if each.worker_id == session.worker_id and each.signals is not None:
            return each.signals.as_of_unix_s + each.signals.age_s
    raise Unavailable("the worker does not say what time it has, so ages cannot be told")


def _agrees(question: str) -> bool:
    sys.stderr.write(question)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# --- plan -------------------------------------------------------------------------------------------------------------


def _run_plan(args: argparse.Namespace) -> None:
    args.steps = read_plan(args.file)
    plan_timeout(args)
    args.key = secrets.token_hex(16) if args.key is None else args.key
    call(args, _plan)


async def _plan(session: Session, args: argparse.Namespace) -> None:
    context = CallContext(timeout_s=args.timeout, idempotency_key=args.key)
    await run_plan(session, args.steps, context, args.json)


async def _plan_show(session: Session, args: argparse.Namespace) -> None:
    show_plan(args.key, await session.plan_record(args.key), args.json)


async def _plan_cancel(session: Session, args: argparse.Namespace) -> None:
    show_plan(args.key, await session.cancel_plan(args.key), args.json)


# --- flags ------------------------------------------------------------------------------------------------------------


def add_service_commands(subparsers: Any) -> None:
    """Adds the commands of this module, and doctor."""

    def command(
        name: str, text: str, run: Callable[[argparse.Namespace], None] | None = None, work: Work | None = None,
        among: Any = subparsers,
    ) -> argparse.ArgumentParser:  # fmt: skip
        sub: argparse.ArgumentParser = among.add_parser(name, help=text, description=text)
        if work is not None:
            run = _calls(work)
        if run is not None:
            sub.set_defaults(run=run)
            caller_flags(sub)
        return sub

    put = command("put", "Puts the tensors of safetensors files into the pool, and says their id.", run=_run_put)
    put.add_argument("path", metavar="PATH", help="a file, or a folder with its index or its files")
    put.add_argument("--name", metavar="NAME", default="", help="make this name point to it")
    put.add_argument("--lease", metavar="SECONDS", help="only while this command runs, and so long after it died")
    _json_flag(put)
    get = command("get", "Writes an artifact to a safetensors file.", work=_get)
    _reference(get)
    get.add_argument("out", metavar="OUT.safetensors", help="is there once it is complete")
    get.add_argument("--tensor", metavar="NAME", action="append", help="only this tensor; again for each further one")
    get.set_defaults(**{OFTEN: "--tensor"})
    ls = command("ls", "Lists artifacts.", work=_list)
    ls.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="of their names or ids")
    _json_flag(ls)
    pin = command("pin", "Keeps an artifact in the memory of a worker.", run=_run_pin)
    _reference(pin)
    pin.add_argument("--ttl", metavar="S", required=True, help="for how long: seconds, or for example 15m or 24h")
    unpin = command("unpin", "Ends that.", run=_run_unpin)
    _reference(unpin)
    for sub in (pin, unpin):
        sub.add_argument("--on", metavar="WORKER", default="", help="name or id (default: the worker that is asked)")
    prefetch = command(
        "prefetch", "Brings an artifact or a published version into the memory of a worker.", run=_run_prefetch
    )
    _reference(prefetch)
    prefetch.add_argument("--to", metavar="WORKER", required=True, help="name or id")
    prefetch.add_argument(
        "--device", metavar="cuda:N", default="", help="on to a device of that worker, for engines that load it there"
    )
    rm = command("rm", "Deletes artifacts and their names.", run=_run_rm)
    rm.add_argument("references", metavar="REF", nargs="*", help="name or id")
    rm.add_argument("--all", action="store_true", help="all of the tenant, which has to be named")
    rm.add_argument("--older-than", metavar="AGE", help="all of the tenant that were put before, for example 24h")
    rm.add_argument("--yes", action="store_true", help="without asking")
    for sub in (pin, unpin, prefetch):
        timeout_flag(sub)
    for sub in (put, get):
        timeout_flag(sub, "as long as it takes")
    _plan_commands(command)
    weights_flags(command("weights", "Published versions of weights, and what engines have loaded."), [caller_flags])
    doctor_flags(command("doctor", "Checks this host and its cluster, and says what to change."), run_doctor)


def _plan_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    plan = command("plan", "Runs plans of steps on workers and engines.")
    among = plan.add_subparsers(dest="action", metavar="run | show | cancel", required=True)
    run = command("run", "Runs a plan, and shows how each step went.", run=_run_plan, among=among)
    run.add_argument("file", metavar="FILE.json", help="its steps, see docs/commands.md")
    run.add_argument("--key", help="running the same plan under the same key again joins it (default: a new one)")
    timeout_flag(run)
    shown = command("show", "Shows a plan that runs or has ended lately.", work=_plan_show, among=among)
    cancel = command("cancel", "Ends a plan; what is done stays done.", work=_plan_cancel, among=among)
    for sub in (shown, cancel):
        sub.add_argument("key", metavar="KEY")
    for sub in (run, shown, cancel):
        _json_flag(sub)


def _calls(work: Work) -> Callable[[argparse.Namespace], None]:
    return lambda args: call(args, work)


def _reference(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("reference", metavar="REF", help="name or id of an artifact")


def _json_flag(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="one object, described in docs/commands.md")
