"""The packages import nothing that an engine's environment would have to agree on."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    "package", ["tensorcast_connector", "tensorcast_connector.cli", "smetric_router", "smetric_router.cli"]
)
def test_importing_loads_neither_torch_nor_an_engine(package: str) -> None:
    code = f"import sys, {package}; print([m for m in ('torch', 'vllm', 'sglang', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
