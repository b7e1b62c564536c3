"""What the engine tests ask the pool and the engines, and how they wait."""

import asyncio
import json
import random
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from demo import pool
from demo.compare import MARGIN, Api, Comparison, Reference, check, compare, refer, save
from demo.engine import Engine
from demo.pool import Started

from tensorcast_connector.client.attachment import Attachment
from tensorcast_connector.config import parse_address
from tensorcast_connector.errors import TensorcastError
from tensorcast_connector.net.sockets import SocketNetwork

WAIT_S = 60.0
BLOCK = 128


def until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Waits for a condition."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def tokens(seed: int, count: int) -> list[int]:
    """A prompt of ordinary tokens that no other seed shares a block with."""
    chance = random.Random(seed)
    return [chance.randrange(300, 1900) for _ in range(count)]


def statistics(worker: Started) -> dict[str, Any]:
    """What a worker counts now."""
    attachment = Attachment(SocketNetwork(), parse_address(worker["worker"], "worker"), "test")
    try:
        until(lambda: attachment.connected, "a connection to the worker", 10)
        return attachment.statistics()
    finally:
        attachment.close()


def wait_saved(workers: Sequence[Started], before: int, pages: int) -> None:
    """Until `pages` more than `before` are known to the shard homes."""
    until(lambda: located(workers) >= before + pages, f"{pages} pages reported")


def located(workers: Sequence[Started]) -> int:
    """Pages whose location is known."""
    try:
        return sum(int(statistics(worker)["catalog_pages"]) for worker in workers)
    except TensorcastError:
        return -1


def api(engine: Engine, salt: str, **body: Any) -> Api:
    """An engine asked under one cache salt."""
    return Api(engine.url, engine.served_name, salt, body)


OUT_OF_POOL = {"kv_transfer_params": {"tensorcast.skip_load": True, "tensorcast.skip_save": True}}


def patient(worker_address: str) -> dict[str, Any]:
    """A connector whose lookups may take long: what is found is asserted, and a busy machine is later than half a second."""
    return pool.connector(worker_address, lookup_deadline_s=10.0)


def referred(plain: Engine, prompts: Sequence[Sequence[int]], salt: str, positions: int = 8) -> list[Reference]:
    """The plain engine's continuations."""
    return asyncio.run(refer(api(plain, salt), prompts, positions))


def saved(engine: Engine, prompts: Sequence[Sequence[int]], salt: str) -> None:
    """Lets an engine compute prompts."""
    asyncio.run(save(api(engine, salt), prompts))


def checked(engine: Engine, references: Sequence[Reference], salt: str) -> Comparison:
    """Compares an engine with the plain one, token by token."""
    return asyncio.run(check(api(engine, salt), references))


def follow(name: str, reference: Reference, tested: Sequence[Any]) -> Comparison:
    """Compares a free-running continuation up to where the reference itself was undecided and they parted."""
    shared = 0
    for expected, found in zip(reference.positions, tested, strict=True):
        shared += 1
        if expected.token != found.token:
            break
    positions, last = reference.positions[:shared], reference.positions[shared - 1]
    parted = Reference(reference.prompt, reference.tokens[:shared], positions)
    if last.token != tested[shared - 1].token and last.margin <= MARGIN:
        parted = Reference(reference.prompt, reference.tokens[: shared - 1], positions[:-1])
    return compare(name, parted, list(tested[: len(parted.positions)]))


def seconds(engine: Engine, prompt: Sequence[int], salt: str, **body: Any) -> float:
    """How long the first token takes."""
    asked = {"model": engine.served_name, "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "cache_salt": salt}
    start = time.perf_counter()
    post(f"{engine.url}/v1/completions", {**asked, **body})
    return time.perf_counter() - start


def post(url: str, body: dict[str, Any] | None = None) -> Any:
    """Posts JSON, reads JSON (or nothing)."""
    data = json.dumps(body).encode() if body is not None else b""
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        text = response.read()
    return json.loads(text) if text.strip() else None


def idle(engine: Engine) -> bool:
    """Whether nothing runs in the engine and none of its blocks is in use."""
    metrics = engine.metrics()
    busy = [
        metrics["vllm:num_requests_running"],
        metrics["vllm:num_requests_waiting"],
        metrics["vllm:kv_cache_usage_perc"],
    ]
    return not any(busy)
