"""The router's memory and what keeps it, without sockets: a process of its own, so that nothing else is in the figures.

python -m benchmarks.programs.router_state
"""

import asyncio
import gc
import itertools
import os
import random
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from benchmarks.programs.measure import obey, resident_bytes
from smetric_router.dispatch import Dispatcher
from smetric_router.policies.smetric import SMetric
from smetric_router.server.kv_events import decode
from smetric_router.state.cluster import ClusterState
from smetric_router.state.exact_index import ExactIndex
from smetric_router.state.prefix_index import PrefixIndex
from smetric_router.state.requests import CHAT_PATH, RequestReader
from smetric_router.types import Chain, InstanceUp, Usage

CHUNK_BYTES = 1024
INSTANCES = 10
SHARED_CHUNKS, TURNS, CHUNKS_PER_TURN = 12, 8, 25
"""Of a session in the index: a system prompt that all share, and so many turns."""
IN_FLIGHT = 16
REPLACED, LOOKS = 6, 8
"""Times that a full index is replaced, and looks at the memory each time."""
TOKENS_PER_BLOCK, BLOCKS_PER_EVENT, EVENTS_PER_SESSION, VOCABULARY = 16, 64, 8, 150_000
"""Of KV events: a prompt of a thousand new tokens each turn."""
SESSIONS_AT_ONCE = 16


