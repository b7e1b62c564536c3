"""Requests and replies between processes: encoded by the production codec, delayed, lost, doubled, cut off.

A request may be delivered twice, the second time long after its caller has given up. What is sent from one host to another
while that direction is cut is lost. A process that is not there refuses the connection, or nobody answers at all.
"""

from collections.abc import Callable
from typing import Any

from tensorcast_connector.errors import DeadlineExceeded, TensorcastError, Unavailable, error_from_code
from tensorcast_connector.wire.codec import decode, encode, failure_decoder, reply_decoder
from tensorcast_connector.wire.messages import Failure, Message
from tests.sim.world import Process, World

CALLER_PATIENCE = 1.25  # net/rpc_client.py: the caller waits longer than it tells the other side
DUPLICATE_DELAY_MAX_S = 12.0
SLOW_DELAY_MAX_S = 3.0

Done = Callable[[Message | TensorcastError, bytes], object]
"""Gets the reply or the error, and the bytes that came behind the reply; may return QUIET."""

Answer = Callable[..., None]
"""What a server calls with its reply (a Failure is an error), and the bytes behind it."""


class _Exchange:
    """One request, from its caller's side."""

    __slots__ = ("_done", "caller")

    def __init__(self, caller: Process, done: Done) -> None:
        self.caller = caller
        self._done: Done | None = done

    def finish(self, result: Message | TensorcastError, payload: bytes = b"") -> object:
        """The first result counts; returns False if this was not it."""
        if self._done is None:
            return False
        done, self._done = self._done, None
        return done(result, payload)

    def arrive(self, body: bytes, failed: bool, payload: bytes) -> object:
        """A reply is there."""
        if self._done is None:
            self.caller.world.counts["reply too late, or the second one"] += 1
            return False
        if failed:
            failure = decode(failure_decoder, body)
            return self.finish(error_from_code(failure.code, failure.message))
        return self.finish(decode(reply_decoder, body), payload)


class Network:
    """See the module. The three chances are per message and may be changed at any time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.loss = 0.0
        self.duplication = 0.0
        self.slow = 0.0
        self.corruption = 0.0  # of the bytes behind a reply
        self.cuts: dict[tuple[str, str], int] = {}  # (from host, to host) -> how many faults cut it now

    def reachable(self, source: str, target: str) -> bool:
        """Whether what `source` sends arrives at `target`."""
        return not self.cuts.get((source, target))

    def call(self, caller: Process, to: str, message: Message, timeout_s: float, done: Done) -> None:
        """Sends `message` to the process named `to`; `done` is called exactly once, if the caller lives."""
        world, chance = self._world, self._world.random.random
        body = encode(message)
        exchange = _Exchange(caller, done)
        late = DeadlineExceeded(f"{to} did not answer within {timeout_s:g} s")
        caller.after(timeout_s * CALLER_PATIENCE, exchange.finish, late)
        if self.duplication and chance() < self.duplication:
            delay = chance() ** 3 * DUPLICATE_DELAY_MAX_S
            world.after(delay, self._deliver, caller.host, to, body, exchange)
        if self._passes(caller.host, self._host(to)):
            world.after(self._delay(), self._deliver, caller.host, to, body, exchange)

    def _host(self, name: str) -> str:
        return name.partition("/")[0]

    def _passes(self, source: str, target: str) -> bool:
        if self.cuts.get((source, target)):
            return False
        return not (self.loss and source != target and self._world.random.random() < self.loss)

    def _delay(self) -> float:
        chance = self._world.random.random
        if self.slow and chance() < self.slow:
            return chance() * SLOW_DELAY_MAX_S
        return 0.0002 + 0.003 * chance() ** 2

    def _deliver(self, source: str, to: str, body: bytes, exchange: _Exchange) -> None:
        world = self._world
        host = self._host(to)
        if self.cuts.get((source, host)):
            return
        target: Any = world.processes.get(to)
        if target is None:  # refused, unless even that does not come back
            if self._passes(host, source) and world.random.random() < 0.7:
                error = Unavailable(f"{to} is not there")
                world.schedule(world.now + self._delay(), exchange.caller, exchange.finish, error)
            return

        def answer(reply: Message, payload: bytes = b"") -> None:
            if not self._passes(host, source):
                return
            if payload and self.corruption and world.random.random() < self.corruption:
                at = world.random.randrange(len(payload))
                payload = payload[:at] + bytes([payload[at] ^ 0x10]) + payload[at + 1 :]
            failed = isinstance(reply, Failure)
            when = world.now + self._delay()
            world.schedule(when, exchange.caller, exchange.arrive, encode(reply), failed, payload)

        world.enter(target, target.receive, body, answer)
