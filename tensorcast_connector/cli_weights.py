"""`tensorcast weights ls|pin|rm`: published versions, and parameters that engines have loaded; and how a prefetch goes on."""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from tensorcast_connector.cli_callers import (
    add_row,
    as_age,
    as_size,
    call,
    delete_each,
    new_table,
    parse_seconds,
    plan_timeout,
    show,
    timeout_flag,
    worker_address,
    write_json,
    write_note,
)
from tensorcast_connector.cli_network import network_of_flags, tenant_of_flags
from tensorcast_connector.client.artifact import Artifact
from tensorcast_connector.client.publisher import WeightPublisher
from tensorcast_connector.client.session import Session, connect
from tensorcast_connector.client.weights import Weights
from tensorcast_connector.config import PROGRESS_INTERVAL_S, TENANT
from tensorcast_connector.core.weights import Held, held_manifest
from tensorcast_connector.errors import NotFound, TensorcastError
from tensorcast_connector.wire.caller_messages import ArtifactListed

MATERIALISED = "weights/"
KEY_TENSOR = "tensorcast.key"
Told = Callable[[int, int], None]


# --- what was stored, and how it comes ----------------------------------------------------------------------------------


@contextlib.contextmanager
def progress_bar() -> Iterator[Told | None]:
    """Bytes, rate and the time that is left, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=None)
        yield lambda done, size: shown.update(task, completed=done, total=size)


async def with_progress(work: Coroutine[Any, Any, None], found: Artifact | Weights, at: str, told: Told | None) -> None:
    """Does `work`, which brings something to a worker, and asks that worker meanwhile how far it is."""
    doing = asyncio.ensure_future(work)
    try:
        while told is not None and not doing.done():
            with contextlib.suppress(TensorcastError):  # the work itself says what is wrong
                told(*await found.arrival(at))
            await asyncio.wait([doing], timeout=PROGRESS_INTERVAL_S)
        await doing
    finally:
        doing.cancel()
        await asyncio.wait([doing])


# --- ls ---------------------------------------------------------------------------------------------------------------


async def _list(session: Session, args: argparse.Namespace, wall: Callable[[], float] = time.time) -> None:
    found = {each.artifact_id: each for each in await session.list_artifacts()}
    versions = [
        await _version(session, each, held, found)
        for each in found.values()
        if (held := held_manifest(each)) is not None and held.model.startswith(args.prefix)
    ]
    versions.sort(key=lambda each: (each["model"], -each["order"]))
    loaded = [each for each in found.values() if any(_is_loaded(name, args.prefix) for name in each.names)]
    async with _sessions(session, args) as at:
        on_devices = await _devices(session, loaded, at)
        materialised = [_materialised(each, await _document(each, session, at), on_devices) for each in loaded]
    if args.json:
        write_json({"tenant": args.tenant or TENANT, "versions": versions, "materialised": materialised})
        return
    if not versions and not materialised:
        write_note("no weights")
        return
    if versions:
        table = new_table("Published versions", "version", "names", "size", "moved", "parts", "age", "id", "where")
        for each in versions:
            add_row(table, f"{each['model']}:{each['version']}" + (" (newest)" if each["newest"] else ""),
                    ", ".join(each["names"]) or "-", _size(each["bytes"]), _size(each["moved_bytes"]),
                    "-" if each["parts"] is None else str(each["parts"]), as_age(max(0.0, wall() - each["created_unix_s"])),
                    each["id"], _where(each["workers"]))  # fmt: skip
        show(table)
    if materialised:
        table = new_table("Loaded parameters", "name", "model", "rank", "engine", "size", "age", "where", "devices")
        for each in materialised:
            devices = [f"{worker} {device}" for worker, names in each["devices"].items() for device in names]
            add_row(table, each["name"], each["model"] or "-", each["rank"] or "-", each["engine"] or "-",
                    _size(each["bytes"]), as_age(max(0.0, wall() - each["created_unix_s"])), _where(each["workers"]),
                    ", ".join(devices) or "-")  # fmt: skip
        show(table)


async def _version(
    session: Session, listed: ArtifactListed, held: Held, found: dict[str, ArtifactListed]
) -> dict[str, Any]:  # fmt: skip
    """What is said of a version; what its manifest says only if that can be read."""
    own = [each for each in listed.names if each.startswith(f"{held.model}:") and each.count(":") == 1]
    others = [each for each in listed.names if each not in (*own, held.model) and not each.startswith(f"{held.model}:")]
    said: dict[str, Any] = {
        "model": held.model, "version": own[0].partition(":")[2] if own else str(held.order), "order": held.order,
        "newest": held.model in listed.names, "names": others, "artifact_id": listed.artifact_id, "id": held.content_id,
        "created_unix_s": listed.created_unix_s, "bytes": None, "moved_bytes": None, "parts": None, "workers": {},
    }  # fmt: skip
    try:
        weights = await session.weights(listed.artifact_id)
    except TensorcastError:
        return said
    published = weights.published
    parts = [found[each] for each in weights.part_ids if each in found]
    size = sum(each.bytes for each in parts)
    workers = sorted({worker for each in parts for worker in each.workers})
    said["workers"] = {
        worker: sum(each.bytes for each in parts if worker in each.workers) / max(1, size) for worker in workers
    }
    return said | {"bytes": published.bytes, "moved_bytes": published.moved_bytes, "parts": published.parts}


def _is_loaded(name: str, prefix: str) -> bool:
    return name.startswith(MATERIALISED) and name.startswith((prefix, MATERIALISED + prefix))


def _materialised(
    listed: ArtifactListed, said: dict[str, Any], on_devices: Mapping[tuple[str, str], list[str]]
) -> dict[str, Any]:  # fmt: skip
    facts = said.get("facts")
    engine = facts.get("engine") if isinstance(facts, dict) else None
    texts = [str(each) for each in engine[:2]] if isinstance(engine, list) else []
    return {
        "name": next(each for each in listed.names if each.startswith(MATERIALISED)), "artifact_id": listed.artifact_id,
        "model": str(said.get("model", "")), "rank": str(said.get("rank", "")), "engine": " ".join(texts),
        "bytes": listed.bytes, "created_unix_s": listed.created_unix_s, "workers": dict.fromkeys(listed.workers, 1.0),
        "devices": {worker: names for (artifact, worker), names in on_devices.items() if artifact == listed.artifact_id},
    }  # fmt: skip


At = Callable[[str], Awaitable[Session | None]]


@contextlib.asynccontextmanager
async def _sessions(session: Session, args: argparse.Namespace) -> AsyncIterator[At]:
    """Sessions with workers by their ids, each opened when it is wanted; None for one that is not listed."""
    async with contextlib.AsyncExitStack() as stack:
        sessions: dict[str, Session | None] = {session.worker_id: session}

        async def at(worker_id: str) -> Session | None:
            if worker_id not in sessions:
                sessions[worker_id] = None
                listed = [each.address for each in await session.list_workers() if each.worker_id == worker_id]
                if not listed:
                    return None
                address, tenant = listed[0], tenant_of_flags(args)
                opening = connect(worker_address(address), tenant=tenant, network=network_of_flags(args, tenant))
                sessions[worker_id] = await stack.enter_async_context(await opening)
            return sessions[worker_id]

        yield at


async def _document(listed: ArtifactListed, session: Session, at: At) -> dict[str, Any]:
    """The key document, read where the parameters are, so that nothing is moved for it."""
    for worker_id in sorted(listed.workers, key=lambda each: each != session.worker_id)[:2]:
        with contextlib.suppress(TensorcastError, ValueError):
            if (there := await at(worker_id)) is not None:
                raw = await there.artifact(listed.artifact_id).tensor(KEY_TENSOR, framework="raw")
                said = json.loads(bytes(raw.data))
                return said if isinstance(said, dict) else {}
    return {}


async def _devices(session: Session, listed: Sequence[ArtifactListed], at: At) -> dict[tuple[str, str], list[str]]:
    """By artifact and worker, the devices that have it in their memory; workers that cannot be asked are left out."""
    found: dict[tuple[str, str], list[str]] = {}
    if not listed:
        return found
    for worker in await session.list_workers():
        if worker.signals is None or not worker.signals.values.get("devices"):
            continue
        with contextlib.suppress(TensorcastError):
            if (there := await at(worker.worker_id)) is not None:
                for each in listed:
                    if replicas := await there.artifact(each.artifact_id).replicas():
                        found[each.artifact_id, worker.worker_id] = sorted(replica.device for replica in replicas)
    return found


def _size(size: int | None) -> str:
    if size is None:
        return "bytes are gone"
    return as_size(size) if size >= 10 << 20 else f"{size / 1024:.1f} KiB"


def _where(workers: dict[str, float]) -> str:
    shares = [worker if share >= 1 else f"{worker} ({share:.0%})" for worker, share in workers.items()]
    return ", ".join(shares) or "none: its bytes are gone"


# --- pin, rm ----------------------------------------------------------------------------------------------------------


def _run_pin(args: argparse.Namespace) -> None:
    args.ttl = parse_seconds(args.ttl, "ttl")
    plan_timeout(args)
    call(args, _pin)


async def _pin(session: Session, args: argparse.Namespace) -> None:
    await (await session.stored(args.reference)).pin(args.ttl, args.on, args.timeout)


def _run_rm(args: argparse.Namespace) -> None:
    call(args, _remove)


async def _remove(session: Session, args: argparse.Namespace) -> None:
    await delete_each(session, args.references, _remove_one)


async def _remove_one(session: Session, reference: str) -> None:
    """A model with all its versions, one version, or loaded parameters."""
    if reference.startswith(MATERIALISED):
        await session.delete(reference)
        return
    model, _, version = reference.partition(":")
    gone = await WeightPublisher(session, model, keep_last=sys.maxsize).remove(version or None)
    if not gone:
        raise NotFound(f"there is no published version {reference!r}; `tensorcast weights ls` lists them")
    write_note(f"{reference}: {gone} version(s) deleted")


# --- flags ------------------------------------------------------------------------------------------------------------


def weights_flags(weights: argparse.ArgumentParser, flags: Sequence[Callable[[argparse.ArgumentParser], None]]) -> None:
    """Of `tensorcast weights`; `flags` are those that every action has."""
    among = weights.add_subparsers(dest="action", metavar="ls | pin | rm", required=True)

    def action(name: str, text: str, run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = among.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        for each in flags:
            each(sub)
        return sub

    ls = action(
        "ls", "Lists published versions, and parameters that engines have loaded.", lambda args: call(args, _list)
    )
    ls.add_argument(
        "prefix", metavar="PREFIX", nargs="?", default="", help="of the model's name, or of the parameters'"
    )
    ls.add_argument("--json", action="store_true", help="one object, described in docs/commands.md")
    pin = action("pin", "Keeps all parts of a version in the memory of a worker.", _run_pin)
    pin.add_argument("reference", metavar="MODEL[:VERSION]", help="the newest unless told; or the name of parameters")
    pin.add_argument("--ttl", metavar="S", required=True, help="for how long: seconds, or for example 15m or 24h")
    pin.add_argument("--on", metavar="WORKER", default="", help="name or id (default: the worker that is asked)")
    timeout_flag(pin)
    rm = action("rm", "Deletes versions, and what only they need.", _run_rm)
    rm.add_argument("references", metavar="MODEL[:VERSION]", nargs="+", help="all versions unless told; or parameters")
