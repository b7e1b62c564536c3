"""Requests and replies over a Stream, the server's side: hello, deadlines, cancellation, limits.

A server answers requests of one connection concurrently and in any order. A client (rpc_client.py) that gives up sends
CANCEL, and a connection that ends cancels all it had asked for.
"""

import asyncio
import inspect
import logging
from collections import OrderedDict
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

import msgspec

from tensorcast_connector.config import (
    ANSWERS_UNREAD_BYTES_MAX,
    ANSWERS_UNREAD_MAX_S,
    HELLO_BYTES_MAX,
    HELLO_TIMEOUT_S,
    REQUESTS_IN_FLIGHT_MAX,
    REQUESTS_WAITING_BYTES_MAX,
)
from tensorcast_connector.errors import (
    DeadlineExceeded,
    ProtocolError,
    TensorcastError,
    Unauthorized,
    Unavailable,
    error_from_code,
)
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.net.turns import Share, turns
from tensorcast_connector.wire.codec import (
    decode,
    encode,
    failure_decoder,
    hello_decoder,
    reply_decoder,
)
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
    BULK_ROLE,
    CALLER_ROLE,
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Failure,
    Hello,
    Message,
    Ok,
    Ping,
    Welcome,
)

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=Message)
Told = TypeVar("Told", bound=TensorcastError)
STORE = "store"
PING = encode(Ping())
TENANT_ROLES = (CALLER_ROLE, BULK_ROLE)  # what a tenant's token is for


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


def check_principal(stream: Stream, hello: Hello, server: str) -> None:
    """Raises Unauthorized for a hello that the token shown on this connection does not allow (see net/access.py)."""
    if stream.tenant is None:
        return
    if server == STORE or hello.role not in TENANT_ROLES or hello.tenant != stream.tenant:
        raise Unauthorized(f"the token of tenant {stream.tenant!r} does not allow a {hello.role[:32]!r} at a {server}")


