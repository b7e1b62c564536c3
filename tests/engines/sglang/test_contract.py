"""SGLang's real controller and host pools over a real worker: every byte of a thousand pages, in every layout."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from demo import model, pool
from demo.pool import Started
from demo.processes import ROOT, Supervisor, run_id
from demo.sglang_engine import SglangOptions

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
PAGES = 1000
Trip = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def worker() -> Iterator[Started]:
    """A store and a worker whose arena holds what these tests store."""
    with Supervisor(ROOT / ".out" / f"sglang-contract-{run_id()}") as supervisor:
        yield pool.up(supervisor, arena="1GiB")


@pytest.fixture
def trip(worker: Started, request: pytest.FixtureRequest) -> Trip:
    """A round trip in a process of its own. Tests find nothing of each other: each has a weight version of its own."""

    def go(*arguments: str, pages: int = PAGES) -> dict[str, Any]:
        line = [sys.executable, "-m", "tests.engines.sglang.roundtrip", "--worker", worker["worker"]]
        line += ["--model", str(model.make("tiny")), "--pages", str(pages), "--weights", request.node.name]
        environment = SglangOptions(Path()).environment()
        done = subprocess.run(
            [*line, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200, env=_with(environment)
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(json.loads(done.stdout.splitlines()[-1]))

    return go


def _with(more: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", **more}


def whole(stored: int = PAGES, beside: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "pages": PAGES, "stored": stored, "prefetched": PAGES, "same": PAGES, "after_clear": 0, "beside": beside
    }  # fmt: skip


def test_a_thousand_pages_and_states_of_which_only_the_last_are_kept(trip: Trip) -> None:
    beside = {
        "written": [True, True],
        "read": [True, True],
        "same": 2,
        "all_pages": [0, []],
        "trailing_pages": [4, [4]],  # the two pages that are stored end at the fourth
        "block_groups": [8, list(range(1, 9))],  # never decides
    }
    assert trip("--layout", "page_first_direct", "--beside") == whole(beside=beside)


@pytest.mark.parametrize(
    "arguments",
    [
        "--layout page_first --io kernel",
        "--layout layer_first",  # by the generic calls, with flat tensors
        "--layout page_first_direct --kind mla",
    ],
)
def test_a_thousand_pages_come_back_exactly(trip: Trip, arguments: str) -> None:
    assert trip(*arguments.split()) == whole()


def test_ranks_of_two_sizes_share_pages_whose_heads_come_first(trip: Trip) -> None:
    layout = ["--layout", "page_head", "--io", "kernel", "--tp-lcm-size", "2"]
    for rank in "01":
        assert trip(*layout, "--tp-size", "2", "--tp-rank", rank) == whole()
    assert trip(*layout, "--only", "read") == whole(stored=0)


def test_a_latent_cache_is_one_for_ranks_of_every_size(trip: Trip) -> None:
    latent = ["--layout", "page_first_direct", "--kind", "mla"]
    assert trip(*latent, "--tp-size", "2", "--tp-rank", "0") == whole()
    assert trip(*latent, "--tp-size", "2", "--tp-rank", "1", "--only", "read") == whole(stored=0)
    assert trip(*latent, "--only", "read") == whole(stored=0)
