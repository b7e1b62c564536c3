"""`tensorcast status` (workers, engines, shards and who holds what, as tables or one JSON object) and `tensorcast story`."""

import argparse
import asyncio
import contextlib
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tensorcast_connector.cli_network import access_flags, network_of_flags
from tensorcast_connector.cli_tables import as_tables, printable
from tensorcast_connector.client.status import ClusterStatus, StatusReader, WorkerStatus, read_story
from tensorcast_connector.config import parse_address
from tensorcast_connector.core.story import nothing_found
from tensorcast_connector.errors import ConfigError, TensorcastError

PIPED_COLUMNS = 100_000  # nothing is cut or broken in a pipe


# --- what JSON says: docs/status.md -----------------------------------------------------------------------------------


def as_json(status: ClusterStatus, now: float, unix_s: float) -> dict[str, Any]:
    """The object that docs/status.md describes.

    Args:
        now: the caller's clock in seconds.
        unix_s: the same moment in seconds since 1970.
    """
    view = status.view
    return {
        "as_of_unix_s": unix_s - (now - status.read_at_s),
        "store": {"incarnation": view.incarnation, "revision": view.revision},
        "workers": [_worker_as_json(worker, status, now) for worker in status.workers.values()],
        "instances": [msgspec.to_builtins(each) for each in view.instances.values()],
        "shard_count": view.shard_count,
        "shards": [
            {"shard": shard, "home": holder.worker_id, **holder.token._asdict()}
            for shard, holder in sorted(view.shards.items())
        ],
        "shards_without_home": status.homeless(),
        "disabled": [{"what": what, "note": note} for what, note in sorted(view.disabled.items())],
        "replicas": [msgspec.to_builtins(copy) for copies in view.replicas.values() for copy in copies.values()],
    }


def _worker_as_json(worker: WorkerStatus, status: ClusterStatus, now: float) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(worker.record),
        "shards": status.shards_of(worker.record.worker_id),
        "reachable": worker.signals is not None,
        "error": worker.error,
        "age_s": worker.age_s(now),
        "artifact_bytes_used": worker.artifact_bytes.used if worker.artifact_bytes else None,
        "artifact_bytes_max": worker.artifact_bytes.most if worker.artifact_bytes else None,
        "signals": None if worker.signals is None else _signals_as_json(worker.signals),
    }


def _signals_as_json(signals: msgspec.Struct) -> dict[str, Any]:
    return {name: msgspec.to_builtins(getattr(signals, name)) for name in signals.__struct_fields__}


# --- once, and again and again ----------------------------------------------------------------------------------------


class StatusCommand:
    """Shows the status of one cluster.

    Args:
        now: this process's clock in seconds.
        wall: seconds since 1970.
        json_lines: objects instead of tables.
    """

    def __init__(
        self, reader: StatusReader, now: Callable[[], float], wall: Callable[[], float], json_lines: bool,
        every_shard: bool,
    ) -> None:  # fmt: skip
        self._reader = reader
        self._now = now
        self._wall = wall
        self._json = json_lines
        self._every_shard = every_shard
        self._console = console()

    async def once(self) -> None:
        """Shows it.

        Raises:
            TensorcastError: no store answers.
        """
        self._show(await self._reader.status())

    async def watch(self, interval_s: float) -> None:
        """Shows it every `interval_s` seconds until it is cancelled: in place on a terminal, else one after the other.

        Raises:
            TensorcastError: no store answers the first time. Later that is shown, and it goes on.
        """
        status = await self._reader.status()
        if self._json or not self._console.is_terminal:
            self._show(status)
            while True:
                await asyncio.sleep(interval_s)
                try:
                    status = await self._reader.status()
                except TensorcastError as error:
                    sys.stderr.write(f"{error}\n")
                    continue
                if not self._json:
                    self._console.print()  # between two pictures
                self._show(status)
        with Live(Group(*self._tables(status)), console=self._console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval_s)
                note: Iterable[RenderableType] = ()
                try:
                    status = await self._reader.status()
                except TensorcastError as error:
                    age_s = self._now() - status.read_at_s
                    why = f"no store answers: {printable(str(error))}; this was read {age_s:.0f} s ago"
                    note = (Text(why, style="red"),)
                live.update(Group(*self._tables(status), *note), refresh=True)

    def _tables(self, status: ClusterStatus) -> list[RenderableType]:
        return as_tables(status, self._now(), self._wall(), self._every_shard)

    def _show(self, status: ClusterStatus) -> None:
        if self._json:
            sys.stdout.write(json.dumps(as_json(status, self._now(), self._wall())) + "\n")
            sys.stdout.flush()
        else:
            self._console.print(*self._tables(status), sep="\n")


def console() -> Console:
    """Where tables go; in a pipe plain text, whatever the environment asks for."""
    if sys.stdout.isatty():
        return Console()
    return Console(width=PIPED_COLUMNS, force_terminal=False, color_system=None)


# --- commands ---------------------------------------------------------------------------------------------------------


def status_flags(sub: argparse.ArgumentParser) -> None:
    """The flags of `tensorcast status`."""
    access_flags(sub)
    sub.add_argument("--store", metavar="HOST:PORT,...", default="127.0.0.1:7700", help="default 127.0.0.1:7700")
    sub.add_argument("--json", action="store_true", help="one object, described in docs/status.md")
    sub.add_argument("--shards", action="store_true", help="one line for each shard, with its fencing token")
    sub.add_argument(
        "--watch", metavar="SECONDS", nargs="?", type=float, const=2.0, help="again and again (default: every 2 s)"
    )


def run_status(args: argparse.Namespace) -> None:
    """`tensorcast status`; raises TensorcastError."""
    stores = [parse_address(each.strip(), "store") for each in args.store.split(",")]
    if args.watch is not None and not (args.watch > 0 and math.isfinite(args.watch)):
        raise ConfigError(f"watch={args.watch:g}: seconds above 0 are needed")
    reader = StatusReader(network_of_flags(args), stores, "tensorcast status", random.Random(), time.monotonic)
    command = StatusCommand(reader, time.monotonic, time.time, args.json, args.shards)
    if args.watch is None:
        asyncio.run(command.once())
        return
    with contextlib.suppress(KeyboardInterrupt):  # that is how it ends
        asyncio.run(command.watch(args.watch))


def story_flags(sub: argparse.ArgumentParser) -> None:
    """The flags of `tensorcast story`."""
    access_flags(sub)
    sub.add_argument("text", help="first hex digits of a block hash, a hold's id, an artifact's id or "
                     "name, a plan's key, 'shard 12', or '' for everything")  # fmt: skip
    sub.add_argument("--worker", metavar="ADDRESS", required=True, help="HOST:PORT or unix:/path of the worker")


def run_story(args: argparse.Namespace) -> None:
    """`tensorcast story`; raises TensorcastError."""
    worker = parse_address(args.worker, "worker")
    lines = asyncio.run(read_story(network_of_flags(args), worker, args.text, "tensorcast story", random.Random()))
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))
    if not lines:
        sys.stderr.write(f"{worker} has {nothing_found(args.text)}\n")
