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
from rich.markup import escape
from rich.table import Table

from tensorcast_connector.client.signals import ClusterStatus, Observatory, WorkerStatus, read_story
from tensorcast_connector.config import parse_address
from tensorcast_connector.core.story import ranges
from tensorcast_connector.errors import ConfigError, TensorcastError
from tensorcast_connector.net.sockets import SocketNetwork

PIPED_COLUMNS = 400  # ids are never cut in a pipe


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
        "shards_without_home": homeless(status),
        "replicas": [msgspec.to_builtins(copy) for copies in view.replicas.values() for copy in copies.values()],
    }


def _worker_as_json(worker: WorkerStatus, status: ClusterStatus, now: float) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(worker.record),
        "shards": shards_of(status, worker.record.worker_id),
        "reachable": worker.signals is not None,
        "error": worker.error,
        "age_s": worker.age_s(now),
        "signals": None if worker.signals is None else _signals_as_json(worker.signals),
    }


def _signals_as_json(signals: msgspec.Struct) -> dict[str, Any]:
    return {name: msgspec.to_builtins(getattr(signals, name)) for name in signals.__struct_fields__}


def homeless(status: ClusterStatus) -> list[int]:
    """The shards that nobody is the home of."""
    return [shard for shard in range(status.view.shard_count) if shard not in status.view.shards]


def shards_of(status: ClusterStatus, worker_id: str) -> list[int]:
    """The shards whose home is that worker, as the store lists them."""
    return sorted(shard for shard, holder in status.view.shards.items() if holder.worker_id == worker_id)


# --- tables -----------------------------------------------------------------------------------------------------------


def as_tables(status: ClusterStatus, now: float, every_shard: bool = False) -> list[RenderableType]:
    """What people see.

    Args:
        now: the caller's clock in seconds.
        every_shard: one line for each shard, with its fencing token.
    """
    if not status.workers:
        return ["No workers yet: start one with `tensorcast worker --store ADDRESS`."]
    return [
        _workers(status, now),
        _instances(status) if status.view.instances else "Instances: none",
        _every_shard(status) if every_shard else _shards(status),
        *([_replicas(status)] if status.view.replicas else []),
    ]


def _workers(status: ClusterStatus, now: float) -> Table:
    table = _table("Workers", "worker", "address", "roles", "version", "arena", "pages", "memory", "network", "queue",
                   "shards", "age")  # fmt: skip
    for worker_id, worker in status.workers.items():
        record, signals = worker.record, worker.signals
        listed = (worker_id, record.address, " ".join(record.roles), str(record.version))
        shards = str(len(shards_of(status, worker_id)))
        size = _size(record.arena_bytes)
        if signals is None:
            table.add_row(*map(escape, (*listed, size, *"----", shards, f"unreachable: {worker.error}")), style="red")
            continue
        used = _share(signals.values.get("arena_used_bytes", 0) / max(1, record.arena_bytes))
        pages = str(signals.values.get("pages", "-"))
        pressures = (_share(signals.memory), _share(signals.network), _share(signals.queue))
        age = f"{worker.age_s(now):.1f} s"
        table.add_row(*map(escape, (*listed, f"{used} of {size}", pages, *pressures, shards, age)))
    return table


def _instances(status: ClusterStatus) -> Table:
    table = _table("Instances", "instance", "engine", "model", "worker")
    for each in status.view.instances.values():
        table.add_row(*map(escape, (each.instance_id, each.engine, each.model, each.worker_id)))
    return table


def _shards(status: ClusterStatus) -> Table:
    table = _table(f"Shards ({status.view.shard_count})", "home", "shards", "which")
    homes = sorted({holder.worker_id for holder in status.view.shards.values()})
    for home in homes:
        held = shards_of(status, home)
        gone = "" if home in status.workers else " (has left)"
        table.add_row(escape(home + gone), str(len(held)), ranges(held))
    if vacant := homeless(status):
        table.add_row("without a home", str(len(vacant)), ranges(vacant), style="red")
    return table


def _every_shard(status: ClusterStatus) -> Table:
    table = _table(f"Shards ({status.view.shard_count})", "shard", "home", "token")
    for shard in range(status.view.shard_count):
        holder = status.view.shards.get(shard)
        if holder is None:
            table.add_row(str(shard), "without a home", "-", style="red")
        else:
            token = f"{holder.token.incarnation}/{holder.token.revision}"
            table.add_row(str(shard), escape(holder.worker_id), token)
    return table


