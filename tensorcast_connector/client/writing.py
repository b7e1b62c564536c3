"""Puts the bytes of an artifact into shared memory, on several threads."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable

import numpy as np

from tensorcast_connector.client.image import Image
from tensorcast_connector.config import PUT_THREADS
from tensorcast_connector.core.artifact import CHUNK_BYTES
from tensorcast_connector.errors import Exhausted
from tensorcast_connector.net.mapping import map_memory


async def write_image(image: Image, descriptor: int) -> bytes:
    """Straight into the gateway's memory; closes the descriptor, and returns the digests.

    Raises:
        Exhausted: there is no memory for it.
        InvalidArgument: as `Image.write`.
    """
    try:
        if image.fresh:
            return b"".join(await _in_threads(lambda chunk: image.store(chunk, descriptor), image.chunks))
        mapped = map_memory(descriptor, image.size)
    except OSError as error:
        raise Exhausted(f"cannot write {image.size} bytes of an artifact: {error.strerror}") from error
    finally:
        os.close(descriptor)
    target = np.frombuffer(mapped.buffer, np.uint8)

    def write(chunk: int) -> bytes:
        return image.write(chunk, target[chunk * CHUNK_BYTES :])

    try:
        return b"".join(await _in_threads(write, image.chunks))
    finally:
        mapped.close()  # the gateway seals it, which needs that nobody can write to it


async def _in_threads(work: Callable[[int], bytes], count: int) -> list[bytes]:
    """`work` of 0 to count - 1, by several threads; when it returns or raises, none of them works any more."""
    results: list[bytes] = [b""] * count
    left = iter(range(count))
    stop = threading.Event()

    def some() -> None:
        try:
            for number in left:
                if stop.is_set():
                    return
                results[number] = work(number)
        except BaseException:
            stop.set()
            raise

    loop = asyncio.get_running_loop()
    working = [loop.run_in_executor(None, some) for _ in range(min(PUT_THREADS, count))]
    threads = asyncio.gather(*working, return_exceptions=True)  # done when all are, also if one of them has failed
    try:
        if failed := [each for each in await asyncio.shield(threads) if each is not None]:
            raise failed[0]
    finally:
        stop.set()
        while not threads.done():  # a thread is not cancelled; what it writes to must be there until it has ended
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([threads])
    return results
