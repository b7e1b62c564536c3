"""Requests and replies over a Stream: ids, deadlines, cancellation, limits, reconnecting with backoff.

A server answers requests of one connection concurrently and in any order. A client that gives up sends CANCEL, and a
connection that ends cancels all it had asked for.
"""

import asyncio
import inspect
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec

from tensorcast_connector.config import (
    CONNECT_TIMEOUT_S,
    HELLO_TIMEOUT_S,
    RECONNECT_DELAY_MAX_S,
    RECONNECT_DELAY_MIN_S,
    REQUESTS_IN_FLIGHT_MAX,
)
from tensorcast_connector.errors import DeadlineExceeded, ProtocolError, TensorcastError, Unavailable, error_from_code
from tensorcast_connector.net.transport import Network, Stream
from tensorcast_connector.types import Address
from tensorcast_connector.wire.frames import (
    HEADER_BYTES,
    Frame,
    FrameDecoder,
    Header,
    Kind,
    decode_header,
    encode_frame,
)
from tensorcast_connector.wire.messages import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Failure,
    Hello,
    Message,
    Welcome,
    encode,
    failure_decoder,
    reply_decoder,
)

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=Message)


class Session(Protocol):
    """What a service keeps per connection."""

    def handle(self, message: Any) -> Message | Awaitable[Message]:
        """The reply, at once or later. A TensorcastError it raises is the caller's answer."""

    def close(self) -> None:
        """The connection has ended; everything held for it is released. Called exactly once."""


class Service(Protocol):
    """What a server serves."""

    server: str
    server_id: str
    decoder: msgspec.msgpack.Decoder[Any]

    def open_session(self, stream: Stream, hello: Hello) -> Session:
        """A new connection that has said hello."""


def welcome(hello: Hello, server: str, server_id: str) -> Welcome:
    """The version that both sides speak.

    Raises:
        ProtocolError: there is none; names both ranges.
    """
    version = min(hello.version, PROTOCOL_VERSION)
    if version < max(hello.version_min, PROTOCOL_VERSION_MIN):
        raise ProtocolError(
            f"protocol versions {hello.version_min}-{hello.version} of {hello.name!r} and "
            f"{PROTOCOL_VERSION_MIN}-{PROTOCOL_VERSION} of this {server} do not overlap; upgrade the older side"
        )
    return Welcome(version, server, server_id)


async def receive_frame(stream: Stream) -> tuple[Header, Frame]:
    """Exactly one frame; its payload, if any, is still to be read.

    Raises:
        ProtocolError: not a frame.
        Unavailable: the peer left.
    """
    head = bytearray(HEADER_BYTES)
    await stream.receive_into(memoryview(head))
    header = decode_header(head)
    body = bytearray(header.body_bytes)
    await stream.receive_into(memoryview(body))
    return header, Frame(header.kind, header.request_id, bytes(body), header.timeout_ms)


