"""The peers' own environments: `.peers/NAME`, made on first use with the exact versions of `NAME.requirements.txt`."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.face import BenchError

ROOT = Path(__file__).resolve().parents[2]
INSTALL_TIMEOUT_S = 600.0


def python_of(
    name: str,
    requirements: Path,
    folder: Path = ROOT / ".peers",
    alone: Sequence[str] = (),
    *,
    interpreter: str | None = None,
) -> Path:
    """The interpreter of the environment; it is made, or made anew, unless it is there with these requirements.

    Args:
        alone: packages that are installed after the others, without what they say they require.
        interpreter: the Python that it is made with; None: this one.

    Raises:
        BenchError: it cannot be made, for example without a network; with the last line of what pip said.
    """
    environment = folder / name
    python = environment / "bin" / "python"
    stamp = environment / "installed"
    wanted = "\n".join([interpreter or sys.version, requirements.read_text(), *alone])
    if stamp.exists() and stamp.read_text() == wanted and python.exists():
        return python
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    commands: list[list[str]] = [
        [interpreter or sys.executable, "-m", "venv", "--clear", str(environment)],
        [*pip, "-r", str(requirements)],
        *([[*pip, "--no-deps", *alone]] if alone else []),
    ]
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        except subprocess.CalledProcessError as error:
            said = (error.stderr or error.stdout).strip().splitlines() or ["no reason given"]
            raise BenchError(f"{environment} cannot be made: {said[-1]}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BenchError(f"{environment} cannot be made: {error}") from error
    stamp.write_text(wanted)
    return python


def install_debian_package(package: str) -> None:
    """For `--install-peers`.

    Raises:
        BenchError: apt-get is not there, or fails, for example because the user is not root.
    """
    try:
        subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", package], check=True,
                       capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)  # fmt: skip
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip().splitlines() or ["no reason given"]
        raise BenchError(f"apt-get install {package} failed: {said[-1]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"apt-get install {package} failed: {error}") from error
