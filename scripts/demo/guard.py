"""Stop process groups when the process that started them has gone, whatever way it went.

A supervisor starts one guard and tells it on its standard input which sessions are alive: `+ID` when one starts, `-ID` when
it has stopped, `dPATH` for a folder that goes with them. The end of that input means that the supervisor is dead (a SIGKILL
included); the guard then stops what is left.
Run with `python -I -S guard.py GRACE_S`: it needs the standard library only, so that it is up in a few milliseconds.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

POLL_S = 0.02
# How long the kernel may take to end a killed process, which can be long in the middle of a write.
KILLED_S = 10.0


def members(session: int) -> list[int]:
    """The live processes of a session: the program, its children, and those that moved to groups of their own."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # After the command's closing bracket: state, parent, group, session.
            state, _, _, owner = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(owner) == session and state not in "ZX":
                found.append(int(entry.name))
    return found


def send(session: int, number: signal.Signals) -> None:
    """Signal every member of the session."""
    for pid in members(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def stop(graces_s: Mapping[int, float]) -> set[int]:
    """SIGTERM to the sessions' groups, then SIGKILL to what is left after each one's grace; the sessions that needed it."""
    for session in graces_s:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, signal.SIGTERM)
    started = time.monotonic()
    left, killed = set(graces_s), set()
    while left := {session for session in left if members(session)}:
        passed_s = time.monotonic() - started
        for session in left:
            if passed_s > graces_s[session]:
                killed.add(session)
                send(session, signal.SIGKILL)
        if passed_s > max(graces_s.values()) + KILLED_S:
            break
        time.sleep(POLL_S)
    return killed


def main() -> None:
    """Read the sessions from standard input; when it ends, stop those that are left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    alive: set[int] = set()
    folders: list[str] = []
    for line in sys.stdin:
        sign, rest = line[0], line[1:].rstrip("\n")
        if sign == "+":
            alive.add(int(rest))
        elif sign == "-":
            alive.discard(int(rest))
        else:
            folders.append(rest)
    stop(dict.fromkeys(alive, float(sys.argv[1])))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
