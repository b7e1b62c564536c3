"""What clients may take: the limits of one connection, and the bytes that all of them have the router hold."""

import asyncio
from dataclasses import dataclass
from typing import cast

from smetric_router.errors import OutOfResources


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may take. Times in seconds, sizes in bytes."""

    head_bytes_max: int
    body_bytes_max: int
    request_timeout_s: float
    """A request that has begun and of which nothing more has come for so long is given up."""
    keepalive_s: float
    """A connection without any request is closed after so long."""
    stall_s: float = 300.0
    """A client that takes nothing of its answer for so long is given up."""
    early_bytes_max: int = 1_048_576
    """Of requests sent before their turn so much is kept."""


class HeldBytes:
    """Of all requests: received in part, waiting, or sent on and not answered yet.

    Args:
        bytes_max: more are not taken.
    """

    __slots__ = ("bytes_max", "count")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.count = 0

    def __repr__(self) -> str:
        return f"<HeldBytes {self.count} of {self.bytes_max}>"

    def check(self, more: int = 0) -> None:
        """Raises OutOfResources if there is no room for what is held and `more`."""
        if self.count + more > self.bytes_max:
            raise OutOfResources(
                f"the router holds requests of {self.count} bytes already; the limit is {self.bytes_max}",
                retry_after_s=1,
            )


class Unwelcome(asyncio.Protocol):
    """A connection that is closed as it comes, since there are too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: it is open."""
        cast(asyncio.Transport, transport).abort()
