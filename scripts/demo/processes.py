"""Start programs, wait until they serve, and stop them all, whatever happens.

Every program runs in a session of its own, so that a Ctrl-C in the terminal reaches only the supervisor, which then stops
the others in good order. A guard process (see `guard.py`) does the same when the supervisor is killed. The output of each
goes to `.out/RUN/NAME.log`; when one dies before it serves, its last lines are shown.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from demo import guard

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.05
LOG_LINES = 25
# A vLLM that is told to stop while it starts waits for ever for its own children, so the grace is short for those.
STARTING_GRACE_S = 3.0


class DemoError(Exception):
    """Something the user can read and act on; shown as it is, without a traceback."""


def run_id() -> str:
    """A name for this run that no other running one has."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def program(name: str) -> str:
    """The path of a command installed beside this interpreter."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise DemoError(f"{name} is not installed beside {sys.executable}; run scripts/install")
    return str(path)


@dataclass(slots=True)
class Running:
    """One started program."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    started: float = field(default_factory=time.monotonic)
    ready: bool = False

    def died(self) -> str | None:
        """Why the program is no longer there, with the end of its log; None while it runs."""
        status = self.process.poll()
        if status is None:
            return None
        ended = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return f"{self.name} ended with {ended}; the end of {self.log}:\n{self.tail()}"

    def tail(self, lines: int = LOG_LINES) -> str:
        """The last lines of the log."""
        with self.log.open(errors="replace") as stream:
            return "".join(f"  | {line.rstrip()}\n" for line in deque(stream, lines)).rstrip("\n")

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> float:
        """Wait until `ready()`; a death is noticed at once. The seconds since the start."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if reason := self.died():
                raise DemoError(reason)
            if time.monotonic() > deadline:
                raise DemoError(f"{self.name} not ready after {timeout_s:g} s; the end of {self.log}:\n{self.tail()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL_S)
        self.ready = True
        return time.monotonic() - self.started


class Supervisor:
    """Owns the programs of one run. Use it as a context manager: leaving it stops them all."""

    def __init__(self, folder: Path | None = None, *, grace_s: float = 15.0) -> None:
        self.folder = folder or ROOT / ".out" / run_id()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.grace_s = grace_s
        self.running: list[Running] = []
        self._ports: list[socket.socket] = []
        self._folders: list[Path] = []
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(grace_s)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Running:
        """Start a program; `env` is added to the environment."""
        log = self.folder / f"{name}.log"
        with _uninterrupted(), log.open("ab") as output:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
            started = Running(name, process, log)
            self.running.append(started)
            self._tell("+", process.pid)
        return started

    def port(self) -> int:
        """A free TCP port of 127.0.0.1, for a program that cannot choose one itself.

        It stays reserved by a bound socket that never listens: the kernel gives the port to nobody else while the program
        starts, and a program that sets SO_REUSEADDR, as servers do, can bind it all the same.
        """
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        self._ports.append(reserved)
        return int(reserved.getsockname()[1])

    def cleanup(self, folder: Path) -> None:
        """Remove this folder at the end, whatever the programs left in it."""
        self._folders.append(folder)
        self._tell("d", folder)

    def check(self) -> None:
        """Raise when one of the programs has died."""
        for running in self.running:
            if reason := running.died():
                raise DemoError(reason)

    def stop(self, *programs: Running) -> None:
        """Stop these programs, all at the same time."""
        graces_s = {
            running.process.pid: self.grace_s if running.ready else min(self.grace_s, STARTING_GRACE_S)
            for running in programs
        }
        with _uninterrupted():
            # A member of the session may outlive its leader, so the session is asked, not the leader alone.
            killed = guard.stop(graces_s)
            for running in programs:
                running.process.wait()
                self._tell("-", running.process.pid)
                if running in self.running:
                    self.running.remove(running)
        for running in programs:
            if running.ready and running.process.pid in killed:
                print(f"{running.name} did not stop within {self.grace_s:g} s and was killed", file=sys.stderr)

    @contextlib.contextmanager
    def standing_still(self, *programs: Running) -> Iterator[None]:
        """These programs, with what they have started, do nothing meanwhile."""
        try:
            self._signal(programs, signal.SIGSTOP)
            yield
        finally:
            self._signal(programs, signal.SIGCONT)

    def _signal(self, programs: Sequence[Running], number: signal.Signals) -> None:
        for running in programs:
            for pid in guard.members(running.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def close(self) -> None:
        """Stop every program and the guard."""
        with _uninterrupted():
            self.stop(*self.running)
            for reserved in self._ports:
                reserved.close()
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)
            self._guard.kill()  # It has nothing left to guard.
            self._guard.communicate()

    def _tell(self, sign: str, what: int | Path) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(f"{sign}{what}\n".encode())
            self._guard.stdin.flush()


def ready_file(path: Path) -> Callable[[], bool]:
    """A readiness condition: the file is there (it is written atomically once its program listens)."""
    return path.exists


def answers(url: str) -> Callable[[], bool]:
    """A readiness condition: the address answers a GET with a success."""

    def ready() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return bool(200 <= response.status < 300)
        except (OSError, urllib.error.URLError):
            return False

    return ready


def read_ready(path: Path) -> dict[str, Any]:
    """What a program wrote into its ready file."""
    return dict(json.loads(path.read_text()))


@contextlib.contextmanager
def terminated_as_exit() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack like Ctrl-C does, so that the supervisor's exit runs."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM: a program being started gets its owner, and a second Ctrl-C leaves none running.

    By handlers and not by a signal mask, because a program started meanwhile would inherit the mask.
    """
    if threading.current_thread() is not threading.main_thread():  # Signals are handled in the main thread only.
        yield
        return
    arrived: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(signal.Signals(arrived[0]))
