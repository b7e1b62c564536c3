"""The packages import nothing that an engine's environment would have to agree on."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tensorcast_connector as tensorcast

DOCS = Path(__file__).parents[1] / "docs"
PUBLIC_NAMES_MAX = 25


@pytest.mark.slow
@pytest.mark.parametrize(
    "package", ["tensorcast_connector", "tensorcast_connector.cli", "smetric_router", "smetric_router.cli"]
)
def test_importing_loads_neither_torch_nor_an_engine(package: str) -> None:
    code = f"import sys, {package}; print([m for m in ('torch', 'vllm', 'sglang', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.slow
def test_the_public_names_are_few_and_all_of_them_are_told_of() -> None:
    told = "".join(each.read_text() for each in DOCS.glob("*.md"))
    assert len(tensorcast.__all__) <= PUBLIC_NAMES_MAX
    for name in tensorcast.__all__:
        assert getattr(tensorcast, name).__doc__, name
        assert re.search(rf"\b{name}\b", told), f"{name} is in no page of docs/"
