"""The `tensorcast` command."""

import argparse
import asyncio
import json
import logging
import random
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tensorcast_connector.config import (
    StoreConfig,
    WorkerConfig,
    config_from_file,
    default_runtime_dir,
    parse_address,
    parse_size,
)
from tensorcast_connector.errors import ConfigError, TensorcastError
from tensorcast_connector.net.sockets import SocketNetwork, private_directory
from tensorcast_connector.store.client import read_cluster
from tensorcast_connector.store.incarnation import ensure_incarnation
from tensorcast_connector.store.server import serve_store
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.worker.server import start_worker

logger = logging.getLogger("tensorcast")


def boottime_s() -> float:
    """Seconds that go on during suspend and never jump."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def _start_store(stack: AsyncExitStack, config: StoreConfig) -> str:
    listen = parse_address(config.listen, "listen")
    kv = SqliteKv(Path(config.data_dir) / "store.db", boottime_s)
    stack.push_async_callback(kv.close)
    await ensure_incarnation(kv, int(time.time()))
    listener = await serve_store(SocketNetwork(), listen, kv, config.data_dir)
    stack.push_async_callback(listener.close)
    logger.info("store serves at %s, database in %s", listener.address, config.data_dir)
    return str(listener.address)


async def _start_worker(stack: AsyncExitStack, config: WorkerConfig) -> dict[str, str]:
    worker = await start_worker(config, SocketNetwork(), random.Random(), boottime_s)
    stack.push_async_callback(worker.close)
    return {"worker": str(worker.socket), "peer": str(worker.address), "worker_id": worker.worker_id}


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
             "socket": args.socket, "arena_bytes": arena, "roles": args.roles}  # fmt: skip
    config = config_from_file(WorkerConfig, args.config or "", flags)
    name = config.name or socket.gethostname()
    path = config.socket or default_socket or str(default_runtime_dir() / f"{name}.sock")
    return replace(config, name=name, socket=path)


def _run_store(args: argparse.Namespace) -> None:
    config = config_from_file(StoreConfig, args.config or "", {"listen": args.listen, "data_dir": args.data})

    async def start(stack: AsyncExitStack) -> dict[str, str]:
        return {"store": await _start_store(stack, config)}

    _serve(start, args.ready_file)


def _run_worker(args: argparse.Namespace) -> None:
    config = _worker_config(args, args.store)
    _serve(lambda stack: _start_worker(stack, config), args.ready_file)


def _run_up(args: argparse.Namespace) -> None:
    folder = Path(args.dir) if args.dir else default_runtime_dir()
    private_directory(folder)
    store = StoreConfig(args.store_listen, str(folder / "store"))
    socket_path = str(folder.absolute() / "worker.sock")
    _worker_config(args, None, socket_path)  # a mistake in it is told before anything starts

    async def start(stack: AsyncExitStack) -> dict[str, str]:
        address = await _start_store(stack, store)
        ready = await _start_worker(stack, _worker_config(args, address, socket_path))
        print(f"engines on this host: --kv-transfer-config worker = {ready['worker']}")
        print(f"workers on other hosts: tensorcast worker --store {address}", flush=True)
        return {"store": address, **ready}

    _serve(start, args.ready_file)


PIPED_COLUMNS = 400


def _run_status(args: argparse.Namespace) -> None:
    stores = [parse_address(each.strip(), "store") for each in args.store.split(",")]
    view = asyncio.run(read_cluster(SocketNetwork(), stores, "tensorcast status", random.Random()))
    if args.json:
        print(json.dumps({"workers": [msgspec.to_builtins(each) for each in view.workers.values()],
                          "instances": [msgspec.to_builtins(each) for each in view.instances.values()]}))  # fmt: skip
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    workers = Table("worker", "address", "arena", title="Workers")
    for each in view.workers.values():
        workers.add_row(escape(each.worker_id), escape(each.address), f"{each.arena_bytes / (1 << 30):.2f} GiB")
    instances = Table("instance", "engine", "model", "worker", title="Instances")
    for one in view.instances.values():
        instances.add_row(*map(escape, (one.instance_id, one.engine, one.model, one.worker_id)))
    console = Console() if sys.stdout.isatty() else Console(width=PIPED_COLUMNS)  # ids are never cut in a pipe
    console.print(workers)
    console.print(instances)


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
        sub.add_argument("--log-format", choices=("text", "json"), default="text")

    def worker_flags(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--config", metavar="FILE", help="TOML file; flags win over it")
        sub.add_argument("--name", help="name of this worker (default: the host's name)")
        sub.add_argument("--listen", metavar="HOST:PORT", help="for other workers (default: 127.0.0.1, any port)")
        sub.add_argument(
            "--advertise", metavar="HOST:PORT", help="what other workers dial (default: the listening address)"
        )
        sub.add_argument("--socket", metavar="PATH", help="Unix socket for the engines of this host")
        sub.add_argument("--roles", metavar="ROLE,...", help="basic, gateway, shard-home (default: all)")
        sub.add_argument("--arena", metavar="SIZE", help="shared memory for pages, for example 4GiB (default: 1GiB)")

    store = command("store", _run_store, "Keeps the list of workers, engines and leases.")
    store.add_argument("--config", metavar="FILE", help="TOML file; flags win over it")
    store.add_argument("--listen", metavar="HOST:PORT", help="default 127.0.0.1:7700; port 0 = any")
    store.add_argument("--data", metavar="DIR", help="folder of the database")
    serving(store)
    worker = command("worker", _run_worker, "Keeps pages in shared memory for the engines of this host.")
    worker.add_argument("--store", metavar="HOST:PORT", help="default 127.0.0.1:7700")
    worker_flags(worker)
    serving(worker)
    up = command("up", _run_up, "A store and one worker in one process: all that one host needs.")
    up.add_argument(
        "--dir", metavar="DIR", help="folder for the database and the socket (default: private to the user)"
    )
    up.add_argument("--store-listen", metavar="HOST:PORT", default="127.0.0.1:7700", help="port 0 = any")
    worker_flags(up)
    serving(up)
    status = command("status", _run_status, "Lists workers and engines.")
    status.add_argument("--store", metavar="HOST:PORT", default="127.0.0.1:7700")
    status.add_argument("--json", action="store_true")
    return parser


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"at": self.formatTime(record), "level": record.levelname.lower(), "logger": record.name,
                                "message": record.getMessage()}  # fmt: skip
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _set_up_logging(log_format: str) -> None:
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_JsonLines() if log_format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. A user's mistake is one line on stderr and exit status 2; an unreachable process is status 1."""
    args = _parser().parse_args(argv)
    _set_up_logging(getattr(args, "log_format", "text"))
    try:
        args.run(args)
    except ConfigError as error:
        print(f"tensorcast {args.command}: {error}", file=sys.stderr)
        return 2
    except TensorcastError as error:
        print(f"tensorcast {args.command}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
