"""Cancels the work on a request when its client goes away, whatever the work is waiting for at that moment."""

import asyncio
from types import TracebackType
from typing import Self

from smetric_router.server.asgi import Receive


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


class UntilDisconnect:
    """`async with UntilDisconnect(receive): ...` raises ClientGone out of the block when the client goes away.

    Enter it when the request body has been read: from then on the only message that can come is the disconnect.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._over = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._watch = asyncio.create_task(self._wait_disconnect())
        return self

    def over(self) -> None:
        """The answer is complete; the server may now report the end of the connection, and it means nothing."""
        self._over = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._watch.cancel()
        if self._gone and self._task.uncancel() <= self._cancelling and kind is not None:
            raise ClientGone from error

    async def _wait_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._over:
            self._gone = True
            self._task.cancel()
