"""Replicas on devices from end to end: a worker, the child that owns the memory, and a caller that opens it."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tensorcast_connector.client.artifact import Artifact
from tensorcast_connector.client.session import Session
from tensorcast_connector.core.artifact import decode_header
from tensorcast_connector.engines.devices.opening import open_device
from tensorcast_connector.errors import ConfigError, DeadlineExceeded, Exhausted, InvalidArgument, NotFound, Unavailable
from tensorcast_connector.wire.caller_messages import ReplicaOpened
from tensorcast_connector.worker import device_process, devices
from tensorcast_connector.worker.server import Worker
from tests.client.callers import Pool, weights
from tests.client.conftest import pool
from tests.cluster import quick
from tests.engines.devices.conftest import device, fake_cuda, stand_in
from tests.loops import quiet_loop
from tests.waiting import until

__all__ = ["device", "fake_cuda", "pool", "quick", "quiet_loop", "stand_in"]
pytestmark = pytest.mark.slow
PAGE = 2 << 20


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child is started again at once."""
    monkeypatch.setattr(devices, "DEVICE_RESTART_MIN_S", 0.01)


def pid_of(worker: Worker) -> int:
    assert worker.devices.process is not None
    return worker.devices.process.pid


@contextlib.contextmanager
def opened_at(name: str, opened: ReplicaOpened) -> Iterator[Any]:
    """Reads tensors of a replica as an engine does: `read(name)`."""
    memory = open_device(name)
    header = decode_header(opened.header)
    address = memory.open(opened.handle, header.size)
    specs = {each.name: each for each in header.tensors}
    yield lambda tensor: memory.copy_out(address + specs[tensor].offset, specs[tensor].bytes)
    memory.close()


async def put(session: Session, seed: int = 0, size: int = 500) -> tuple[Artifact, dict[str, Any]]:
    tensors = weights(seed, size=size)
    return await session.put(tensors, name=f"weights/{seed}"), tensors


async def test_an_artifact_is_copied_to_a_device_and_read_there(pool: Pool, device: str) -> None:
    (worker,) = await pool.start("a", devices=f"{device},{device[:-1]}1")
    session = await pool.session(worker)
    artifact, tensors = await put(session)
    assert await artifact.replicas() == []
    await artifact.replicate(device)
    await artifact.replicate(device)  # it is there
    (listed,) = await artifact.replicas()
    assert (listed.device, listed.bytes, listed.open) == (device, PAGE, 0)
    identity = open_device(device).identity
    for wanted in (device, identity):
        opened = await session.artifact("weights/0").open_replica(wanted)
        assert (opened.device, opened.artifact_id) == (device, await artifact.id())
        assert (await artifact.replicas())[0].open == 1
        with opened_at(device, opened) as read:
            assert {name: read(name) for name in tensors} == {name: each.tobytes() for name, each in tensors.items()}
        await artifact.close_replica(opened)
    with pytest.raises(NotFound, match=f"there is no replica of it on {device[:-1]}1"):
        await artifact.open_replica(device[:-1] + "1")
    with pytest.raises(NotFound, match="none of the worker's devices"):
        await artifact.open_replica("cuda-of-elsewhere")
    with pytest.raises(NotFound):
        await artifact.close_replica(opened)
    assert worker.devices.counters == {"made": 1, "opened": 2, "restarts": 0}


async def test_an_artifact_without_bytes(pool: Pool) -> None:
    (worker,) = await pool.start("a", devices="host:0")
    session = await pool.session(worker)
    artifact = await session.put({})
    await artifact.replicate("host:0")
    opened = await artifact.open_replica("host:0")
    with opened_at("host:0", opened):
        await artifact.close_replica(opened)


