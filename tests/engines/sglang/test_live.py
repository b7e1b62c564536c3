"""Weights and a router in front of real SGLang servers on the CPU."""

import json
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from demo import model, pool, sglang_engine
from demo.pool import Started
from demo.processes import ROOT, Supervisor, run_id
from demo.sglang_engine import SglangOptions, SglangServer

from smetric_router.config import RouterConfig
from smetric_router.server.proxy import Proxy
from smetric_router.server.rendering import Dialect
from smetric_router.server.tokenising import ModelTokenizer
from smetric_router.state.engine_reports import read_loads, read_metrics
from smetric_router.state.requests import CHAT_PATH
from smetric_router.types import Ticket, Usage

from ...router.conftest import Router, running, until
from .test_loading import versions

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
PAGE = 64
# Of several for so small a model each waits for the others, on a busy machine for long.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SESSIONS, TURNS = 7, 4
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks <it> up.", "parameters": {"type": "object"}},
    }
]


@pytest.fixture(scope="module")
def supervisor() -> Iterator[Supervisor]:
    """Owns the programs of these tests."""
    with Supervisor(ROOT / ".out" / f"sglang-live-{run_id()}") as made:
        yield made


@pytest.fixture(scope="module")
def tiny() -> Path:
    """The model."""
    return model.make("tiny")


@pytest.fixture(scope="module")
def other() -> Path:
    """The same shape with other weights."""
    return model.make("tiny", seed=1)


@pytest.fixture(scope="module")
def worker(supervisor: Supervisor, other: Path) -> Started:
    """A store and a worker, with versions of the model."""
    started = pool.up(supervisor, arena="256MiB")
    versions(started["worker"], other)
    return started


@dataclass(frozen=True)
class Pair:
    """Two servers of the same model, started one after the other."""

    cold: SglangServer
    warm: SglangServer

    @property
    def each(self) -> tuple[SglangServer, SglangServer]:
        return self.cold, self.warm


@pytest.fixture(scope="module")
def pair(supervisor: Supervisor, tiny: Path, worker: Started) -> Pair:
    def start(name: str) -> SglangServer:
        events = {
            "publisher": "zmq", "endpoint": f"tcp://*:{supervisor.port()}", "replay_endpoint": f"tcp://*:{supervisor.port()}",
        }  # fmt: skip
        args = (
            "--load-format", "tensorcast", "--model-loader-extra-config", json.dumps({"worker": worker["worker"]}),
            "--kv-events-config", json.dumps(events), "--enable-metrics", "--served-model-name", "demo",
        )  # fmt: skip
        server = sglang_engine.start(supervisor, name, SglangOptions(tiny, kv_tokens=2048, args=args, env=ONE_THREAD))
        server.wait()
        return server

    cold = start("cold")
    with supervisor.standing_still(cold.running):  # with nothing to do it would keep a core busy
        return Pair(cold, start("warm"))


def log(server: SglangServer) -> str:
    return server.running.log.read_text(errors="replace")


def outputs(server: SglangServer) -> list[list[int]]:
    """Greedy tokens for a few prompts that nobody else asks for, computed and not found."""
    server.flush()
    draw = random.Random(5)
    return [server.generate(draw.choices(range(10, 2000), k=100), tokens=6).tokens for _ in range(3)]


def name(server: SglangServer) -> str:
    """What the server calls its model."""
    (entry,) = json.loads(server.ask("/v1/models", method="GET")[1])["data"]
    return str(entry["id"])


def update(server: SglangServer, path: Path | str, load_format: str, **more: Any) -> tuple[int, str]:
    status, text = server.ask(
        "/update_weights_from_disk", {"model_path": str(path), "load_format": load_format, **more}
    )
    message = json.loads(text)["message"]
    if "the cache was not flushed" in message:  # it was not idle yet after its last answer
        server.flush()
        status = 200
    return status, message


def test_cold_and_warm_compute_what_sglangs_own_loader_gives(pair: Pair, tiny: Path) -> None:
    assert "from files, being shared" in log(pair.cold) and "from the pool, mapped" in log(pair.warm)
    cold, warm = (outputs(each) for each in pair.each)
    assert update(pair.warm, tiny, "auto")[0] == 200
    assert cold == warm == outputs(pair.warm)


def test_versions_are_taken_all_or_nothing(pair: Pair, tiny: Path, other: Path) -> None:
    before = outputs(pair.cold)
    prompt = list(range(10, 210))
    pair.cold.generate(prompt)
    status, message = update(pair.cold, "demo", "tensorcast:policy:shape")
    assert status == 400 and "has shape [255, 768]" in message
    assert pair.cold.generate(prompt).cached == {"device": 192}, "nothing has changed, so nothing was emptied"
    assert outputs(pair.cold) == before
    pair.cold.generate(prompt)
    status, message = update(pair.cold, "demo", "tensorcast:policy", weight_version="10")
    assert status == 200, message
    assert name(pair.cold) == "demo"
    assert not pair.cold.generate(prompt).cached, "KV of the former weights is not used"
    assert update(pair.warm, other, "auto")[0] == 200
    assert outputs(pair.cold) == outputs(pair.warm) != before
    for each in pair.each:
        assert update(each, tiny, "tensorcast")[0] == 200
        assert outputs(each) == before


