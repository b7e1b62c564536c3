"""The etcd backend when etcd is not well: nodes killed and stopped, no quorum, full, or no etcd at all."""

import asyncio
import base64
import logging
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tensorcast_connector.errors import (
    Compacted,
    ConfigError,
    Exhausted,
    NotFound,
    TensorcastError,
    Unavailable,
)
from tensorcast_connector.store import etcd_watch
from tensorcast_connector.store.etcd_kv import EtcdKv, open_etcd
from tensorcast_connector.store.kv import Compare, Event, Put
from tensorcast_connector.types import Address
from tests.store.conftest import Backend, EtcdBackend
from tests.store.etcd_servers import EtcdCluster, free_ports
from tests.store.proxy import Proxy

on_one = pytest.mark.parametrize("servers", ["etcd-1"], indirect=True)
on_three = pytest.mark.parametrize("servers", ["etcd-3"], indirect=True)


@pytest.fixture
def etcd(backend: Backend) -> EtcdBackend:
    """Needs a parameter `servers` that is an etcd."""
    assert isinstance(backend, EtcdBackend)
    return backend


async def put(kv: EtcdKv, key: str, value: bytes = b"v", lease_id: int = 0) -> int:
    return (await kv.txn([], [Put(key, value, lease_id)])).revision


async def followed(kv: EtcdKv, after: int, upto: int) -> list[Event]:
    async with asyncio.timeout(10):
        while True:
            revision, events = await kv.changes("", after)
            if revision >= upto:
                return events
            await kv.wait(revision, 1)


@on_three
async def test_two_processes_share_everything(etcd: EtcdBackend) -> None:
    other = await etcd.open()
    kvs = [etcd.kv, other] * 10
    done = await asyncio.gather(*(kv.txn([Compare("k", 0)], [Put("k", b"%d" % n)]) for n, kv in enumerate(kvs)))
    assert sum(each.succeeded for each in done) == 1
    lease = await etcd.kv.lease_grant(10)
    revision = await put(other, "leased", b"", lease)
    await other.lease_keepalive(lease)
    await other.lease_revoke(lease)
    with pytest.raises(NotFound):
        await etcd.kv.lease_keepalive(lease)
    assert [(each.key, each.value) for each in await followed(etcd.kv, revision, revision + 1)] == [("leased", None)]
    await other.close()


@on_one
async def test_clusters_with_other_prefixes_see_nothing_of_each_other(etcd: EtcdBackend) -> None:
    names = [etcd.prefix + name for name in ("a", "aa", "a0")]
    kvs = [await open_etcd(etcd.servers.addresses, name + "/") for name in names]
    start = await etcd.kv.revision()
    for n, kv in enumerate(kvs):
        last = await put(kv, "k", b"%d" % n)
    for n, kv in enumerate(kvs):
        assert [(each.key, each.value) for each in (await kv.range(""))[1]] == [("k", b"%d" % n)]
    assert [each.value for each in await followed(kvs[2], start, last)] == [b"2"]
    await asyncio.gather(*(kv.close() for kv in kvs))


class Writer:
    """Writes one key after another for as long as it runs, as a store does; counts what was acknowledged."""

    def __init__(self, kv: EtcdKv) -> None:
        self._kv = kv
        self.acknowledged: list[int] = []
        self.failed: list[TensorcastError] = []
        self.longest_s = 0.0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        last, number = time.monotonic(), 0
        while True:
            number += 1
            try:
                await put(self._kv, f"w/{number:06}")
                self.acknowledged.append(number)
                self.longest_s, last = max(self.longest_s, time.monotonic() - last), time.monotonic()
            except TensorcastError as error:
                self.failed.append(error)
                await asyncio.sleep(0.01)

    async def more(self, count: int) -> None:
        goal = len(self.acknowledged) + count
        async with asyncio.timeout(20):
            while len(self.acknowledged) < goal:  # noqa: ASYNC110 - plain numbers
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def break_node(servers: EtcdCluster, node: int, how: str) -> Callable[[], Awaitable[None]]:
    """Kills or stops it; returns what makes it well again."""
    if how == "killed":
        servers.kill(node)
    else:
        servers.signal(node, signal.SIGSTOP)

    async def heal() -> None:
        if how == "killed":
            servers.start(node, wait=False)
        else:
            servers.signal(node, signal.SIGCONT)
        await asyncio.to_thread(servers.wait_healthy)

    return heal


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize(("who", "how"), [("leader", "killed"), ("leader", "stopped"), ("follower", "stopped")])
async def test_a_node_is_lost_and_nothing_that_was_acknowledged(tmp_path: Path, who: str, how: str) -> None:
    servers = EtcdCluster(3, tmp_path)
    try:
        await lose(servers, who, how)
    finally:
        servers.close()