async def test_what_goes_when_there_is_no_room(pool: Pool) -> None:
    (worker,) = await pool.start("a", artifact_bytes=64 << 20, devices="host:0", device_bytes=2 * PAGE)
    session = await pool.session(worker)
    (one, _), (two, _), (three, tensors) = [await put(session, seed) for seed in range(3)]
    await one.replicate("host:0")
    await two.replicate("host:0")
    held = await one.open_replica("host:0")
    await three.replicate("host:0")
    assert await two.replicas() == [] and len(await one.replicas()) == len(await three.replicas()) == 1
    also = await three.open_replica("host:0")
    # Tried again until then: somebody may close one. The last try may still be under way.
    with pytest.raises((Exhausted, DeadlineExceeded), match="no room"):
        await two.replicate("host:0", timeout_s=2.0)
    with opened_at("host:0", also) as read:
        assert read("w0") == tensors["w0"].tobytes()
    await one.close_replica(held)
    await two.replicate("host:0")
    large, _ = await put(session, 9, size=PAGE)
    for where, words in [("host:0", r"\(--device-memory\)"), ("host:1", "no device 'host:1'; there are host:0")]:
        with pytest.raises(InvalidArgument, match=words):
            await large.replicate(where)
    assert await large.replicas() == []


async def test_replicas_go_with_their_artifact_and_holds_with_their_connection(pool: Pool) -> None:
    a, b = await pool.start("a", "b", devices="host:0")
    session, other = await pool.session(a), await pool.session(a)
    artifact, tensors = await put(session)
    await artifact.replicate("host:0")
    await artifact.replicate("host:0", to="b")
    opened = await other.artifact("weights/0").open_replica("host:0")
    with opened_at("host:0", opened) as read:
        await session.delete("weights/0")
        await until(lambda: not b.devices.table.used_bytes("host:0"))
        assert a.devices.table.used_bytes("host:0") == PAGE and a.devices.listed(await artifact.id()) == []
        assert read("w1") == tensors["w1"].tobytes()
        await pool.die(other)
        await until(lambda: not a.devices.table.used_bytes("host:0"))


async def test_the_child_dies_while_a_replica_is_open(pool: Pool, device: str) -> None:
    (worker,) = await pool.start("a", devices=device)
    session = await pool.session(worker)
    artifact, tensors = await put(session)
    await artifact.replicate(device)
    opened = await artifact.open_replica(device)
    child = pid_of(worker)
    with opened_at(device, opened) as read:
        process = worker.devices.process
        assert process is not None
        os.kill(child, signal.SIGKILL)
        while process.alive:  # the event loop does not turn meanwhile: nothing has told the worker
            time.sleep(0.001)  # noqa: ASYNC251
        with pytest.raises(NotFound, match="died"):
            await artifact.close_replica(opened)
        assert read("w0") == tensors["w0"].tobytes()
    await until(lambda: worker.devices.counters["restarts"] == 1)
    assert pid_of(worker) != child and await artifact.replicas() == []
    with pytest.raises(Unavailable), opened_at(device, opened):
        pass  # a stale handle
    await artifact.replicate(device)
    again = await artifact.open_replica(device)
    with pytest.raises(NotFound):
        await artifact.close_replica(opened)
    with opened_at(device, again) as read:
        assert read("w2") == tensors["w2"].tobytes()
    await artifact.close_replica(again)


async def test_the_child_is_killed_again_and_again(pool: Pool) -> None:
    (worker,) = await pool.start("a", devices="host:0")
    session = await pool.session(worker)
    artifact, _ = await put(session, size=1 << 20)
    for count in range(1, 4):
        replicating = asyncio.ensure_future(artifact.replicate("host:0"))
        await asyncio.sleep(0.002 * count)
        os.kill(pid_of(worker), signal.SIGKILL)
        await replicating  # tried again until the child is back
        assert len(await artifact.replicas()) == 1 or worker.devices.counters["restarts"] < count
        await until(lambda count=count: worker.devices.counters["restarts"] == count)
    worker.devices.table.check()


