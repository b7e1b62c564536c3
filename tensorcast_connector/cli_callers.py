"""What the commands for callers share: the worker they talk to, times as people write them, and how they write back."""

import argparse
import asyncio
import math
import os
import re
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, RenderableType

from tensorcast_connector.cli_network import access_flags, network_of_flags, tenant_of_flags
from tensorcast_connector.cli_tables import add_row, as_size, new_table, printable
from tensorcast_connector.client.session import Session, connect
from tensorcast_connector.config import PLAN_DEADLINE_S, TENANT, default_runtime_dir
from tensorcast_connector.errors import ConfigError, TensorcastError

__all__ = ["add_row", "as_size", "new_table", "printable"]

PIPED_COLUMNS = 100_000  # nothing is cut or broken in a pipe
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


# --- the worker -------------------------------------------------------------------------------------------------------


def caller_flags(sub: argparse.ArgumentParser) -> None:
    """Which worker, and for whom."""
    sub.add_argument(
        "--worker",
        metavar="ADDRESS",
        help="unix:/path or HOST:PORT of a worker (default: the one of this user and host)",
    )
    access_flags(sub)
    sub.add_argument("--tenant", metavar="NAME", help=f"whose artifacts and plans (default: {TENANT})")


def sockets_of_workers(folder: Path) -> list[Path]:
    """The Unix sockets in a folder; if there are several, those at which somebody listens."""
    try:
        found = sorted(each for each in folder.iterdir() if each.is_socket())
    except OSError:
        return []
    return found if len(found) < 2 else [each for each in found if _serves(each)]


def _serves(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # it is busy, but there
            return True
        except OSError:
            return False
    return True


def worker_address(given: str | None) -> str:
    """The address that was given, else that of the only socket in this user's folder.

    Raises:
        ConfigError: there is none, or several.
    """
    if given is not None:
        return given
    folder = default_runtime_dir()
    found = sockets_of_workers(folder)
    if not found:
        raise ConfigError(
            f"no worker has its socket in {folder}: start one with `tensorcast up`, or name one with --worker unix:/path "
            "or --worker HOST:PORT"
        )
    if len(found) > 1:
        names = ", ".join(f"unix:{each}" for each in found)
        raise ConfigError(f"several workers have their sockets in {folder}: name one with --worker, of {names}")
    return f"unix:{found[0]}"


def call(args: argparse.Namespace, work: Callable[[Session, argparse.Namespace], Awaitable[None]]) -> None:
    """Does `work` with a session at the worker that the flags name; raises TensorcastError."""

    async def run() -> None:
        tenant = tenant_of_flags(args)
        name = f"tensorcast {args.command} {os.getpid()}"
        network = network_of_flags(args, tenant)
        async with await connect(worker_address(args.worker), tenant=tenant, name=name, network=network) as session:
            await work(session, args)

    asyncio.run(run())


# --- a flag that is given often -----------------------------------------------------------------------------------------

OFTEN = "often"
"""The default of a parser that names its flag of this kind: `--flag a --flag b`, or `--flag a b` if nothing else is missing."""


def behind_first_values(words: Sequence[str], flag: str) -> list[str]:
    """The words that stand right behind the first value of `flag`, each time it is given."""
    found: list[str] = []
    at = len(words)  # the first word that may be another value
    for number, word in enumerate(words):
        if word == flag or word.startswith(f"{flag}="):
            at = number + (2 if word == flag else 1)
        elif word.startswith("-"):
            at = len(words)
        elif number >= at:
            found.append(word)
    return found


# --- times ------------------------------------------------------------------------------------------------------------


def parse_seconds(text: str, flag: str) -> float:
    """Seconds of "90", "90s", "15m", "24h" or "7d".

    Raises:
        ConfigError: naming the flag and the value.
    """
    match = re.fullmatch(r"\s*([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*([smhd]?)\s*", text)
    if match is None or not float(match.group(1)):
        raise ConfigError(f"--{flag} {text!r} is no time; write seconds above 0, or for example 15m, 24h or 7d")
    return float(match.group(1)) * _UNITS_S[match.group(2)]


def timeout_flag(sub: argparse.ArgumentParser, default: str = f"{PLAN_DEADLINE_S:g}") -> None:
    """`--timeout` of a command; unless told the default is that of what is a plan, for which see `plan_timeout`."""
    sub.add_argument("--timeout", metavar="S", help=f"what has not ended then has failed (default: {default})")


def plan_timeout(args: argparse.Namespace) -> None:
    """Reads the flag of what is a plan; raises ConfigError."""
    args.timeout = PLAN_DEADLINE_S if args.timeout is None else parse_seconds(args.timeout, "timeout")


def as_age(seconds: float) -> str:
    """For people: "42 s", "3 m", "5 h", "2 d"."""
    if not math.isfinite(seconds):
        return "-"
    for unit in ("d", "h", "m"):
        if abs(seconds) >= 2 * _UNITS_S[unit]:
            return f"{seconds / _UNITS_S[unit]:.0f} {unit}"
    return f"{seconds:.0f} s"


# --- writing ----------------------------------------------------------------------------------------------------------


def write_line(text: str) -> None:
    """To standard output, at once."""
    sys.stdout.write(f"{printable(text)}\n")
    sys.stdout.flush()


def write_note(text: str) -> None:
    """To standard error: for people, and not what the command is run for."""
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()


def write_json(value: Any) -> None:
    """One object on one line."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def show(*shown: RenderableType) -> None:
    """Tables; in a pipe plain text, whatever the environment asks for."""
    terminal = sys.stdout.isatty()
    console = Console() if terminal else Console(width=PIPED_COLUMNS, force_terminal=False, color_system=None)
    console.print(*shown, sep="\n")


async def delete_each(
    session: Session, references: Sequence[str], delete: Callable[[Session, str], Awaitable[None]]
) -> None:
    """Deletes all that can be. Raises TensorcastError that names the others and why."""
    failed: list[str] = []
    for reference in references:
        try:
            await delete(session, reference)
        except TensorcastError as error:
            if len(references) == 1:
                raise
            failed.append(f"{reference}: {error}")
    if failed:
        raise TensorcastError(f"{len(failed)} of {len(references)} not deleted: {'; '.join(failed)}")
