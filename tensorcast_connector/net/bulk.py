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

from tensorcast_connector.config import CONNECT_TIMEOUT_S, HELLO_TIMEOUT_S, KEYS_PER_MESSAGE_MAX
from tensorcast_connector.errors import Exhausted, ProtocolError, TensorcastError, Unavailable
from tensorcast_connector.net.rpc import receive_frame, result_of
from tensorcast_connector.net.transport import Network, Stream
from tensorcast_connector.types import Address
from tensorcast_connector.wire.frames import Kind, encode_frame
from tensorcast_connector.wire.messages import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Failure,
    Fetch,
    Fetched,
    Hello,
    Welcome,
    encode,
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
        Unavailable: the peer left.
        ProtocolError: it did not speak the protocol.
    """
    while True:
        _, frame = await receive_frame(stream)
        try:
            if frame.kind is not Kind.REQUEST:
                raise ProtocolError(f"a bulk connection takes requests only, not {frame.kind.name}")
            request = _fetch_decoder.decode(frame.body)
            if len(request.keys) > KEYS_PER_MESSAGE_MAX:
                raise Exhausted(f"{len(request.keys)} keys in one request; the limit is {KEYS_PER_MESSAGE_MAX}")
        except (msgspec.DecodeError, TensorcastError) as error:
            await stream.send(encode_frame(Kind.ERROR, frame.request_id, encode(Failure("protocol", str(error)))))
            raise ProtocolError(str(error)) from error
        async with source.hold(request.keys) as pages:
            present = [page for page in pages if page is not None]
            reply = Fetched([(page.data.nbytes, page.digest) if page else (0, 0) for page in pages])
            total = sum(page.data.nbytes for page in present)
            stream.write(encode_frame(Kind.REPLY, frame.request_id, encode(reply), payload_bytes=total))
            for page in present:
                await stream.send(page.data)


class BulkClient:
    """A few bulk connections to one peer, opened when needed and kept."""

    def __init__(self, network: Network, address: Address, name: str, connections_max: int) -> None:
        self._network = network
        self._hello = Hello(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION, BULK_ROLE, name)
        self._idle: list[Stream] = []
        self._slots = asyncio.Semaphore(connections_max)
        self.address = address

    async def fetch(
        self, keys: Sequence[bytes], target: Callable[[int, int], memoryview | None], done: Callable[[int, int], None]
    ) -> None:
        """Fetches pages in order.

        Args:
            keys: the pages.
            target: (index, length) -> the memory to fill, exactly `length` bytes, or None: not wanted (then the
                connection is given up, since the bytes are already on their way).
            done: (index, digest) -> called when the page has arrived; pages that are gone are never reported.

        Raises:
            Unavailable: the peer went away; pages reported before are complete.
            ProtocolError: it answered nonsense.
        """
        async with self._slots:
            stream = self._idle.pop() if self._idle else await self._open()
            healthy = False
            try:
                stream.write(encode_frame(Kind.REQUEST, 1, encode(Fetch(list(keys)))))
                header, frame = await receive_frame(stream)
                pages = result_of(frame, Fetched).pages
                if len(pages) != len(keys) or sum(length for length, _ in pages) != header.payload_bytes:
                    raise ProtocolError(
                        f"{self.address} answered {len(pages)} pages and {header.payload_bytes} bytes for {len(keys)} keys"
                    )
                for index, (length, digest) in enumerate(pages):
                    if not length:
                        continue
                    memory = target(index, length)
                    if memory is None or memory.nbytes != length:
                        raise ProtocolError(
                            f"{self.address} sent a page of {length} bytes where another size was expected"
                        )
                    await stream.receive_into(memory)
                    done(index, digest)
                healthy = True
            finally:
                if healthy:
                    self._idle.append(stream)
                else:
                    stream.close()

    async def _open(self) -> Stream:
        stream = await self._network.dial(self.address, CONNECT_TIMEOUT_S)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                stream.write(encode_frame(Kind.REQUEST, 0, encode(self._hello)))
                _, frame = await receive_frame(stream)
                result_of(frame, Welcome)
        except TimeoutError as error:
            stream.close()
            raise Unavailable(f"{self.address} did not answer hello") from error
        except BaseException:
            stream.close()
            raise
        return stream

    def close(self) -> None:
        """Closes idle connections; one in use closes itself when its fetch fails or ends."""
        for stream in self._idle:
            stream.close()
        self._idle.clear()