def test_loads_and_metrics_are_read(pair: Pair) -> None:
    for path, read in (("/v1/loads?include=core", read_loads), ("/metrics", read_metrics)):
        status, text = pair.cold.ask(path, method="GET")
        report = read(text.encode())
        assert status == 200 and report is not None, text[:500]
        assert (report.running, report.waiting) == (0, 0)
        assert report.kv_usage is not None and 0 <= report.kv_usage < 1


def test_tokens_are_the_servers(pair: Pair, tiny: Path) -> None:
    tokenizer = ModelTokenizer(tiny, 100_000)
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"what": "x", "n": [1, 2]}'}}
    cases: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "hello", "name": "someone"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "one part"}]}]},
        {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "<|im_end|> <|im_start|>"}]},
        {"messages": [{"role": "user", "content": "x " * 700}], "tools": TOOLS},
        {
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
                {"role": "tool", "tool_call_id": "c1", "content": "found\n"},
                {"role": "assistant", "content": " so "},
                {"role": "user", "content": "\n go on"},
            ],
            "tools": [{"type": "function", "function": {"parameters": {"type": "object"}, "name": "look"}}],
        },
    ]
    for case in cases:
        body = {"model": "demo", **case}
        status, text = pair.cold.ask("/tokenize", body)
        assert status == 200, text
        made = tokenizer.prompt(CHAT_PATH, json.dumps(body).encode(), dialect=Dialect.SGLANG)
        assert list(made.tokens) == json.loads(text)["tokens"], case
    status, text = pair.cold.ask("/tokenize", {"model": "demo", "prompt": "a <|im_end|> text"})
    assert tokenizer.prompt("/v1/completions", b'{"prompt": "a <|im_end|> text"}').tokens == array(
        "I", json.loads(text)["tokens"]
    )


async def converse(router: Router, model_name: str, draw: random.Random, system: str, **fields: Any) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for _ in range(TURNS):
        messages.append({"role": "user", "content": words(draw, draw.randrange(20, 70))})
        body = {"model": model_name, "messages": messages, "max_tokens": 4, "temperature": 0, **fields}
        async with router.client.post(f"{router.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            said = await answer.json()
        messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"] or ""})


def words(draw: random.Random, count: int) -> str:
    stems = ("def", "return x", "f(", "été", "\n\n", "0x1f")
    return " ".join(draw.choice(stems) + str(draw.randrange(999)) for _ in range(count))


async def test_the_router_knows_what_each_server_holds(pair: Pair, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions of several turns, more than the devices hold: prediction and `cached_tokens` of each answer."""
    seen: list[tuple[float, int, int]] = []
    finished = Proxy.finished

    def record(self: Proxy, ticket: Ticket, *, usage: Usage, **more: Any) -> None:
        if usage.prompt_tokens and usage.cached_tokens is not None:
            share = ticket.decision.hit / ticket.request.length
            seen.append((share * usage.prompt_tokens, usage.cached_tokens, usage.prompt_tokens))
        finished(self, ticket, usage=usage, **more)

    monkeypatch.setattr(Proxy, "finished", record)
    served = name(pair.cold)  # SGLang names a model by the folder that it was last updated from
    assert name(pair.warm) == served
    config = RouterConfig(
        engines=tuple(each.url for each in pair.each), index="exact", tokenizers={served: str(tiny)},
        kv_media=("GPU", "CPU_PINNED"), report_interval_s=0.2,
    )  # fmt: skip
    async with running(config) as router:
        await until(lambda: router.healthy() == 2 and len(router.state.statistics(0).feeds) == 2, 30)
        draw = random.Random(7)
        system = words(draw, 60)
        for number in range(SESSIONS):
            await converse(router, served, draw, system, **({"tools": TOOLS} if number % 3 == 0 else {}))
        within = sum(abs(predicted - cached) <= PAGE for predicted, cached, _ in seen) / len(seen)
        print(
            f"within one page {within:.1%} of {len(seen)}; missed {[each for each in seen if abs(each[0] - each[1]) > PAGE]}"
        )
        assert len(seen) == SESSIONS * TURNS
        assert sum(cached for _, cached, _ in seen) > 0.4 * sum(prompt for *_, prompt in seen)
        assert within >= 0.95
        text = router.app.metrics.render().decode()
        assert f'smetric_router_tokenised_total{{result="tokenised"}} {len(seen)}.0' in text
        router.state.check()
