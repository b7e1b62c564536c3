"""The peers' own environments: `.peers/NAME`, made on first use with the exact versions of `NAME.requirements.txt`."""

import subprocess
import sys
from pathlib import Path

from benchmarks.face import BenchError

ROOT = Path(__file__).resolve().parents[2]
INSTALL_TIMEOUT_S = 600.0


def python_of(name: str, requirements: Path, folder: Path = ROOT / ".peers") -> Path:
    """The interpreter of the environment; it is made, or made anew, unless it is there with these requirements.

    Raises:
        BenchError: it cannot be made, for example without a network; with the last line of what pip said.
    """
    environment = folder / name
    python = environment / "bin" / "python"
    stamp = environment / "installed"
    wanted = f"{sys.version}\n{requirements.read_text()}"
    if stamp.exists() and stamp.read_text() == wanted and python.exists():
        return python
    commands: list[list[str]] = [
        [sys.executable, "-m", "venv", "--clear", str(environment)],
        [str(python), "-m", "pip", "--disable-pip-version-check", "-q", "install", "-r", str(requirements)],
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
