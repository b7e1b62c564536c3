"""scripts/gpu_check says where there is no GPU; and its checks, on memory of the machine and over a stand-in of the driver."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.devices.conftest import stand_in

__all__ = ["stand_in"]
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHON": sys.executable, **env}
    return subprocess.run(
        [str(ROOT / "scripts" / "gpu_check"), *args], env=variables, capture_output=True, text=True, timeout=170
    )


def test_without_a_gpu_it_says_so() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        found = run()
        assert found.returncode == 3 and "no CUDA driver on this machine" in found.stdout, found
    found = run("--device", "cuda:999")
    assert found.returncode == 3 and "nothing was checked" in found.stdout and found.stdout.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_all_checks_on_memory_of_the_machine() -> None:
    found = run("--device", "host", "--size", "8MiB")
    assert found.returncode == 0, found
    lines = found.stdout.splitlines()
    assert len(lines) == 9 and lines[-1] == "all 7 checks done, none failed"
    assert [line for line in lines[1:-1] if not line.startswith(("ok ", "skipped  "))] == []
    assert "a stale handle is refused; memory that was open is intact" in found.stdout


def test_all_checks_over_a_driver_and_a_device_that_fails(stand_in: Path) -> None:
    library = os.pathsep.join([str(stand_in), os.environ.get("LD_LIBRARY_PATH", "")])
    found = run("--size", "8MiB", LD_LIBRARY_PATH=library)
    assert found.returncode == 0 and "ok       shared between processes" in found.stdout, found
    found = run("--size", "8MiB", LD_LIBRARY_PATH=library, FAKE_CUDA_FAILS="cuMemcpyDtoDAsync_v2")
    assert found.returncode == 1, found
    assert "FAILED   shared between processes: CudaError: cuMemcpyDtoDAsync_v2 failed" in found.stdout
    assert "ok       round trip" in found.stdout
