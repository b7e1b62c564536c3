"""Wrong options of the connector and of the loader stop `vllm serve` with one clear line before it serves."""

import json
import subprocess
from pathlib import Path

import pytest
from demo import pool
from demo.processes import program

pytestmark = pytest.mark.engine

GOOD = pool.connector("unix:/nowhere/worker.sock")
WRONG = {
    "no worker": ({**GOOD, "kv_connector_extra_config": {}}, '"worker" is missing'),
    "unknown key": (
        {**GOOD, "kv_connector_extra_config": {"worker": "unix:/w", "tenent": "x"}},
        "did you mean 'tenant'",
    ),
    "wrong policy": ({**GOOD, "kv_load_failure_policy": "fail"}, 'kv_load_failure_policy is "fail"'),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_line_and_a_status(case: str, tiny: Path) -> None:
    transfer, words = WRONG[case]
    line = [program("vllm"), "serve", str(tiny), "--port", "0", "--kv-transfer-config", json.dumps(transfer)]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert ended.returncode != 0
    ours = [each for each in (ended.stdout + ended.stderr).splitlines() if each.startswith("tensorcast:")]
    assert len(ours) == 1 and words in ours[0], ended.stderr[-2000:]
    assert "Traceback" not in ended.stdout + ended.stderr


def test_wrong_options_of_the_loader_too(tiny: Path) -> None:
    line = [program("vllm"), "serve", str(tiny), "--port", "0", "--load-format", "tensorcast"]
    line += ["--model-loader-extra-config", '{"wrker": "unix:/w"}']
    ended = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert ended.returncode != 0
    ours = [each for each in (ended.stdout + ended.stderr).splitlines() if each.startswith("tensorcast:")]
    assert len(ours) == 1 and "did you mean 'worker'" in ours[0], ended.stderr[-2000:]
    assert "Traceback" not in ended.stdout + ended.stderr
