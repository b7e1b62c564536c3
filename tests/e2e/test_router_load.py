"""The router's view of a real engine's load: what others sent there, and how fast it computes prompts."""

import json
import random
from pathlib import Path

import aiohttp
import pytest
from demo.engine import EngineOptions

from ..router.conftest import route, until

pytestmark = pytest.mark.engine
__all__ = ["route"]


def body(draw: random.Random, words: int, tokens: int) -> bytes:
    asked = {
        "model": "demo",
        "prompt": " ".join(f"{draw.randrange(10**6)}" for _ in range(words)),
        "max_tokens": tokens,
    }
    asked |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0}
    return json.dumps(asked).encode()


@pytest.mark.timeout(600)
async def test_load_and_rate(start_engine, tiny: Path, route) -> None:
    engine = start_engine("reporting", EngineOptions(tiny))
    engine.wait()
    router = await route(engine.url, report_interval_s=0.05, report_stale_s=5)
    clock, draw = router.app._clock, random.Random(1)

    def figures():
        return router.state.statistics(clock()).instances[engine.url]

    await until(lambda: figures().report_age_s is not None)
    assert (figures().load, figures().prefill_rate) == (0, None)
    json_body = {"content-type": "application/json"}
    async with aiohttp.ClientSession(headers=json_body) as other:
        asked = [await other.post(f"{engine.url}/v1/completions", data=body(draw, 50, 8000)) for _ in range(3)]
        await until(lambda: figures().load == 3)
        assert figures().inflight == 0 and 0 <= figures().kv_usage <= 1
        for each in asked:
            each.close()
    await until(lambda: figures().load == 0, 60)

    for _ in range(8):
        assert figures().prefill_rate is None
        async with router.client.post(
            f"{router.url}/v1/completions", data=body(draw, 400, 2), headers=json_body
        ) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
    rate = figures().prefill_rate
    assert rate is not None and rate > 0
    seen = router.state.view(router.app._proxy._reader.read("/v1/completions", body(draw, 10, 1)))
    assert seen.bytes_per_token != 4, "it was learnt from the usage of the answers"