async def lose(servers: EtcdCluster, who: str, how: str) -> None:
    node = servers.leader() if who == "leader" else servers.followers()[0]
    # Requests and the watch go to that node: the worst case.
    others = [each for each in servers.addresses if each != servers.addresses[node]]
    kv = await open_etcd([servers.addresses[node], *others], "t/", timeout_s=1.0)
    start = await kv.revision()
    writer = Writer(kv)
    await writer.more(5)
    heal = await break_node(servers, node, how)
    await writer.more(20)
    await writer.stop()
    last = await put(kv, "last")
    seen = await followed(kv, start, last)
    print(f"{who} {how}: writes interrupted for {writer.longest_s:.2f} s, {len(writer.failed)} failed")
    assert all(isinstance(each, Unavailable) for each in writer.failed), writer.failed
    written = [f"w/{number:06}" for number in writer.acknowledged]
    assert {each.key for each in (await kv.range("w/"))[1]}.issuperset(written)
    assert [each.key for each in seen if each.key in set(written)] == written, (
        "the watch has each of them once, in order"
    )
    assert writer.longest_s < 8
    await heal()
    # A write that timed out may happen even now, when the node goes on; what was seen stays as it was.
    assert (await followed(kv, start, await put(kv, "healed")))[: len(seen)] == seen
    await kv.close()


@pytest.mark.faults
@pytest.mark.slow
@on_three
async def test_a_change_of_leader_gives_every_lease_its_full_time_anew(etcd: EtcdBackend) -> None:
    lease = await etcd.kv.lease_grant(2)
    await put(etcd.kv, "leased", b"", lease)
    granted = time.monotonic()
    await asyncio.sleep(1.2)
    node = etcd.servers.leader()
    heal = await break_node(etcd.servers, node, "stopped")
    try:
        while True:
            try:
                assert [each.key for each in (await etcd.kv.range(""))[1]] == ["leased"]
            except Unavailable:
                continue
            if time.monotonic() - granted > 2.5:
                break
        await etcd.kv.lease_keepalive(lease)
    finally:
        await heal()


@pytest.mark.faults
@pytest.mark.slow
@on_three
async def test_without_a_quorum_everything_is_unavailable_in_time(etcd: EtcdBackend) -> None:
    await put(etcd.kv, "k")
    kv = await open_etcd(etcd.servers.addresses, etcd.prefix, timeout_s=0.5)
    lease = await kv.lease_grant(30)
    heals = [await break_node(etcd.servers, node, "stopped") for node in etcd.servers.followers()]
    try:
        started = time.monotonic()
        failures = await asyncio.gather(
            kv.revision(), kv.range(""), put(kv, "k"), kv.lease_grant(5), kv.lease_keepalive(lease),
            kv.lease_revoke(lease), kv.changes("", 1 << 40), return_exceptions=True,
        )  # fmt: skip
        assert time.monotonic() - started < 1.5
        # A leader that has lost the others still renews leases until it notices; the next one gives them more time.
        failures = [each for each in failures if each is not None]
        assert len(failures) >= 6
        assert all(isinstance(each, Unavailable) and "\n" not in str(each) for each in failures), failures
        with pytest.raises(Unavailable):
            await open_etcd(etcd.servers.addresses, etcd.prefix, timeout_s=0.3)
    finally:
        await asyncio.gather(*(heal() for heal in heals))
    async with asyncio.timeout(10):
        while True:
            try:
                await put(kv, "k", b"again")
                break
            except Unavailable:
                continue
    await kv.close()


