"""A store and workers in this process, for callers that talk to them over real sockets."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tensorcast_connector.net.sockets import SocketNetwork
from tests.client.callers import Pool
from tests.cluster import quick
from tests.loops import quiet_loop

__all__ = ["quick", "quiet_loop"]


@pytest.fixture
async def pool(tmp_path: Path, quick: None) -> AsyncIterator[Pool]:
    """Nothing runs yet; what the test starts is checked and stopped at its end."""
    pool = Pool(SocketNetwork(), tmp_path)
    yield pool
    await pool.close()


@pytest.fixture(params=["unix", "tcp"])
def scheme(request: pytest.FixtureRequest) -> str:
    """How a session reaches its gateway."""
    return str(request.param)
