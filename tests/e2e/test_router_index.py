"""What the router predicts against what a real engine finds in its cache, by its KV events and without them."""

import asyncio
import json
import math
import random
import time
import urllib.request
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from demo.engine import Engine, EngineOptions, cpus_of, start
from demo.processes import Running, Supervisor

from smetric_router.config import RouterConfig
from smetric_router.server.proxy import Proxy
from smetric_router.server.tokenising import ModelTokenizer
from smetric_router.state.requests import CHAT_PATH
from smetric_router.types import Ticket, Usage

from ..router.conftest import Router, running, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK = 128
SESSIONS, TURNS, LIVE = 60, 5, 4
# Sessions begun before this much time is over are played to their end; a machine that is slow plays fewer.
BUDGET_S = 100.0
REQUESTS_MIN = 60
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{at}",
            "description": "Looks <something> up & says \u00fc.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
        },
    }
    for at in range(3)
]


@dataclass(frozen=True)
class Publishing:
    """An engine that publishes what it caches."""

    engine: Engine
    model: Path
    ports: tuple[int, int]
    options: EngineOptions

    @property
    def endpoints(self) -> tuple[str, str]:
        return f"tcp://127.0.0.1:{self.ports[0]}", f"tcp://127.0.0.1:{self.ports[1]}"


@pytest.fixture(scope="module")
def publishing(supervisor: Supervisor, tiny: Path) -> Publishing:
    ports = supervisor.port(), supervisor.port()
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://*:{ports[1]}",
    }
    # One compute thread: two that wait for each other on a busy machine are slower than one.
    options = EngineOptions(tiny, args=("--kv-events-config", json.dumps(events)), cpus=cpus_of(0, 2))
    made = start(supervisor, "publishing", options)
    made.wait()
    return Publishing(made, tiny, ports, options)


@dataclass
class Seen:
    """(predicted, cached, prompt) tokens of each answer."""

    answers: list[tuple[float, int, int]] = field(default_factory=list)

    def within(self, tokens: int) -> float:
        return sum(abs(predicted - cached) <= tokens for predicted, cached, _ in self.answers) / len(self.answers)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    made, finished = Seen(), Proxy.finished

    def record(self: Proxy, ticket: Ticket, *, usage: Usage, **more: Any) -> None:
        if usage.prompt_tokens and usage.cached_tokens is not None:
            share = ticket.decision.hit / ticket.request.length
            made.answers.append((share * usage.prompt_tokens, usage.cached_tokens, usage.prompt_tokens))
        finished(self, ticket, usage=usage, **more)

    monkeypatch.setattr(Proxy, "finished", record)
    return made


def exact(publishing: Publishing, **options: Any) -> RouterConfig:
    return RouterConfig(
        engines=(publishing.engine.url,),
        index="exact",
        tokenizers={publishing.engine.served_name: str(publishing.model)},
        **options,
    )


def words(draw: random.Random, count: int) -> str:
    stems = ("def", "return x", "f(", "self.", "été", "\n\n", "0x1f", "名", "class A:")
    return " ".join(draw.choice(stems) + str(draw.randrange(999)) for _ in range(count))


