"""An engine attached to a real worker in another thread: blocking calls, restarts, and every way to end."""

import asyncio
import gc
import logging
import mmap
import os
import random
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tensorcast_connector.client import attachment as module
from tensorcast_connector.client.attachment import Attachment, Mapping
from tensorcast_connector.errors import DeadlineExceeded, ProtocolError, Unavailable
from tensorcast_connector.net import rpc_client
from tensorcast_connector.net.rpc import accept, serve_stream
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.net.transport import Stream
from tensorcast_connector.settings import WorkerConfig
from tensorcast_connector.types import Address
from tensorcast_connector.wire.messages import (
    AttachInstance,
)
from tensorcast_connector.worker.server import Worker, start_worker
from tests.cluster import PAGE, SPACE, content, hashes, plane
from tests.net.service import Scripted
from tests.waiting import until_blocking

KEYS = hashes(4)
DIGESTS = [xxhash.xxh3_64_intdigest(content(key)) for key in KEYS]


class Host:
    """A thread with an event loop, and a worker on it that can stop and start again."""

    def __init__(self, folder: Path) -> None:
        self.address = Address("unix", path=str(folder / "w.sock"))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.worker: Worker | None = None
        self._runs = 0

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def start(self) -> Worker:
        self._runs += 1
        config = WorkerConfig("127.0.0.1:1", "w", "127.0.0.1:0", "", self.address.path, 1 << 20)
        self.worker = self.run(start_worker(config, SocketNetwork(), random.Random(self._runs), time.monotonic))
        assert self.worker is not None
        return self.worker

    def stop(self) -> None:
        if self.worker is not None:
            self.run(self.worker.close())
            self.worker = None

    def listen(self, on_stream: Any) -> Any:
        return self.run(SocketNetwork().listen(self.address, on_stream))

    def close(self) -> None:
        self.stop()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(rpc_client, "RECONNECT_DELAY_MIN_S", 0.002)
    monkeypatch.setattr(rpc_client, "RECONNECT_DELAY_MAX_S", 0.01)
    host = Host(tmp_path)
    yield host
    host.close()


@pytest.fixture
def attach(host: Host) -> Iterator[Any]:
    attachments: list[Attachment] = []

    def attach(wait: bool = True, **options: Any) -> Attachment:
        attachment = Attachment(SocketNetwork(), host.address, "test", **options)
        attachments.append(attachment)
        if wait:
            until_blocking(lambda: attachment.connected)
        return attachment

    yield attach
    for attachment in attachments:
        attachment.close()
        assert not attachment._thread.is_alive()
    attachments.clear()
    gc.collect(1)


def save(attachment: Attachment, mapping: Mapping | None = None) -> int:
    slots = attachment.reserve(SPACE, KEYS, PAGE, mapping or attachment.mapping)
    for key, slot in zip(KEYS, slots, strict=True):
        if slot is not None:
            slot[:] = content(key)
    attachment.commit(SPACE, KEYS, DIGESTS)
    return sum(slot is not None for slot in slots)


def load(attachment: Attachment, hold_id: str = "h") -> list[bytes]:
    return [bytes(page) for page in attachment.acquire(hold_id, SPACE, KEYS, attachment.mapping)]


def test_save_and_load_byte_exact(host: Host, attach: Any) -> None:
    worker = host.start()
    one, two = attach(), attach()
    assert one.mapping.worker_id == worker.worker_id and one.mapping.memory.nbytes == 1 << 20
    assert save(one) == 4 and save(two) == 0
    assert two.lookup("l", [SPACE], KEYS, 5).result(5).blocks == 4
    assert load(two) == [content(key) for key in KEYS]
    assert two.statistics()["pages_held"] == 4
    two.release(["h", "l"])
    until_blocking(lambda: one.statistics()["pages_held"] == 0)
    one.release([])
    assert repr(one) == f"<Attachment {host.address} up>"


