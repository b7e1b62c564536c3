"""Requests and replies over a Stream, the client's side: a connection that keeps itself alive."""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from tensorcast_connector.config import (
    CONNECT_TIMEOUT_S,
    HELLO_TIMEOUT_S,
    PING_INTERVAL_S,
    RECONNECT_DELAY_MAX_S,
    RECONNECT_DELAY_MIN_S,
    SILENCE_MAX_S,
)
from tensorcast_connector.errors import DeadlineExceeded, ProtocolError, TensorcastError, Unavailable
from tensorcast_connector.net.rpc import result_of
from tensorcast_connector.net.transport import Network, Stream
from tensorcast_connector.types import Address
from tensorcast_connector.wire.codec import (
    encode,
)
from tensorcast_connector.wire.frames import Frame, FrameDecoder, Kind, encode_frame
from tensorcast_connector.wire.messages import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Hello,
    Message,
    Ping,
    Welcome,
)

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=Message)
# What came of a request: its reply, why the connection ended, or None: there was no answer in time. An error is a result here:
# a caller that was cancelled in the same instant would leave an exception unread.
_Answer = Frame | TensorcastError | None


class RpcClient:
    """A connection that keeps itself alive. `start` it once; calls while it is down fail at once with Unavailable.

    Args:
        network, addresses: where the server is; several are of servers that can stand in for each other, and when one
            dies the next is tried.
        role, name: who calls, for the hello.
        chance: spreads the reconnects of many clients.
        on_connected: what has to happen before the first calls; may call. If it fails the connection is given up.
        on_disconnected: the connection that had been up is lost; calls fail from now on.
        tenant: of a caller.
        settle: what has to end before the socket is closed after that, so that the server does not yet take its end for
            the end of what this side does with what it holds there.
    """

    def __init__(
        self,
        network: Network,
        addresses: Address | Sequence[Address],
        role: str,
        name: str,
        chance: random.Random,
        on_connected: Callable[["RpcClient"], Awaitable[None]] | None = None,
        on_disconnected: Callable[[TensorcastError], None] | None = None,
        settle: Callable[[], Awaitable[None]] | None = None,
        tenant: str = "",
    ) -> None:
        self._network = network
        self._hello = Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION, role, name, tenant)
        self._chance = chance
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected
        self._settle = settle
        self._stream: Stream | None = None  # set once the server has answered the hello
        # By request id, each until it is answered: who is told, and when it is given up (loop's time).
        self._pending: dict[int, tuple[Callable[[_Answer], None], float]] = {}
        # One timer for all calls, since one for each would cost more than the call: at the earliest time in `_pending`.
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at_s = math.inf
        self._next_id = 1
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._failures = 0
        self._addresses = [addresses] if isinstance(addresses, Address) else list(addresses)
        self.address = self._addresses[0]
        self.error: TensorcastError = Unavailable(f"not yet connected to {self.address}")
        self.server = ""  # what it is: "store" or "worker"
        self.server_id = ""
        self.version = 0  # of the protocol, as agreed on the last connection
        self.connected = False
        self._announced = False  # `on_connected` was done, and the end of that connection was not told yet
        self._heard_s = 0.0  # when there was the last word of the other side
        self._heard = False  # whether there was one since the last ping
        self._given_up: Unavailable | None = None
        self._leave = asyncio.Event()  # the connection is given up

    def __repr__(self) -> str:
        return f"<RpcClient {self.address} {'connected' if self.connected else 'down'}, {len(self._pending)} pending>"

    def start(self) -> None:
        """Connects, and reconnects for ever, in the background."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def wait_connected(self, timeout_s: float, patient: bool = True) -> None:
        """Until connected.

        Raises:
            TensorcastError: not within `timeout_s`, or if not `patient` a first attempt failed; says why.
        """
        failures = self._failures
        try:
            async with asyncio.timeout(timeout_s):
                while not self.connected:
                    if not patient and self._failures > failures:
                        raise self.error
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self.error from None

    def try_another(self, error: Unavailable) -> None:
        """The server answers, but cannot serve: goes on to the next address, if there is one."""
        if len(self._addresses) > 1 and self._stream is not None:
            self._given_up = error
            self._leave.set()

    async def close(self) -> None:
        """Ends the connection; pending calls fail with Unavailable."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def call(self, message: Message, expected: type[R], timeout_s: float) -> R:
        """Sends `message` and waits for its reply.

        Raises:
            Unavailable: not connected, or the connection broke before the reply.
            DeadlineExceeded: no reply within `timeout_s`; the request was cancelled.
            ProtocolError: `message` is too large, or the reply is none.
            TensorcastError: what the other side answered.
        """
        if self._stream is None:
            raise Unavailable(str(self.error))
        return await self._exchange(self._stream, message, expected, timeout_s)

    def send(
        self, message: Message, expected: type[R], timeout_s: float, done: Callable[[R | TensorcastError], None]
    ) -> Callable[[], bool]:
        """Sends `message` without a task that would wait for its reply.

        Args:
            done: is given the reply or what `call` would raise, once, and not before this returns.

        Returns:
            what takes the request back, so that `done` is not called any more; False: it was.

        Raises:
            Unavailable: not connected.
            ProtocolError: `message` is too large.
        """
        stream = self._stream
        if stream is None:
            raise Unavailable(str(self.error))

        def told(answer: _Answer) -> None:
            result: R | TensorcastError
            try:
                result = self._result(stream, request_id, answer, expected, timeout_s)
            except TensorcastError as error:
                result = error
            except Exception as error:
                logger.exception("the answer to %s was not understood", type(message).__name__)
                result = ProtocolError(f"{type(error).__name__}: {error}")
            try:
                done(result)
            except Exception:  # a fault of our own is not one of the connection
                logger.exception("the answer to %s was not taken", type(message).__name__)

        def take_back() -> bool:
            if self._pending.pop(request_id, None) is None:
                return False
            stream.write(encode_frame(Kind.CANCEL, request_id, b""))
            return True

        request_id = self._begin(stream, message, timeout_s, told)
        return take_back

    async def _exchange(self, stream: Stream, message: Message, expected: type[R], timeout_s: float) -> R:
        # What is done before the waiting is done while the other side works.
        future: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()

        def told(answer: _Answer) -> None:
            if not future.done():
                future.set_result(answer)

        request_id = self._begin(stream, message, timeout_s, told)
        try:
            answer = await future
        except asyncio.CancelledError:
            self._pending.pop(request_id, None)
            stream.write(encode_frame(Kind.CANCEL, request_id, b""))
            raise
        return self._result(stream, request_id, answer, expected, timeout_s)

    def _begin(self, stream: Stream, message: Message, timeout_s: float, told: Callable[[_Answer], None]) -> int:
        """Sends a request. The answer cannot be read before the event loop's next turn."""
        request_id = self._next_id
        self._next_id += 1
        stream.write(encode_frame(Kind.REQUEST, request_id, encode(message), max(1, int(timeout_s * 1000))))
        # The other side gives up first, so that its reason arrives; this is for when it is silent.
        give_up_s = asyncio.get_running_loop().time() + timeout_s * 1.25
        self._pending[request_id] = told, give_up_s
        if give_up_s < self._alarm_at_s:
            self._set_alarm(give_up_s)
        return request_id

    def _result(self, stream: Stream, request_id: int, answer: _Answer, expected: type[R], timeout_s: float) -> R:
        """Raises as `call`."""
        if answer is None:
            stream.write(encode_frame(Kind.CANCEL, request_id, b""))
            raise DeadlineExceeded(f"{self.address} did not answer within {timeout_s:g} s")
        if isinstance(answer, TensorcastError):
            raise Unavailable(str(answer))
        return result_of(answer, expected)

    def _set_alarm(self, at_s: float) -> None:
        """For the call that is given up next."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at_s = at_s
        self._alarm = None if at_s == math.inf else asyncio.get_running_loop().call_at(at_s, self._give_up)

    def _give_up(self) -> None:
        """Ends the calls whose time is over."""
        now = asyncio.get_running_loop().time()
        over = [request_id for request_id, (_, give_up_s) in self._pending.items() if give_up_s <= now]
        self._set_alarm(min((at for _, at in self._pending.values() if at > now), default=math.inf))
        self._end(over, None)

    async def _run(self) -> None:
        # No TaskGroup here: on Python 3.11 it swallows a cancellation that meets an error of one of its tasks.
        delay_s = RECONNECT_DELAY_MIN_S
        try:
            while True:
                try:
                    await self._connect_once()
                    delay_s = RECONNECT_DELAY_MIN_S  # it had been up
                except TensorcastError as why:
                    self._down(why)
                except Exception as why:
                    logger.exception("connection to %s failed", self.address)
                    self._down(Unavailable(f"{self.address}: {why}"))
                self._addresses.append(self._addresses.pop(0))
                self.address = self._addresses[0]
                await asyncio.sleep(delay_s * self._chance.uniform(0.5, 1.0))
                delay_s = min(delay_s * 2, RECONNECT_DELAY_MAX_S)
        finally:
            self._down(Unavailable(f"the client of {self.address} was closed"))
            self._set_alarm(math.inf)

    async def _connect_once(self) -> None:
        """One connection from its beginning to its end.

        Raises:
            TensorcastError: it has never been up; says why.
        """
        stream = await self._network.dial(self.address, CONNECT_TIMEOUT_S)
        loop = asyncio.get_running_loop()
        reading = loop.create_task(self._read(stream))
        watching: asyncio.Task[TensorcastError] | None = None
        try:
            greeting = await self._exchange(stream, self._hello, Welcome, HELLO_TIMEOUT_S)
            self.server, self.server_id, self.version = greeting.server, greeting.server_id, greeting.version
            self._stream = stream
            if self._on_connected is not None:
                await self._on_connected(self)
            self._announced = True
            if not reading.done():
                self.connected = True
                self._changed.set()
            watching = loop.create_task(self._watch(stream))
            ended, _ = await asyncio.wait({reading, watching}, return_when=asyncio.FIRST_COMPLETED)
            self._down(reading.result() if reading in ended else watching.result())
            if self._settle is not None:
                await self._settle()
        except Unavailable:
            if reading.done() and not reading.cancelled():
                raise reading.result() from None  # the reason behind it
            raise
        finally:
            stream.close()
            tasks = [task for task in (reading, watching) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, stream: Stream) -> TensorcastError:
        """Hands replies to those who wait for them, until the connection ends; returns why."""
        decoder = FrameDecoder()
        clock = asyncio.get_running_loop().time

        def take(data: memoryview) -> bool:
            self._heard_s, self._heard = clock(), True
            for frame in decoder.feed(data):
                if frame.request_id == 0:
                    result_of(frame, Message)  # the server says why it ends the connection
                waiting = self._pending.pop(frame.request_id, None)
                if waiting is not None:
                    waiting[0](frame)
            return True

        self._given_up = None
        self._leave.clear()
        error: TensorcastError = Unavailable(f"{self.address} closed the connection")
        try:
            await stream.deliver(take)
        except TensorcastError as why:
            error = why
        self._fail_pending(error)
        return error

    async def _watch(self, stream: Stream) -> TensorcastError:
        """Returns when the connection is to be given up: another address is tried, or the other side is silent, because it
        is stopped, or gone without the kernel telling us."""
        loop = asyncio.get_running_loop()
        self._heard_s, unanswered = loop.time(), 0
        while self._given_up is None:
            self._heard = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_INTERVAL_S):
                    await self._leave.wait()
            # Pings are counted, not seconds: while this process stands still, or waits for its turn, it asks nothing.
            unanswered = 0 if self._heard else unanswered + 1
            if unanswered >= SILENCE_MAX_S / PING_INTERVAL_S:
                await asyncio.sleep(PING_INTERVAL_S / 10)  # if it was we who stood still, the answers are read now
                if not self._heard:
                    return Unavailable(f"{self.address} has been silent for {loop.time() - self._heard_s:.0f} s")
            request_id = self._next_id
            self._next_id += 1
            stream.write(encode_frame(Kind.REQUEST, request_id, encode(Ping())))
        return self._given_up

    def _fail_pending(self, error: TensorcastError) -> None:
        self._end(list(self._pending), error)

    def _end(self, request_ids: Iterable[int], answer: TensorcastError | None) -> None:
        """One by one: who is told may send more, or take others of them back."""
        for request_id in request_ids:
            waiting = self._pending.pop(request_id, None)
            if waiting is not None:
                waiting[0](answer)

    def _down(self, error: TensorcastError) -> None:
        """The connection has ended, or never came about."""
        announced, self._announced = self._announced, False
        self.connected, self._stream, self.error = False, None, error
        self._failures += 1
        self._fail_pending(error)
        self._changed.set()
        if announced and self._on_disconnected is not None:
            self._on_disconnected(error)
