"""What a decision of the router costs, and that it costs the same with ten instances and with a thousand.

In this process: reading a request, digesting its prompt, the view, the decision and its record. No sockets.
"""

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from benchmarks.face import LIMIT, OURS, Figure, Row, Target
from smetric_router.dispatch import Dispatcher
from smetric_router.policies.base import Policy
from smetric_router.policies.registry import build_policies
from smetric_router.state.cluster import ClusterState
from smetric_router.state.requests import CHAT_PATH, RequestReader
from smetric_router.types import EngineReport, EngineReported, InstanceUp, ModelsSeen, RequestInfo
from smetric_router.view import ClusterView

FEW, MANY = 10, 1000
PROMPT_BYTES, TURNS, SYSTEM_BYTES = 800_000, 40, 20_000
"""200,000 tokens in 40 turns, behind a system prompt of 5,000."""
DECISION_US_MAX = 100.0


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    runs: int
    calls: int


FULL = Scale(runs=15, calls=60)
QUICK = Scale(runs=5, calls=15)


_WORDS = ["agent", "tool", "result", "file", "error", "line", "value", "return", "import", "class", "test", "path"]


@dataclass(frozen=True, slots=True)
class Bodies:
    """Requests of conversations with one system prompt."""

    before: bytes
    """The last request but one of a long conversation."""
    follow_up: bytes
    """Its last."""
    system: str

    def first_turn(self, question: str) -> bytes:
        """Of another conversation."""
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": question}]
        return json.dumps({"model": "m", "messages": messages}).encode()

    @classmethod
    def make(cls) -> "Bodies":
        """The same ones every time."""
        draw = random.Random(1)

        def text(length: int) -> str:
            return " ".join(draw.choice(_WORDS) for _ in range(length // 6))[:length]

        system = text(SYSTEM_BYTES)
        messages = [{"role": "system", "content": system}]
        size = (PROMPT_BYTES - SYSTEM_BYTES) // (2 * TURNS)
        for _ in range(TURNS - 1):
            messages += [{"role": "user", "content": text(size)}, {"role": "assistant", "content": text(size)}]
        before = json.dumps({"model": "m", "messages": messages[:-1]}).encode()
        messages.append({"role": "user", "content": text(2 * size)})
        return cls(before, json.dumps({"model": "m", "messages": messages, "stream": True}).encode(), system)


def cluster(count: int, bodies: Bodies) -> Dispatcher:
    """So many instances at work on conversations with one system prompt; one of them holds the long one."""
    names = [f"http://10.0.{at // 250}.{at % 250}:8000" for at in range(count)]
    state = ClusterState(names, chunk_bytes=1024, index_chunks_max=4_194_304)
    for at, name in enumerate(names):
        state.apply(InstanceUp(name), 0.0)
        state.apply(ModelsSeen(name, {"m": b"{}"}), 0.0)
        state.apply(EngineReported(name, EngineReport(running=1 + at % 3, waiting=at % 2), own=0), 0.0)
    policies, reader = build_policies({}), RequestReader()
    dispatcher = Dispatcher(state, policies["smetric"])
    for at in range(count):
        other = reader.read(CHAT_PATH, bodies.first_turn(f"{at}"))
        dispatcher.finish(dispatcher.dispatch(other, 0.0, policy=policies["round-robin"]), 0.0, computed=True)
    dispatcher.finish(dispatcher.dispatch(reader.read(CHAT_PATH, bodies.before), 0.0), 0.0, computed=True)
    return dispatcher


def decide(dispatcher: Dispatcher, reader: RequestReader, body: bytes) -> float:
    """Seconds from the body to the ticket."""
    begun = time.perf_counter()
    ticket = dispatcher.dispatch(reader.read(CHAT_PATH, body), 0.0)
    taken = time.perf_counter() - begun
    dispatcher.finish(ticket, 0.0)
    return taken


def read(reader: RequestReader, body: bytes) -> float:
    """Seconds to parse and digest it."""
    begun = time.perf_counter()
    reader.read(CHAT_PATH, body)
    return time.perf_counter() - begun


def fastest(call: Callable[[], float], calls: int) -> float:
    """The least time of so many calls: what it costs when nobody disturbs it."""
    return min(call() for _ in range(calls))


def decide_alone(policy: Policy, request: RequestInfo, view: ClusterView) -> float:
    """Seconds of the policy."""
    begun = time.perf_counter()
    policy.decide(request, view)
    return time.perf_counter() - begun


def whole_rows(scale: Scale, many: Dispatcher, few: Dispatcher, turn: str, body: bytes) -> list[Row]:
    """A request from its body to its ticket."""
    reader = RequestReader()
    what = f"decision at {MANY:,} instances, 200,000-token prompt, {turn}"
    beside_reading = Figure(f"{what} / reading and digesting it", "ms", Target("ratio", "<=", 2.0))
    beside_few = Figure(f"{what} / the same at {FEW}", "ms", Target("ratio", "<=", 1.3))
    for _ in range(scale.runs):
        ours = 1e3 * fastest(partial(decide, many, reader, body), scale.calls)
        beside_reading.add(OURS, ours)
        beside_reading.add(LIMIT, 1e3 * fastest(partial(read, reader, body), scale.calls))
        beside_few.add(OURS, ours)
        beside_few.add(LIMIT, 1e3 * fastest(partial(decide, few, reader, body), scale.calls))
    return [beside_reading.made({}), beside_few.made({})]


def policy_rows(scale: Scale, many: Dispatcher, body: bytes) -> list[Row]:
    """`decide` of every policy alone: the dearer one of a follow-up and a first turn."""
    follow_up = RequestReader().read(CHAT_PATH, body, session="s")
    first_turn = replace(follow_up, turn=0, est_hit=0)
    view = many.state.view(follow_up)
    rows: list[Row] = []
    for name, policy in build_policies({}).items():
        figure = Figure(f"decide of {name} at {MANY:,} instances", "us", Target("ours", "<=", DECISION_US_MAX))
        for _ in range(scale.runs):
            taken = (
                fastest(partial(decide_alone, policy, each, view), scale.calls) for each in (follow_up, first_turn)
            )
            figure.add(OURS, 1e6 * max(taken))
        rows.append(figure.made({}))
    return rows


def run(scale: Scale, say: Callable[[str], None]) -> list[Row]:
    """All rows."""
    bodies = Bodies.make()
    say(f"decisions: a prompt of {len(bodies.follow_up):,} bytes, {FEW} and {MANY:,} instances")
    many, few = cluster(MANY, bodies), cluster(FEW, bodies)
    rows = whole_rows(scale, many, few, "follow-up", bodies.follow_up)
    rows += whole_rows(scale, many, few, "first turn", bodies.first_turn("x" * PROMPT_BYTES))
    return rows + policy_rows(scale, many, bodies.follow_up)
