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
from pathlib import Path
from typing import Any

import msgspec

from tensorcast_connector.config import (
    STORE_TIMEOUT_S,
    StoreConfig,
    WorkerConfig,
    config_from_file,
    default_runtime_dir,
    parse_address,
    parse_size,
)
from tensorcast_connector.errors import ConfigError, TensorcastError
from tensorcast_connector.net.rpc import RpcClient
from tensorcast_connector.net.sockets import SocketNetwork, private_directory
from tensorcast_connector.store.server import serve_store
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.wire.messages import ListMembers, Members
from tensorcast_connector.worker.server import start_worker

logger = logging.getLogger("tensorcast")
Stop = Callable[[], Awaitable[None]]


def boottime_s() -> float:
    """Seconds that go on during suspend and never jump."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def _start_store(config: StoreConfig) -> tuple[str, Stop]:
    kv = SqliteKv(Path(config.data_dir) / "store.db", boottime_s)
    try:
        listener = await serve_store(SocketNetwork(), parse_address(config.listen, "listen"), kv, config.data_dir)
    except BaseException:
        await kv.close()
        raise
    logger.info("store serves at %s, database in %s", listener.address, config.data_dir)

    async def stop() -> None:
        await listener.close()
        await kv.close()

    return str(listener.address), stop


async def _start_worker(config: WorkerConfig) -> tuple[dict[str, str], Stop]:
    worker = await start_worker(config, SocketNetwork(), random.Random())
    return {"worker": str(worker.socket), "peer": str(worker.address), "worker_id": worker.worker_id}, worker.close


async def _until_stopped(start: Callable[[], Awaitable[tuple[dict[str, str], list[Stop]]]], ready_file: str) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    ready, stops = await start()
    try:
        if ready_file:
            partial = Path(f"{ready_file}.partial")
            partial.write_text(json.dumps(ready) + "\n")
            partial.rename(ready_file)
        await stopped.wait()
        logger.info("stopping")
    finally:
        for stop in stops:
            await stop()


def _worker_config(args: argparse.Namespace, store: str | None) -> WorkerConfig:
    arena = parse_size(args.arena, "arena") if args.arena is not None else None
    flags = {"store": store, "name": args.name, "listen": args.listen, "advertise": args.advertise,
             "socket": args.socket, "arena_bytes": arena}  # fmt: skip
    config = config_from_file(WorkerConfig, args.config or "", flags)
    name = config.name or socket.gethostname()
    path = config.socket or str(default_runtime_dir() / f"{name}.sock")
    return config_from_file(WorkerConfig, args.config or "", {**flags, "name": name, "socket": path})


def _run_store(args: argparse.Namespace) -> None:
    config = config_from_file(StoreConfig, args.config or "", {"listen": args.listen, "data_dir": args.data})

    async def start() -> tuple[dict[str, str], list[Stop]]:
        address, stop = await _start_store(config)
        return {"store": address}, [stop]

    asyncio.run(_until_stopped(start, args.ready_file))


def _run_worker(args: argparse.Namespace) -> None:
    config = _worker_config(args, args.store)

    async def start() -> tuple[dict[str, str], list[Stop]]:
        ready, stop = await _start_worker(config)
        return ready, [stop]

    asyncio.run(_until_stopped(start, args.ready_file))


def _run_up(args: argparse.Namespace) -> None:
    folder = Path(args.dir) if args.dir else default_runtime_dir()
    private_directory(folder)
    if args.socket is None:
        args.socket = str(folder / "worker.sock")

    async def start() -> tuple[dict[str, str], list[Stop]]:
        address, stop_store = await _start_store(StoreConfig(args.store_listen, str(folder / "store")))
        try:
            ready, stop_worker = await _start_worker(_worker_config(args, address))
        except BaseException:
            await stop_store()
            raise
        print(f"engines on this host: --kv-transfer-config worker = {ready['worker']}")
        print(f"workers on other hosts: tensorcast worker --store {address}", flush=True)
        return {"store": address, **ready}, [stop_worker, stop_store]

    asyncio.run(_until_stopped(start, args.ready_file))


async def _members(store: str) -> Members:
    client = RpcClient(SocketNetwork(), parse_address(store, "store"), "client", "tensorcast status", random.Random())
    client.start()
    try:
        await client.wait_connected(STORE_TIMEOUT_S)
        return await client.call(ListMembers(), Members, STORE_TIMEOUT_S)
    finally:
        await client.close()


def _run_status(args: argparse.Namespace) -> None:
    members = asyncio.run(_members(args.store))
    if args.json:
        print(json.dumps({"workers": [msgspec.to_builtins(each) for each in members.workers],
                          "instances": [msgspec.to_builtins(each) for each in members.instances]}))  # fmt: skip
        return
    from rich.console import Console
    from rich.table import Table

    workers = Table("worker", "address", "arena", title="Workers")
    for each in members.workers:
        workers.add_row(each.worker_id, each.address, f"{each.arena_bytes / (1 << 30):.2f} GiB")
    instances = Table("instance", "engine", "model", "worker", title="Instances")
    for one in members.instances:
        instances.add_row(one.instance_id, one.engine, one.model, one.worker_id)
    console = Console()
    console.print(workers)
    console.print(instances)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensorcast", description="The tensor pool: store, workers, and what is in them."
    )
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