def test_what_is_reserved_is_mapped_before_it_is_written_to(host: Host, attach: Any) -> None:
    host.start()
    one = attach()
    mapping = one.mapping
    assert None not in one.reserve(SPACE, KEYS, PAGE, mapping)  # of an arena that is smaller than a huge page
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for offset in range(0, mapping.memory.nbytes, mmap.PAGESIZE):
        mapping.memory[offset] = 1
    taken = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert taken < mapping.memory.nbytes // mmap.PAGESIZE / 4


def test_aborted_pages_can_be_reserved_again(host: Host, attach: Any) -> None:
    host.start()
    one = attach()
    assert None not in one.reserve(SPACE, KEYS, PAGE, one.mapping)
    assert one.reserve(SPACE, KEYS, PAGE, one.mapping) == [None] * 4
    one.abort(SPACE, KEYS)
    one.abort(SPACE, [])
    assert None not in one.reserve(SPACE, KEYS, PAGE, one.mapping)


def test_what_the_worker_refuses_is_raised(host: Host, attach: Any) -> None:
    host.start()
    one = attach()
    with pytest.raises(ProtocolError, match="a keyspace has 16 bytes"):
        one.acquire("h", b"short", KEYS, one.mapping)
    with pytest.raises(ProtocolError, match="a page of 2097152 bytes"):
        one.reserve(SPACE, KEYS, 2 << 20, one.mapping)
    assert isinstance(one.lookup("l", [b"short"], KEYS, 5).exception(5), ProtocolError)


def test_closing_frees_everything_at_the_worker(host: Host, attach: Any) -> None:
    host.start()
    one, two = attach(), attach()
    save(one)
    load(one)
    one.reserve(SPACE, hashes(2, 50), PAGE, one.mapping)
    one.close()
    until_blocking(lambda: two.statistics()["pages_held"] == two.statistics()["pages_reserved"] == 0)
    assert not one.connected and repr(one).endswith("down>")


def test_a_restarted_worker_is_another_arena_and_the_old_one_stays_readable(
    host: Host, attach: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, module.__name__)
    host.start()
    one = attach()
    save(one)
    old = one.mapping
    pages = one.acquire("h", SPACE, KEYS, old)
    host.stop()
    until_blocking(lambda: not one.connected)
    with pytest.raises(Unavailable, match="not attached"):
        _ = one.mapping
    for ask in (
        lambda: one.acquire("h", SPACE, KEYS, old), lambda: one.reserve(SPACE, KEYS, PAGE, old),
        lambda: one.commit(SPACE, KEYS, DIGESTS), lambda: one.statistics(),
        lambda: one.lookup("l", [SPACE], KEYS, 5).result(5),
    ):  # fmt: skip
        with pytest.raises(Unavailable):
            ask()
    one.release(["h"])
    one.abort(SPACE, KEYS)
    host.start()
    until_blocking(lambda: one.connected)
    assert one.mapping is not old and one.mapping.worker_id != old.worker_id
    assert [bytes(page) for page in pages] == [content(key) for key in KEYS]
    with pytest.raises(Unavailable, match="restarted meanwhile"):
        one.reserve(SPACE, KEYS, PAGE, old)
    assert host.worker is not None and host.worker.pages.statistics()["pages_reserved"] == 0, "nothing was asked for"
    assert load(one) == [] and save(one) == 4 and len(load(one)) == 4
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "lost the worker" in warnings[0], "once, not per request"


def test_without_a_worker_everything_fails_at_once_and_is_told_once(
    host: Host, attach: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "STORE_TIMEOUT_S", 0.005)
    one = attach(wait=False)
    assert not one.connected
    assert isinstance(one.lookup("l", [SPACE], KEYS, 5).exception(5), Unavailable)
    with pytest.raises(Unavailable):
        one.statistics()
    until_blocking(lambda: caplog.records)
    host.start()
    until_blocking(lambda: one.connected)
    lines = [record.getMessage() for record in caplog.records if record.name == module.__name__]
    assert len(lines) == 1 and "no worker (" in lines[0] and "serving without the pool" in lines[0]
    monkeypatch.undo()


