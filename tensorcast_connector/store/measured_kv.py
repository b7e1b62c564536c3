"""How long the database takes and whether it answers: a KvStore around another one."""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tensorcast_connector.errors import TensorcastError, Unavailable
from tensorcast_connector.net.histogram import Histogram
from tensorcast_connector.store.kv import Compare, Delete, Event, KeyValue, KvStore, Put, TxnResult

logger = logging.getLogger(__name__)
T = TypeVar("T")
OPERATIONS = ("revision", "range", "page", "changes", "txn", "lease_grant", "lease_keepalive", "lease_revoke")


class MeasuredKv:
    """A KvStore that tells how long another one takes, and whether it answers; once in the log when that changes.

    Args:
        clock: seconds, for differences only.
    """

    def __init__(self, kv: KvStore, clock: Callable[[], float]) -> None:
        self._kv = kv
        self._clock = clock
        self.seconds = {operation: Histogram() for operation in OPERATIONS}
        self.errors: Counter[str] = Counter()
        self.error: Unavailable | None = None  # why the database could not be asked last; None: it was

    async def _measured(self, operation: str, work: Awaitable[T]) -> T:
        started_at = self._clock()
        try:
            result = await work
        except Unavailable as error:
            self.errors[operation] += 1
            self._tell(error)
            raise
        except TensorcastError:  # that is an answer
            self._tell(None)
            raise
        finally:
            self.seconds[operation].observe(self._clock() - started_at)
        self._tell(None)
        return result

    def _tell(self, error: Unavailable | None) -> None:
        if error is not None and self.error is None:
            fields = {"event": "backend-lost", "error": str(error)}
            logger.warning("the database does not answer: %s", error, extra=fields)
        elif error is None and self.error is not None:
            logger.info("the database answers again", extra={"event": "backend-back"})
        self.error = error

    async def revision(self) -> int:
        """See KvStore."""
        return await self._measured("revision", self._kv.revision())

    async def range(self, prefix: str) -> tuple[int, list[KeyValue]]:
        """See KvStore."""
        return await self._measured("range", self._kv.range(prefix))

    async def page(self, prefix: str, after_key: str, bytes_max: int) -> tuple[int, list[KeyValue], bool]:
        """See KvStore."""
        return await self._measured("page", self._kv.page(prefix, after_key, bytes_max))

    async def changes(self, prefix: str, after_revision: int) -> tuple[int, list[Event]]:
        """See KvStore."""
        return await self._measured("changes", self._kv.changes(prefix, after_revision))

    async def wait(self, after_revision: int, timeout_s: float, prefix: str = "") -> None:
        """See KvStore. Not measured: waiting is what it is for."""
        await self._kv.wait(after_revision, timeout_s, prefix)

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        """See KvStore."""
        return await self._measured("txn", self._kv.txn(compares, operations))

    async def lease_grant(self, ttl_s: int) -> int:
        """See KvStore."""
        return await self._measured("lease_grant", self._kv.lease_grant(ttl_s))

    async def lease_keepalive(self, lease_id: int) -> None:
        """See KvStore."""
        await self._measured("lease_keepalive", self._kv.lease_keepalive(lease_id))

    async def lease_revoke(self, lease_id: int) -> None:
        """See KvStore."""
        await self._measured("lease_revoke", self._kv.lease_revoke(lease_id))

    async def close(self) -> None:
        """See KvStore."""
        await self._kv.close()
