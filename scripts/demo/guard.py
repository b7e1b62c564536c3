"""Stop process groups when the process that started them has gone, whatever way it went.

A supervisor starts one guard and tells it on its standard input which sessions are alive: `+ID` when one starts, `-ID` when
it has stopped. The end of that input means the supervisor is dead (a SIGKILL included); the guard then stops what is left.
Run with `python -I -S guard.py GRACE_S`: it needs the standard library only, so that it is up in a few milliseconds.
"""

import contextlib
import os
import signal
import sys
import time
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


def stop(sessions: list[int], grace_s: float) -> list[int]:
    """SIGTERM to the sessions' leaders and their groups, then SIGKILL to what is left; the sessions that needed it."""
    for session in sessions:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, signal.SIGTERM)
    left = _wait(sessions, grace_s)
    for session in left:
        send(session, signal.SIGKILL)
    _wait(left, KILLED_S)
    return left


def _wait(sessions: list[int], timeout_s: float) -> list[int]:
    """Wait until the sessions are empty; those that are not."""
    deadline = time.monotonic() + timeout_s
    while (left := [session for session in sessions if members(session)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def main() -> None:
    """Read the sessions from standard input; when it ends, stop those that are left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    alive: set[int] = set()
    for line in sys.stdin:
        session = int(line[1:])
        if line[0] == "+":
            alive.add(session)
        else:
            alive.discard(session)
    stop(sorted(alive), float(sys.argv[1]))


if __name__ == "__main__":
    main()
