"""A peer: the same index in a redis-server, through redis-py's asyncio client with hiredis, in the peers' environment.

    python -m benchmarks.programs.redis_peer PORT

A lookup is one MGET, which costs less than a pipeline of GETs; a report is one pipeline of an MSET and a DEL. A page has one
holder at most.
"""
# mypy: disable-error-code="import-untyped, import-not-found"

import asyncio
import sys
from typing import Any

from redis.asyncio import Redis

from benchmarks.programs.measure import Measured, obey


class Client:
    """An Index."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis

    async def find(self, keys: list[bytes]) -> object:
        """See Index."""
        return await self._redis.mget(keys)

    async def found(self, keys: list[bytes]) -> int:
        """See Index."""
        return sum(1 for holder in await self._redis.mget(keys) if holder is not None)

    async def report(self, holder: int, added: list[bytes], removed: list[bytes]) -> None:
        """See Index."""
        pipeline = self._redis.pipeline(transaction=False)
        if removed:
            pipeline.delete(*removed)
        if added:
            pipeline.mset(dict.fromkeys(added, holder))
        await pipeline.execute()


async def measure(port: int) -> None:
    """Until the input ends."""
    async with Redis(host="127.0.0.1", port=port) as redis:
        await redis.ping()
        await obey(Measured(Client(redis)).commands())


def main() -> None:
    """See the module."""
    asyncio.run(measure(int(sys.argv[1])))


if __name__ == "__main__":
    main()