async def accept(stream: Stream, server: str, server_id: str) -> Hello:
    """The server's side of the hello.

    Raises:
        ProtocolError: garbage, silence, or no common version; the peer has been told.
        Unauthorized: what it wants is not what its token is for; it has been told.
        Unavailable: the peer left without a word.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            frame = await _first_frame(stream)
        if frame.kind is not Kind.REQUEST:
            raise ProtocolError(f"the first message must be Hello, not a {frame.kind.name}")
        hello = decode(hello_decoder, frame.body, "the first message must be Hello;")
        check_principal(stream, hello, server)
        stream.write(encode_frame(Kind.REPLY, frame.request_id, encode(welcome(hello, server, server_id))))
    except TimeoutError:
        raise ProtocolError(f"no hello within {HELLO_TIMEOUT_S:g} s") from None
    except (ProtocolError, Unauthorized) as error:
        raise _told(stream, error) from None
    return hello


async def _first_frame(stream: Stream) -> Frame:
    decoder = FrameDecoder(HELLO_BYTES_MAX)
    arrived = False
    while data := await stream.receive():
        arrived = True
        if frames := decoder.feed(data):
            if len(frames) > 1 or not decoder.empty:
                raise ProtocolError("a caller sends nothing more until its hello is answered")
            return frames[0]
    if arrived:
        decoder.feed_eof()
    raise Unavailable(f"{stream.peer} left without a word")


def _told(stream: Stream, error: Told) -> Told:
    """`error`, after the peer was told; request id 0 speaks of the whole connection."""
    stream.write(encode_frame(Kind.ERROR, 0, encode(Failure(error.code, str(error)))))
    return error


class Connection:
    """The server's end of one connection after its hello.

    Args:
        kept: not ended when the peer does not read, because it may be writing into memory that it would lose with it.
    """

    def __init__(self, stream: Stream, service: Service, session: Session, kept: bool = False) -> None:
        self._stream = stream
        self._service = service
        self._session = session
        self._kept = kept
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._decoder = FrameDecoder()
        self._waiting: OrderedDict[int, Frame] = (
            OrderedDict()
        )  # requests that are not begun, in the order of their coming
        self._waiting_bytes = 0
        self._turns = turns()
        self._driver: asyncio.Task[None] | None = None  # serves what waits, when it can
        self._room = asyncio.Event()  # a request has ended
        self._written_bytes = 0

    async def serve(self) -> None:
        """Until the peer leaves or breaks the protocol.

        Raises:
            Unavailable: it left in the middle of something, or does not read its answers.
            ProtocolError: it broke the protocol; it has been told.
        """
        try:
            await self._stream.deliver(self._take)
            self._decoder.feed_eof()
        except ProtocolError as error:
            raise _told(self._stream, error) from None
        finally:
            tasks = [*self._tasks.values(), *([self._driver] if self._driver is not None else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._session.close()

    # --- what is served when ---

    def _take(self, data: memoryview) -> bool:
        """Serves what arrived, as far as its share goes."""
        try:
            for frame in self._decoder.feed(data):
                self._arrived(frame)
        finally:  # what came before nonsense is answered
            self._serve()
        return True

    def _arrived(self, frame: Frame) -> None:
        """What must not wait is done; requests wait."""
        number = frame.request_id
        if frame.kind is Kind.CANCEL:
            if number in self._waiting:
                self._waiting_bytes -= len(self._waiting.pop(number).body)
            elif task := self._tasks.get(number):
                task.cancel()
        elif frame.kind is not Kind.REQUEST:
            raise ProtocolError(f"a client sends requests and cancels, not {frame.kind.name}")
        elif number in self._tasks or number in self._waiting:
            raise ProtocolError(f"request id {number} is in use")
        elif frame.body == PING:
            self._answer(number, Ok())
        else:
            self._waiting[number] = frame
            self._waiting_bytes += len(frame.body)

    def _serve(self, share: Share | None = None) -> None:
        """Begins requests that wait, one at least. While others have their turn the rest waits, and then nothing more is read.

        The same while too many are under way, or the peer does not read its answers, so that nothing piles up here.
        """
        while self._waiting and not self._blocked:
            _, frame = self._waiting.popitem(last=False)
            self._waiting_bytes -= len(frame.body)
            self._dispatch(frame)
            if self._waiting:  # seldom
                share = share or self._turns.share()
                if not share.left():
                    break
        if self._waiting or not self._stream.flushed:
            self._drive()

    @property
    def _blocked(self) -> bool:
        return len(self._tasks) >= REQUESTS_IN_FLIGHT_MAX or not self._stream.flushed

    def _drive(self) -> None:
        if self._waiting_bytes > REQUESTS_WAITING_BYTES_MAX or not self._stream.flushed:
            self._stream.pause()
        if self._driver is None:
            self._driver = asyncio.get_running_loop().create_task(self._driven())

    async def _driven(self) -> None:
        """Until nothing waits."""
        try:
            while True:
                if self._stream.flushed and self._waiting_bytes <= REQUESTS_WAITING_BYTES_MAX:
                    self._stream.resume()
                if not self._stream.flushed:
                    await self._drained()
                elif not self._waiting:
                    return
                elif len(self._tasks) >= REQUESTS_IN_FLIGHT_MAX:
                    self._room.clear()
                    await self._room.wait()
                else:
                    self._serve(await self._turns.turn())
        except Unavailable:
            pass  # the connection has ended
        finally:
            self._driver = None

    async def _drained(self) -> None:
        """Until the peer has read its answers.

        Raises:
            Unavailable: it does not.
        """
        while not self._stream.flushed:
            taken = self._written_bytes - self._stream.unsent_bytes
            try:
                async with asyncio.timeout(ANSWERS_UNREAD_MAX_S):
                    await self._stream.drained()
            except TimeoutError:
                if self._written_bytes - self._stream.unsent_bytes <= taken and not self._kept:
                    self._end(f"has read none of its answers for {ANSWERS_UNREAD_MAX_S:g} s")
                    raise Unavailable(f"{self._stream.peer} does not read") from None

    def _end(self, why: str) -> None:
        logger.warning("connection from %s closed: it %s", self._stream.peer, why)
        self._stream.close()

    # --- one request ---

    def _dispatch(self, frame: Frame) -> None:
        try:
            result = self._session.handle(decode(self._service.decoder, frame.body))
        except Exception as error:
            self._answer(frame.request_id, _as_failure(error))
            return
        if isinstance(result, Message):
            self._answer(frame.request_id, result)
        else:
            self._spawn(frame, result)

    def _spawn(self, frame: Frame, result: Awaitable[Message]) -> None:
        def ended(_: asyncio.Task[None]) -> None:
            del self._tasks[frame.request_id]
            self._room.set()
            if inspect.iscoroutine(result):
                result.close()  # cancelled before its first step; otherwise this does nothing

        task = asyncio.get_running_loop().create_task(self._finish(frame, result))
        self._tasks[frame.request_id] = task
        task.add_done_callback(ended)

    async def _finish(self, frame: Frame, result: Awaitable[Message]) -> None:
        reply: Message
        try:
            async with asyncio.timeout(frame.timeout_ms / 1000 if frame.timeout_ms else None) as deadline:
                reply = await result
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                error = DeadlineExceeded(f"not done within {frame.timeout_ms} ms")
            reply = _as_failure(error)
        self._answer(frame.request_id, reply)

    def _answer(self, request_id: int, reply: Message) -> None:
        kind = Kind.ERROR if isinstance(reply, Failure) else Kind.REPLY
        try:
            data = encode_frame(kind, request_id, encode(reply))
        except Exception as error:  # larger than a frame, or not encodable
            data = encode_frame(Kind.ERROR, request_id, encode(_as_failure(error)))
        self._stream.write(data)
        self._written_bytes += len(data)
        if not self._stream.flushed:
            if self._stream.unsent_bytes > ANSWERS_UNREAD_BYTES_MAX and not self._kept:
                self._end(f"does not read its answers, and {self._stream.unsent_bytes} bytes of them wait")
            else:
                self._drive()


def _as_failure(error: Exception) -> Failure:
    """What the caller is told. An error that is neither ours nor the caller's is a bug, and logged."""
    if isinstance(error, TensorcastError):
        return Failure(error.code, str(error))
    logger.error("request failed", exc_info=error)
    return Failure(TensorcastError.code, f"{type(error).__name__}: {error}")


