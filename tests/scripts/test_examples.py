"""The examples run, on real stores and workers, and what they move arrives."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo import pool
from demo.processes import Supervisor

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with Supervisor(tmp_path_factory.mktemp("examples")) as supervisor:
        store = pool.store(supervisor)
        yield [
            pool.worker(supervisor, store["store"], name, arena="16MiB")["worker"] for name in ("one", "two", "three")
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "last"),
    [
        ("branching", "6 of 6 branches go on from the same bytes"),
        ("scale_up", "3 of 3 engines have the right parameters"),
        ("trainer", "3 of 3 versions arrived at every rank as they were published"),
    ],
)
def test_an_example(example: str, last: str, workers: list[str]) -> None:
    path = os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{example}", *workers],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == last
