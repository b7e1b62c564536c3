"""What changed in etcd lately: one watch per process that follows all keys under a prefix, and a bounded memory of it."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from tensorcast_connector.config import (
    ETCD_PROBE_INTERVAL_S,
    HISTORY_BYTES_MAX,
    HISTORY_REVISIONS_MAX,
    RECONNECT_DELAY_MAX_S,
    RECONNECT_DELAY_MIN_S,
)
from tensorcast_connector.errors import Compacted, TensorcastError, Unavailable
from tensorcast_connector.store.etcd_gateway import Answer, EtcdKey, Gateway
from tensorcast_connector.store.kv import Event
from tensorcast_connector.types import Address

logger = logging.getLogger(__name__)


class History:
    """The last changes: all of those with a revision above `floor` and up to `last`. No I/O."""

    def __init__(self, floor: int) -> None:
        self._events: deque[Event] = deque()
        self._bytes = 0
        self.floor = self.last = floor

    def resume(self) -> None:
        """A part of a revision that came without the rest is forgotten; it will come again."""
        while self._events and self._events[-1].mod_revision > self.last:
            self._bytes -= len(self._events.pop().value or b"")

    def add(self, events: Iterable[Event], complete: bool) -> None:
        """What came, in order. Not `complete`: the last revision of it goes on with the next call."""
        for event in events:
            self._events.append(event)
            self._bytes += len(event.value or b"")
        if not self._events:
            return
        newest = self._events[-1].mod_revision
        if complete:
            self.last = max(self.last, newest)
        while self._events and (
            self._bytes > HISTORY_BYTES_MAX or self._events[0].mod_revision <= newest - HISTORY_REVISIONS_MAX
        ):
            oldest = self._events.popleft()
            self._bytes -= len(oldest.value or b"")
            self.floor = oldest.mod_revision

    def after(self, prefix: str, revision: int) -> tuple[int, list[Event]]:
        """See KvStore.changes."""
        if revision < self.floor:
            raise Compacted(f"the changes after revision {self.floor} are known, not those after {revision}")
        found = []
        for event in reversed(self._events):
            if event.mod_revision <= revision:
                break
            if event.mod_revision <= self.last and event.key.startswith(prefix):
                found.append(event)
        return max(revision, self.last), found[::-1]

    def touched(self, prefix: str, revision: int) -> bool:
        """Whether a key under `prefix` has changed since, as far as is known."""
        if self.last <= revision:
            return False
        return not prefix or revision < self.floor or bool(self.after(prefix, revision)[1])


class _Change(msgspec.Struct):
    kv: EtcdKey
    type: str = "PUT"


class _Watched(Answer):
    events: list[_Change] = msgspec.field(default_factory=list)
    created: bool = False
    canceled: bool = False
    cancel_reason: str = ""
    compact_revision: int = 0
    fragment: bool = False


class EtcdWatch:
    """Follows the keys in [start, end) of one etcd, for ever; what comes is in `history`.

    Args:
        floor: changes after this revision are asked for.
        key_of: a key of ours from one of etcd's.
    """

    def __init__(self, gateway: Gateway, start: bytes, end: bytes, floor: int, key_of: Callable[[bytes], str]) -> None:
        self._gateway = gateway
        self._range = {"key": start, "range_end": end}
        self._key_of = key_of
        self._waiters: set[asyncio.Future[None]] = set()
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._restarts = 0
        self._following: asyncio.Task[None] | None = None
        self._lost = False
        self.history = History(floor)

    async def wait(self, after_revision: int, timeout_s: float, prefix: str = "") -> None:
        """Until the history has a change under `prefix` after `after_revision`.

        Or it begins anew, or does not reach back so far, or `timeout_s` is over, or the watch is closed.
        """
        loop = asyncio.get_running_loop()
        end, restarts = loop.time() + timeout_s, self._restarts
        while not self.history.touched(prefix, after_revision) and restarts == self._restarts and not self._task.done():
            if (left := end - loop.time()) <= 0:
                return
            waiter = loop.create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=left)
            finally:
                self._waiters.discard(waiter)

    def begin_anew(self, revision: int) -> None:
        """The database is another one than before, and at `revision`: nothing of the former counts."""
        logger.warning(
            "etcd has gone back to revision %d: its data was lost, or an older copy was put in its place", revision
        )
        self._restarts += 1
        self.history = History(revision)
        self._wake()
        if self._following is not None:
            self._following.cancel()

    async def close(self) -> None:
        """Waiters return."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _run(self) -> None:
        delay_s = RECONNECT_DELAY_MIN_S
        while True:
            endpoint, before = self._gateway.endpoint, self.history.last
            # No TaskGroup here: on Python 3.11 it swallows a cancellation that meets an error of one of its tasks.
            both = [asyncio.create_task(each) for each in (self._follow(endpoint), self._probe(endpoint))]
            self._following = both[0]
            try:
                ended, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in both:
                    task.cancel()
                await asyncio.gather(*both, return_exceptions=True)
            first = ended.pop()
            if not first.cancelled():  # else it begins anew
                self._broke(endpoint, first.exception() or Unavailable("the watch ended"))
            delay_s = RECONNECT_DELAY_MIN_S if self.history.last > before else min(2 * delay_s, RECONNECT_DELAY_MAX_S)
            await asyncio.sleep(delay_s)

    def _broke(self, endpoint: Address, error: BaseException) -> None:
        if isinstance(error, Compacted):
            return
        if not self._lost:
            self._lost = True
            fault = None if isinstance(error, TensorcastError) else error
            logger.warning("etcd cannot be followed any more: %s", error, exc_info=fault)
        self._gateway.leave(endpoint, error)

    async def _probe(self, endpoint: Address) -> None:
        """A member that does not answer, or has lost the others, would leave the stream open and silent."""
        body = msgspec.json.encode({**self._range, "count_only": True})
        while True:
            await asyncio.sleep(ETCD_PROBE_INTERVAL_S)
            await self._gateway.ask(endpoint, "/v3/kv/range", body, Answer, ETCD_PROBE_INTERVAL_S)

    async def _follow(self, endpoint: Address) -> None:
        self.history.resume()
        create = {**self._range, "start_revision": self.history.last + 1, "fragment": True}
        async for got in self._gateway.stream(endpoint, "/v3/watch", {"create_request": create}, _Watched):
            if self._lost and got.created and not got.canceled:
                self._lost = False
                logger.info("etcd at %s is followed", endpoint)
            if got.compact_revision:
                logger.warning(
                    "etcd has compacted its history up to revision %d, before it was read", got.compact_revision
                )
                self._restarts += 1
                self.history = History(got.compact_revision)
                self._wake()
                raise Compacted(f"compacted up to revision {got.compact_revision}")
            if got.canceled:
                raise Unavailable(f"the watch was cancelled: {got.cancel_reason}")
            self.history.add(map(self._event, got.events), complete=not got.fragment)
            if got.events:
                self._wake()

    def _event(self, event: _Change) -> Event:
        value = None if event.type == "DELETE" else event.kv.value
        return Event(self._key_of(event.kv.key), value, event.kv.mod_revision, event.kv.lease)
