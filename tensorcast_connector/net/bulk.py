"""Bulk transfer of pages and parts of artifacts: a request frame, a reply frame, then raw bytes straight into the target.

A bulk connection carries one request at a time, so its bytes need no framing of their own; a peer that wants more
parallelism opens more connections.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tensorcast_connector.config import CONNECT_TIMEOUT_S, FETCH_TIMEOUT_S, HELLO_TIMEOUT_S, KEYS_PER_MESSAGE_MAX
from tensorcast_connector.errors import Exhausted, NotFound, ProtocolError, TensorcastError, Unavailable
from tensorcast_connector.net.rpc import receive_frame, result_of
from tensorcast_connector.net.transport import Network, Stream
from tensorcast_connector.types import Address
from tensorcast_connector.wire.codec import (
    decode,
    encode,
)
from tensorcast_connector.wire.frames import Frame, Header, Kind, encode_frame
from tensorcast_connector.wire.messages import (
    BULK_ROLE,
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    BytesFollow,
    Failure,
    Fetch,
    FetchBytes,
    Fetched,
    Hello,
    Message,
    Welcome,
)


@dataclass(frozen=True, slots=True)
class PageBytes:
    """A page that is ready to be sent, its digest, and how old it is."""

    data: memoryview
    digest: int
    age_s: float = 0.0


class PageSource(Protocol):
    """Where a bulk server takes pages from."""

    def hold(self, keys: Sequence[bytes]) -> AbstractAsyncContextManager[list[PageBytes | None]]:
        """The pages, in the order of `keys`, kept in place until the context ends; None = gone."""


class PartSource(Protocol):
    """Where it takes parts of artifacts from. They stay as they are as long as the memoryviews do."""

    def parts(self, hello: Hello, artifact_id: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The parts (offset, length), for who said that hello.

        Raises:
            NotFound: the artifact is not here, or not the caller's.
            ProtocolError: a part that is not within it.
        """


_request_decoder = msgspec.msgpack.Decoder(Fetch | FetchBytes)


async def serve_bulk(stream: Stream, hello: Hello, pages: PageSource, artifacts: PartSource) -> None:
    """Serves one bulk connection after its hello until the peer leaves.

    Raises:
        Unavailable: the peer left, or did not read.
        ProtocolError: it did not speak the protocol.
    """
    while True:
        header, frame = await receive_frame(stream)
        try:
            if frame.kind is not Kind.REQUEST or header.payload_bytes:
                raise ProtocolError(f"a bulk connection takes requests only, not {frame.kind.name}")
            request = decode(_request_decoder, frame.body)
            count = len(request.keys) if isinstance(request, Fetch) else len(request.ranges)
            if count > KEYS_PER_MESSAGE_MAX:
                raise Exhausted(f"{count} parts in one request; the limit is {KEYS_PER_MESSAGE_MAX}")
            if isinstance(request, Fetch) and hello.tenant:
                raise ProtocolError("a caller does not read pages")
        except TensorcastError as error:
            await _send_failure(stream, frame, error)
            raise
        try:
            # A peer that does not read must not keep pages in place for ever.
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                if isinstance(request, Fetch):
                    async with pages.hold(request.keys) as held:
                        await _send_pages(stream, frame.request_id, held)
                else:
                    await _send_parts(stream, frame, hello, request, artifacts)
        except TimeoutError as error:
            raise Unavailable(f"{stream.peer} did not take its pages within {FETCH_TIMEOUT_S:g} s") from error


async def _send_failure(stream: Stream, frame: Frame, error: TensorcastError) -> None:
    await stream.send(encode_frame(Kind.ERROR, frame.request_id, encode(Failure(error.code, str(error)))))


async def _send_parts(
    stream: Stream, frame: Frame, hello: Hello, request: FetchBytes, artifacts: PartSource
) -> None:  # fmt: skip
    try:
        parts = artifacts.parts(hello, request.artifact_id, request.ranges)
    except TensorcastError as error:
        await _send_failure(stream, frame, error)
        return
    total = sum(part.nbytes for part in parts)
    stream.write(encode_frame(Kind.REPLY, frame.request_id, encode(BytesFollow()), payload_bytes=total))
    for part in parts:
        await stream.send(part)


async def _send_pages(stream: Stream, request_id: int, pages: Sequence[PageBytes | None]) -> None:
    present = [page for page in pages if page is not None]
    ages_s = [page.age_s if page else 0.0 for page in pages]
    reply = Fetched([(page.data.nbytes, page.digest) if page else (0, 0) for page in pages], ages_s)
    total = sum(page.data.nbytes for page in present)
    stream.write(encode_frame(Kind.REPLY, request_id, encode(reply), payload_bytes=total))
    try:
        for page in present:
            await stream.send(page.data)
    except BaseException:
        stream.close()  # before the hold ends: from then on the memory may be written again
        raise