@pytest.mark.slow
@on_one
async def test_what_was_compacted_while_nobody_could_watch_is_a_gap(
    etcd: EtcdBackend, caplog: pytest.LogCaptureFixture
) -> None:
    async with Proxy(etcd.servers.addresses[0]) as proxy:
        kv = await open_etcd([proxy.address], etcd.prefix)
        start = await put(kv, "a")
        for each in (kv, etcd.kv):
            await followed(each, start - 1, start)
        waiting = asyncio.create_task(kv.wait(start, 30))
        await proxy.cut()
        missed = [await put(etcd.kv, "a", b"%d" % n) for n in range(3)]
        await asyncio.to_thread(etcd.servers.post, 0, "/v3/kv/compaction", {"revision": missed[-1], "physical": True})
        with pytest.raises(Unavailable, match="cannot connect"):
            await kv.revision()
        await proxy.restore()
        await asyncio.wait_for(waiting, 5)
        with pytest.raises(Compacted):
            await kv.changes("", start)
        revision, _ = await kv.range("")
        later = await put(etcd.kv, "b")
        assert [each.key for each in await followed(kv, revision, later)] == ["b"], "and it goes on from there"
        await kv.close()
    lines = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(lines) == 2 and "cannot be followed any more" in lines[0] and "compacted" in lines[1], lines


@pytest.mark.slow
@on_one
async def test_a_broken_stream_goes_on_where_it_was(etcd: EtcdBackend) -> None:
    async with Proxy(etcd.servers.addresses[0]) as proxy:
        kv = await open_etcd([proxy.address], etcd.prefix)
        start = await put(kv, "a")
        for n in range(3):
            await proxy.cut()
            written = [await put(etcd.kv, f"k{n}", b"%d" % m) for m in range(5)]
            await proxy.restore()
            events = await followed(kv, start, written[-1])
            assert [each.value for each in events] == [b"0", b"1", b"2", b"3", b"4"]
            start = written[-1]
        await kv.close()


@pytest.mark.slow
@on_one
async def test_an_endpoint_that_falls_silent_is_left(etcd: EtcdBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_watch, "ETCD_PROBE_INTERVAL_S", 0.1)
    address = etcd.servers.addresses[0]
    async with Proxy(address) as silent:
        kv = await open_etcd([silent.address, address], etcd.prefix)
        start = await put(kv, "a")
        await followed(kv, start, start)
        silent.silence()
        later = await put(etcd.kv, "b")
        assert [each.key for each in await followed(kv, start, later)] == ["b"]
        started = time.monotonic()
        await put(kv, "c")
        assert time.monotonic() - started < 0.5, "requests have left it too"
        await kv.close()


@pytest.mark.slow
@on_one
async def test_large_values_come_through_whole(etcd: EtcdBackend) -> None:
    start = await etcd.kv.revision()
    values = [bytes([n]) * (900_000 + n) for n in range(6)]
    for n, value in enumerate(values):
        last = await put(etcd.kv, f"k{n}", value)
    assert [each.value for each in (await etcd.kv.range(""))[1]] == values
    fresh = await etcd.open()
    for kv in (etcd.kv, fresh):
        assert [each.value for each in await followed(kv, start, last)] == values
    await fresh.close()


