"""A router of several processes on one port: a supervisor that starts them, replaces one that dies, and ends them.

The supervisor makes all that must outlive a process: the listening sockets (one each, so that what arrives while one is
replaced waits for its successor), the shared table of requests in flight, and a folder with the Unix sockets by which they tell
each other of the index, one each and for the same reason, and with the files in which they count. It does nothing else, has no
threads, and forks.
"""

import mmap
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from smetric_router.config import RouterConfig, count_in
from smetric_router.errors import ConfigError
from smetric_router.server.logs import log
from smetric_router.server.place import Place, listen, listen_unix, peer_listener
from smetric_router.state.shared_counts import SharedCounts

RESTART_INTERVAL_S = 0.5
"""Between two starts of one process."""


@dataclass(frozen=True, slots=True)
class Worker:
    """What one process is given.

    `orphaned` becomes readable when the supervisor has gone; a byte is written into `ready` once it listens.
    """

    place: Place
    listener: socket.socket
    orphaned: int
    ready: int


class Supervisor:
    """Runs `main` in each process, until it is told to stop.

    Args:
        folder: for the processes' Unix sockets.
        main: serves until SIGTERM.
        announce: called once all of them listen.

    Raises ConfigError when the sockets cannot be had.
    """

    def __init__(
        self,
        config: RouterConfig,
        folder: Path,
        main: Callable[[Worker], None],
        announce: Callable[[socket.socket], None],
    ) -> None:
        self._main = main
        self._announce = announce
        self._count = config.workers
        if config.port:  # whoever has it, even one of these, is told from one of our own
            listen(config.host, config.port).close()
        first = listen(config.host, config.port, shared=True)
        port = first.getsockname()[1]
        self._listeners = [first, *(listen(config.host, port, shared=True) for _ in range(1, self._count))]
        self._peer_listener = peer_listener(config)
        self._peers = config.peers
        self._width = len(config.engines)
        self._table = mmap.mmap(-1, SharedCounts.size(self._count, self._width))
        self._paths = tuple(folder / f"{row}.sock" for row in range(self._count))
        self._doors = [listen_unix(path) for path in self._paths]
        self._alive = os.pipe()
        self._ready = os.pipe()
        self._pids: dict[int, int] = {}  # pid -> row
        self._started_s: dict[int, float] = {}  # by row

    def __repr__(self) -> str:
        return f"<Supervisor {self._pids}>"

    def run(self) -> int:
        """Until they have ended; the exit status."""
        signals = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
        if not sys.stderr.isatty():
            signals.add(signal.SIGHUP)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        stopping, waiting_for = False, self._count
        try:
            # Bound but not listening, connections would be refused while the processes begin; now they wait.
            for listener in self._listeners:
                listener.listen(2048)
            for row in range(self._count):
                self._start(row, before)
            while self._pids:
                told = signal.sigtimedwait(signals, 0.05 if waiting_for else 1.0)
                if told is not None and told.si_signo != signal.SIGCHLD:
                    if told.si_signo != signal.SIGHUP:
                        stopping = True
                        for listener in self._listeners:  # while anybody has them, who connects would wait in vain
                            listener.close()
                    self._signal(told.si_signo)
                for row, status in self._reaped():
                    if stopping:
                        continue
                    if waiting_for:  # it never came up: the others would not either
                        self._signal(signal.SIGTERM)
                        self._wait()
                        return os.waitstatus_to_exitcode(status) or 1
                    self._replace(row, status, before)
                if waiting_for and not stopping and select.select([self._ready[0]], [], [], 0)[0]:
                    waiting_for -= len(os.read(self._ready[0], waiting_for))
                    if not waiting_for:
                        self._announce(self._listeners[0])
        finally:
            self._signal(signal.SIGKILL)
            self._wait()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return 0

    def _replace(self, row: int, status: int, mask: set[int | signal.Signals]) -> None:
        fields = {"process": row, "status": os.waitstatus_to_exitcode(status)}
        log.error("a process has died and is replaced", extra={"fields": fields})
        time.sleep(max(0.0, self._started_s[row] + RESTART_INTERVAL_S - time.monotonic()))
        self._start(row, mask)

    def _start(self, row: int, mask: set[int | signal.Signals]) -> None:
        self._started_s[row] = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self._pids[pid] = row
            return
        status = 1
        try:
            os.close(self._alive[1])
            for at in range(self._count):
                if at != row:
                    self._listeners[at].close()
                    self._doors[at].close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._main(Worker(self._place(row), self._listeners[row], self._alive[0], self._ready[1]))
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except ConfigError as error:
            log.error("a process cannot begin", extra={"fields": {"process": row, "cause": error.message}})
            status = 2
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _place(self, row: int) -> Place:
        counts = SharedCounts(memoryview(self._table), self._count, self._width, row)
        siblings = tuple(path for at, path in enumerate(self._paths) if at != row)
        if row == 0:
            return Place(counts, self._doors[0], siblings, self._peers, self._peer_listener)
        return Place(counts, self._doors[row], siblings)

    def _reaped(self) -> list[tuple[int, int]]:
        found = []
        while self._pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            row = self._pids.pop(pid, None)
            if row is not None:
                SharedCounts(memoryview(self._table), self._count, self._width, row).clear_inflight(row)
                found.append((row, status))
        return found

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def _wait(self) -> None:
        while self._pids:
            pid, _ = os.waitpid(-1, 0)
            self._pids.pop(pid, None)


def prepare() -> Path:
    """Before anything that counts is imported: makes the folder of the processes, and says where they count."""
    folder = Path(tempfile.mkdtemp(prefix="smetric-router-"))
    (folder / "metrics").mkdir()
    count_in(folder / "metrics")
    return folder