async def index(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sessions of several turns on INSTANCES instances until the hit index holds so many `blocks`. Returns `bytes` of memory
    that it takes, and `per_s`, blocks recorded a second.
    """
    blocks = told["blocks"]
    draw = random.Random(0)
    made = PrefixIndex([f"instance-{number}" for number in range(INSTANCES)], blocks)
    shared = [draw.getrandbits(64) for _ in range(SHARED_CHUNKS)]
    before, used_s, held = resident(), 0.0, 0
    while held < blocks:
        digests = shared + [draw.getrandbits(64) for _ in range(TURNS * CHUNKS_PER_TURN)]
        lengths = [SHARED_CHUNKS + turn * CHUNKS_PER_TURN for turn in range(1, TURNS + 1)]
        ends = tuple(range(CHUNK_BYTES, (len(digests) + 1) * CHUNK_BYTES, CHUNK_BYTES))
        chains = [Chain(tuple(digests[:length]), ends[:length]) for length in lengths]
        instance = f"instance-{draw.randrange(INSTANCES)}"
        begun_s = time.process_time()
        for chain in chains:
            made.settle(made.record(instance, chain), computed=True)
        used_s += time.process_time() - begun_s
        held += TURNS * CHUNKS_PER_TURN
    statistics = made.statistics()
    assert statistics.dropped == 0 and statistics.digests >= blocks
    return {"bytes": resident_bytes(os.getpid()) - before, "per_s": held / used_s}


async def replaced(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """An index of so many `blocks`, full, in which all are replaced REPLACED times. Returns `bytes`, the most memory that it
    took, `grown`, how much of that is above the most of the first half, and `longest_s`, of one update.
    """
    blocks, draw = told["blocks"], random.Random(0)
    made = PrefixIndex([f"instance-{number}" for number in range(INSTANCES)], blocks // INSTANCES)
    ends = tuple(range(CHUNK_BYTES, (TURNS * CHUNKS_PER_TURN + 1) * CHUNK_BYTES, CHUNK_BYTES))
    before, longest_s, most = resident(), 0.0, []
    for _ in range((1 + REPLACED) * LOOKS):
        for number in range(blocks // LOOKS // len(ends)):
            chain = Chain(tuple([draw.getrandbits(64) for _ in ends]), ends)
            begun_s = time.process_time()
            made.settle(made.record(f"instance-{number % INSTANCES}", chain), computed=True)
            longest_s = max(longest_s, time.process_time() - begun_s)
        most.append(resident_bytes(os.getpid()) - before)
    assert made.statistics().dropped > (REPLACED - 1) * blocks
    first, last = most[LOOKS : LOOKS * (1 + REPLACED // 2)], most[LOOKS * (1 + REPLACED // 2) :]
    return {"bytes": max(most), "grown": max(last) - max(first), "longest_s": longest_s}


class Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    """As vLLM 0.32 writes it."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


def session(draw: np.random.Generator, events: int, blocks: int) -> list[bytes]:
    """The messages of one engine about one session: so many events of so many blocks, each following the one before."""
    messages: list[bytes] = []
    parent = None
    for _ in range(events):
        names = [draw.bytes(32) for _ in range(blocks)]
        tokens = draw.integers(0, VOCABULARY, blocks * TOKENS_PER_BLOCK).tolist()
        event = Stored(names, parent, tokens, TOKENS_PER_BLOCK, None, "GPU", None, [None] * blocks, 0)
        messages.append(msgspec.msgpack.encode([1.5, [event], 0]))
        parent = names[-1]
    return messages


async def exact(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """Messages with KV events of INSTANCES engines until the exact index holds so many `blocks`, and then some of a block each.
    Returns `bytes` of memory that it takes, `longest_s` of one event, and blocks a second: `decoded_per_s`, `taken_per_s` into
    the index, `per_s` both one after the other, and `single_per_s`, that of the events of one block.
    """
    blocks, draw = told["blocks"], np.random.default_rng(0)
    made = ExactIndex(2 * blocks)
    before = resident()
    decoding_s = taking_s = longest_s = 0.0

    def take(events: int, each: int) -> None:
        nonlocal decoding_s, taking_s, longest_s
        for _ in range(SESSIONS_AT_ONCE):
            messages, instance = session(draw, events, each), f"instance-{draw.integers(INSTANCES)}"
            begun_s = time.process_time()
            batches = list(map(decode, messages))
            decoded_s = time.process_time()
            decoding_s += decoded_s - begun_s
            for batch in batches:
                for event in batch.events:
                    begun_s = time.process_time()
                    made.apply(instance, batch.rank, event)
                    taken_s = time.process_time() - begun_s
                    taking_s += taken_s
                    longest_s = max(longest_s, taken_s)

    while made.statistics().digests < blocks:
        take(EVENTS_PER_SESSION, BLOCKS_PER_EVENT)
    used, held = resident() - before, made.statistics().digests
    speeds = {"decoded_per_s": held / decoding_s, "taken_per_s": held / taking_s}
    speeds["per_s"] = held / (decoding_s + taking_s)
    decoding_s = taking_s = 0.0
    take(BLOCKS_PER_EVENT, 1)
    single = made.statistics().digests - held
    assert single == SESSIONS_AT_ONCE * BLOCKS_PER_EVENT
    assert made.statistics().dropped == made.statistics().orphans == 0
    speeds["longest_s"] = longest_s
    return {"bytes": used / held * blocks, **speeds, "single_per_s": single / (decoding_s + taking_s)}


async def requests(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """`requests` prompts that nobody has seen before through the dispatcher, IN_FLIGHT at a time. The index is small
    and full long before a fifth of them is through. Returns `grown`, bytes of memory since then.
    """
    count, names = told["requests"], [f"instance-{number}" for number in range(INSTANCES)]
    state = ClusterState(names, chunk_bytes=CHUNK_BYTES, index_chunks_max=max(100, count // 100))
    for name in names:
        state.apply(InstanceUp(name), 0.0)
    dispatcher, reader = Dispatcher(state, SMetric()), RequestReader(CHUNK_BYTES)
    usage, waiting, settled = Usage(500, 0), [], 0
    for number in itertools.count():
        if number == count // 5:
            settled = resident()
        if number == count:
            break
        body = b'{"model": "m", "messages": [{"role": "user", "content": "%d %b"}]}' % (number, b"x" * 2000)
        waiting.append(dispatcher.dispatch(reader.read(CHAT_PATH, body), float(number)))
        if len(waiting) == IN_FLIGHT:
            dispatcher.finish(waiting.pop(0), float(number), computed=True, usage=usage)
    state.check()
    return {"grown": resident() - settled}


def resident() -> int:
    """Bytes in memory of what is still in use."""
    gc.collect()
    return resident_bytes(os.getpid())


if __name__ == "__main__":
    asyncio.run(obey({"index": index, "replaced": replaced, "exact": exact, "requests": requests}))