@pytest.mark.slow
async def test_a_full_etcd_is_one_line_and_recovers(tmp_path: Path) -> None:
    servers = EtcdCluster(1, tmp_path, "--quota-backend-bytes", str(1 << 20))
    kv = await open_etcd(servers.addresses, "t/")
    try:
        lease = await kv.lease_grant(30)
        await put(kv, "leased", b"v", lease)
        written = {}
        with pytest.raises(Exhausted, match=r"^etcd is full: compact and defragment it") as full:
            for n in range(100):
                written[f"k{n}"] = bytes([n]) * 100_000
                await put(kv, f"k{n}", written[f"k{n}"])
        assert "\n" not in str(full.value) and 3 < len(written) < 80
        with pytest.raises(Exhausted):
            await kv.lease_grant(10)
        await kv.lease_keepalive(lease)
        found = {each.key: each.value for each in (await kv.range("k"))[1]}
        refused = set(written) - set(found)
        assert all(written[key] == value for key, value in found.items()), "what is there stays readable"
        assert refused <= {list(written)[-1]}, "only the last may be missing; etcd may have written even that"
        start, end = (base64.b64encode(each).decode() for each in kv._span("k"))
        header = servers.post(0, "/v3/kv/deleterange", {"key": start, "range_end": end})["header"]
        revision = int(header["revision"])
        servers.post(0, "/v3/kv/compaction", {"revision": revision, "physical": True})
        servers.post(0, "/v3/maintenance/defragment", {})
        for alarm in servers.post(0, "/v3/maintenance/alarm", {"action": "GET"})["alarms"]:
            servers.post(0, "/v3/maintenance/alarm", {**alarm, "action": "DEACTIVATE"})
        assert await put(kv, "k", bytes(100_000)) == revision + 1
        assert [each.key for each in (await kv.range(""))[1]] == ["k", "leased"]
    finally:
        await kv.close()
        servers.close()


@pytest.mark.slow
async def test_an_etcd_that_is_read_only_is_one_line_and_recovers(tmp_path: Path) -> None:
    servers = EtcdCluster(1, tmp_path)
    kv = await open_etcd(servers.addresses, "t/")
    try:
        lease = await kv.lease_grant(30)
        revision = await put(kv, "k", b"v", lease)
        [member] = servers.post(0, "/v3/cluster/member/list", {})["members"]
        alarm = {"memberID": member["ID"], "alarm": "CORRUPT"}
        servers.post(0, "/v3/maintenance/alarm", {**alarm, "action": "ACTIVATE"})
        for attempt in (lambda: put(kv, "k", b"w"), lambda: kv.lease_grant(10)):
            with pytest.raises(Unavailable, match=r"takes no writes, because what its members have differs") as error:
                await attempt()
            assert "\n" not in str(error.value) and "etcdctl alarm disarm" in str(error.value)
        await kv.lease_keepalive(lease)
        assert [each.value for each in (await kv.range("k"))[1]] == [b"v"], "what is there stays readable"
        servers.post(0, "/v3/maintenance/alarm", {**alarm, "action": "DEACTIVATE"})
        assert await put(kv, "k", b"w") == revision + 1
    finally:
        await kv.close()
        servers.close()


@pytest.mark.slow
async def test_an_etcd_that_asks_for_a_user_is_one_line(tmp_path: Path) -> None:
    servers = EtcdCluster(1, tmp_path)
    kv = await open_etcd(servers.addresses, "t/")
    try:
        servers.post(0, "/v3/auth/user/add", {"name": "root", "password": "x"})
        servers.post(0, "/v3/auth/role/add", {"name": "root"})
        servers.post(0, "/v3/auth/user/grant", {"user": "root", "role": "root"})
        servers.post(0, "/v3/auth/enable", {})
        for attempt in (lambda: open_etcd(servers.addresses, "t/"), kv.revision):
            with pytest.raises(ConfigError, match="asks for a user") as error:
                await attempt()
            assert "\n" not in str(error.value)
    finally:
        await kv.close()
        servers.close()


@pytest.mark.slow
@on_one
async def test_members_of_two_clusters_are_not_mixed(etcd: EtcdBackend, tmp_path: Path) -> None:
    other = EtcdCluster(1, tmp_path)
    async with Proxy(etcd.servers.addresses[0]) as proxy:
        kv = await open_etcd([proxy.address, *other.addresses], etcd.prefix)
        await put(kv, "k")
        await proxy.cut()
        with pytest.raises(Unavailable):
            await kv.range("")
        async with asyncio.timeout(5):
            while True:
                try:
                    await kv.range("")
                except Unavailable as error:
                    if "belongs to another cluster" in str(error):
                        break
        await kv.close()
    other.close()


