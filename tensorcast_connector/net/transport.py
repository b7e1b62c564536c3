"""The seam to the network: what RPC and bulk transfer need, and nothing more.

`net/sockets.py` is the real one; `testing/network.py` is a seeded fake that is shipped, so that users can test
against it. Addresses, clocks and chance are arguments everywhere above this line.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

from tensorcast_connector.types import Address

Buffer = bytes | bytearray | memoryview


class Stream(Protocol):
    """An ordered byte stream to one peer. One task reads at a time; any may write, and the bytes of one call stay together."""

    @property
    def peer(self) -> str:
        """Who is on the other side, for messages to people."""

    @property
    def tenant(self) -> str | None:
        """Whom the peer acts for, if it has shown a tenant's token; None: it may do everything that this listener offers."""

    async def receive(self) -> bytes:
        """Some bytes, at least one; b"" once the peer has finished.

        Raises:
            Unavailable: the connection broke.
        """

    async def deliver(self, take: Callable[[memoryview], bool]) -> None:
        """Hands all bytes to `take` the moment they arrive, until the peer has finished.

        For requests and replies, where every turn of the event loop counts. The memory is reused when `take` returns.
        When it returns False it wants no more until nothing that was written is queued any more (`flushed`): then it is
        called with no bytes, and so on. What it raises is raised here.

        Raises:
            Unavailable: the connection broke.
        """

    def pause(self) -> None:
        """Stops reading, for `deliver`; bytes that have been read already may still be handed over."""

    def resume(self) -> None:
        """Reads again."""

    @property
    def flushed(self) -> bool:
        """Whether nothing that was written waits for the peer to read it."""

    @property
    def unsent_bytes(self) -> int:
        """About how many bytes that were written wait for the peer to read them."""

    async def drained(self) -> None:
        """Until `flushed`, or the connection has ended."""

    async def receive_into(self, target: memoryview) -> None:
        """Fills all of `target`, without copies in between where the transport can.

        Raises:
            Unavailable: the connection broke or ended before `target` was full.
        """

    def write(self, data: Buffer) -> None:
        """Queues bytes; never blocks. Writing to a closed stream is ignored: the reader learns of it."""

    async def send(self, data: Buffer) -> None:
        """Writes and waits until the transport no longer needs `data`.

        Raises:
            Unavailable: the connection broke.
        """

    async def send_descriptor(self, descriptor: int) -> None:
        """Passes a file descriptor on one zero byte (Unix sockets only).

        Raises:
            Unavailable: the connection broke, or this transport cannot pass descriptors.
        """

    def close(self) -> None:
        """Ends the stream both ways; pending calls raise Unavailable. Idempotent.

        What is already on its way still arrives; what only waits for a peer that does not read is dropped.
        """


OnStream = Callable[[Stream], Awaitable[None]]
"""Serves one accepted connection; the listener closes the stream when it returns or raises."""


class Listener(Protocol):
    """An open listening socket and the connections it accepted."""

    @property
    def address(self) -> Address:
        """The real address, with the port the kernel chose."""

    async def close(self) -> None:
        """Stops listening, closes all accepted connections and waits for their servers to end."""


class Network(Protocol):
    """Dials and listens."""

    async def dial(self, address: Address, timeout_s: float) -> Stream:
        """A connection to `address`.

        Raises:
            Unavailable: nobody there, not within `timeout_s`, or not allowed.
        """

    async def listen(self, address: Address, on_stream: OnStream) -> Listener:
        """Accepts connections at `address` (port 0 = any) and serves each by a task of its own.

        Raises:
            ConfigError: the address cannot be listened on; says why.
        """
