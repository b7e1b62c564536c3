"""What a block costs in the exact index, in a process of its own."""

import subprocess
import sys

import pytest

PROGRAM = """
import random
from pathlib import Path
from smetric_router.blocks import stored_blocks
from smetric_router.state.exact_index import ExactIndex

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

draw, index, blocks, held = random.Random(1), ExactIndex(1_000_000), 0, {}
before = resident()
while blocks < 600_000:
    hashes = [draw.randbytes(32) for _ in range(64)]
    index.apply("a", 0, stored_blocks(hashes, None, [draw.randrange(1 << 17) for _ in range(64)], 1))
    blocks += 64
print((resident() - before) / blocks)
"""


@pytest.mark.slow
def test_ten_million_blocks_fit_into_a_gigabyte_and_a_half() -> None:
    # As full as the dictionaries are with ten million in eight instances.
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert float(ran.stdout) <= 150, "10 million in 1.5 GB"
