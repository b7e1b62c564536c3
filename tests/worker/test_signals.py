"""A worker's signals: from raw counts without time, from the kernel's files, and as a running worker answers them."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tensorcast_connector.config import CONNECTIONS_MAX, REQUESTS_IN_FLIGHT_MAX
from tensorcast_connector.core.usage import Usage
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.types import WorkerId
from tensorcast_connector.wire.messages import GetSignals, Signals
from tensorcast_connector.worker import signals
from tensorcast_connector.worker.probe import Link, Requests, Sample
from tensorcast_connector.worker.signals import Sampler, find_interface, interface_of, read_link, signals_of
from tests.cluster import Cluster, T, hashes
from tests.waiting import until

ME = WorkerId("a/1")
IDLE = Sample(
    at_s=10.0, as_of_unix_s=1e9, usage=Usage(3, 1, 2, 2000, 500, 4000, 7), memory_available_bytes=123,
    link=Link("eth0", 1_000_000, 1000, 5000), fetched_bytes=100, sent_bytes=200, requests_in_flight=0,
    requests_of_busiest=0, sends_in_flight=0, fetches_waiting=0, engines=1, shards=(4, 9),
)  # fmt: skip


def measured(before: Sample | None = IDLE, **changes: Any) -> Signals:
    """The signals two seconds later."""
    return signals_of(ME, ("basic",), before, replace(IDLE, at_s=12.0, **changes))


def test_what_is_said_of_a_sample() -> None:
    found = measured(None)
    assert (found.worker_id, found.roles, found.shards) == (ME, ["basic"], [4, 9])
    assert (found.as_of_unix_s, found.age_s, found.disk) == (1e9, 0.0, None)
    assert found.memory == 500 / 4000
    assert found.values == {
        "pages": 3, "pages_held": 2, "pages_reserved": 1, "arena_used_bytes": 2000, "arena_pinned_bytes": 500,
        "arena_total_bytes": 4000, "evictions": 7, "memory_available_bytes": 123, "requests_in_flight": 0,
        "requests_in_flight_per_connection_limit": REQUESTS_IN_FLIGHT_MAX, "sends_in_flight": 0, "fetches_waiting": 0,
        "engines": 1, "interface": "eth0", "link_bits_per_s": 1_000_000,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("received", "sent", "pressure"),
    [(0, 0, 0.0), (25_000, 0, 0.1), (0, 125_000, 0.5), (25_000, 125_000, 0.5), (1_000_000, 0, 1.0)],
)
def test_the_network_is_as_busy_as_its_busier_direction(received: int, sent: int, pressure: float) -> None:
    found = measured(link=Link("eth0", 1_000_000, 1000 + received, 5000 + sent))
    assert found.network == pytest.approx(pressure)
    assert found.values["link_received_bytes_per_s"] == received / 2
    assert found.values["link_sent_bytes_per_s"] == sent / 2


def test_rates_of_pages_are_known_without_a_link() -> None:
    found = measured(fetched_bytes=1100, sent_bytes=204, link=None)
    assert found.network is None
    rates = {name: value for name, value in found.values.items() if name.endswith("_per_s")}
    assert rates == {"pages_fetched_bytes_per_s": 500.0, "pages_sent_bytes_per_s": 2.0}
    assert found.values["interval_s"] == 2.0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Link("eth0", None, 0, 0), Link("eth0", None, 10, 10)),
        (None, Link("eth0", 1000, 10, 10)),
        (Link("eth1", 1000, 0, 0), Link("eth0", 1000, 10, 10)),
        (Link("eth0", 1000, 50, 0), Link("eth0", 1000, 10, 10)),
        (Link("eth0", 1000, 0, 50), Link("eth0", 1000, 10, 10)),
    ],
    ids=["no speed", "the first time", "another interface", "received less than nothing", "sent less than nothing"],
)
def test_where_the_network_cannot_be_known(before: Link | None, after: Link) -> None:
    assert measured(replace(IDLE, link=before), link=after).network is None


def test_a_clock_that_stands_still_gives_no_rates() -> None:
    found = signals_of(ME, (), IDLE, IDLE)
    assert found.network is None and "interval_s" not in found.values


@pytest.mark.parametrize(
    ("busiest", "sends", "pressure"),
    [(0, 0, 0.0), (REQUESTS_IN_FLIGHT_MAX // 4, 0, 0.25), (1, CONNECTIONS_MAX // 2, 0.5), (10**6, 0, 1.0)],
)
def test_the_queue_is_as_full_as_its_fullest_part(busiest: int, sends: int, pressure: float) -> None:
    found = measured(requests_of_busiest=busiest, requests_in_flight=busiest + 5, sends_in_flight=sends)
    assert found.queue == pytest.approx(pressure)


def test_requests_are_counted_by_connection() -> None:
    requests = Requests()
    assert (requests.in_flight, requests.busiest, requests.connections) == (0, 0, 0)
    one, two = requests.opened(), requests.opened()
    with one, one, two:
        assert (requests.in_flight, requests.busiest, requests.connections) == (3, 2, 2)
        requests.closed(one)
        assert (requests.in_flight, requests.busiest, requests.connections) == (1, 1, 1)
    assert requests.in_flight == 0


# --- the kernel ---


def interface(root: Path, speed: str | None) -> Path:
    folder = root / "eth7"
    (folder / "statistics").mkdir(parents=True)
    (folder / "statistics" / "rx_bytes").write_text("11\n")
    (folder / "statistics" / "tx_bytes").write_text("22\n")
    if speed is not None:
        (folder / "speed").write_text(speed)
    return root


@pytest.mark.parametrize(
    ("speed", "bits"), [("25000\n", 25_000_000_000), ("-1\n", None), ("0\n", None), ("\n", None), (None, None)]
)
def test_an_interface_as_the_kernel_tells_it(tmp_path: Path, speed: str | None, bits: int | None) -> None:
    assert read_link("eth7", interface(tmp_path, speed)) == Link("eth7", bits, 11, 22)


def test_an_interface_that_is_gone(tmp_path: Path) -> None:
    assert read_link("eth7", tmp_path) is None


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None, "an address of nobody here"
    assert interface_of("2001:db8::7") is None
    link = read_link("lo")
    assert link is not None and link.bits_per_s is None, "a loopback has no speed"


async def test_the_interface_of_a_name() -> None:
    assert await find_interface("localhost") == "lo"
    assert await find_interface("a..b") is None, "no name at all"


# --- sampling ---


async def test_measured_at_an_interval_and_aged_by_the_workers_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SIGNALS_INTERVAL_S", 0.001)
    taken: list[Link | None] = []

    def read(link: Link | None) -> Sample:
        taken.append(link)
        return replace(IDLE, at_s=100.0 + len(taken), link=link, fetched_bytes=1000 * len(taken))

    sampler = Sampler(ME, ("basic",), "127.0.0.1", read)
    sampler.measure()
    assert sampler.signals(101.25).age_s == 0.25 and sampler.signals(109.0).age_s == 8.0
    assert sampler.signals(50.0).age_s == 0.0
    assert taken == [None], "asking measures nothing"
    sampler.start()
    await until(lambda: len(taken) > 3)
    await sampler.close()
    assert taken[-1] is not None and taken[-1].interface == "lo"
    assert sampler.signals(0.0).values["pages_fetched_bytes_per_s"] == 1000.0


async def test_a_measurement_that_fails_is_told_once_and_made_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(signals, "SIGNALS_INTERVAL_S", 0.001)
    failing, taken = False, 0

    def read(link: Link | None) -> Sample:
        nonlocal taken
        taken += 1
        if failing:
            raise ValueError("no sense in the kernel's file")
        return replace(IDLE, at_s=float(taken))

    sampler = Sampler(ME, ("basic",), "127.0.0.1", read)
    sampler.measure()
    sampler.start()
    for times in (1, 2):
        failing, until_then = True, taken + 5
        await until(lambda until_then=until_then: taken > until_then)
        assert caplog.text.count("cannot be measured") == times
        failing = False
        await until(lambda: sampler.signals(taken + 1.0).age_s == 1.0)
    await sampler.close()


async def test_a_name_server_that_does_not_answer_stops_no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SIGNALS_INTERVAL_S", 0.001)

    async def never(_: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(signals, "find_interface", never)
    taken = 0

    def read(link: Link | None) -> Sample:
        nonlocal taken
        taken += 1
        return IDLE

    sampler = Sampler(ME, ("basic",), "slow.example", read)
    sampler.start()
    await until(lambda: taken > 2)
    await sampler.close()


async def ask(cluster: Cluster, address: Any) -> Signals:
    client = RpcClient(cluster.network, address, "client", "test", cluster.chance)
    client.start()
    try:
        await client.wait_connected(T)
        return await client.call(GetSignals(), Signals, T)
    finally:
        await client.close()


async def test_a_worker_answers_on_both_its_listeners(cluster: Cluster) -> None:
    (a, b), _ = await cluster.pair()
    for worker in (a, b):
        worker._sampler.measure()
        here, there = [await ask(cluster, address) for address in (worker.socket, worker.address)]
        assert 0 <= here.age_s <= there.age_s < T
        assert replace_age(here) == replace_age(there)
        assert here.worker_id == worker.worker_id and here.roles == ["basic", "gateway", "shard-home"]
        assert here.shards == [shard for shard in range(cluster.shards) if cluster.at(shard) is worker]
        assert here.memory == 0 and here.queue == 0 and here.disk is None
        assert here.values["engines"] == 0, "a connection is no engine until it says so"
        if isinstance(cluster.network, SocketNetwork):
            await until(lambda worker=worker: worker._sampler._interface == "lo")


def replace_age(found: Signals) -> dict[str, Any]:
    return {name: getattr(found, name) for name in found.__struct_fields__ if name != "age_s"}


async def test_pages_in_use_are_memory_pressure_and_a_load_that_waits_is_in_the_queue(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a, b), (at_a, at_b) = await cluster.pair()
    keys = hashes(2)
    await at_a.save(keys, 1 << 20)  # two of the four that fit
    await at_a.load(keys[:1])
    await at_b.finds(keys)
    a._sampler.measure()
    found = await ask(cluster, a.address)
    assert found.memory == pytest.approx(0.25) and found.values["pages"] == 2 and found.values["pages_held"] == 1
    assert found.values["arena_used_bytes"] == 2 << 20 and found.values["arena_pinned_bytes"] == 1 << 20

    gate = asyncio.Event()
    fetch = b.peers.fetch

    async def later(*args: Any) -> None:
        await gate.wait()
        await fetch(*args)

    monkeypatch.setattr(b.peers, "fetch", later)
    loading = asyncio.create_task(at_b.load(keys))
    await until(lambda: b.pages.fetches == 2)
    b._sampler.measure()
    found = await ask(cluster, b.address)
    assert found.values["requests_in_flight"] == 1 and found.values["fetches_waiting"] == 2
    assert found.queue == pytest.approx(1 / REQUESTS_IN_FLIGHT_MAX)
    gate.set()
    assert await loading == 2
    b._sampler.measure()
    found = await ask(cluster, b.address)
    assert found.values["requests_in_flight"] == found.values["fetches_waiting"] == 0
    assert math.isfinite(found.values["pages_fetched_bytes_per_s"]) and found.values["pages_fetched_bytes_per_s"] > 0
