"""A TCP proxy that a test can cut or make silent: the network between a store and one endpoint."""

import asyncio
from types import TracebackType

from tensorcast_connector.types import Address


class Proxy:
    """Use it as `async with Proxy(target) as proxy`; `proxy.address` leads to `target`."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._port = 0
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> Address:
        return Address("tcp", host="127.0.0.1", port=self._port)

    async def restore(self) -> None:
        """Connections are accepted again."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    def silence(self, silent: bool = True) -> None:
        """Connections stay open, and nothing passes."""
        (self._open.clear if silent else self._open.set)()

    async def cut(self) -> None:
        """Connections break, and new ones are refused."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._target.host, self._target.port)
        pair = {writer, back}
        self._writers |= pair
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer), return_exceptions=True)
        self._writers -= pair

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def __aenter__(self) -> "Proxy":
        await self.restore()
        return self

    async def __aexit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.silence(False)
        await self.cut()
        for _ in range(100):
            if not self._writers:
                break
            await asyncio.sleep(0.001)
