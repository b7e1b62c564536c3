"""The scripts a user types, on a copy of the tree whose programs are stubs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ruff", "mypy", "lint-imports", "python")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run(tree: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **env}
    return subprocess.run(
        [str(tree / command[0]), *command[1:]], env=variables, capture_output=True, text=True, timeout=30
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the scripts, the locks and the project file."""
    for name in ("install", "test", "lint", "vllm_alias.py"):
        (tmp_path / "scripts").mkdir(exist_ok=True)
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copytree(ROOT / "tests" / "sglang_cpu", tmp_path / "tests" / "sglang_cpu")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    return tmp_path


@pytest.fixture
def stubbed(tree: Path) -> Path:
    """The tree with nothing to install, and tools that note their arguments and fail when `FAIL` names them."""
    write(tree / "scripts" / "install", "exit 0")
    for tool in TOOLS:
        stub(tree / ".venv" / "bin" / tool, tool)
    stub(tree / ".envs" / "sglang" / "bin" / "python", "sglang-python")
    return tree


def stub(path: Path, name: str) -> None:
    write(path, f'echo "{name} $*" >>calls\ncase "{name} $*" in *"${{FAIL:-nothing}}"*) exit 1;; esac')


def calls(tree: Path) -> list[str]:
    return (tree / "calls").read_text().splitlines()


FAST = "python -m pytest -m not engine and not faults and not sglang"
SGLANG = "sglang-python -m pytest -m sglang tests/engines/sglang"
STATIC = ["ruff check .", "ruff format --check .", "mypy ", "lint-imports "]


def test_without_a_tier_everything_runs(stubbed: Path) -> None:
    assert run(stubbed, "scripts/test").returncode == 0
    assert calls(stubbed) == [*STATIC, FAST, "python -m pytest -m faults -s", "python -m pytest -m engine", SGLANG]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fast", "-k", "a b"], [*STATIC, f"{FAST} -k a b"]),
        (["faults", "-x"], ["python -m pytest -m faults -s -x"]),
        (["engines", "-x"], ["python -m pytest -m engine -x"]),
        (["sglang", "-x"], [f"{SGLANG} -x"]),
        (["slow"], ["python -m pytest -m slow"]),
    ],
)
def test_a_tier_or_a_marker_with_arguments_for_pytest(stubbed: Path, arguments: list[str], expected: list[str]) -> None:
    assert run(stubbed, "scripts/test", *arguments).returncode == 0
    assert calls(stubbed) == expected


@pytest.mark.parametrize(
    "failing",
    ["ruff check", "ruff format", "mypy", "lint-imports", "-m not engine", "-m faults", "-m engine", "-m sglang"],
)
def test_any_failure_is_the_status_and_hides_nothing(stubbed: Path, failing: str) -> None:
    assert run(stubbed, "scripts/test", FAIL=failing).returncode == 1
    assert len(calls(stubbed)) == 8


CI_TESTS = [FAST, "python -m pytest -m engine and not long", SGLANG.replace("-m sglang", "-m sglang and not long")]
CI = [*STATIC, *(f"{each} --cache-clear" for each in CI_TESTS)]
AGAIN = " --last-failed --last-failed-no-failures none"


def test_the_continuous_integration_leaves_out_what_is_long(stubbed: Path) -> None:
    assert run(stubbed, "scripts/test", "ci").returncode == 0
    assert calls(stubbed) == CI
    assert "exec scripts/test ci" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize(("failing", "at"), [("-m not engine", 4), ("-m engine", 5), ("-m sglang", 6)])
def test_and_runs_once_more_what_failed(stubbed: Path, failing: str, at: int) -> None:
    assert run(stubbed, "scripts/test", "ci", FAIL=failing).returncode == 1
    assert calls(stubbed) == [*CI[: at + 1], CI_TESTS[at - 4] + AGAIN, *CI[at + 1 :]]


@pytest.mark.parametrize("status", [2, 3, 4, 5, 139])
def test_but_not_of_a_run_that_was_cut_short(stubbed: Path, status: int) -> None:
    """What it did not come to was never run."""
    write(
        stubbed / ".venv" / "bin" / "python",
        f'case "$*" in *--last-failed*) exit 0;; *"-m engine"*) exit {status};; esac',
    )
    assert run(stubbed, "scripts/test", "ci").returncode == 1


