"""What the router's state takes: the hit indices, and memory over many requests."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.driver import Driver
from benchmarks.face import OURS, BenchError, Figure, Row, Target
from benchmarks.programs.measure import resident_bytes
from benchmarks.router_systems import Machine
from smetric_router.config import RouterConfig

Say = Callable[[str], None]
MIB, GB = 1 << 20, 1e9
GROWN_MAX_MIB = 8.0
CHUNK_BYTES_MAX = 150
"""Memory of a chunk of the observed index; configs/router.toml tells operators so."""
UPDATES_MIN = 500_000
GB_MAX = 1.5
"""Of ten million blocks."""
PROMPT_BYTES = 2_000
EACH_TIMES = 50
"""So often each prompt comes that fills no index."""
STEPS, CONCURRENCY = 50, 16


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes:
        blocks: in the hit indices.
        chunks: in the index that is replaced.
        decisions: through the dispatcher, for the memory.
        requests: through a running router with its default settings, over sockets.
        new_requests: likewise, each with a prompt of its own and with a small index.
    """

    blocks: int
    chunks: int
    decisions: int
    requests: int
    new_requests: int


FULL = Scale(10_000_000, RouterConfig().index_chunks_max, 1_000_000, 1_000_000, 50_000)
QUICK = Scale(500_000, 262_144, 20_000, 4_000, 4_000)


def _row(what: str, unit: str, target: Target | None, value: float) -> Row:
    figure = Figure(what, unit, target)
    figure.add(OURS, value)
    return figure.made({})


def index_rows(machine: Machine, scale: Scale, say: Say) -> list[Row]:
    """Memory and speed of both indices."""
    return _observed_rows(machine, scale, say) + _exact_rows(machine, scale, say)


def _observed_rows(machine: Machine, scale: Scale, say: Say) -> list[Row]:
    what = f"hit index of {scale.blocks:,} blocks"
    say(what)
    got = machine.driver("router_state").ask("index", blocks=scale.blocks)
    rows = [
        _row(f"{what}: memory per 10 million", "GB", Target("ours", "<=", GB_MAX), _per_10m(got, scale)),
        _row(f"{what}: updates", "blocks/s", Target("ours", ">=", UPDATES_MIN), got["per_s"]),
    ]
    what = f"hit index of {scale.chunks:,} blocks, all of them replaced six times"
    say(what)
    got = machine.driver("router_state").ask("replaced", blocks=scale.chunks)
    grown = Target("ours", "<=", GROWN_MAX_MIB)
    rows.append(_row(f"{what}: memory at most, above that of the first three", "MiB", grown, got["grown"] / MIB))
    documented = Target("ours", "<=", CHUNK_BYTES_MAX)
    rows.append(_row(f"{what}: memory per block at most", "bytes", documented, got["bytes"] / scale.chunks))
    rows.append(_row(f"{what}: longest update", "ms", None, got["longest_s"] * 1e3))
    return rows


def _exact_rows(machine: Machine, scale: Scale, say: Say) -> list[Row]:
    what = f"exact index of {scale.blocks:,} blocks from KV events"
    say(what)
    got = machine.driver("router_state").ask("exact", blocks=scale.blocks)
    updates = Target("ours", ">=", UPDATES_MIN)
    return [
        _row(f"{what}: memory per 10 million", "GB", Target("ours", "<=", GB_MAX), _per_10m(got, scale)),
        _row(f"{what}: updates, decoding included", "blocks/s", updates, got["per_s"]),
        _row(f"{what}: the decoding alone", "blocks/s", None, got["decoded_per_s"]),
        _row(f"{what}: the index alone", "blocks/s", None, got["taken_per_s"]),
        _row(f"{what}: longest event", "ms", None, got["longest_s"] * 1e3),
        _row(f"{what}: events of one block, decoding included", "blocks/s", None, got["single_per_s"]),
    ]


def _per_10m(got: dict[str, float], scale: Scale) -> float:
    return got["bytes"] / GB * 1e7 / scale.blocks


def memory_rows(machine: Machine, load: Driver, scale: Scale, say: Say) -> list[Row]:
    """Memory over many requests whose prompts are all new, with an index that is full long before a fifth of them is through."""
    say(f"memory over {scale.decisions:,} decisions")
    got = machine.driver("router_state").ask("requests", requests=scale.decisions)
    what = f"memory grown by the last 4/5 of {scale.decisions:,} decisions, small index"
    rows = [_row(what, "MiB", Target("ours", "<=", GROWN_MAX_MIB), got["grown"] / MIB)]
    count = scale.new_requests
    settings = [f"index_chunks_max={max(100, count // 10)}"]
    return [*rows, _sockets_row(machine, load, count, count, settings, "new prompts, small index", say)]


def million_rows(machine: Machine, load: Driver, scale: Scale, say: Say) -> list[Row]:
    """Memory over a million requests with the default settings; the index knows all of the prompts after a fifth of them."""
    count, different = scale.requests, scale.requests // EACH_TIMES
    return [_sockets_row(machine, load, count, different, [], f"{different:,} prompts, default index", say)]


def _sockets_row(
    machine: Machine, load: Driver, count: int, different: int, settings: list[str], how: str, say: Say
) -> Row:
    """Of a running router: `count` requests, so many of them `different`."""
    say(f"memory over {count:,} requests over sockets, {how}")
    engines = machine.engines(2)
    router = machine.router(OURS, engines, settings)
    pid, settled = router.running.process.pid, 0
    step = count // STEPS
    for first in range(0, step * STEPS, step):
        if first == step * (STEPS // 5):
            settled = resident_bytes(pid)
        asked = {"requests": step, "first": first % different, "different": different}
        got = load.ask("unique", url=router.url, bytes=PROMPT_BYTES, concurrency=CONCURRENCY, **asked)
        if got["failed"]:
            raise BenchError(f"{got['failed']} of {got['requests']} requests failed")
    grown = resident_bytes(pid) - settled
    machine.stop(router, *engines)
    what = f"memory grown by the last 4/5 of {count:,} requests, {how}"
    return _row(what, "MiB", Target("ours", "<=", GROWN_MAX_MIB), grown / MIB)
