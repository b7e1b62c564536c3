"""Fetching pages from another worker into this worker's memory."""

import asyncio
import itertools
import logging
from collections.abc import Sequence

from tensorcast_connector.config import FETCH_PAGES_PER_REQUEST
from tensorcast_connector.errors import TensorcastError
from tensorcast_connector.net.bulk import BulkClient
from tensorcast_connector.types import WorkerId
from tensorcast_connector.worker.pages import Pages
from tensorcast_connector.worker.recorder import Record

logger = logging.getLogger(__name__)


class Fetches:
    """See the module. Requests are small, so that the first pages are usable early and two connections share the work."""

    def __init__(self, pages: Pages, record: Record) -> None:
        self._pages = pages
        self._record = record
        self._ids = itertools.count()

    async def fetch(self, keys: Sequence[bytes], source: WorkerId, bulk: BulkClient) -> None:
        """Those of the pages that the other worker has, as far as they come; the log is told what does not."""
        parts = [
            keys[start : start + FETCH_PAGES_PER_REQUEST] for start in range(0, len(keys), FETCH_PAGES_PER_REQUEST)
        ]
        fetches = (self._fetch_part(part, source, bulk) for part in parts)
        results = await asyncio.gather(*fetches, return_exceptions=True)
        gone = 0
        for part, result in zip(parts, results, strict=True):
            if isinstance(result, TensorcastError):
                logger.info("fetching from %s: %s", source, result)
            elif isinstance(result, BaseException):
                raise result
            else:
                gone += len(part) - result
        if gone:
            logger.info("%s was said to hold %d pages that it does not have (of %d asked)", source, gone, len(keys))

    async def _fetch_part(self, keys: Sequence[bytes], source: WorkerId, bulk: BulkClient) -> int:
        """How many of the pages the other side had."""
        owner = f"fetch/{next(self._ids)}"
        memory: memoryview | None = None
        arrived = 0
        became = ["gone"] * len(keys)
        cause = ""
        self._record("fetch", source, keys)

        def target(index: int, length: int) -> memoryview:
            nonlocal memory
            memory = self._pages.receive(owner, keys[index], length)
            # Another way was faster, or there is no room: the bytes are on their way all the same.
            return memoryview(bytearray(length)) if memory is None else memory

        ages_s: dict[int, float] = {}

        def done(index: int, digest: int) -> None:
            nonlocal arrived
            arrived += 1
            became[index] = "not needed"
            if memory is not None:
                whole = self._pages.received(owner, keys[index], memory, digest, ages_s[index])
                became[index] = "arrived" if whole else "wrong bytes"

        try:
            await bulk.fetch(keys, target, done, ages_s.__setitem__)
            return arrived
        except TensorcastError as error:
            cause = f"the rest did not come: {error}"
            raise
        finally:
            self._pages.give_up(owner)
            self._record("fetched", source, keys, became, cause=cause)