async def serve_stream(stream: Stream, service: Service) -> None:
    """Serves one connection until it ends; an OnStream once the service is bound."""
    hello = await accept(stream, service.server, service.server_id)
    await Connection(stream, service, open_session(stream, service, hello)).serve()


def open_session(stream: Stream, service: Service, hello: Hello) -> Session:
    """The session of a connection that has said hello; one that is refused is told why."""
    try:
        return service.open_session(stream, hello)
    except TensorcastError as error:
        stream.write(encode_frame(Kind.ERROR, 0, encode(Failure(error.code, str(error)))))
        raise


def result_of(frame: Frame, expected: type[R]) -> R:
    """The reply in `frame`.

    Raises:
        TensorcastError: the error that the other side answered with.
        ProtocolError: the reply is not an `expected`.
    """
    if frame.kind is Kind.ERROR:
        failure = decode(failure_decoder, frame.body, "error")
        raise error_from_code(failure.code, failure.message)
    if frame.kind is not Kind.REPLY:
        raise ProtocolError(f"a server sends replies and errors, not {frame.kind.name}")
    reply = decode(reply_decoder, frame.body, "reply")
    if not isinstance(reply, expected):
        raise ProtocolError(f"expected {expected.__name__}, got {type(reply).__name__}")
    return reply