def test_an_instance_is_listed_while_attached_and_again_after_a_restart(host: Host, attach: Any) -> None:
    worker = host.start()
    one = attach(instance=AttachInstance("i", "vllm", "m", "first"))
    listed = plane(worker).member._listed
    until_blocking(lambda: [each.namespace for each in listed.values()] == ["first"])
    one.describe(AttachInstance("i", "vllm", "m", "second"))
    until_blocking(lambda: [each.namespace for each in listed.values()] == ["second"])
    host.stop()
    again = plane(host.start()).member._listed
    until_blocking(lambda: [each.namespace for each in again.values()] == ["second"])
    one.close()
    until_blocking(lambda: not again)


# --- ending in every state ---


def closes_promptly(attachment: Attachment) -> None:
    closing = threading.Thread(target=attachment.close)
    closing.start()
    closing.join(1)
    assert not closing.is_alive() and not attachment._thread.is_alive()
    attachment.close()
    assert isinstance(attachment.lookup("l", [SPACE], KEYS, 5).exception(1), Unavailable)
    with pytest.raises(Unavailable):
        attachment.statistics()
    attachment.release(["h"])
    attachment.describe(AttachInstance("i", "e", "m", "n"))


def test_close_without_a_worker(attach: Any) -> None:
    closes_promptly(attach(wait=False))


def test_close_when_attached(host: Host, attach: Any) -> None:
    host.start()
    closes_promptly(attach())


def test_close_while_the_worker_does_not_answer_hello(host: Host, attach: Any) -> None:
    accepted: list[Stream] = []

    async def mute(stream: Stream) -> None:
        accepted.append(stream)
        while await stream.receive():
            pass

    listener = host.listen(mute)
    one = attach(wait=False)
    until_blocking(lambda: accepted)
    assert isinstance(one.lookup("l", [SPACE], KEYS, 5).exception(1), Unavailable), "at once"
    closes_promptly(one)
    host.run(listener.close())


def test_close_while_the_arena_does_not_come(host: Host, attach: Any) -> None:
    accepted: list[Stream] = []

    async def no_arena(stream: Stream) -> None:
        await accept(stream, "worker", "w/1")
        accepted.append(stream)
        while await stream.receive():
            pass

    listener = host.listen(no_arena)
    one = attach(wait=False)
    until_blocking(lambda: len(accepted) == 2)
    assert not one.connected
    closes_promptly(one)
    host.run(listener.close())


