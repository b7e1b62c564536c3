"""Devices to test on: `host`, and `cuda` over a driver that is made here, since there may be no GPU (libcuda.c)."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorcast_connector.engines.devices import driver

SOURCE = Path(__file__).with_name("libcuda.c")


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the driver."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of the CUDA driver")
    folder = tmp_path_factory.mktemp("driver")
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(folder / driver.LIBRARY), str(SOURCE)]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def fake_cuda(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process, and those that it starts, use it instead of a real driver."""
    monkeypatch.setattr(driver, "LIBRARY", str(stand_in / driver.LIBRARY))
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join([str(stand_in), os.environ.get("LD_LIBRARY_PATH", "")]))
    driver.driver.cache_clear()
    yield
    driver.driver.cache_clear()


@pytest.fixture(params=["host:0", "cuda:0"])
def device(request: pytest.FixtureRequest) -> str:
    """The name of one."""
    if request.param.startswith("cuda"):
        request.getfixturevalue("fake_cuda")
    return str(request.param)
