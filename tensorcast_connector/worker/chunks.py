"""Fetches the chunks of an artifact from several workers at once, and checks each."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import xxhash

from tensorcast_connector.config import ARTIFACT_SOURCES_MAX
from tensorcast_connector.core.artifact import CHUNK_BYTES, CHUNK_DIGEST_BYTES, Header, chunk_count
from tensorcast_connector.errors import NotFound, ProtocolError, TensorcastError
from tensorcast_connector.types import ByteRange, WorkerId
from tensorcast_connector.wire.store_messages import ReplicaRecord


class Elsewhere(Protocol):
    """The other workers, as far as artifacts go (worker/peers.py)."""

    def add(self, record: ReplicaRecord) -> None:
        """Lists a copy that is here."""

    def remove(self, record: ReplicaRecord) -> None:
        """It is not any more."""

    async def header(self, artifact: str, source: WorkerId) -> bytes:
        """The encoded header, from a worker that has a copy."""

    async def fetch_bytes(
        self, artifact: str, source: WorkerId, ranges: Sequence[ByteRange], into: Sequence[memoryview]
    ) -> None:
        """Parts of an artifact, straight into memory."""


Fetch = Callable[[WorkerId, Sequence[ByteRange], Sequence[memoryview]], Awaitable[None]]


async def fetch_chunks(
    header: Header, memory: memoryview, sources: Callable[[], list[WorkerId]], fetch: Fetch, arrived: Callable[[int], None]
) -> None:  # fmt: skip
    """All chunks; what one worker does not deliver another is asked for.

    Args:
        sources: who has a copy just now, the best first.
        arrived: told the bytes of each chunk that is here and right.

    Raises:
        NotFound: nobody is left to ask; says what the last ones answered.
    """
    left = list(range(chunk_count(header.size)))[::-1]
    failures: list[str] = []
    failed: set[WorkerId] = set()

    async def take(source: WorkerId) -> None:
        while left:
            chunk = left.pop()
            part = memory[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
            try:
                await fetch(source, [ByteRange(chunk * CHUNK_BYTES, part.nbytes)], [part])
                check_chunk(header, chunk, part)
                arrived(part.nbytes)
            except TensorcastError as error:
                left.append(chunk)
                failures.append(f"{source}: {error}")
                failed.add(source)
                return
            except BaseException:
                left.append(chunk)
                raise
            finally:
                part.release()

    while left:  # what a source left over that was slow to fail, those that were done before it are asked for again
        asked = [each for each in sources() if each not in failed][:ARTIFACT_SOURCES_MAX]
        if not asked:
            raise NotFound("; ".join(failures[-3:]) or "nobody is listed")
        tasks = [asyncio.get_running_loop().create_task(take(each)) for each in asked for _ in range(2)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def check_chunk(header: Header, chunk: int, data: memoryview) -> None:
    """Raises ProtocolError unless these are the bytes of that chunk."""
    at = chunk * CHUNK_DIGEST_BYTES
    if xxhash.xxh3_128_digest(data) != header.chunks[at : at + CHUNK_DIGEST_BYTES]:
        raise ProtocolError(f"chunk {chunk} arrived with wrong bytes")
