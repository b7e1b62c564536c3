"""The router with the exact index: engines that tell what they hold, prompts in tokens."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from smetric_router.config import RouterConfig
from smetric_router.errors import ConfigError
from smetric_router.server.exact import CAUSES_MAX
from smetric_router.server.tokenising import ModelTokenizer
from smetric_router.state.requests import CHAT_PATH

from ..conftest import Router, until
from ..publisher import Cleared, Publisher, Stored
from .test_tokenising import body, folder, said

BLOCK = 4


@pytest.fixture
async def publishers():
    made = [Publisher(), Publisher()]
    for each in made:
        await each.start()
    yield made
    for each in made:
        await each.stop()


@pytest.fixture
async def routed(engines, route, publishers, tmp_path: Path):
    """A router in front of two engines, and both's publishers."""
    two = await engines(2)
    router = await route(
        *two,
        index="exact",
        tokenizers={"fake": str(folder(tmp_path))},
        kv_events={engine.url: (each.endpoints,) for engine, each in zip(two, publishers, strict=True)},
    )
    await until(lambda: len(router.state.statistics(0).feeds) == 2)
    return router, two, publishers, ModelTokenizer(tmp_path, 1000)


async def stores(publisher: Publisher, tokenizer: ModelTokenizer, *contents: str) -> int:
    """The engine computes a conversation; the tokens of whole blocks."""
    tokens = list(tokenizer.prompt(CHAT_PATH, body(said(*contents), add_generation_prompt=False)).tokens)
    count = len(tokens) // BLOCK
    await publisher.publish(Stored([b"%d" % at for at in range(count)], None, tokens[: count * BLOCK], BLOCK))
    return count * BLOCK


def tokenised(router: Router, result: str) -> float:
    return router.app.metrics.registry.get_sample_value("smetric_router_tokenised_total", {"result": result}) or 0.0


async def test_a_follow_up_goes_where_the_engine_says_it_has_it(routed) -> None:
    router, two, publishers, tokenizer = routed
    length = await stores(publishers[1], tokenizer, "the quick brown fox " * 10, "jumps over")
    await until(lambda: (router.state.statistics(0).exact.blocks or {}).get(two[1].url, 0) == length // BLOCK)
    reply = await router.chat("the quick brown fox " * 10, "jumps over", "the dog")
    assert (reply.headers["x-smetric-instance"], reply.headers["x-smetric-reason"]) == (two[1].url, "sticky")
    assert tokenised(router, "tokenised") == 1
    prompts, hits = (
        router.app.metrics.registry.get_sample_value(f"smetric_router_{name}", {"engine": two[1].url, **more})
        for name, more in (("prompt_tokens_total", {}), ("hit_tokens_total", {"kind": "predicted"}))
    )
    tokens = tokenizer.prompt(CHAT_PATH, body(said("the quick brown fox " * 10, "jumps over", "the dog"))).tokens
    assert hits == pytest.approx(prompts * length / len(tokens))


async def test_where_nothing_is_heard_of_an_engine_the_observed_index_stands_in(routed) -> None:
    router, two, publishers, _ = routed
    first = await router.chat("hello " * 200)
    where = first.headers["x-smetric-instance"]
    await publishers[[engine.url for engine in two].index(where)].stop()
    await until(lambda: len(router.state.statistics(0).feeds) == 1)
    for _ in range(3):
        reply = await router.chat("hello " * 200, "answer", "again")
        assert (reply.headers["x-smetric-instance"], reply.headers["x-smetric-reason"]) == (where, "sticky")


async def test_what_cannot_be_tokenised_is_placed_by_what_was_sent(routed) -> None:
    router, *_ = routed
    first = await router.chat("hello " * 200, chat_template="x")
    reply = await router.chat("hello " * 200, "answer", "again", chat_template="x")
    assert reply.headers["x-smetric-instance"] == first.headers["x-smetric-instance"]
    assert reply.headers["x-smetric-reason"] == "sticky"
    other = await router.chat("hello", model="")
    assert other.status == 200
    assert (tokenised(router, "observed"), tokenised(router, "tokenised")) == (3, 0)


@pytest.mark.slow
async def test_long_prompts_are_tokenised_in_a_thread_and_answered(routed) -> None:
    router, two, *_ = routed
    replies = await asyncio.gather(*(router.chat(f"{at} the fox " * 4000, headers={"x-n": str(at)}) for at in range(8)))
    assert [reply.status for reply in replies] == [200] * 8
    assert tokenised(router, "tokenised") == 8
    sent = sorted(len(json.loads(each)["messages"][0]["content"]) for engine in two for each in engine.bodies)
    assert sent == [len("0 the fox " * 4000)] * 8


async def test_a_client_that_leaves_while_its_prompt_is_tokenised(routed, monkeypatch) -> None:
    router, two, *_ = routed
    begun, go_on = asyncio.Event(), asyncio.Event()
    prompts = router.app._prompts

    def slowly(work: Any, info: Any, done: Any) -> None:
        async def wait() -> None:
            begun.set()
            await go_on.wait()
            done(info)

        wait.task = asyncio.create_task(wait())  # type: ignore[attr-defined]

    monkeypatch.setattr(prompts, "_in_thread", slowly)
    asking = asyncio.create_task(router.chat("the fox " * 8000))
    await begun.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: not router.app._proxy._active)
    go_on.set()
    await asyncio.sleep(0)
    reply = await router.chat("hello")
    assert reply.status == 200
    assert sum(len(engine.bodies) for engine in two) == 1
    assert router.inflight() == 0


def test_exact_without_a_tokenizer_is_told() -> None:
    with pytest.raises(ConfigError, match="needs tokenizers"):
        RouterConfig(index="exact")
    with pytest.raises(ConfigError, match="not among the engines"):
        RouterConfig(engines=("http://a:1",), kv_events={"http://b:1": ("tcp://b:2",)})


@pytest.mark.parametrize(
    "asked",
    [
        # Names from clients in the causes, and bytes that only some parsers refuse.
        [b'{"model": "fake", "messages": [{"role": "user", "content": "x", "f%d": 1}]}' % at for at in range(150)],
        [b'{"model": "fake", "messages": [{"role": "user", "content": "\xff"}]}'] * 5,
        [b'{"model": "fake", "messages": [{"role": "user", "content": "a\\ud83d"}]}'] * 5,
    ],
)
async def test_what_cannot_be_tokenised_fills_neither_memory_nor_log(routed, caplog, asked) -> None:
    router, _, _, _ = routed
    caplog.set_level("INFO")
    for each in asked:
        async with router.client.post(router.url + CHAT_PATH, data=each) as answer:
            assert answer.status == 200
    assert len(router.app._prompts._told) <= CAUSES_MAX
    told = [record for record in caplog.records if record.getMessage().startswith("not tokenised here")]
    assert len(told) <= min(CAUSES_MAX, len({*asked}))
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_fault_in_tokenising_is_told_once(routed, caplog, monkeypatch) -> None:
    router, _, _, _ = routed

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(ModelTokenizer, "begin", broken)
    for _ in range(5):
        assert (await router.chat("x")).status == 200
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


async def test_an_engine_that_says_its_cache_is_cleared_holds_nothing_by_either_index(routed) -> None:
    router, two, publishers, _ = routed
    await router.chat("x" * 5000)
    await router.chat("x" * 5000)
    held = [router.state.statistics(0).instances[engine.url].chunks for engine in two]
    assert all(held)
    await publishers[0].publish(Cleared())
    await until(lambda: router.state.statistics(0).instances[two[0].url].chunks == 0)
    assert router.state.statistics(0).instances[two[1].url].chunks == held[1]