async def accept(stream: Stream, server: str, server_id: str) -> Hello:
    """The server's side of the hello.

    Raises:
        ProtocolError: garbage, silence, or no common version; the peer has been told.
        Unavailable: the peer left.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            header, frame = await receive_frame(stream)
        if header.kind is not Kind.REQUEST or header.payload_bytes:
            raise ProtocolError("the first message must be Hello")
        hello = msgspec.msgpack.decode(frame.body, type=Hello)
        stream.write(encode_frame(Kind.REPLY, frame.request_id, encode(welcome(hello, server, server_id))))
    except TimeoutError:
        raise ProtocolError(f"no hello within {HELLO_TIMEOUT_S:g} s") from None
    except (msgspec.DecodeError, ProtocolError) as error:
        why = ProtocolError(
            f"the first message must be Hello: {error}" if isinstance(error, msgspec.DecodeError) else str(error)
        )
        stream.write(encode_frame(Kind.ERROR, 0, encode(Failure(why.code, str(why)))))
        raise why from None
    return hello


class Connection:
    """The server's end of one connection after its hello."""

    def __init__(self, stream: Stream, service: Service, session: Session) -> None:
        self._stream = stream
        self._service = service
        self._session = session
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Until the peer leaves or breaks the protocol."""
        decoder = FrameDecoder()
        try:
            while data := await self._stream.receive():
                for frame in decoder.feed(data):
                    self._dispatch(frame)
            decoder.feed_eof()
        except ProtocolError as error:
            self._stream.write(encode_frame(Kind.ERROR, 0, encode(Failure(error.code, str(error)))))
            raise
        finally:
            for task in self._tasks.values():
                task.cancel()
            self._session.close()

    def _dispatch(self, frame: Frame) -> None:
        if frame.kind is Kind.CANCEL:
            if task := self._tasks.get(frame.request_id):
                task.cancel()
            return
        if frame.kind is not Kind.REQUEST:
            raise ProtocolError(f"a client sends requests and cancels, not {frame.kind.name}")
        try:
            message = self._service.decoder.decode(frame.body)
        except msgspec.DecodeError as error:
            self._fail(frame.request_id, ProtocolError(f"message not understood: {error}"))
            return
        if len(self._tasks) >= REQUESTS_IN_FLIGHT_MAX:
            self._stream.write(
                encode_frame(Kind.ERROR, frame.request_id, encode(Failure("exhausted", "too many requests in flight")))
            )
            return
        try:
            result = self._session.handle(message)
        except TensorcastError as error:
            self._fail(frame.request_id, error)
            return
        if inspect.isawaitable(result):
            self._spawn(frame, result)
        else:
            self._reply(frame.request_id, result)

    def _spawn(self, frame: Frame, result: Awaitable[Message]) -> None:
        task = asyncio.get_running_loop().create_task(self._finish(frame, result))
        self._tasks[frame.request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(frame.request_id, None))

    async def _finish(self, frame: Frame, result: Awaitable[Message]) -> None:
        try:
            async with asyncio.timeout(frame.timeout_ms / 1000 if frame.timeout_ms else None):
                reply = await result
        except TimeoutError:
            self._fail(frame.request_id, DeadlineExceeded(f"not done within {frame.timeout_ms} ms"))
        except TensorcastError as error:
            self._fail(frame.request_id, error)
        except Exception as error:
            logger.exception("request failed")
            self._fail(frame.request_id, TensorcastError(f"{type(error).__name__}: {error}"))
        else:
            self._reply(frame.request_id, reply)

    def _reply(self, request_id: int, message: Message) -> None:
        self._stream.write(encode_frame(Kind.REPLY, request_id, encode(message)))

    def _fail(self, request_id: int, error: TensorcastError) -> None:
        self._stream.write(encode_frame(Kind.ERROR, request_id, encode(Failure(error.code, str(error)))))


async def serve_stream(stream: Stream, service: Service) -> None:
    """Serves one connection until it ends; an OnStream once the service is bound."""
    hello = await accept(stream, service.server, service.server_id)
    await Connection(stream, service, service.open_session(stream, hello)).serve()


def result_of(frame: Frame, expected: type[R]) -> R:
    """The reply in `frame`.

    Raises:
        TensorcastError: the error that the other side answered with.
        ProtocolError: the reply is not an `expected`.
    """
    try:
        if frame.kind is Kind.ERROR:
            failure = failure_decoder.decode(frame.body)
            raise error_from_code(failure.code, failure.message)
        reply = reply_decoder.decode(frame.body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"reply not understood: {error}") from error
    if not isinstance(reply, expected):
        raise ProtocolError(f"expected {expected.__name__}, got {type(reply).__name__}")
    return reply


class RpcClient:
    """A connection that keeps itself alive. `start` it once; calls while it is down fail at once with Unavailable."""

    def __init__(
        self,
        network: Network,
        address: Address,
        role: str,
        name: str,
        chance: random.Random,
        on_connected: Callable[["RpcClient"], Awaitable[None]] | None = None,
        on_disconnected: Callable[[TensorcastError], None] | None = None,
    ) -> None:
        self._network = network
        self._hello = Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION, role, name)
        self._chance = chance
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected
        self._stream: Stream | None = None
        self._pending: dict[int, asyncio.Future[Frame]] = {}
        self._next_id = 1
        self._task: asyncio.Task[None] | None = None
        self._error: TensorcastError = Unavailable(f"not yet connected to {address}")
        self._changed = asyncio.Event()
        self.address = address
        self.server_id = ""
        self.connected = False

    def __repr__(self) -> str:
        return f"<RpcClient {self.address} {'connected' if self.connected else 'down'}, {len(self._pending)} pending>"

    def start(self) -> None:
        """Connects, and reconnects for ever, in the background."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def wait_connected(self, timeout_s: float) -> None:
        """Until connected.

        Raises:
            TensorcastError: not within `timeout_s`; the last reason.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self.connected:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self._error from None

    async def close(self) -> None:
        """Ends the connection; pending calls fail with Unavailable."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def call(self, message: Message, expected: type[R], timeout_s: float) -> R:
        """Sends `message` and waits for its reply.

        Raises:
            Unavailable: not connected, or the connection broke before the reply.
            DeadlineExceeded: no reply within `timeout_s`; the request was cancelled.
            TensorcastError: what the other side answered.
        """
        stream = self._stream
        if stream is None:
            raise Unavailable(str(self._error))
        request_id = self._next_id
        self._next_id += 1
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = future
        stream.write(encode_frame(Kind.REQUEST, request_id, encode(message), max(1, int(timeout_s * 1000))))
        try:
            # The other side gives up first, so that its reason arrives; this is for when it is silent.
            async with asyncio.timeout(timeout_s * 1.25):
                frame = await future
        except TimeoutError:
            stream.write(encode_frame(Kind.CANCEL, request_id, b""))
            raise DeadlineExceeded(f"{self.address} did not answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            stream.write(encode_frame(Kind.CANCEL, request_id, b""))
            raise
        finally:
            self._pending.pop(request_id, None)
        return result_of(frame, expected)

    async def _run(self) -> None:
        delay_s = RECONNECT_DELAY_MIN_S
        try:
            while True:
                try:
                    async with asyncio.TaskGroup() as group:
                        stream = await self._network.dial(self.address, CONNECT_TIMEOUT_S)
                        try:
                            reading = group.create_task(self._read(stream))
                            await self._greet(stream)
                            delay_s = RECONNECT_DELAY_MIN_S
                            await asyncio.wait([reading])
                        finally:
                            stream.close()
                except* TensorcastError as errors:
                    self._down(errors.exceptions[0])
                await asyncio.sleep(delay_s * self._chance.uniform(0.5, 1.0))
                delay_s = min(delay_s * 2, RECONNECT_DELAY_MAX_S)
        finally:
            self._down(Unavailable(f"the client of {self.address} was closed"))

    async def _greet(self, stream: Stream) -> None:
        self._stream = stream
        greeting = await self.call(self._hello, Welcome, HELLO_TIMEOUT_S)
        self.server_id = greeting.server_id
        if self._on_connected is not None:
            await self._on_connected(self)
        self.connected = True
        self._changed.set()

    async def _read(self, stream: Stream) -> None:
        decoder = FrameDecoder()
        while data := await stream.receive():
            for frame in decoder.feed(data):
                if frame.request_id == 0 and frame.kind is Kind.ERROR:
                    result_of(frame, Message)
                future = self._pending.get(frame.request_id)
                if future is not None and not future.done():
                    future.set_result(frame)
        raise Unavailable(f"{self.address} closed the connection")

    def _down(self, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, TensorcastError)
        was_connected, self.connected, self._stream, self._error = self.connected, False, None, error
        for future in self._pending.values():
            if not future.done():
                future.set_exception(Unavailable(str(error)))
        self._pending.clear()
        self._changed.set()
        if was_connected and self._on_disconnected is not None:
            self._on_disconnected(error)
