"""What a real SGLang server has said (tests/engines/sglang/record.py), as the router reads it."""

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from smetric_router.blocks import TokenPrompt, prompt_seed
from smetric_router.server.event_sources import discovered
from smetric_router.server.kv_events import Groups, decode
from smetric_router.server.rendering import Dialect
from smetric_router.state.engine_reports import read_loads, read_metrics
from smetric_router.state.exact_index import ExactIndex
from smetric_router.types import EngineReport

RECORDED = Path(__file__).parent / "recorded" / "sglang-0.5.23"
PAGE = 64


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / "answers.json").read_text())
    assert found["version"] == "0.5.23"
    return found


@pytest.fixture(scope="module")
def said() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDED / "events.jsonl").read_text().splitlines()]


def test_load(answers: dict[str, Any]) -> None:
    loads = read_loads(json.dumps(answers["/v1/loads"]).encode())
    metrics = read_metrics(answers["/metrics"].encode())
    assert loads is not None and metrics is not None
    assert (loads.running, loads.waiting) == (metrics.running, metrics.waiting) == (0, 0)
    assert loads.kv_usage is not None and metrics.kv_usage is not None
    assert isinstance(loads, EngineReport) and loads.queued_tokens == 0


async def test_publishers_and_whose_models_they_are(answers: dict[str, Any]) -> None:
    class Engine:
        async def get(self, _: str, path: str) -> tuple[int, bytes]:
            return (200, json.dumps(answers[path]).encode()) if path in answers else (404, b'{"detail":"Not Found"}')

    (source,) = await discovered(Engine(), "http://host-a:30000")
    events = answers["/server_info"]["kv_events"]
    assert source.endpoint == f"tcp://host-a:{events['endpoint_port_base']}"
    assert source.replay_endpoint == f"tcp://host-a:{events['replay_endpoint_port_base']}"
    (entry,) = answers["/v1/models"]["data"]
    assert (entry["id"], Dialect.of(entry["owned_by"])) == ("demo", Dialect.SGLANG)


def test_events_say_what_is_cached(said: list[dict[str, Any]]) -> None:
    """What was cached of the next prompt, by all events before it: blocks are stored, move to host memory and back, and go."""
    index = ExactIndex(100_000, ("GPU", "CPU_PINNED"))
    off, hits, groups = [], 0, Groups()
    for each in said:
        prompt = TokenPrompt(array("I", each["prompt"]), prompt_seed("", each["salt"]))
        predicted = index.match(prompt).get("server", 0)
        hits += each["cached"] > 0
        if predicted != each["cached"]:
            off.append((predicted, each["cached"], len(each["prompt"])))
        for payload in each["events"]:
            batch = decode(bytes.fromhex(payload), groups)
            assert not batch.ignored
            for event in batch.events:
                index.apply("server", batch.rank, event)
        index.check()
    assert hits > len(said) / 2
    assert not off, "(predicted, cached, prompt)"


def test_all_kinds_of_events_were_recorded(said: list[dict[str, Any]]) -> None:
    kinds, media, wheres = set(), set(), set()
    for each in said:
        wheres.update(each["where"])
        for payload in each["events"]:
            _, events, rank = msgspec.msgpack.decode(bytes.fromhex(payload))
            assert rank in (0, None)
            for event in events:
                kinds.add(event["type"])
                media.add(event.get("medium"))
                assert all(isinstance(key, int) for key in event.get("block_hashes", []))
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert {"GPU", "CPU_PINNED"} <= media
    assert {"device", "host"} <= wheres