class BulkClient:
    """A few bulk connections to one peer, opened when needed and kept."""

    def __init__(
        self, network: Network, address: Address, name: str, connections_max: int, tenant: str = ""
    ) -> None:  # fmt: skip
        self._network = network
        self._hello = Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION, BULK_ROLE, name, tenant)
        self._idle: list[Stream] = []
        self._streams: set[Stream] = set()
        self._slots = asyncio.Semaphore(connections_max)
        self._closed = False
        self.address = address

    def __repr__(self) -> str:
        return f"<BulkClient {self.address} {len(self._idle)} idle>"

    async def fetch(
        self, keys: Sequence[bytes], target: Callable[[int, int], memoryview], done: Callable[[int, int], None],
        aged: Callable[[int, float], None] = lambda *_: None,
    ) -> None:  # fmt: skip
        """Fetches pages in order, once a connection is free.

        Args:
            keys: the pages.
            target: (index, length) -> the memory to fill, exactly `length` bytes; may raise if that length cannot be.
            aged: (index, seconds) -> how old the page is at most, by the peer's clock and the time that this took.
            done: (index, digest) -> called after that when the page has arrived; pages that are gone are never reported.

        Raises:
            Unavailable: the peer went away, or did not deliver in time; pages reported before are complete.
            ProtocolError: it answered nonsense.
        """

        async def receive(stream: Stream, header: Header, frame: Frame) -> None:
            reply = result_of(frame, Fetched)
            pages = reply.pages
            lengths = [length for length, _ in pages]
            if len(pages) != len(keys) or min(lengths, default=0) < 0 or sum(lengths) != header.payload_bytes:
                raise ProtocolError(
                    f"{self.address} answered {len(pages)} pages and {header.payload_bytes} bytes for {len(keys)} keys"
                )
            for index, (length, digest) in enumerate(pages):
                if length:
                    await stream.receive_into(target(index, length))
                    age_s = reply.ages_s[index] if index < len(reply.ages_s) else 0.0
                    aged(index, (age_s if 0 <= age_s < math.inf else 0.0) + clock() - asked_at)
                    done(index, digest)

        clock = asyncio.get_running_loop().time
        asked_at = clock()
        await self._exchange(Fetch(list(keys)), receive)

    async def fetch_bytes(self, artifact_id: str, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fetches parts of an artifact, each from its offset into the memory beside it.

        Raises:
            NotFound: the peer does not have it.
            Unavailable, ProtocolError: as `fetch`.
        """
        wanted = sum(memory.nbytes for _, memory in parts)

        async def receive(stream: Stream, header: Header, frame: Frame) -> None:
            result_of(frame, BytesFollow)
            if header.payload_bytes != wanted:
                raise ProtocolError(
                    f"{self.address} answered {header.payload_bytes} bytes where {wanted} were asked for"
                )
            for _, memory in parts:
                await stream.receive_into(memory)

        await self._exchange(FetchBytes(artifact_id, [(offset, memory.nbytes) for offset, memory in parts]), receive)

    async def _exchange(
        self, message: Message, receive: Callable[[Stream, Header, Frame], Awaitable[None]]
    ) -> None:  # fmt: skip
        """One request on a free connection; `receive` reads what follows its answer."""
        async with self._slots:
            try:
                async with asyncio.timeout(FETCH_TIMEOUT_S):
                    stream, header, frame = await self._ask(message)
                    try:
                        await receive(stream, header, frame)
                    except NotFound:
                        self._idle.append(stream)  # an answer like any other
                        raise
                    except BaseException:
                        self._drop(stream)
                        raise
            except TimeoutError as error:
                raise Unavailable(f"{self.address} did not deliver within {FETCH_TIMEOUT_S:g} s") from error
            self._idle.append(stream)

    async def _ask(self, message: Message) -> tuple[Stream, Header, Frame]:
        """A connection on which the answer has come, and what follows it is about to."""
        while self._idle:
            try:
                return await self._request(self._idle.pop(), message)
            except Unavailable:
                continue  # the peer closed it while nobody looked
        return await self._request(await self._open(), message)

    async def _request(self, stream: Stream, message: Message) -> tuple[Stream, Header, Frame]:
        try:
            stream.write(encode_frame(Kind.REQUEST, 1, encode(message)))
            header, frame = await receive_frame(stream)
        except BaseException:
            self._drop(stream)
            raise
        return stream, header, frame

    async def _open(self) -> Stream:
        if self._closed:
            raise Unavailable(f"{self.address} has left the cluster")
        stream = await self._network.dial(self.address, CONNECT_TIMEOUT_S)
        self._streams.add(stream)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                stream.write(encode_frame(Kind.REQUEST, 0, encode(self._hello)))
                _, frame = await receive_frame(stream)
                result_of(frame, Welcome)
        except TimeoutError as error:
            self._drop(stream)
            raise Unavailable(f"{self.address} did not answer hello") from error
        except BaseException:
            self._drop(stream)
            raise
        return stream

    def _drop(self, stream: Stream) -> None:
        stream.close()
        self._streams.discard(stream)

    def close(self) -> None:
        """Closes all connections; fetches under way fail with Unavailable."""
        self._closed = True
        for stream in list(self._streams):
            self._drop(stream)
        self._idle.clear()
