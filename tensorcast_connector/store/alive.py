"""Which store processes serve a database that several can share: each keeps a key there, under a lease of its own.

SQLite needs none of it: its file is locked by the process that has it open.
"""

import asyncio
import contextlib
import logging

from tensorcast_connector.config import HEARTBEAT_INTERVAL_S, MEMBER_TTL_S
from tensorcast_connector.errors import NotFound, TensorcastError
from tensorcast_connector.store.kv import ALIVE, KvStore, Put

logger = logging.getLogger(__name__)


class Presence:
    """One store process, known to be there from `announce` to `close`, and a little longer if it is killed.

    Args:
        who: for people, for example "10.0.0.1:7700 on host-1".
    """

    def __init__(self, kv: KvStore, who: str) -> None:
        self._kv = kv
        self._who = who
        self._lease_id = 0
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Presence of {self._who} by lease {self._lease_id}>"

    async def announce(self) -> None:
        """Before it serves; goes on by itself.

        Raises:
            TensorcastError: the database does not take it.
        """
        await self._announce()
        self._task = asyncio.get_running_loop().create_task(self._stay())

    async def _announce(self) -> None:
        lease_id = await self._kv.lease_grant(MEMBER_TTL_S)
        await self._kv.txn([], [Put(f"{ALIVE}{lease_id}", self._who.encode(), lease_id)])
        self._lease_id = lease_id

    async def _stay(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            try:
                await self._kv.lease_keepalive(self._lease_id)
            except NotFound:  # it was away for long, or the database is another one
                with contextlib.suppress(TensorcastError):
                    await self._announce()
            except TensorcastError as error:
                logger.debug("presence of %s: %s", self._who, error)

    async def close(self) -> None:
        """Nobody waits for it to run out."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(TensorcastError):
            await self._kv.lease_revoke(self._lease_id)
