"""Bulk transfer of pages between arenas: one request frame, one reply frame, then raw bytes straight into the target.

A bulk connection carries one request at a time, so its bytes need no framing of their own; a peer that wants more
parallelism opens more connections.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tensorcast_connector.config import CONNECT_TIMEOUT_S, FETCH_TIMEOUT_S, HELLO_TIMEOUT_S, KEYS_PER_MESSAGE_MAX
from tensorcast_connector.errors import Exhausted, ProtocolError, TensorcastError, Unavailable
from tensorcast_connector.net.rpc import receive_frame, result_of
from tensorcast_connector.net.transport import Network, Stream
from tensorcast_connector.types import Address
from tensorcast_connector.wire.codec import (
    decode,
    encode,
)
from tensorcast_connector.wire.frames import Kind, encode_frame
from tensorcast_connector.wire.messages import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Failure,
    Fetch,
    Fetched,
    Hello,
    Welcome,
)

BULK_ROLE = "bulk"


@dataclass(frozen=True, slots=True)
class PageBytes:
    """A page that is ready to be sent, and its digest."""

    data: memoryview
    digest: int


class PageSource(Protocol):
    """Where a bulk server takes pages from."""

    def hold(self, keys: Sequence[bytes]) -> AbstractAsyncContextManager[list[PageBytes | None]]:
        """The pages, in the order of `keys`, kept in place until the context ends; None = gone."""


_fetch_decoder = msgspec.msgpack.Decoder(Fetch)


async def serve_bulk(stream: Stream, source: PageSource) -> None:
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
            request = decode(_fetch_decoder, frame.body)
            if len(request.keys) > KEYS_PER_MESSAGE_MAX:
                raise Exhausted(f"{len(request.keys)} keys in one request; the limit is {KEYS_PER_MESSAGE_MAX}")
        except TensorcastError as error:
            await stream.send(encode_frame(Kind.ERROR, frame.request_id, encode(Failure(error.code, str(error)))))
            raise
        try:
            # A peer that does not read must not keep pages in place for ever.
            async with asyncio.timeout(FETCH_TIMEOUT_S), source.hold(request.keys) as pages:
                await _send_pages(stream, frame.request_id, pages)
        except TimeoutError as error:
            raise Unavailable(f"{stream.peer} did not take its pages within {FETCH_TIMEOUT_S:g} s") from error


async def _send_pages(stream: Stream, request_id: int, pages: Sequence[PageBytes | None]) -> None:
    present = [page for page in pages if page is not None]
    reply = Fetched([(page.data.nbytes, page.digest) if page else (0, 0) for page in pages])
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

    def __init__(self, network: Network, address: Address, name: str, connections_max: int) -> None:
        self._network = network
        self._hello = Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION, BULK_ROLE, name)
        self._idle: list[Stream] = []
        self._streams: set[Stream] = set()
        self._slots = asyncio.Semaphore(connections_max)
        self._closed = False
        self.address = address

    def __repr__(self) -> str:
        return f"<BulkClient {self.address} {len(self._idle)} idle>"

    async def fetch(
        self, keys: Sequence[bytes], target: Callable[[int, int], memoryview], done: Callable[[int, int], None]
    ) -> None:
        """Fetches pages in order, once a connection is free.

        Args:
            keys: the pages.
            target: (index, length) -> the memory to fill, exactly `length` bytes; may raise if that length cannot be.
            done: (index, digest) -> called when the page has arrived; pages that are gone are never reported.

        Raises:
            Unavailable: the peer went away, or did not deliver in time; pages reported before are complete.
            ProtocolError: it answered nonsense.
        """
        async with self._slots:
            try:
                async with asyncio.timeout(FETCH_TIMEOUT_S):
                    stream, pages = await self._ask(keys)
                    try:
                        for index, (length, digest) in enumerate(pages):
                            if length:
                                await stream.receive_into(target(index, length))
                                done(index, digest)
                    except BaseException:
                        self._drop(stream)
                        raise
            except TimeoutError as error:
                raise Unavailable(f"{self.address} did not deliver within {FETCH_TIMEOUT_S:g} s") from error
            self._idle.append(stream)

    async def _ask(self, keys: Sequence[bytes]) -> tuple[Stream, list[tuple[int, int]]]:
        """A connection on which the pages are about to arrive, and what they will be."""
        while self._idle:
            try:
                return await self._request(self._idle.pop(), keys)
            except Unavailable:
                continue  # the peer closed it while nobody looked
        return await self._request(await self._open(), keys)

    async def _request(self, stream: Stream, keys: Sequence[bytes]) -> tuple[Stream, list[tuple[int, int]]]:
        try:
            stream.write(encode_frame(Kind.REQUEST, 1, encode(Fetch(list(keys)))))
            header, frame = await receive_frame(stream)
            pages = result_of(frame, Fetched).pages
            lengths = [length for length, _ in pages]
            if len(pages) != len(keys) or min(lengths, default=0) < 0 or sum(lengths) != header.payload_bytes:
                raise ProtocolError(
                    f"{self.address} answered {len(pages)} pages and {header.payload_bytes} bytes for {len(keys)} keys"
                )
        except BaseException:
            self._drop(stream)
            raise
        return stream, pages

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
