"""Two engines on two workers, beside a plain one: what the pool must hold, on real engines. In this order: the last one kills."""

import asyncio
import json
import os
import signal
import statistics as stats
import subprocess
from collections.abc import Callable

import pytest
from demo.compare import Comparison, check
from demo.engine import Engine
from demo.pool import Started
from demo.processes import program

from tensorcast_connector.client.blocking import connect_blocking
from tests.e2e.conftest import System
from tests.e2e.probe import (
    BLOCK,
    OUT_OF_POOL,
    api,
    checked,
    idle,
    located,
    post,
    referred,
    saved,
    seconds,
    statistics,
    tokens,
    until,
    wait_saved,
)

pytestmark = pytest.mark.engine
StartWorker = Callable[[str, str], Started]


def test_a_prompt_of_8000_tokens_served_by_a_is_loaded_by_b_and_gives_the_same_tokens(
    system: System, salt: str
) -> None:
    prompts = [tokens(1, 8000), tokens(2, 8000)]
    references = referred(system.plain, prompts, salt)
    before, known = system.b.sources(), located(system.workers)
    saved(system.a, prompts, salt)
    wait_saved(system.workers, known, 2 * (8000 // BLOCK))
    comparison = checked(system.b, references, salt)
    print(f"\ntokens: {comparison}; from the pool at first: {comparison.cached_share:.1%}")
    assert comparison.same, comparison.differences
    assert comparison.cached_share >= 0.95
    assert (system.b.sources() - before).pool >= 0.95 * 16_000
    arena = [statistics(worker) for worker in system.workers]
    assert arena[1]["pages_fetched"] >= 2 * (8000 // BLOCK) and arena[1]["digest_mismatches"] == 0
    shown = system.b.metrics()
    assert shown["tensorcast:attached"] == 1 and shown["tensorcast:pages_failed_total"] == 0
    assert shown["tensorcast:pages_loaded_total"] >= 2 * (8000 // BLOCK)
    until(lambda: idle(system.a) and idle(system.b), "no block stays in use")


def test_the_store_lists_both_engines_with_their_workers(system: System) -> None:
    status = [program("tensorcast"), "status", "--store", system.store["store"], "--json"]
    listed = json.loads(subprocess.run(status, check=True, capture_output=True, text=True).stdout)
    mine = {worker["worker_id"] for worker in system.workers}
    assert {each["worker_id"] for each in listed["instances"]} >= mine
    assert {each["worker_id"] for each in listed["workers"]} >= mine
    namespaces = {each["namespace"] for each in listed["instances"] if each["worker_id"] in mine}
    assert len(namespaces) == 1, "the same model and settings: the same namespace"


def test_a_pool_hit_takes_a_fraction_of_computing_the_prompt(system: System, salt: str) -> None:
    computed, loaded, local = [], [], []
    for round_ in range(3):
        prompt = tokens(100 + round_, 7500)
        known = located(system.workers)
        saved(system.a, [prompt], salt)
        wait_saved(system.workers, known, 7500 // BLOCK)
        loaded.append(seconds(system.b, prompt, salt))
        local.append(seconds(system.b, prompt, salt))
        computed.append(seconds(system.b, prompt, f"{salt}-{round_}", **OUT_OF_POOL))
    ratio = stats.median(computed) / stats.median(loaded)
    print(
        f"\nTTFT of 7,500 tokens, medians of 3: computed {stats.median(computed):.2f} s, from the pool "
        f"{stats.median(loaded):.2f} s (1/{ratio:.0f}), from the engine's own cache {stats.median(local):.2f} s"
    )
    assert (
        ratio >= 3
    )  # 1/17 where a core computes slowly, 1/5 where it computes three times as fast: loading costs the same


def test_pages_are_found_again_after_the_engine_forgot_them(system: System, salt: str) -> None:
    prompt = tokens(3, 3000)
    known = located(system.workers)
    saved(system.b, [prompt], salt)
    wait_saved(system.workers, known, 3000 // BLOCK)
    assert post(f"{system.b.url}/reset_prefix_cache")["success"]
    before = system.b.sources()
    seconds(system.b, prompt, salt)
    assert (system.b.sources() - before).pool == 3000 // BLOCK * BLOCK


def test_a_prompt_of_whole_blocks_is_loaded_whole_and_gives_the_same_tokens(system: System, salt: str) -> None:
    prompts = [tokens(6, 16 * BLOCK)]
    references = referred(system.plain, prompts, salt)
    known = located(system.workers)
    saved(system.a, prompts, salt)
    wait_saved(system.workers, known, 16)
    comparison = checked(system.b, references, salt)
    print(f"\ntokens: {comparison}; from the pool at first: {comparison.cached_share:.1%}")
    assert comparison.same, comparison.differences
    assert comparison.cached_tokens >= 16 * BLOCK - 1, "all but the last token, which gives the answer"


def test_a_request_may_stay_out_of_the_pool(system: System, salt: str) -> None:
    prompt = tokens(4, 2000)
    before = statistics(system.workers[0])["pages_saved"]
    seconds(system.a, prompt, salt, **OUT_OF_POOL)
    until(lambda: idle(system.a), "the engine is idle")
    assert statistics(system.workers[0])["pages_saved"] == before


def test_engines_say_how_they_are_doing_and_serve_on_when_they_are_switched_off(system: System, salt: str) -> None:
    """No restart, and the same tokens; then the pages of the tenant are removed everywhere."""
    prompts = [tokens(8, 3000)]
    references = referred(system.plain, prompts, salt)
    known = located(system.workers)
    saved(system.a, prompts, salt)
    wait_saved(system.workers, known, 3000 // BLOCK)
    with connect_blocking(system.workers[0]["worker"]) as session:
        mine = {worker["worker_id"] for worker in system.workers}
        until(lambda: all(each.report for each in session.list_instances() if each.worker_id in mine), "engines report")
        seen = {each.worker_id: each for each in session.list_instances()}
        report = seen[system.workers[0]["worker_id"]].report
        assert report is not None and report.state == "serving" and report.kv_usage is not None
        assert report.running == report.waiting == 0 and 0 <= report.kv_usage <= 1
        engine = seen[system.workers[1]["worker_id"]].instance_id
        session.disable(engine, "a test")
        before = system.b.sources()
        comparison = checked(system.b, references, f"{salt}")
        assert comparison.same and (system.b.sources() - before).pool == 0
        assert post(f"{system.b.url}/reset_prefix_cache")["success"]
        session.enable(engine)
        before = system.b.sources()
        seconds(system.b, prompts[0], salt)
        assert (system.b.sources() - before).pool == 3000 // BLOCK * BLOCK
        until(lambda: idle(system.a) and idle(system.b), "the engines are idle")
        until(lambda: session.forget_pages().in_use == 0, "no page is in use")
        assert post(f"{system.b.url}/reset_prefix_cache")["success"]
        before = system.b.sources()
        seconds(system.b, prompts[0], salt)
        assert (system.b.sources() - before).pool == 0


def test_aborted_requests_leave_no_block_in_use(system: System, salt: str) -> None:
    prompt = tokens(5, 6000)
    known = located(system.workers)
    saved(system.a, [prompt], salt)
    wait_saved(system.workers, known, 6000 // BLOCK)

    async def ask_and_leave(delay_s: float, seed: int) -> None:
        asked = tokens(5, 6000) if seed % 2 else tokens(seed, 4000)
        try:
            async with asyncio.timeout(delay_s):
                await asyncio.to_thread(seconds_cut, asked, delay_s)
        except TimeoutError:
            pass

    def seconds_cut(asked: list[int], delay_s: float) -> None:
        import http.client
        import json

        connection = http.client.HTTPConnection(system.b.url.removeprefix("http://"), timeout=delay_s)
        body = {"model": system.b.served_name, "prompt": asked, "max_tokens": 64, "cache_salt": salt, "stream": True}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            connection.getresponse().read()
        except TimeoutError:
            pass
        finally:
            connection.close()

    async def storm() -> None:
        await asyncio.gather(*(ask_and_leave(0.02 + 0.05 * each, 500 + each) for each in range(12)))

    asyncio.run(storm())
    until(lambda: idle(system.b), "aborted requests are gone and their blocks are free")
    assert seconds(system.b, prompt, salt) > 0


def test_the_openai_client_works_through_the_router_unchanged(system: System, start_router: object, salt: str) -> None:
    import openai

    router: Started = start_router([system.a, system.b])  # type: ignore[operator]
    client = openai.OpenAI(base_url=f"{router['url']}/v1", api_key="-")
    tool = {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    messages = [
        {"role": "system", "content": "You read files. " * 40},
        {"role": "user", "content": "What is in README?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "README"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "A project. " * 30},
    ]
    asked = {
        "model": system.a.served_name,
        "messages": messages,
        "tools": [tool],
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"cache_salt": salt, "ignore_eos": True},
    }
    answer = client.chat.completions.with_raw_response.create(**asked)
    whole = answer.parse()
    assert answer.headers["x-smetric-instance"] and answer.headers["x-smetric-reason"]
    assert whole.usage.completion_tokens == 12
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0, "the follow-up found its prefix"
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == (whole.choices[0].message.content or "")
    assert [model.id for model in client.models.list()] == [system.a.served_name]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=system.a.served_name, messages=messages, max_tokens=-5)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=messages)


def test_a_worker_killed_under_traffic_costs_no_request_and_no_token(
    system: System, start_worker: StartWorker, salt: str
) -> None:
    prompts = [tokens(200 + each, 1500) for each in range(6)]
    references = referred(system.plain, prompts, salt, positions=4)
    saved(system.a, prompts[:3], salt)
    dead = system.workers[1]

    async def traffic() -> Comparison:
        work = [check(api(engine, salt), [reference]) for reference in references for engine in (system.a, system.b)]
        running = [asyncio.ensure_future(each) for each in work]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        os.kill(dead.running.process.pid, signal.SIGKILL)
        return sum(await asyncio.gather(*running), Comparison())

    comparison = asyncio.run(traffic())
    print(f"\ntokens under a killed worker: {comparison}")
    assert comparison.same, comparison.differences
    assert dead.running.process.poll() == -signal.SIGKILL

    revived = start_worker("worker-b-again", dead["worker"])
    again = (system.workers[0], revived)
    until(lambda: attachments(system.b, revived) == 2, "the engine is attached again")
    prompt = tokens(300, 3000)
    until(lambda: located(again) >= 0 and statistics(again[0])["workers"] == 2, "the workers know each other")
    known = located(again)
    saved(system.a, [prompt], salt)
    wait_saved(again, known, 3000 // BLOCK)
    before = system.b.sources()
    seconds(system.b, prompt, salt)
    assert (system.b.sources() - before).pool == 3000 // BLOCK * BLOCK, "hits resume"
    assert statistics(revived)["pages_fetched"] >= 3000 // BLOCK


def attachments(engine: Engine, worker: Started) -> int:
    """How many of the engine's processes have attached to this run of a worker: the scheduler and the rank will."""
    return engine.running.log.read_text().count(f"attached to worker {worker['worker_id']}")


def test_what_a_saved_is_loaded_by_b_after_a_was_killed(system: System, start_worker: StartWorker, salt: str) -> None:
    if system.workers[1].running.died():  # by the test before
        revived = start_worker("worker-b-once-more", system.workers[1]["worker"])
        until(lambda: attachments(system.b, revived) == 2, "the engine is attached")
        until(lambda: statistics(revived)["workers"] == 2, "the workers know each other")
    prompts = [tokens(400, 8000)]
    references = referred(system.plain, prompts, salt)
    known = statistics(system.workers[0])["pages_saved"]
    saved(system.a, prompts, salt)
    until(lambda: statistics(system.workers[0])["pages_saved"] >= known + 8000 // BLOCK, "saved")
    os.killpg(system.a.running.process.pid, signal.SIGKILL)
    comparison = checked(system.b, references, salt)
    print(f"\ntokens after A was killed: {comparison}; from the pool at first: {comparison.cached_share:.1%}")
    assert comparison.same, comparison.differences
    assert comparison.cached_share >= 0.95