def test_nor_of_one_that_was_told_to_stop_early(stubbed: Path) -> None:
    assert run(stubbed, "scripts/test", "ci", "-x").returncode == 2 and not (stubbed / "calls").exists()


def test_what_fails_once_is_no_failure_there_and_one_elsewhere(stubbed: Path) -> None:
    """A stub that fails unless it is told to run what failed."""
    write(stubbed / ".venv" / "bin" / "python", 'case "$*" in *--last-failed*) exit 0;; *"-m engine"*) exit 1;; esac')
    assert run(stubbed, "scripts/test", "ci").returncode == 0
    assert run(stubbed, "scripts/test", "engines").returncode == 1


def test_static_checks_are_not_run_once_more(stubbed: Path) -> None:
    assert run(stubbed, "scripts/test", "ci", FAIL="ruff check").returncode == 1
    assert calls(stubbed) == CI


def test_a_failed_installation_stops_the_tests(stubbed: Path) -> None:
    write(stubbed / "scripts" / "install", "exit 1")
    assert run(stubbed, "scripts/test").returncode == 1
    assert not (stubbed / "calls").exists()


def test_install_refuses_an_old_python_in_one_line(tree: Path) -> None:
    write(tree / "old", 'case "$*" in *version_info*) exit 1;; -V) echo "Python 3.9.2";; esac')
    done = run(tree, "scripts/install", PYTHON=str(tree / "old"))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("install: Python 3.11 or later is needed") and "3.9.2" in line
    assert not (tree / ".venv").exists()


def test_install_names_the_missing_debian_package(tree: Path) -> None:
    write(tree / "bare", 'case "$*" in *ensurepip*) exit 1;; esac')
    done = run(tree, "scripts/install", PYTHON=str(tree / "bare"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("apt-get install python3-venv")


def test_install_says_when_there_is_no_python(tree: Path) -> None:
    done = run(tree, "scripts/install", PYTHON="python-that-is-not-there")
    assert done.returncode == 1
    assert "python-that-is-not-there is not there" in done.stderr


def test_install_does_nothing_when_nothing_changed_and_something_when_a_lock_did(tree: Path) -> None:
    write(tree / ".venv" / "bin" / "python", 'echo "$*" >>calls')
    first = run(tree, "scripts/install")
    assert first.returncode == 0, first.stderr
    (tree / "calls").unlink()
    again = run(tree, "scripts/install")
    assert (again.returncode, again.stderr) == (0, "")
    assert not (tree / "calls").exists()
    with (tree / "requirements" / "dev.lock").open("a") as lock:
        lock.write("another==1\n")
    assert run(tree, "scripts/install").returncode == 0
    assert any("install" in call for call in calls(tree))


def test_the_environments_are_installed_apart(tree: Path) -> None:
    for folder in (".venv", ".envs/sglang"):
        write(tree / folder / "bin" / "python", f'echo "{folder} $*" >>calls')
    assert run(tree, "scripts/install", "sglang").returncode == 0
    assert all(call.startswith(".envs/sglang ") for call in calls(tree))
    (tree / "calls").unlink()
    with (tree / "requirements" / "dev.lock").open("a") as lock:
        lock.write("another==1\n")
    assert run(tree, "scripts/install", "sglang").returncode == 0 and not (tree / "calls").exists()
    with (tree / "tests" / "sglang_cpu" / "sglang_on_cpu.py").open("a") as module:
        module.write("# changed\n")
    assert run(tree, "scripts/install", "sglang").returncode == 0 and (tree / "calls").exists()
    refused = run(tree, "scripts/install", "other")
    assert refused.returncode == 2 and "scripts/install sglang" in refused.stderr


def test_install_fails_when_pip_does_and_is_not_taken_for_done(tree: Path) -> None:
    write(tree / ".venv" / "bin" / "python", 'case "$*" in *"install"*) exit 1;; esac')
    assert run(tree, "scripts/install").returncode != 0
    assert not (tree / ".venv" / "installed").exists()
