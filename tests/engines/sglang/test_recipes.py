"""Every recipe for SGLang (configs/recipes/sglang-*) as SGLang's own parser reads it, and mistakes in our options."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from demo import model
from demo.processes import ROOT

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(120)]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("sglang-*/sglang.yaml"))
# What differs on a machine for tests: the model, and no GPU.
HERE = ("--device", "cpu", "--attention-backend", "torch_native", "--tp-size", "1", "--host", "127.0.0.1")


def parsed(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tests.engines.sglang.recipe", *map(str, arguments)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_there_are_recipes() -> None:
    assert {each.parent.name for each in RECIPES} == {"sglang-colocated", "sglang-pool"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda each: each.parent.name)
def test_sglang_takes_it(recipe: Path) -> None:
    done = parsed(recipe, "--model-path", model.make("tiny"), *HERE)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    args, events = said["args"], said["events"]
    assert (args["page_size"], args["enable_hierarchical_cache"], args["enable_cache_report"]) == (64, True, True)
    assert args["hicache_mem_layout"] == "page_first_direct", "none that we say was replaced by another one"
    assert events["publisher"] == "zmq" and events["replay_endpoint"]
    if recipe.parent.name == "sglang-pool":
        assert args["load_format"] == "tensorcast"
        assert json.loads(args["model_loader_extra_config"])["worker"].startswith("unix:")
        assert args["hicache_storage_backend"] == "dynamic"
        assert json.loads(args["hicache_storage_backend_extra_config"])["interface_v1"] == 1


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ('{"worker": "10.0.0.1:7701"}', "must be a Unix socket"),
        ('{"wroker": "unix:/x"}', "wroker"),
        ('{"threads": 0}', "threads=0"),
    ],
)
def test_a_mistake_in_our_options_is_one_line(tmp_path: Path, extra: str, why: str) -> None:
    file = tmp_path / "sglang.yaml"
    file.write_text(f"load-format: tensorcast\nmodel-loader-extra-config: '{extra}'\n")
    done = parsed(file, "--model-path", model.make("tiny"), *HERE)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("tensorcast: model_loader_extra_config") and why in last
    assert "Traceback" not in done.stderr