# --- no etcd ------------------------------------------------------------------------------------------------------------
def http(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (status.encode(), len(body), body)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[bytes], Awaitable[Address]]]:
    """Starts a server that answers everything with the same bytes and hangs up."""
    servers: list[asyncio.Server] = []

    async def start(answer: bytes) -> Address:
        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if length := re.search(rb"Content-Length: (\d+)", head):
                await reader.readexactly(int(length[1]))
            writer.write(answer)
            await writer.drain()
            writer.close()

        servers.append(await asyncio.start_server(on_connection, "127.0.0.1", 0))
        return Address("tcp", host="127.0.0.1", port=servers[-1].sockets[0].getsockname()[1])

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (http(b"<html>It works!</html>"), "is no etcd"),
        (http(b'{"status": "ok"}'), "is no etcd"),
        (http(b"\xff\xfe"), "is no etcd"),
        (http(b"", "404 Not Found"), "is no etcd"),
        (b"-ERR unknown command 'GET'\r\n", "is no etcd"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is no etcd"),
        (bytes(range(256)), "is no etcd"),
        (b"", "is no etcd"),
        (http(b'{"etcdserver": "2.3.8"}'), "has version '2.3.8'; 3.4 or a later 3.x is needed"),
        (http(b'{"etcdserver": "3.3.27"}'), "has version '3.3.27'"),
        (http(b'{"etcdserver": "4.0.0"}'), "has version '4.0.0'"),
        (http(b'{"etcdserver": "new"}'), "has version 'new'"),
    ],
)
async def test_something_else_at_the_address_is_one_line(serve: Any, answer: bytes, why: str) -> None:
    address = await serve(answer)
    with pytest.raises(ConfigError, match=why) as error:
        await open_etcd([address], "t/", timeout_s=1)
    assert str(address) in str(error.value) and "\n" not in str(error.value)


async def test_something_that_only_begins_like_etcd_is_one_line(serve: Any) -> None:
    address = await serve(http(b'{"etcdserver": "3.5.0"}'))
    with pytest.raises(Unavailable, match="an answer that is not etcd's"):
        await open_etcd([address], "t/", timeout_s=1)


@pytest.mark.slow
async def test_an_etcd_without_its_json_interface_is_one_line(tmp_path: Path) -> None:
    servers = EtcdCluster(1, tmp_path, "--enable-grpc-gateway=false", wait=False)
    try:
        async with asyncio.timeout(10):
            while True:
                try:
                    await open_etcd(servers.addresses, "t/")
                except Unavailable:  # it has not started yet
                    await asyncio.sleep(0.02)
                except ConfigError as error:
                    assert "its JSON interface is missing" in str(error)
                    break
    finally:
        servers.close()


async def test_nobody_at_the_address_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    addresses = [Address("tcp", host="127.0.0.1", port=port) for port in free_ports(2)]
    with pytest.raises(Unavailable, match=r"^no etcd answers: .*: cannot connect: .*; .*: cannot connect") as error:
        await open_etcd(addresses, "t/")
    assert "\n" not in str(error.value)
    with pytest.raises(Unavailable, match="cannot connect"):
        await open_etcd([Address("tcp", host="no-such-host.invalid", port=2379)], "t/")


@asynccontextmanager
async def closing_kv(kv: EtcdKv) -> AsyncIterator[EtcdKv]:
    """Closed whatever happens."""
    try:
        yield kv
    finally:
        await kv.close()


@on_three
async def test_at_the_start_one_endpoint_is_enough(etcd: EtcdBackend, caplog: pytest.LogCaptureFixture) -> None:
    nobody = Address("tcp", host="127.0.0.1", port=free_ports(1)[0])
    async with closing_kv(await open_etcd([nobody, etcd.servers.addresses[1]], etcd.prefix)) as kv:
        await put(kv, "k")
        assert str(nobody) in caplog.text and repr(kv) == f"<EtcdKv {etcd.prefix!r} at {etcd.servers.addresses[1]}>"
