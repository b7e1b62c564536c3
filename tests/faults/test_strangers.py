"""Ports of real programs are filled by strangers who say hello and then nothing: those who work get in all the same."""

import asyncio
import resource
import shutil
from collections.abc import Callable, Iterator

import pytest
from demo import pool
from demo.processes import Supervisor

from tensorcast_connector.config import CONNECTIONS_MAX, parse_address
from tests.faults.host import Host, fresh
from tests.strangers import Strangers
from tests.waiting import until_blocking

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
MORE = CONNECTIONS_MAX + 50


@pytest.fixture
def strangers() -> Iterator[Strangers]:
    """This process may open as many files as it takes."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(3 * MORE, before[1])), before[1]))
    made = Strangers()
    yield made
    made.leave()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_cluster_goes_on_and_grows(
    supervisor: Supervisor, host: Callable[[str, str], Host], strangers: Strangers
) -> None:
    store = pool.store(supervisor)
    # As most systems start programs: with fewer open files than a port has places.
    few = ["prlimit", "--nofile=1024:8192"] if shutil.which("prlimit") else []
    a = Host(pool.worker(supervisor, store["store"], "a", arena="64MiB", prefix=few))
    pages = fresh()
    a.save(pages)
    for address in (store["store"], a.worker["peer"]):
        asyncio.run(strangers.come(parse_address(address, "address"), MORE))
    b = host(store["store"], "b")
    until_blocking(lambda: b.joins == 1, 30.0)
    b.finds(pages, 60.0)
    b.loads(pages)
    assert a.joins == 1 and a.statistics()["store_connected"], "who works was not sent away for strangers"
    assert "out of system resource" not in a.worker.running.log.read_text()
    a.close()
