"""The real networks and the fake one, behind one fixture."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.net.transport import Network
from tensorcast_connector.testing.network import FakeNetwork
from tensorcast_connector.types import Address
from tests.loops import quiet_loop
from tests.net.certificates import make_authorities, of
from tests.net.pair import Pair

try:
    from uvloop import new_event_loop as new_uvloop
except ImportError:
    new_uvloop = None

__all__ = ["quiet_loop"]


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Any]:
    """The stream tests also run under uvloop where it is installed, as the streams do."""
    loops: dict[str, Any] = {"asyncio": asyncio.SelectorEventLoop}
    if new_uvloop is not None and item.path.name in (
        "test_sockets.py",
        "test_descriptors.py",
        "test_deliver.py",
        "test_access.py",
        "test_tls_mistakes.py",
    ):
        loops["uvloop"] = new_uvloop
    return loops


@dataclass(frozen=True)
class Place:
    """A network and an address on it where a test may listen."""

    network: Network
    address: Address


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See make_authorities."""
    folder = tmp_path_factory.mktemp("tls")
    make_authorities(folder)
    return folder


@pytest.fixture(params=["tcp", "tls", "unix", "fake"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """One of each."""
    if request.param == "fake":
        return Place(FakeNetwork(random.Random(request.node.name)), Address("tcp", host="here", port=0))
    if request.param == "tls":
        return Place(of(request.getfixturevalue("authority"), "a"), Address("tcp", host="127.0.0.1", port=0))
    if request.param == "unix":
        return Place(SocketNetwork(), Address("unix", path=str(tmp_path / "sock")))
    return Place(SocketNetwork(), Address("tcp", host="127.0.0.1", port=0))


@pytest.fixture
async def pair(place: Place) -> AsyncIterator[Pair]:
    """Listens; in the end everything is closed as it should be."""
    pair = Pair(place.network, place.address)
    await pair.listen()
    yield pair
    for client in pair.clients:
        await client.close()
    await pair.stop()
    assert pair.service.closed == pair.service.sessions, "a session was not closed exactly once"
    assert not pair.service.running_at_close, "a session was closed while one of its requests still ran"
