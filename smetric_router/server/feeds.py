"""Listens to the KV events of the engines and keeps the exact index right: one task per publisher, none in the request path.

A publisher is subscribed to over ZMQ. First what it has published before is asked of its replay socket; after a gap the same from
the first missing message on. Where that cannot be had, or the publisher began anew, all that is known of the rank is
dropped, and learnt again as it comes. While it is not listened to, the engine's feed is not live and the
observed index stands in.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from smetric_router.blocks import BlocksCleared, BlocksStored
from smetric_router.errors import ConfigError
from smetric_router.server.event_sources import Asks, Source, configured, discovered
from smetric_router.server.kv_events import Arrival, Batch, Groups, Order, decode
from smetric_router.server.logs import log
from smetric_router.state.cluster import ClusterState
from smetric_router.types import BlocksChanged, CacheCleared, FeedChanged

MESSAGE_BYTES_MAX = 64 << 20
QUEUE_MESSAGES_MAX = 10_000
"""What waits in the socket; a publisher that is faster loses messages, which shows as a gap."""
BLOCKS_AT_ONCE = 2_048
"""After so many the loop serves others first."""
REPLAY_TIMEOUT_S = 5.0
"""Of silence."""
REPLAY_INTERVAL_S = 0.2
"""Between two of one publisher, however odd its numbers are."""
DISCOVERY_INTERVAL_S = 2.0
_END = (1 << 64) - 1


class Feeds:
    """All publishers of all engines.

    Args:
        endpoints: per engine "publisher replay", one entry for each data-parallel rank; an engine that is not in it is asked.
    """

    def __init__(
        self,
        state: ClusterState,
        instances: tuple[str, ...],
        endpoints: Mapping[str, tuple[str, ...]],
        asks: Asks,
        clock: Callable[[], float],
        count: Callable[[str, int], None],
    ) -> None:
        self._zmq = _import_zmq()
        self._state = state
        self._instances = instances
        self._endpoints = endpoints
        self._asks = asks
        self._clock = clock
        self._context: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._live: dict[str, dict[str, bool]] = {}
        self.count = count
        """Is told of events `taken` and `ignored`, of messages that were none (`garbage`), of `gaps`, of those that stayed
        (`lost`), and of publishers that began anew (`restarts`)."""

    def __repr__(self) -> str:
        return f"<Feeds {self._live}>"

    async def start(self) -> None:
        """Begins to listen; returns at once."""
        self._context = self._zmq.asyncio.Context()
        self._tasks = [asyncio.create_task(self._engine(instance)) for instance in self._instances]

    async def stop(self) -> None:
        """Stops listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    # --- which publishers there are ---

    async def _engine(self, instance: str) -> None:
        sources = [configured(each) for each in self._endpoints.get(instance, ())]
        while not sources:
            sources = await discovered(self._asks, instance)
            if not sources:
                await asyncio.sleep(DISCOVERY_INTERVAL_S)
        self._live[instance] = {str(each.endpoint): False for each in sources}
        self._tasks += [asyncio.create_task(_Feed(self, instance, source).run()) for source in sources]

    # --- for the feeds ---

    def set_live(self, instance: str, endpoint: str, live: bool) -> None:
        """An engine's feed is live when all its publishers are listened to."""
        mine = self._live[instance]
        if mine[endpoint] == live:
            return
        before = all(mine.values())
        mine[endpoint] = live
        if all(mine.values()) != before:
            log.info("KV events" if live else "no KV events", extra={"fields": {"instance": instance}})
            self._state.apply(FeedChanged(instance, live), self._clock())

    def clear(self, instance: str, ranks: set[int]) -> None:
        """All that these ranks hold is forgotten."""
        for rank in ranks:
            self._state.apply(BlocksChanged(instance, rank, BlocksCleared()), self._clock())

    async def take(self, instance: str, batch: Batch) -> None:
        """Applies the events, with pauses."""
        self.count("ignored", batch.ignored)
        blocks = 0
        for event in batch.events:
            if isinstance(event, BlocksCleared) and len(self._live[instance]) == 1:
                self._state.apply(CacheCleared(instance), self._clock())  # what was observed is gone too
            else:
                self._state.apply(BlocksChanged(instance, batch.rank, event), self._clock())
            self.count("taken", 1)
            blocks += len(event.keys) if isinstance(event, BlocksStored) else 1
            if blocks >= BLOCKS_AT_ONCE:
                blocks = 0
                await asyncio.sleep(0)
        await asyncio.sleep(0)  # a socket with messages in it does not wait

    def socket(self, kind: str) -> Any:
        """A socket with bounded queues, not connected yet. Raises ZMQError."""
        made = self._context.socket(getattr(self._zmq, kind))
        made.setsockopt(self._zmq.LINGER, 0)
        made.setsockopt(self._zmq.RCVHWM, QUEUE_MESSAGES_MAX)
        made.setsockopt(self._zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        made.setsockopt(self._zmq.RECONNECT_IVL_MAX, 2000)
        made.setsockopt(self._zmq.IPV6, 1)
        return made

    def now(self) -> float:
        """Seconds of the clock."""
        return self._clock()

    @property
    def zmq(self) -> Any:
        """The library."""
        return self._zmq


class _Feed:
    """One publisher."""

    def __init__(self, feeds: Feeds, instance: str, source: Source) -> None:
        self._feeds = feeds
        self._instance = instance
        self._source = source
        self._endpoint = str(source.endpoint)
        self._order = Order()
        self._groups = Groups()
        self._connected = False
        self._ranks: set[int] = set()
        self._last: tuple[int, bytes] | None = None
        self._replay_after_s = 0.0
        self._replay_ended = False
        """Whether the last replay was told to the end."""

    async def run(self) -> None:
        """Listens for ever."""
        while True:
            try:
                await self._listen()
            except (self._feeds.zmq.ZMQError, ConnectionError) as error:
                fields = {"instance": self._instance, "endpoint": self._endpoint, "cause": str(error)}
                log.warning("KV events: cannot listen", extra={"fields": fields})
            except Exception:
                log.exception("KV events: failed", extra={"fields": {"instance": self._instance}})
            self._set_connected(False)
            await asyncio.sleep(DISCOVERY_INTERVAL_S)

    async def _listen(self) -> None:
        zmq = self._feeds.zmq
        stream = self._feeds.socket("SUB")
        events = stream.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        stream.setsockopt_string(zmq.SUBSCRIBE, self._source.topic)
        stream.connect(self._endpoint)
        watching = asyncio.ensure_future(events.recv_multipart())
        reading = asyncio.ensure_future(stream.recv_multipart())
        try:
            while True:
                await asyncio.wait((watching, reading), return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    await self._connection_changed(watching.result())
                    watching = asyncio.ensure_future(events.recv_multipart())
                if reading.done():
                    await self._arrived(reading.result())
                    reading = asyncio.ensure_future(stream.recv_multipart())
        finally:
            watching.cancel()
            reading.cancel()
            await asyncio.gather(watching, reading, return_exceptions=True)
            stream.disable_monitor()
            stream.close(linger=0)

    async def _connection_changed(self, frames: list[bytes]) -> None:
        event = int.from_bytes(frames[0][:2], "little")
        if event == self._feeds.zmq.EVENT_DISCONNECTED:
            self._set_connected(False)
            return
        if not await self._same_as_before():
            await self._begin_anew()
        self._set_connected(True)

    def _set_connected(self, connected: bool) -> None:
        self._connected = connected
        self._feeds.set_live(self._instance, self._endpoint, connected and not self._groups.undecided)

    async def _same_as_before(self) -> bool:
        """Whether the publisher still has the message that was its last; then only what came since is read."""
        if self._last is None:
            return False
        number, payload = self._last
        order, self._order = self._order, Order(number)
        first = True
        same = False
        async with aclosing(self._replay(number)) as messages:
            async for at, body in messages:
                if first and not (same := (at, body) == (number, payload)):
                    break
                self._order.replayed(at)
                if not first:
                    await self._take(at, body)
                first = False
        if not same:
            self._order = order
        return same

    async def _begin_anew(self) -> None:
        """Nothing that was known of it counts any more."""
        if self._last is not None or self._ranks:
            self._feeds.count("restarts", 1)
            self._feeds.clear(self._instance, self._ranks)
        self._order.restart()
        self._groups = Groups()
        await self._catch_up(fresh=True)

    async def _catch_up(self, *, fresh: bool = False) -> None:
        """Reads what is missing; what the publisher no longer has is lost, and with it all that was known before."""
        expected, any_came = self._order.expected or 0, False
        async with aclosing(self._replay(expected)) as messages:
            async for number, payload in messages:
                if not any_came and number > expected and not fresh:
                    self._lost()
                if self._order.replayed(number) is Arrival.GAP:
                    self._order.begin_at(number + 1)  # those before are too old
                any_came = True
                await self._take(number, payload)
        if fresh and not any_came and not self._replay_ended:
            self._order.begin_at(None)  # nobody says how many there were before

    def _lost(self) -> None:
        self._feeds.count("lost", 1)
        self._feeds.clear(self._instance, self._ranks)

    async def _arrived(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self._feeds.count("garbage", 1)
            await asyncio.sleep(0)
            return
        number, payload = int.from_bytes(frames[1], "big"), frames[2]
        arrival = self._order.live(number)
        if arrival is Arrival.RESTART:
            await self._begin_anew()
            arrival = self._order.live(number)
        if arrival is Arrival.GAP:
            self._feeds.count("gaps", 1)
            await self._catch_up()
            expected = self._order.expected or 0
            if number >= expected:  # it could not be had
                if number > expected:
                    self._lost()
                self._order.begin_at(number + 1)
                arrival = Arrival.NEXT
        if arrival is Arrival.NEXT:
            await self._take(number, payload)

    async def _take(self, number: int, payload: bytes) -> None:
        self._last = (number, payload)
        seen = len(self._groups.kinds)
        try:
            batch = decode(payload, self._groups)
        except ValueError as error:
            self._feeds.count("garbage", 1)
            log.debug("KV events: garbage", extra={"fields": {"instance": self._instance, "cause": str(error)}})
            await asyncio.sleep(0)
            return
        if len(self._groups.kinds) != seen:
            self._tell_groups()
        self._ranks.add(batch.rank)
        await self._feeds.take(self._instance, batch)

    def _tell_groups(self) -> None:
        groups = self._groups
        self._set_connected(self._connected)
        if len(groups.kinds) > 1 or groups.undecided:
            kinds = ", ".join(f"{group}: {kind}" for group, kind in sorted(groups.kinds.items()))
            fields = {"instance": self._instance, "groups": kinds, "taken": groups.deciding}
            cause = "no group tells how long a hit is: the observed index stands in" if groups.undecided else None
            log.info("KV events: groups of layers", extra={"fields": {**fields, "cause": cause}})

    async def _replay(self, first: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """The messages from `first` on that the publisher still has, as (number, payload)."""
        self._replay_ended = False
        if not self._source.replay_endpoint:
            return
        await asyncio.sleep(max(0.0, self._replay_after_s - self._feeds.now()))
        self._replay_after_s = self._feeds.now() + REPLAY_INTERVAL_S
        socket = self._feeds.socket("DEALER")
        try:
            socket.connect(self._source.replay_endpoint)
            await socket.send_multipart((b"", first.to_bytes(8, "big")))
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    frames = await socket.recv_multipart()
                if len(frames) != 4 or len(frames[2]) != 8:
                    self._feeds.count("garbage", 1)
                    return
                number = int.from_bytes(frames[2], "big")
                if number == _END:
                    self._replay_ended = True
                    return
                yield number, frames[3]
        except TimeoutError:
            log.warning("KV events: no replay", extra={"fields": {"instance": self._instance}})
        finally:
            socket.close(linger=0)


def _import_zmq() -> Any:
    try:
        import zmq
        import zmq.asyncio
    except ImportError:
        raise ConfigError(
            'index = "exact" needs pyzmq: install it beside the router, or use index = "observed"'
        ) from None
    return zmq
