"""The `tensorcast` command."""

import argparse
import asyncio
import io
import json
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from tensorcast_connector.cli_logs import set_up_logging
from tensorcast_connector.cli_status import run_status, run_story, status_flags, story_flags
from tensorcast_connector.config import (
    StoreConfig,
    WorkerConfig,
    config_from_file,
    default_runtime_dir,
    parse_address,
    parse_endpoints,
    parse_metrics,
    parse_size,
)
from tensorcast_connector.errors import ConfigError, TensorcastError
from tensorcast_connector.net.private import private_directory
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.store.backup import read_backup, restore_backup, take_backup, write_backup
from tensorcast_connector.store.incarnation import ensure_incarnation
from tensorcast_connector.store.kv import KvStore
from tensorcast_connector.store.measured_kv import MeasuredKv
from tensorcast_connector.store.server import Store, listen, open_store
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.worker.server import Worker, start_worker

logger = logging.getLogger("tensorcast")


def boottime_s() -> float:
    """Seconds that go on during suspend and never jump."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def _open_kv(stack: AsyncExitStack, config: StoreConfig) -> KvStore:
    kv: KvStore
    if config.etcd:
        from tensorcast_connector.store.etcd_kv import open_etcd  # the HTTP client takes a while to load

        kv = await open_etcd(parse_endpoints(config.etcd, "etcd"), config.etcd_prefix)
    else:
        kv = SqliteKv(_database(config), boottime_s)
    stack.push_async_callback(kv.close)
    return kv


def _database(config: StoreConfig) -> Path:
    return Path(config.data_dir) / "store.db"


def _where(config: StoreConfig) -> str:
    return f"etcd {config.etcd} {config.etcd_prefix}" if config.etcd else config.data_dir


@dataclass
class _Running:
    """What runs in this process and has metrics."""

    stores: list[tuple[Store, MeasuredKv]] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)


async def _start_store(stack: AsyncExitStack, config: StoreConfig, running: _Running) -> str:
    address = parse_address(config.listen, "listen")
    kv = await _open_kv(stack, config)
    await ensure_incarnation(kv, int(time.time()))
    measured = MeasuredKv(kv, time.monotonic)
    store = await open_store(measured, _where(config), config.shards)
    listener = await listen(SocketNetwork(), address, store)
    stack.push_async_callback(listener.close)
    running.stores.append((store, measured))
    fields = {"event": "serving", "address": str(listener.address), "database": _where(config)}
    logger.info("store serves at %s, database in %s", listener.address, _where(config), extra=fields)
    return str(listener.address)


async def _backup(config: StoreConfig, path: Path) -> None:
    if not config.etcd and not _database(config).exists():
        raise ConfigError(f"there is no store database in {config.data_dir}")
    async with AsyncExitStack() as stack:
        backup = await take_backup(await _open_kv(stack, config))
    write_backup(path, backup)
    print(
        f"{len(backup.entries)} key(s) at revision {backup.revision}, incarnation {backup.incarnation}, written to {path}"
    )


async def _restore(config: StoreConfig, path: Path, replace_all: bool) -> None:
    backup = read_backup(path)
    async with AsyncExitStack() as stack:
        kv = await _open_kv(stack, config)
        incarnation = await restore_backup(kv, backup, replace=replace_all, now_unix_s=int(time.time()))
    print(f"{len(backup.entries)} key(s) restored to {_where(config)}, incarnation {incarnation}")


async def _start_worker(stack: AsyncExitStack, config: WorkerConfig, running: _Running) -> dict[str, str]:
    worker = await start_worker(config, SocketNetwork(), random.Random(), boottime_s)
    stack.push_async_callback(worker.close)
    running.workers.append(worker)
    return {"worker": str(worker.socket), "peer": str(worker.address), "worker_id": worker.worker_id}


async def _start_metrics(stack: AsyncExitStack, metrics: str, running: _Running) -> dict[str, str]:
    """Serves the metrics of all that runs here, if there is an address for it; what to add to the ready file."""
    address = parse_metrics(metrics)
    if address is None:
        return {}
    from tensorcast_connector.net.metrics_server import Source, serve_metrics  # the HTTP server takes a while to load
    from tensorcast_connector.store.metrics import StoreMetrics
    from tensorcast_connector.worker.metrics import WorkerMetrics

    sources: list[Source] = [StoreMetrics(*store) for store in running.stores]
    sources += [WorkerMetrics(worker) for worker in running.workers]
    listener = await serve_metrics(address, sources)
    stack.push_async_callback(listener.close)
    return {"metrics": str(listener.address)}


Start = Callable[[AsyncExitStack], Awaitable[dict[str, str]]]


def _serve(start: Start, ready_file: str) -> None:
    """Runs what `start` starts until SIGTERM or SIGINT."""
    asyncio.run(_until_stopped(start, ready_file))


async def _until_stopped(start: Start, ready_file: str) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    if ready_file:
        _ready(ready_file, None)
    async with AsyncExitStack() as stack:
        ready = await start(stack)
        if ready_file:
            stack.callback(_ready, ready_file, None)
            _ready(ready_file, ready)
        await stopped.wait()
        logger.info("stopping")


def _ready(path: str, addresses: dict[str, str] | None) -> None:
    """Writes the ready file as a whole, or removes it: it is there only while its addresses are served."""
    try:
        if addresses is None:
            Path(path).unlink(missing_ok=True)
        else:
            partial = Path(f"{path}.partial")
            partial.write_text(json.dumps(addresses) + "\n")
            partial.rename(path)
    except OSError as error:
        raise ConfigError(f"ready file {path}: {error.strerror}") from error


def _worker_config(args: argparse.Namespace, store: str | None, default_socket: str = "") -> WorkerConfig:
    arena = parse_size(args.arena, "arena") if args.arena is not None else None
    flags = {"store": store, "name": args.name, "listen": args.listen, "advertise": args.advertise,
             "socket": args.socket, "arena_bytes": arena, "roles": args.roles, "metrics": args.metrics}  # fmt: skip
    config = config_from_file(WorkerConfig, args.config or "", flags)
    parse_metrics(config.metrics)
    name = config.name or socket.gethostname()
    path = config.socket or default_socket or str(default_runtime_dir() / f"{name}.sock")
    return replace(config, name=name, socket=path)


def _store_config(args: argparse.Namespace) -> StoreConfig:
    flags = {"listen": args.listen, "data_dir": args.data, "etcd": args.etcd, "etcd_prefix": args.etcd_prefix,
             "metrics": args.metrics, "shards": getattr(args, "shards", None)}  # fmt: skip
    return config_from_file(StoreConfig, args.config or "", flags)


def _run_backup(args: argparse.Namespace) -> None:
    asyncio.run(_backup(_store_config(args), Path(args.to)))


def _run_restore(args: argparse.Namespace) -> None:
    asyncio.run(_restore(_store_config(args), Path(args.file), args.replace))


def _run_store(args: argparse.Namespace) -> None:
    config = _store_config(args)
    parse_metrics(config.metrics)

    async def start(stack: AsyncExitStack) -> dict[str, str]:
        running = _Running()
        address = await _start_store(stack, config, running)
        return {"store": address, **await _start_metrics(stack, config.metrics, running)}

    _serve(start, args.ready_file)


def _run_worker(args: argparse.Namespace) -> None:
    config = _worker_config(args, args.store)

    async def start(stack: AsyncExitStack) -> dict[str, str]:
        running = _Running()
        ready = await _start_worker(stack, config, running)
        return {**ready, **await _start_metrics(stack, config.metrics, running)}

    _serve(start, args.ready_file)


def _run_up(args: argparse.Namespace) -> None:
    folder = Path(args.dir) if args.dir else default_runtime_dir()
    private_directory(folder)
    store = StoreConfig(args.store_listen, str(folder / "store"))
    socket_path = str(folder.absolute() / "worker.sock")
    _worker_config(args, None, socket_path)  # a mistake in it is told before anything starts

    async def start(stack: AsyncExitStack) -> dict[str, str]:
        running = _Running()
        address = await _start_store(stack, store, running)
        config = _worker_config(args, address, socket_path)
        ready = await _start_worker(stack, config, running)
        ready |= await _start_metrics(stack, config.metrics, running)
        print(f"engines on this host: --kv-transfer-config worker = {ready['worker']}")
        if parse_address(address, "store").is_loopback:
            print(
                "other hosts cannot join: the store listens on this host only (see --store-listen and --listen)",
                flush=True,
            )
        else:
            print(f"workers on other hosts: tensorcast worker --store {address} --listen HOST:PORT", flush=True)
        return {"store": address, **ready}

    _serve(start, args.ready_file)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help shows what there is)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tensorcast", description="The tensor pool: its store and its workers.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    def serving(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--ready-file", default="", metavar="FILE", help="written with the addresses as JSON once serving"
        )
        sub.add_argument(
            "--metrics", metavar="HOST:PORT", help="serve /metrics for Prometheus and /healthz there; port 0 = any"
        )
        sub.add_argument("--log-format", choices=("text", "json"), default="text")

    def worker_flags(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--config", metavar="FILE", help="TOML file; flags win over it")
        sub.add_argument("--name", help="name of this worker (default: the host's name)")
        sub.add_argument(
            "--listen",
            metavar="HOST:PORT",
            help="for other workers (default: 127.0.0.1, any port, which is for one host)",
        )
        sub.add_argument(
            "--advertise", metavar="HOST:PORT", help="what other workers dial (default: the listening address)"
        )
        sub.add_argument(
            "--socket",
            metavar="PATH",
            help="Unix socket for the engines of this host (default: in a folder private to the user)",
        )
        sub.add_argument(
            "--roles",
            metavar="ROLE,...",
            help="basic: keeps pages (always); shard-home: knows where pages are; gateway: for callers (default: all)",
        )
        sub.add_argument("--arena", metavar="SIZE", help="shared memory for pages, for example 4GiB (default: 1GiB)")

    store = command("store", _run_store, "Keeps the list of workers, engines and leases.")
    store.add_argument("--listen", metavar="HOST:PORT", help="default 127.0.0.1:7700; port 0 = any")
    serving(store)
    _store_flags(store)
    worker = command("worker", _run_worker, "Keeps pages in shared memory for the engines of this host.")
    worker.add_argument("--store", metavar="HOST:PORT,...", help="default 127.0.0.1:7700; several of one cluster")
    worker_flags(worker)
    serving(worker)
    up = command("up", _run_up, "A store and one worker in one process: all that one host needs.")
    up.add_argument(
        "--dir", metavar="DIR", help="folder for the database and the socket (default: private to the user)"
    )
    up.add_argument("--store-listen", metavar="HOST:PORT", default="127.0.0.1:7700", help="port 0 = any")
    worker_flags(up)
    serving(up)
    status_flags(command("status", run_status, "Shows workers, engines, shards, and who holds what."))
    story_flags(command("story", run_story, "Tells what a worker has recorded about a page, a hold or a shard."))
    return parser


def _store_flags(store: argparse.ArgumentParser) -> None:
    """Which database, for `store` itself and what it can do with one."""

    def database(sub: argparse.ArgumentParser, default: str | None) -> None:
        for flag, metavar, text in (
            ("--config", "FILE", "TOML file; flags win over it"),
            ("--data", "DIR", "folder of the database (default: private to the user, and gone with the next boot)"),
            (
                "--etcd",
                "HOST:PORT,...",
                "keep the database in this etcd cluster instead; any number of stores can share it",
            ),
            ("--etcd-prefix", "NAME/", "what all its keys begin with there (default: tensorcast/)"),
        ):
            sub.add_argument(flag, metavar=metavar, help=text, default=default)

    database(store, None)
    store.add_argument(
        "--shards", type=int, metavar="N", help="of a new cluster: a power of two up to 256 (default: 64)"
    )
    actions = store.add_subparsers(dest="action", metavar="backup | restore")
    text = (
        "Writes the life and the settings of a cluster to a file: all that hangs on no lease. Workers, engines and shard "
        "leases are not part of it, since they come back by themselves. A store on a folder must be stopped for it, one on "
        "etcd may run."
    )
    backup = actions.add_parser("backup", help="write a backup", description=text)
    backup.add_argument("--to", metavar="FILE", required=True, help="appears once it is complete")
    text = "Makes a database of a backup. Stop the stores on it first."
    restore = actions.add_parser("restore", help="read a backup", description=text)
    restore.add_argument("file", metavar="FILE", help="checked as a whole before anything is changed")
    restore.add_argument("--replace", action="store_true", help="give up what is in the database")
    for sub, run in ((backup, _run_backup), (restore, _run_restore)):
        sub.set_defaults(run=run)
        database(sub, argparse.SUPPRESS)  # what was said before the word counts too


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. A user's mistake is one line on stderr and exit status 2; an unreachable process is status 1."""
    args = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # ids may hold letters that the terminal does not know
    set_up_logging(getattr(args, "log_format", "text"), args.command)
    try:
        args.run(args)
    except ConfigError as error:
        print(f"tensorcast {args.command}: {error}", file=sys.stderr)
        return 2
    except TensorcastError as error:
        print(f"tensorcast {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
