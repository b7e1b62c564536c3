"""The ranks of an engine that only load weights, each in a process of its own (see loading.py), asked together."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tensorcast_connector.client.blocking import connect_blocking
from tensorcast_connector.errors import NotFound

END_S = 20.0
PUBLISHED_S = 120.0


class Ranks:
    """See the module. A context manager that ends the processes.

    Args:
        log: what they say goes there.
        threads: of torch, of each.
        packages: a folder with packages that are used if the environment has no such ones.
    """

    def __init__(self, count: int, log: Path, threads: int = 1, packages: str = "") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._stack = ExitStack()
        output = self._stack.enter_context(log.open("ab"))
        self._log = log
        path = [str(Path(__file__).resolve().parents[1]), *sys.path, *([packages] if packages else [])]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "demo.loading", "--port", str(port), "--ranks", str(count), "--rank", str(rank),
                 "--threads", str(threads)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            )
            for rank in range(count)
        ]  # fmt: skip
        for each in self.processes:
            self._answer(each)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self.processes:
            if each.stdin is not None:
                with suppress(BrokenPipeError):
                    each.stdin.close()  # nothing more is asked
        for each in self.processes:
            try:
                each.wait(END_S)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
            if each.stdout is not None:
                each.stdout.close()
        self._stack.close()

    def load(self, model: Path, load_format: str = "tensorcast", **asked: Any) -> list[dict[str, Any]]:
        """What each rank answers; see loading.py."""
        line = json.dumps({"model": str(model), "load_format": load_format, **asked}).encode() + b"\n"
        for each in self.processes:
            assert each.stdin is not None
            each.stdin.write(line)
            each.stdin.flush()
        return [self._answer(each) for each in self.processes]

    def _answer(self, process: "subprocess.Popen[bytes]") -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            end = "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])
            raise RuntimeError(f"a rank has ended; the end of {self._log}:\n{end}")
        found: dict[str, Any] = json.loads(line)
        return found


def published(answers: Sequence[dict[str, Any]], worker: str, tenant: str = "") -> float:
    """Waits until what ranks have loaded and are sharing (their answers) is in the pool: the seconds that took from now on.

    Raises:
        TimeoutError: it does not get there.
    """
    begun = time.monotonic()
    names = {
        word for each in answers for line in each["said"] if "is not in the pool" in line or "cannot be used" in line
        for word in line.split() if word.startswith("weights/")
    }  # fmt: skip
    assert names, answers[0]["said"]
    with connect_blocking(worker, tenant=tenant) as session:
        for name in names:
            while True:
                with suppress(NotFound):
                    session.artifact(name).id()
                    break
                if time.monotonic() > begun + PUBLISHED_S:
                    raise TimeoutError(f"{name} is not published")
                time.sleep(0.01)
    return time.monotonic() - begun