def _replicas(status: ClusterStatus) -> Table:
    table = _table("Replicas", "artifact", "copies", "size", "where")
    for artifact, copies in sorted(status.view.replicas.items()):
        where = ", ".join(f"{worker_id} ({copy.tier})" for worker_id, copy in sorted(copies.items()))
        size = _size(max(copy.bytes for copy in copies.values()))
        table.add_row(escape(artifact), str(len(copies)), size, escape(where))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB" if size_bytes >= 1 << 30 else f"{size_bytes / (1 << 20):.0f} MiB"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


# --- once, and again and again ----------------------------------------------------------------------------------------


class StatusCommand:
    """Shows the status of one cluster.

    Args:
        now: this process's clock in seconds.
        wall: seconds since 1970.
        json_lines: objects instead of tables.
    """

    def __init__(
        self, observatory: Observatory, now: Callable[[], float], wall: Callable[[], float], json_lines: bool,
        every_shard: bool,
    ) -> None:  # fmt: skip
        self._observatory = observatory
        self._now = now
        self._wall = wall
        self._json = json_lines
        self._every_shard = every_shard
        self._console = Console() if sys.stdout.isatty() else Console(width=PIPED_COLUMNS)

    async def once(self) -> None:
        """Shows it.

        Raises:
            TensorcastError: no store answers.
        """
        self._show(await self._observatory.status())

    async def watch(self, interval_s: float) -> None:
        """Shows it every `interval_s` seconds until it is cancelled: in place on a terminal, else one after the other.

        Raises:
            TensorcastError: no store answers the first time. Later that is shown, and it goes on.
        """
        status = await self._observatory.status()
        if self._json or not self._console.is_terminal:
            self._show(status)
            while True:
                await asyncio.sleep(interval_s)
                try:
                    self._show(await self._observatory.status())
                except TensorcastError as error:
                    sys.stderr.write(f"{error}\n")
        with Live(Group(*self._tables(status)), console=self._console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval_s)
                note: Iterable[RenderableType] = ()
                try:
                    status = await self._observatory.status()
                except TensorcastError as error:
                    age_s = self._now() - status.read_at_s
                    note = (f"[red]no store answers: {escape(str(error))}; this was read {age_s:.0f} s ago[/red]",)
                live.update(Group(*self._tables(status), *note), refresh=True)

    def _tables(self, status: ClusterStatus) -> list[RenderableType]:
        return as_tables(status, self._now(), self._every_shard)

    def _show(self, status: ClusterStatus) -> None:
        if self._json:
            sys.stdout.write(json.dumps(as_json(status, self._now(), self._wall())) + "\n")
            sys.stdout.flush()
        else:
            self._console.print(*self._tables(status), sep="\n")


# --- commands ---------------------------------------------------------------------------------------------------------


def status_flags(sub: argparse.ArgumentParser) -> None:
    """The flags of `tensorcast status`."""
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
    observatory = Observatory(SocketNetwork(), stores, "tensorcast status", random.Random(), time.monotonic)
    command = StatusCommand(observatory, time.monotonic, time.time, args.json, args.shards)
    if args.watch is None:
        asyncio.run(command.once())
        return
    with contextlib.suppress(KeyboardInterrupt):  # that is how it ends
        asyncio.run(command.watch(args.watch))


def story_flags(sub: argparse.ArgumentParser) -> None:
    """The flags of `tensorcast story`."""
    sub.add_argument("text", help="first hex digits of a block hash, a hold's id, 'shard 12', or '' for everything")
    sub.add_argument("--worker", metavar="ADDRESS", required=True, help="HOST:PORT or unix:/path of the worker")


def run_story(args: argparse.Namespace) -> None:
    """`tensorcast story`; raises TensorcastError."""
    worker = parse_address(args.worker, "worker")
    lines = asyncio.run(read_story(SocketNetwork(), worker, args.text, "tensorcast story", random.Random()))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    if not lines:
        sys.stderr.write(f"{worker} has nothing recorded about {args.text!r}; only the latest events are kept\n")
