"""Sessions with a shared system prompt in closed loop: the workload that tells stickiness from balance."""

import asyncio
import heapq
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from smetric_router.dispatch import Dispatcher
from smetric_router.state.requests import CHAT_PATH, RequestReader

SESSIONS, TURNS, LIVE = 64, 8, 16
SYSTEM_BYTES, TURN_BYTES = 6 * 1024, 2 * 1024


@dataclass
class Tally:
    """Where the requests went."""

    served: Counter[str] = field(default_factory=Counter)
    follow_ups: int = 0
    stuck: int = 0

    def add(self, instance: str, previous: str | None) -> None:
        self.served[instance] += 1
        if previous is not None:
            self.follow_ups += 1
            self.stuck += instance == previous

    @property
    def sticky(self) -> float:
        return self.stuck / self.follow_ups

    def imbalance(self, engines: int) -> float:
        return max(self.served.values()) * engines / sum(self.served.values())


class Session:
    """One conversation; `next_body` is its next request, with the whole history."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": "s" * SYSTEM_BYTES}]
        self.turns = 0
        self.instance: str | None = None

    def next_body(self) -> bytes:
        if self.turns:
            self._messages.append({"role": "assistant", "content": "tok " * 50})
        self.turns += 1
        self._messages.append({"role": "user", "content": self._draw.randbytes(TURN_BYTES // 2).hex()})
        return json.dumps({"model": "fake", "messages": self._messages}).encode()


async def converse(client: aiohttp.ClientSession, urls: Sequence[str], seed: int, think_s: float = 0.025) -> Tally:
    """The workload over sockets; each request goes to one of the routers by chance."""
    draw, tally, places = random.Random(seed), Tally(), asyncio.Semaphore(LIVE)

    async def one() -> None:
        async with places:
            session = Session(draw)
            for _ in range(TURNS):
                url = f"{draw.choice(urls)}/v1/chat/completions"
                async with client.post(url, data=session.next_body()) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
                    tally.add(answer.headers["x-smetric-instance"], session.instance)
                    session.instance = answer.headers["x-smetric-instance"]
                await asyncio.sleep(draw.uniform(0, think_s))

    await asyncio.gather(*(one() for _ in range(SESSIONS)))
    return tally


def simulate(dispatcher: Dispatcher, seed: int, service_s: float = 0.06, think_s: float = 0.05) -> Tally:
    """The workload on a virtual clock, an engine being nothing but a delay."""
    draw, reader, tally = random.Random(seed), RequestReader(), Tally()
    events: list[tuple[float, int, Any]] = [(draw.uniform(0, 0.002), at, Session(draw)) for at in range(LIVE)]
    begun = serial = LIVE
    while events:
        now, _, what = heapq.heappop(events)
        serial += 1
        if isinstance(what, Session):
            ticket = dispatcher.dispatch(reader.read(CHAT_PATH, what.next_body()), now)
            tally.add(ticket.decision.instance, what.instance)
            what.instance = ticket.decision.instance
            heapq.heappush(events, (now + service_s, serial, (what, ticket)))
            continue
        session, ticket = what
        dispatcher.finish(ticket, now, computed=True)
        if session.turns == TURNS:
            if begun == SESSIONS:
                continue
            session = Session(draw)
            begun += 1
        heapq.heappush(events, (now + draw.uniform(0, think_s), serial, session))
    return tally
