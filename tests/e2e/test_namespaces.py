"""A page of another model, dtype, precision or block size is never a hit; a page of the same one is."""

from collections.abc import Callable
from pathlib import Path

import pytest
from demo import engine
from demo.engine import Engine, EngineOptions
from demo.pool import Started

from tests.e2e.probe import patient, saved, statistics, tokens, until

pytestmark = [pytest.mark.engine, pytest.mark.long]
PROMPT = 2000


def test_only_the_same_model_dtype_and_block_size_share_pages(
    workers: tuple[Started, Started],
    tiny: Path,
    other_tiny: Path,
    start_engine: Callable[[str, EngineOptions], Engine],
    salt: str,
) -> None:
    transfer = patient(workers[0]["worker"])
    blue = {**transfer, "kv_connector_extra_config": {"worker": workers[0]["worker"], "tenant": "blue"}}
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [transfer]},
    }
    kinds = {
        "first": EngineOptions(tiny, kv_transfer=transfer),
        "other-model": EngineOptions(other_tiny, kv_transfer=transfer),
        "other-dtype": EngineOptions(tiny, kv_transfer=transfer, args=("--dtype", "float32")),
        "other-block-size": EngineOptions(tiny, kv_transfer=transfer, block_size=64),
        "other-tenant": EngineOptions(tiny, kv_transfer=blue),
        "same": EngineOptions(tiny, kv_transfer=transfer),
        "same-among-several-connectors": EngineOptions(tiny, kv_transfer=several),
        "other-precision": EngineOptions(tiny, kv_transfer=transfer, env={"VLLM_MARLIN_INPUT_DTYPE": "int8"}),
    }
    prompt = tokens(7, PROMPT)
    hits: dict[str, int] = {}
    names = list(kinds)
    for pair in (names[:2], names[2:4], names[4:6], names[6:]):
        engines = {name: start_engine(name, kinds[name]) for name in pair}
        for name, made in engines.items():
            made.wait()
            before = int(statistics(workers[0])["pages_saved"])
            saved(made, [prompt], salt)
            hits[name] = made.sources().pool
            if not hits[name]:
                until(lambda b=before: statistics(workers[0])["pages_saved"] > b, "its own pages are saved")  # type: ignore[misc]
    print(f"\ntokens from the pool: {hits}")
    whole = PROMPT // 128 * 128
    assert hits == {**dict.fromkeys(names, 0), "same": whole, "same-among-several-connectors": whole}


@pytest.fixture(autouse=True)
def _all_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiny engines at a time, not bound: they are started, asked once and stopped."""
    monkeypatch.setattr(engine, "START_TIMEOUT_S", 400.0)
