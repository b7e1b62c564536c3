"""One measuring program (see programs/measure.py) as a process that is told what to do."""

import contextlib
import json
import os
import select
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.environments import ROOT
from benchmarks.face import BenchError

ANSWER_TIMEOUT_S = 300.0
ENDING_S = 10.0


def pin(pid: int, cpus: Iterable[int]) -> None:
    """Keeps all threads that a process has, and those they will start, on these CPUs."""
    wanted = set(cpus)
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(task.name), wanted)


def python_path() -> dict[str, str]:
    """The environment variable with which programs find this package; what was on the path stays on it."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "scripts"), os.environ.get("PYTHONPATH")]))}


class Driver:
    """Use it as a context manager: leaving it ends the process.

    Args:
        name: for messages and the log.
        command: the program.
        log: where its standard error goes.
        cpus: where it may run.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, cpus: Iterable[int]) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,  # a Ctrl-C reaches who drives it, and then it is ended
                env={**os.environ, **python_path()},
            )  # fmt: skip
        pin(self._process.pid, cpus)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has died, with something still to be read
            self._process.stdin.close()
        try:
            self._process.wait(ENDING_S if kind is None else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def ready(self) -> Self:
        """Waits until it is connected.

        Raises:
            BenchError: it died, or does not answer.
        """
        self._answer()
        return self

    def ask(self, what: str, **how: Any) -> dict[str, Any]:
        """Tells it to do something, and waits until it is done.

        Raises:
            BenchError: it died, or does not answer.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **how}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it said before is told by `_answer`
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        output = self._process.stdout
        assert output is not None
        ready, _, _ = select.select([output], [], [], ANSWER_TIMEOUT_S)  # it answers in whole lines
        line = output.readline() if ready else b""
        if not line:
            why = "ended" if ready else f"did not answer within {ANSWER_TIMEOUT_S:g} s"
            last = self._log.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing"]
            raise BenchError(f"{self.name} {why}; the end of {self._log}: {last[0]}")
        return dict(json.loads(line))
