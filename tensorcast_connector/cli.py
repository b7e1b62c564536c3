"""The `tensorcast` command."""

import argparse
import asyncio
import io
import os
import platform
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from tensorcast_connector.cli_callers import OFTEN, behind_first_values, parse_seconds
from tensorcast_connector.cli_database import back_up, restore
from tensorcast_connector.cli_logs import set_up_logging
from tensorcast_connector.cli_network import ACCESS_FLAGS, access_flags, run_token, token_flags
from tensorcast_connector.cli_serve import serve_both, serve_store, serve_worker
from tensorcast_connector.cli_service import add_service_commands
from tensorcast_connector.cli_status import run_status, run_story, status_flags, story_flags
from tensorcast_connector.cli_switch import disable_flags, enable_flags, run_disable, run_enable
from tensorcast_connector.config import default_runtime_dir, parse_metrics, parse_size
from tensorcast_connector.errors import ConfigError, TensorcastError
from tensorcast_connector.net.private import private_directory
from tensorcast_connector.settings import StoreConfig, WorkerConfig, config_from_file
from tensorcast_connector.wire.messages import PROTOCOL_VERSION
from tensorcast_connector.worker.server import check_config

# --- what the flags say -----------------------------------------------------------------------------------------------


def _worker_config(
    args: argparse.Namespace, store: str | None, default_socket: str = "", refused: Mapping[str, str] | None = None
) -> WorkerConfig:
    arena = parse_size(args.arena, "arena") if args.arena is not None else None
    artifacts = parse_size(args.artifacts, "artifacts") if args.artifacts is not None else None
    share = parse_size(args.tenant_bytes_max, "tenant-bytes-max") if args.tenant_bytes_max is not None else None
    memory = parse_size(args.device_memory, "device-memory") if args.device_memory is not None else None
    flags = {"store": store, "tenant_bytes_max": share, "name": args.name, "listen": args.listen, "advertise": args.advertise,
             "devices": args.devices, "device_bytes": memory,
             "socket": args.socket, "arena_bytes": arena, "artifact_bytes": artifacts, "page_age_max_s": _seconds(args.page_age),
             "roles": args.roles, "metrics": args.metrics, **_access(args)}  # fmt: skip
    config = config_from_file(WorkerConfig, args.config or "", flags, refused)
    parse_metrics(config.metrics)
    name = config.name or socket.gethostname()
    path = config.socket or default_socket or str(default_runtime_dir() / f"{name}.sock")
    return replace(config, name=name, socket=path)


def _store_config(args: argparse.Namespace) -> StoreConfig:
    flags = {"listen": args.listen, "data_dir": args.data, "etcd": args.etcd, "etcd_prefix": args.etcd_prefix,
             "metrics": args.metrics, "shards": getattr(args, "shards", None), **_access(args)}  # fmt: skip
    return config_from_file(StoreConfig, args.config or "", flags)


def _seconds(text: str | None) -> float | None:
    return None if text is None else parse_seconds(text, "page-age")


def _access(args: argparse.Namespace) -> dict[str, str | None]:
    return {flag: getattr(args, flag, None) for flag in ACCESS_FLAGS}


# --- commands ---------------------------------------------------------------------------------------------------------


def _run_backup(args: argparse.Namespace) -> None:
    _check_serves_nothing(args)
    asyncio.run(back_up(_store_config(args), Path(args.to)))


def _run_restore(args: argparse.Namespace) -> None:
    _check_serves_nothing(args)
    asyncio.run(restore(_store_config(args), Path(args.file), args.replace, args.force))


def _check_serves_nothing(args: argparse.Namespace) -> None:
    """Flags of the store itself, before the word for what is done with its database."""
    for flag in ("shards", "listen", "metrics", "ready_file"):
        if getattr(args, flag):
            name = "--" + flag.replace("_", "-")
            raise ConfigError(f"{name} is for a store that serves; `store {args.action}` takes none")


def _run_store(args: argparse.Namespace) -> None:
    config = _store_config(args)
    parse_metrics(config.metrics)
    serve_store(config, args.ready_file)


def _run_worker(args: argparse.Namespace) -> None:
    serve_worker(_worker_config(args, args.store), args.ready_file)


def _run_up(args: argparse.Namespace) -> None:
    folder = Path(args.dir) if args.dir else default_runtime_dir()
    store = StoreConfig(args.store_listen, str(folder / "store"))
    its_own = {
        "store": "`tensorcast up` runs its own store (--store-listen); take the key out, or run `tensorcast worker`"
    }
    worker = _worker_config(args, None, str(folder.absolute() / "worker.sock"), its_own)
    same = {flag: getattr(worker, flag) for flag in ACCESS_FLAGS}
    check_config(worker)
    private_directory(folder)
    serve_both(replace(store, **same), worker, args.ready_file)


