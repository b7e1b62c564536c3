"""The writes that make artifacts of uploads: each goes on when its caller has gone, and is followed until its outcome is known.

Nobody knows whether a write was done that was not answered. A name may point to the artifact then, so its bytes stay until
it cannot be done any more (worker/fence.py), and the store says that it is not there.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from tensorcast_connector.config import COMMIT_FOLLOW_INTERVAL_S
from tensorcast_connector.errors import Conflict, NotFound, TensorcastError
from tensorcast_connector.worker.artifacts import Artifacts
from tensorcast_connector.worker.records import NotWritten, StoreRecords

logger = logging.getLogger(__name__)
_NOT_DONE = (NotWritten, NotFound, Conflict)


class Commits:
    """See the module."""

    def __init__(self, artifacts: Artifacts, records: StoreRecords) -> None:
        self._artifacts = artifacts
        self._records = records
        self._tasks: set[asyncio.Task[Any]] = set()

    async def record(
        self, identity: str, puts: Sequence[tuple[str, bytes, int]], name: tuple[str, str] | None = None
    ) -> int:
        """Records a committed artifact, whose key is the first of `puts`; the revision it was done at.

        Args:
            name: tenant and name, if one is among `puts`.

        Raises:
            TensorcastError: see StoreRecords.write.
        """
        return await asyncio.shield(self._spawn(self._record(identity, puts, name)))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller gets it, if there still is one

    async def _record(
        self, identity: str, puts: Sequence[tuple[str, bytes, int]], name: tuple[str, str] | None
    ) -> int:  # fmt: skip
        view = self._records.view
        life, before = view.incarnation, view.revision
        try:
            listing = self._artifacts.listing(identity)
            if name is None:
                revision = await self._records.write(puts, listing=listing)
            else:
                revision = await self._records.write_name(puts, *name, listing)
        except _NOT_DONE:
            self._artifacts.unrecorded(identity)
            raise
        except Exception:
            self._artifacts.unsure(identity)
            self._spawn(self._follow(identity, puts[0][0]))
            raise
        if view.incarnation == life and revision > before:
            self._artifacts.recorded(identity, life, revision)
        else:  # of which life that revision is, is not known
            self._spawn(self._follow(identity, puts[0][0]))
        return revision

    async def _follow(self, identity: str, key: str) -> None:
        """Reads the artifact's key, after no write can be late any more, until the store has answered."""
        await self._records.settled()
        view = self._records.view
        while True:
            life = view.incarnation
            try:
                found = [each.revision for each in await self._records.read(key) if each.key == key]
            except TensorcastError as error:
                logger.debug("whether artifact %s is recorded: %s", identity, error)
            else:
                here = view.incarnation == life and bool(found)
                if here and (found[0] > view.revision or identity in view.artifact_ids):
                    self._artifacts.recorded(identity, life, found[0])
                    return
                if not found:
                    self._artifacts.unrecorded(identity)
                    return
            await asyncio.sleep(COMMIT_FOLLOW_INTERVAL_S)

    async def close(self) -> None:
        """Follows nothing any more."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
