"""Every backend of the KV port behind one fixture."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tensorcast_connector.store.kv import KvStore
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.testing.clock import SettableClock
from tests.loops import quiet_loop

__all__ = ["quiet_loop"]


class Backend:
    """A store that can be restarted, and its clock."""

    def __init__(self, clock: SettableClock, make: Callable[[], KvStore]) -> None:
        self.clock = clock
        self._make = make
        self.kv = make()

    async def restart(self) -> None:
        await self.kv.close()
        self.kv = self._make()


@pytest.fixture(params=["sqlite"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    """One of each."""
    clock = SettableClock(1000)
    makers: dict[str, Callable[[], KvStore]] = {"sqlite": lambda: SqliteKv(tmp_path / "store" / "store.db", clock)}
    backend = Backend(clock, makers[request.param])
    yield backend
    await backend.kv.close()


@pytest.fixture
def kv(backend: Backend) -> KvStore:
    """For tests that never restart it."""
    return backend.kv


@pytest.fixture
def clock(backend: Backend) -> SettableClock:
    """The clock of that store."""
    return backend.clock
