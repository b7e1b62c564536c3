"""Clusters over loopback and over the fake network."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.testing.network import FakeNetwork
from tests.cluster import Cluster, quick
from tests.loops import quiet_loop

__all__ = ["quick", "quiet_loop"]


@pytest.fixture(params=["loopback", "fake"])
async def cluster(request: pytest.FixtureRequest, tmp_path: Path, quick: None) -> AsyncIterator[Cluster]:
    """Nothing runs yet; whatever the test starts is checked and stopped at its end."""
    network = SocketNetwork() if request.param == "loopback" else FakeNetwork(random.Random(request.node.name))
    cluster = Cluster(network, tmp_path)
    yield cluster
    await cluster.close()


@pytest.fixture
async def faulty(
    request: pytest.FixtureRequest, tmp_path: Path, quick: None
) -> AsyncIterator[tuple[Cluster, FakeNetwork]]:
    """On the fake network only, for faults."""
    network = FakeNetwork(random.Random(request.node.name))
    cluster = Cluster(network, tmp_path)
    yield cluster, network
    await cluster.close()
