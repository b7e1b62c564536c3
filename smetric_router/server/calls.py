"""The router's own small calls to the engines: health, models, load."""

import asyncio

from smetric_router.config import RouterConfig
from smetric_router.server.http1 import request_bytes
from smetric_router.server.links import Collected, EngineLinks

_ANSWER_BYTES_MAX = 16 << 20


class EngineCalls:
    """See the module."""

    def __init__(self, links: EngineLinks, config: RouterConfig) -> None:
        self._links = links
        self._key = config.engine_api_key.encode()
        self._timeout_s = config.health_timeout_s

    async def get(self, instance: str, path: str) -> tuple[int, bytes]:
        """Status and body, on a connection of its own. Raises UpstreamFailed, OutOfResources, or TimeoutError."""
        headers = [(b"connection", b"close")] + ([(b"authorization", b"Bearer " + self._key)] if self._key else [])
        prefix, host = self._links.address(instance)
        async with asyncio.timeout(self._timeout_s):
            link = await self._links.connect(instance, once=True)
            try:
                answer = Collected(_ANSWER_BYTES_MAX)
                link.begin(answer, request_bytes(b"GET", prefix + path.encode(), host, headers, 0), b"")
                return await answer.done
            finally:
                link.abandon()