async def ask(router: Router, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": messages, "max_tokens": 6, **fields}
    async with router.client.post(f"{router.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def converse(router: Router, draw: random.Random, system: str, turns: int, **fields: Any) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for _ in range(turns):
        messages.append({"role": "user", "content": words(draw, draw.randrange(20, 150))})
        answer = await ask(router, messages, **fields)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


async def play(router: Router, seed: int) -> None:
    """Multi-turn sessions with a shared system prompt, a third of them with tools."""
    draw = random.Random(seed)
    system = words(draw, 120)
    end_s = time.monotonic() + BUDGET_S
    places = asyncio.Semaphore(LIVE)
    await converse(router, draw, system, TURNS)
    await converse(router, draw, system, TURNS, tools=TOOLS)

    async def one(at: int) -> None:
        async with places:
            if time.monotonic() > end_s:
                return
            fields = {"tools": TOOLS, "tool_choice": "auto"} if at % 3 == 0 else {}
            await converse(router, random.Random(seed + at), system, TURNS, **fields)

    await asyncio.gather(*(one(at) for at in range(1, SESSIONS - 1)))


async def test_exact_is_within_one_block(publishing: Publishing, seen: Seen) -> None:
    async with running(exact(publishing)) as router:
        await until(lambda: bool(router.state.statistics(0).feeds))
        await play(router, 1)
        missed = [answer for answer in seen.answers if abs(answer[0] - answer[1]) > BLOCK]
        print(f"missed (predicted, cached, prompt): {missed}")
        print(f"exact: within one block {seen.within(BLOCK):.1%} of {len(seen.answers)}, the same {seen.within(0):.1%}")
        assert len(seen.answers) >= REQUESTS_MIN
        assert sum(cached for _, cached, _ in seen.answers) > 0.4 * sum(prompt for *_, prompt in seen.answers)
        assert seen.within(BLOCK) >= 0.99
        text = router.app.metrics.render().decode()
        assert f'smetric_router_tokenised_total{{result="tokenised"}} {len(seen.answers)}.0' in text
        router.state.check()


async def test_observed_is_within_two_blocks(publishing: Publishing, seen: Seen) -> None:
    async with running(RouterConfig(engines=(publishing.engine.url,))) as router:
        await play(router, 2)
        print(f"observed: within two blocks {seen.within(2 * BLOCK):.1%}, one {seen.within(BLOCK):.1%}")
        assert len(seen.answers) >= REQUESTS_MIN
        assert seen.within(2 * BLOCK) >= 0.90


def test_tokens_are_the_engines(publishing: Publishing) -> None:
    """vLLM says how it tokenises a conversation."""
    tokenizer = ModelTokenizer(publishing.model, 100_000)
    call = {"id": "c1", "type": "function", "function": {"name": "tool_0", "arguments": '{"what": "x", "n": [1, 2]}'}}
    draw = random.Random(4)
    cases: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "hello"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "one part"}]}]},
        {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "<|im_end|> <|im_start|>"}]},
        {"messages": [{"role": "user", "content": "hello"}], "add_generation_prompt": False},
        {"messages": [{"role": "user", "content": words(draw, 500)}], "tools": TOOLS},
        {
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "found\n"},
                {"role": "assistant", "content": " so "},
                {"role": "user", "content": "\n go on"},
            ],
            "tools": TOOLS,
        },
    ]
    for case in cases:
        request = urllib.request.Request(
            f"{publishing.engine.url}/tokenize",
            json.dumps({"model": "demo", **case}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            expected = json.load(answer)["tokens"]
        made = tokenizer.prompt(CHAT_PATH, json.dumps({"model": "demo", **case}).encode())
        assert list(made.tokens) == expected, case
    assert tokenizer.piecewise
    with urllib.request.urlopen(
        urllib.request.Request(
            f"{publishing.engine.url}/tokenize",
            json.dumps({"model": "demo", "prompt": "a <|im_end|> text"}).encode(),
            {"content-type": "application/json"},
        ),
        timeout=30,
    ) as answer:
        expected = json.load(answer)["tokens"]
    made = tokenizer.prompt("/v1/completions", b'{"prompt": "a <|im_end|> text"}')
    assert made.tokens == array("I", expected)


class Lossy:
    """Stands between an engine's publisher and the router, and loses what it is told to."""

    def __init__(self, publisher: str) -> None:
        self._context = zmq.asyncio.Context()
        self._from = self._context.socket(zmq.SUB)
        self._from.setsockopt(zmq.SUBSCRIBE, b"")
        self._from.connect(publisher)
        self._to = self._context.socket(zmq.PUB)
        self.port = self._to.bind_to_random_port("tcp://127.0.0.1")
        self.lose = False
        self.lost = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            frames = await self._from.recv_multipart()
            self.lost += self.lose
            if not self.lose:
                await self._to.send_multipart(frames)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)


async def test_what_was_lost_is_replayed_and_a_restarted_engine_learnt_anew(
    publishing: Publishing, supervisor: Supervisor, seen: Seen
) -> None:
    stream, replay = publishing.endpoints
    lossy = Lossy(stream)
    url = publishing.engine.url
    config = exact(publishing, kv_events={url: (f"tcp://127.0.0.1:{lossy.port} {replay}",)})
    counts: dict[str, float] = {}
    started: list[Running] = []

    def count(router: Router, kind: str) -> float:
        value = router.app.metrics.registry.get_sample_value("smetric_router_kv_events_total", {"kind": kind})
        counts[kind] = value or 0.0
        return counts[kind]

    def predicts(router: Router) -> Callable[[list[dict[str, Any]]], int]:
        tokenizer = ModelTokenizer(publishing.model, 1000)
        exact_index = router.state._exact
        assert exact_index is not None

        def hit(messages: list[dict[str, Any]]) -> int:
            body = json.dumps({"messages": messages}).encode()
            exact_index.expire(math.inf)  # what events have said, and nothing that is only expected
            return exact_index.match(tokenizer.prompt(CHAT_PATH, body)).get(url, 0)

        return hit

    try:
        async with running(config) as router:
            await until(lambda: bool(router.state.statistics(0).feeds))
            hit, draw = predicts(router), random.Random(9)
            first, second = ([{"role": "user", "content": words(draw, 300)}] for _ in range(2))
            lossy.lose = True
            await ask(router, first)
            await until(lambda: lossy.lost > 0)
            assert hit(first) == 0
            lossy.lose = False
            await ask(router, second)
            await until(lambda: hit(second) > 2 * BLOCK)
            assert hit(first) > 2 * BLOCK, "the lost batches were asked for"
            assert count(router, "gaps") >= 1 and count(router, "lost") == 0
            # Another life of the engine on the same ports.
            supervisor.stop(publishing.engine.running)
            again = start(supervisor, "publishing-again", publishing.options, int(url.rpartition(":")[2]))
            started.append(again.running)
            again.wait()
            await until(lambda: router.healthy() == 1, 30)
            third = [{"role": "user", "content": words(draw, 300)}]
            await ask(router, third)
            await until(lambda: hit(third) > 2 * BLOCK and hit(first) == 0, 30)
            assert count(router, "restarts") >= 1
            seen.answers.clear()
            await ask(router, third)
            ((predicted, cached, _),) = seen.answers
            assert abs(predicted - cached) <= BLOCK and cached > 2 * BLOCK
            router.state.check()
    finally:
        await lossy.close()
        supervisor.stop(*started)