def test_a_service_that_is_no_worker(host: Host, attach: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(module, "STORE_TIMEOUT_S", 0.02)
    service = Scripted()  # answers MapArena with Ok, and passes nothing

    async def on_stream(stream: Stream) -> None:
        await serve_stream(stream, service)

    listener = host.listen(on_stream)
    one = attach(wait=False)
    until_blocking(lambda: [r for r in caplog.records if r.name == module.__name__])
    assert not one.connected and "expected ArenaInfo, got Ok" in caplog.text
    monkeypatch.undo()
    closes_promptly(one)
    host.run(listener.close())


def test_close_with_requests_under_way_fails_them(host: Host, attach: Any) -> None:
    host.start()
    one = attach()
    pending: Future[Any] = Future()

    async def never(*_: object) -> Any:
        pending.set_result(None)
        await asyncio.Event().wait()

    assert host.worker is not None
    host.worker.pages.fetch = never  # type: ignore[method-assign]
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            one.acquire("h", SPACE, KEYS, one.mapping)
        except Unavailable as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    pending.result(5)
    closes_promptly(one)
    asking.join(1)
    assert len(failed) == 1


def test_when_its_thread_dies_everything_fails_at_once(
    host: Host, attach: Any, caplog: pytest.LogCaptureFixture
) -> None:
    host.start()
    one = attach()

    def die() -> None:
        raise SystemExit("something went very wrong")

    one._loop.call_soon_threadsafe(die)
    one._thread.join(5)
    assert not one.connected and "the connection to the worker failed" in caplog.text
    closes_promptly(one)


def test_a_loop_that_hangs_is_a_deadline(host: Host, attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host.start()
    one = attach()
    monkeypatch.setattr(module, "STORE_TIMEOUT_S", 0.02)
    hang = threading.Event()
    one._loop.call_soon_threadsafe(hang.wait, 5)
    with pytest.raises(DeadlineExceeded, match="did not answer within"):
        one.statistics()
    hang.set()
    monkeypatch.undo()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_after_a_fork_the_child_has_no_worker(host: Host, attach: Any) -> None:
    host.start()
    one = attach()
    child = os.fork()
    if child == 0:  # its loop's thread stayed with the parent
        try:
            failed = isinstance(one.lookup("l", [SPACE], KEYS, 5).exception(1), Unavailable)
            one.close()
            os._exit(0 if failed else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert save(one) == 4


def test_nonsense_offsets_are_refused(host: Host, attach: Any) -> None:
    host.start()
    one = attach()
    assert host.worker is not None
    host.worker.pages.reserve = lambda *_: [1 << 20, 0, 0, 0]  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="the worker named 5000 bytes at 1048576 of an arena of 1048576"):
        one.reserve(SPACE, KEYS, PAGE, one.mapping)
    host.worker.pages.reserve = lambda *_: [0]  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="1 slots for 4 pages"):
        one.reserve(SPACE, KEYS, PAGE, one.mapping)


@pytest.mark.slow
def test_what_a_stopped_worker_reserves_too_late_is_given_back(
    host: Host, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.start()
    one, other = attach(), attach()
    stopped = threading.Event()
    host.loop.call_soon_threadsafe(stopped.wait, 5)
    monkeypatch.setattr(module, "SAVE_TIMEOUT_S", 0.02)
    with pytest.raises(DeadlineExceeded):
        one.reserve(SPACE, KEYS, PAGE, one.mapping)
    stopped.set()
    monkeypatch.undo()
    until_blocking(lambda: other.statistics()["pages_reserved"] == 0)
    assert save(other) == len(KEYS), "somebody else may write them"


@pytest.mark.slow
def test_a_worker_that_is_stopped_but_not_dead_is_given_up_and_found_again(
    host: Host, attach: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rpc_client, "PING_INTERVAL_S", 0.02)
    monkeypatch.setattr(rpc_client, "SILENCE_MAX_S", 0.1)
    host.start()
    one = attach()
    mapping = one.mapping
    stopped = threading.Event()
    host.loop.call_soon_threadsafe(stopped.wait, 5)
    with pytest.raises(Unavailable, match="has been silent for"):
        one.reserve(SPACE, KEYS, PAGE, mapping)
    assert not one.connected and not one.still_holds(mapping)
    stopped.set()
    until_blocking(lambda: one.connected)
    assert caplog.text.count("lost the worker") == 1
    assert save(one) == len(KEYS)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["given up", "closed"])
def test_what_is_being_written_belongs_to_nobody_else_however_the_connection_ends(
    host: Host, attach: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The engine's thread stands still in the middle of a copy into reserved memory."""
    monkeypatch.setattr(rpc_client, "PING_INTERVAL_S", 0.02)
    monkeypatch.setattr(rpc_client, "SILENCE_MAX_S", 0.1)
    worker = host.start()
    one, other = attach(), attach()
    mapping = one.mapping
    one.reserve(SPACE, KEYS, PAGE, mapping)
    reserved = worker.pages.statistics
    closing = threading.Thread(target=one.close)
    with one.writing(mapping):
        if how == "closed":
            closing.start()
            until_blocking(lambda: not one.connected)
        else:
            stopped = threading.Event()
            host.loop.call_soon_threadsafe(stopped.wait, 5)
            until_blocking(lambda: not one.connected)
            stopped.set()
        with pytest.raises(Unavailable, match="lost the worker"), one.writing(mapping):
            pass
        until_blocking(lambda: other.connected)
        for _ in range(20):
            assert other.statistics()["pages_reserved"] == len(KEYS)
        assert other.reserve(SPACE, KEYS, PAGE, other.mapping) == [None] * len(KEYS)
    until_blocking(lambda: reserved()["pages_reserved"] == 0)
    assert save(other) == len(KEYS)
    if how == "closed":
        closing.join()