async def test_a_child_that_does_not_come_up_is_tried_again(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    (worker,) = await pool.start("a", devices="host:0")
    tried: list[float] = []
    real = worker.devices._start

    async def start(names: Any) -> Any:
        tried.append(time.monotonic())
        if len(tried) < 4:
            raise Unavailable("no") if len(tried) < 3 else OSError("a fault of our own")
        return await real(names)

    monkeypatch.setattr(worker.devices, "_start", start)
    session = await pool.session(worker)
    artifact, _ = await put(session)
    os.kill(pid_of(worker), signal.SIGKILL)
    await artifact.replicate("host:0")
    waits = [after - before for before, after in pairwise(tried)]
    assert len(tried) == 4 and waits[1] > 0.015 and waits[2] > 0.03, "later each time"


async def test_a_child_that_does_not_answer_is_ended(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_process, "DEVICE_CALL_TIMEOUT_S", 0.2)
    (worker,) = await pool.start("a", devices="host:0")
    session = await pool.session(worker)
    artifact, _ = await put(session)
    os.kill(pid_of(worker), signal.SIGSTOP)
    await artifact.replicate("host:0")
    assert worker.devices.counters["restarts"] == 1


async def test_a_device_that_fails_ends_the_child(
    pool: Pool, fake_cuda: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAILS", "cuMemcpyHtoDAsync_v2")
    (worker,) = await pool.start("a", devices="cuda:0")
    monkeypatch.delenv("FAKE_CUDA_FAILS")
    session = await pool.session(worker)
    artifact, tensors = await put(session)
    await artifact.replicate("cuda:0")  # by the next one
    assert worker.devices.counters["restarts"] == 1
    assert "has died (cuMemcpyHtoDAsync_v2 failed: misused (CUDA error 999))" in caplog.text
    opened = await artifact.open_replica("cuda:0")
    with opened_at("cuda:0", opened) as read:
        assert read("w0") == tensors["w0"].tobytes()


async def test_a_device_without_memory_refuses(pool: Pool, fake_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_BYTES", str(3 * PAGE))
    (worker,) = await pool.start("a", artifact_bytes=64 << 20, devices="cuda:0")
    session = await pool.session(worker)
    large, _ = await put(session, 1, size=PAGE)
    with pytest.raises((Exhausted, DeadlineExceeded), match="cuda:0 has no room"):
        await large.replicate("cuda:0", timeout_s=2.0)
    small, _ = await put(session, 2)
    await small.replicate("cuda:0")
    assert worker.devices.counters["restarts"] == 0 and worker.devices.table.used_bytes("cuda:0") == PAGE


async def test_other_tenants_and_other_hosts_get_nothing(pool: Pool) -> None:
    (worker,) = await pool.start("a", devices="host:0")
    session = await pool.session(worker)
    artifact, _ = await put(session)
    await artifact.replicate("host:0")
    stranger = await pool.session(worker, tenant="blue")
    for reference in ("weights/0", await artifact.id()):
        with pytest.raises(NotFound):
            await stranger.artifact(reference).open_replica("host:0")
        with pytest.raises(NotFound):
            await stranger.artifact(reference).replicas()
    far = await pool.session(worker, "tcp")
    with pytest.raises(InvalidArgument, match="connect to its Unix socket"):
        await far.artifact("weights/0").open_replica("host:0")


async def test_a_worker_without_devices_refuses(pool: Pool) -> None:
    (worker,) = await pool.start("a")
    session = await pool.session(worker)
    artifact, _ = await put(session)
    with pytest.raises(InvalidArgument, match=r"it has none \(--devices\)"):
        await artifact.replicate("host:0")
    with pytest.raises(NotFound, match=r"no devices \(--devices\)"):
        await artifact.open_replica("host:0")
    assert await artifact.replicas() == [] and worker.devices.process is None
    assert "devices" not in worker.observer.signals().values


async def test_a_worker_does_not_start_without_its_devices(
    pool: Pool, tmp_path: Path, fake_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "1")
    await pool.start_store()
    with pytest.raises(ConfigError, match="there is no cuda:1: the driver shows 1 device"):
        await pool.worker("a", devices="cuda:0,cuda:1")
    assert not (tmp_path / "a.sock").exists()


async def test_signals_and_metrics_say_what_is_there(pool: Pool) -> None:
    (worker,) = await pool.start("a", devices="host:0,host:1", device_bytes=4 * PAGE)
    session = await pool.session(worker)
    artifact, _ = await put(session)
    await artifact.replicate("host:1")
    opened = await artifact.open_replica("host:1")
    worker._sampler.measure()
    assert worker.observer.signals().values["devices"] == {
        "host:0": {"replicas": 0, "open": 0, "bytes_used": 0, "bytes_max": 4 * PAGE},
        "host:1": {"replicas": 1, "open": 1, "bytes_used": PAGE, "bytes_max": 4 * PAGE},
    }
    await artifact.close_replica(opened)
