"""Connections for what callers cause, beside those that keep the cluster together: whatever callers do, these stay usable."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from tensorcast_connector.config import LANE_REQUESTS_MAX
from tensorcast_connector.errors import DeadlineExceeded, Unavailable
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.wire.messages import Message

R = TypeVar("R", bound=Message)


class Lane:
    """Requests of one kind on such a connection. Only so many are under way; more wait for their turn.

    Args:
        client: the connection, which lanes can share; started, and closed by who made it.
        main: the connection to the same server that tells whether it is there.
        another: whether to try its next address after Unavailable.
    """

    def __init__(self, client: RpcClient, main: RpcClient, another: bool = False) -> None:
        self._client = client
        self._main = main
        self._another = another
        self._room = asyncio.Semaphore(LANE_REQUESTS_MAX)

    def __repr__(self) -> str:
        return f"<Lane on {self._client!r}>"

    async def call(self, message: Message, expected: type[R], timeout_s: float) -> R:
        """As RpcClient.call; the time is also for the waiting."""
        async with self.turn(timeout_s) as left_s:
            return await self.call_now(message, expected, left_s)

    @asynccontextmanager
    async def turn(self, timeout_s: float) -> AsyncIterator[float]:
        """Until it is this request's turn, which ends with the block; how much time is left.

        Raises:
            DeadlineExceeded: none.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._room.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                f"no answer of {self._client.address} within {timeout_s:g} s: too much is asked of it from here"
            ) from None
        try:
            yield max(until - loop.time(), 0.001)
        finally:
            self._room.release()

    async def call_now(self, message: Message, expected: type[R], timeout_s: float) -> R:
        """As `call`, by who has the turn.

        Raises:
            Unavailable: the main connection says that the server is not there.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        if not self._client.connected:
            if not self._main.connected:
                raise Unavailable(str(self._main.error))
            await self._client.wait_connected(timeout_s)
        try:
            return await self._client.call(message, expected, max(until - loop.time(), 0.001))
        except Unavailable as error:
            if self._another:
                self._client.try_another(error)
            raise


class StepLanes:
    """What a gateway asks of another worker for plans, on one connection: no kind of request waits for another.

    Args:
        client, main: as for a Lane.
    """

    def __init__(self, client: RpcClient, main: RpcClient) -> None:
        self.client = client
        self.steps = Lane(client, main)
        self.cancels = Lane(client, main)
        self.plans = Lane(client, main)
