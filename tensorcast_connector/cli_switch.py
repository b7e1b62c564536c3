"""`tensorcast disable` and `enable`: an engine serves on without the pool, or with it again, at once and without a restart."""

import argparse
import getpass
import os
import platform
import time

from tensorcast_connector.cli_callers import call, caller_flags, write_line
from tensorcast_connector.client.session import Session
from tensorcast_connector.errors import ConfigError


def disable_flags(sub: argparse.ArgumentParser) -> None:
    """The flags of `tensorcast disable`."""
    caller_flags(sub)
    sub.add_argument(
        "what", nargs="?", help="an instance's id, a model or a namespace, as `tensorcast status` shows them"
    )
    sub.add_argument("--why", metavar="TEXT", type=str, default="", help="for others who look")
    sub.add_argument("--list", action="store_true", help="what is disabled, by whom and since when")


def enable_flags(sub: argparse.ArgumentParser) -> None:
    """The flags of `tensorcast enable`."""
    caller_flags(sub)
    sub.add_argument("what", help="what was disabled")


def run_disable(args: argparse.Namespace) -> None:
    """`tensorcast disable`; raises TensorcastError."""
    if args.list == bool(args.what):
        raise ConfigError("say what to disable, or --list")
    call(args, _list if args.list else _disable)


def run_enable(args: argparse.Namespace) -> None:
    """`tensorcast enable`; raises TensorcastError."""
    call(args, _enable)


def _user() -> str:
    """Who runs this; in a container that may be a number without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


async def _disable(session: Session, args: argparse.Namespace) -> None:
    known = (await session.list_disabled()).get(args.what)
    if known is not None and not args.why:
        write_line(
            f"{args.what}: was disabled already, {known}; `tensorcast enable` ends it, --why gives another reason"
        )
        return
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    note = f"since {since}, by {_user()} on {platform.node()}" + (f": {args.why}" if args.why else "")
    await session.disable(args.what, note)
    seen = await session.list_instances()
    count = sum(args.what in (each.instance_id, each.model, each.namespace) for each in seen)
    if not count:
        write_line(
            f"{args.what}: nothing by that name is attached now; the rule stands for what comes, `tensorcast enable` ends it"
        )
        return
    write_line(f"{args.what}: {count} engine(s) that are there now serve without the pool; `tensorcast enable` ends it")


async def _enable(session: Session, args: argparse.Namespace) -> None:
    known = await session.list_disabled()
    await session.enable(args.what)
    write_line(f"{args.what}: enabled" if args.what in known else f"{args.what}: was not disabled")


async def _list(session: Session, _: argparse.Namespace) -> None:
    for what, note in sorted((await session.list_disabled()).items()):
        write_line(f"{what}: {note}")