# --- flags ------------------------------------------------------------------------------------------------------------


class _Filled(argparse.Action):
    """A flag with a value. An empty one is what is left of a shell variable that is not set, and never means the default."""

    def __call__(self, _parser: object, namespace: argparse.Namespace, values: Any, _flag: str | None = None) -> None:
        if not values:
            raise argparse.ArgumentError(self, "is empty; give it a value, or leave it out")
        several = [*(getattr(namespace, self.dest) or ()), values] if self.const else values
        setattr(namespace, self.dest, several)


class _Parser(argparse.ArgumentParser):
    def add_argument(self, *names: Any, **how: Any) -> argparse.Action:
        """Every flag that takes text takes some, unless its `type` says otherwise."""
        action = how.get("action", "store")
        if names[0].startswith("-") and action in ("store", "append") and "type" not in how:
            how.update(action=_Filled, const=action == "append")
        return super().add_argument(*names, **how)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """What is left over belongs to the flag of OFTEN, if it was written right behind its first value."""
        found, left = super().parse_known_args(args, namespace)
        flag = self.get_default(OFTEN)
        if flag and left and left == behind_first_values(list(args or ()), flag):
            getattr(found, flag.lstrip("-")).extend(left)
            return found, []
        return found, left

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help shows what there is)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tensorcast", description="The tensor pool: its store and its workers.")
    parser.add_argument("--version", action="version", version=_version())
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
        access_flags(sub)
        sub.add_argument("--log-format", choices=("text", "json"), default="text")

    store = command("store", _run_store, "Keeps the list of workers, engines and leases.")
    store.add_argument("--listen", metavar="HOST:PORT", help="default 127.0.0.1:7700; port 0 = any")
    serving(store)
    _store_flags(store)
    worker = command("worker", _run_worker, "Keeps pages in shared memory for the engines of this host.")
    worker.add_argument("--store", metavar="HOST:PORT,...", help="default 127.0.0.1:7700; several of one cluster")
    _worker_flags(worker)
    serving(worker)
    up = command("up", _run_up, "A store and one worker in one process: all that one host needs.")
    up.add_argument(
        "--dir", metavar="DIR", help="folder for the database and the socket (default: private to the user)"
    )
    up.add_argument("--store-listen", metavar="HOST:PORT", default="127.0.0.1:7700", help="port 0 = any")
    _worker_flags(up)
    serving(up)
    status_flags(command("status", run_status, "Shows workers, engines, shards, and who holds what."))
    story_flags(
        command(
            "story", run_story, "Tells what a worker has recorded of a page, a hold, a shard, an artifact or a plan."
        )
    )
    add_service_commands(commands)
    disable_flags(command("disable", run_disable, "Switches the pool off for an engine, a model or a namespace."))
    enable_flags(command("enable", run_enable, "Switches it on again."))
    token_flags(command("token", run_token, "Prints a new token for a cluster, or the one of a tenant."))
    return parser


def _worker_flags(sub: argparse.ArgumentParser) -> None:
    """What a worker is, on its own or in `up`."""
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
    sub.add_argument(
        "--page-age",
        metavar="TIME",
        help="pages of KV cache go so long after they came, for example 24h (default: never)",
    )
    sub.add_argument("--artifacts", metavar="SIZE", help="shared memory for artifacts, at most (default: 1GiB)")
    sub.add_argument("--tenant-bytes-max", metavar="SIZE", help="of it, for one tenant's at most (default: all of it)")
    sub.add_argument(
        "--devices",
        metavar="cuda:0,...",
        help="a process of its own keeps copies of artifacts in the memory of these (`tensorcast prefetch --device`)",
    )
    sub.add_argument("--device-memory", metavar="SIZE", help="for such copies on each device, at most (default: 8GiB)")


def _version() -> str:
    """Of the package, of what its processes say to each other, and of the Python it runs on."""
    try:
        package = version("tensorcast-connector")
    except PackageNotFoundError:
        package = "unknown (not installed)"
    return f"tensorcast {package}, protocol {PROTOCOL_VERSION}, Python {platform.python_version()}"


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
    restore.add_argument(
        "--force",
        action="store_true",
        help="also if stores on etcd are said to serve it, which is for when that is wrong",
    )
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
