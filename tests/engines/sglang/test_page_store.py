"""Pages between memory of this process and a real worker in another thread, and every way in which it fails in time."""

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from tensorcast_connector.client.attachment import Attachment
from tensorcast_connector.config import STORAGE_BACKOFF_MAX_S, STORAGE_BACKOFF_MIN_S, STORAGE_COUNTS_MAX
from tensorcast_connector.engines.sglang import page_copies
from tensorcast_connector.engines.sglang import page_store as module
from tensorcast_connector.engines.sglang.page_copies import Parts, Span
from tensorcast_connector.engines.sglang.page_store import Backoff, PageStore
from tensorcast_connector.errors import DeadlineExceeded, Unavailable
from tensorcast_connector.wire.messages import LookupResult
from tests.client.test_attachment import Host, attach, host  # noqa: F401 - fixtures
from tests.cluster import SPACE, hashes
from tests.waiting import until_blocking

KEYS = hashes(4)
PART = 2500
OTHER = b"o" * 16


class Memory:
    """Memory of an engine: pages in two parts, which do not lie side by side."""

    def __init__(self, seed: int) -> None:
        self.parts = [ctypes.create_string_buffer(bytes([seed + n]) * PART, PART) for n in range(2 * len(KEYS))]

    def pages(self) -> list[Parts]:
        spans = [Span(ctypes.addressof(part), PART) for part in self.parts]
        return [(spans[place], spans[len(KEYS) + place]) for place in range(len(KEYS))]

    def bytes(self) -> list[bytes]:
        return [part.raw for part in self.parts]


def store(attachment: Attachment, deadline_s: float = 5.0, **options: Any) -> PageStore:
    return PageStore(attachment, options.get("now", time.monotonic), time.sleep, deadline_s, deadline_s)


def write(
    one: PageStore, memory: Memory, keys: Sequence[bytes] = KEYS, valid: Callable[[], bool] = lambda: True
) -> int:
    return one.write(SPACE, keys, memory.pages(), valid)


def test_pages_come_back_as_they_were(host: Host, attach: Any) -> None:
    host.start()
    one, two = store(attach()), store(attach())
    memory, empty = Memory(1), Memory(100)
    assert one.leading([SPACE], KEYS) == 0 and one.read(SPACE, KEYS, empty.pages()) == 0
    assert write(one, memory) == 4
    assert two.leading([SPACE], KEYS) == 4 and two.leading([SPACE, OTHER], KEYS) == 0
    assert two.read(SPACE, KEYS, empty.pages()) == 4 and empty.bytes() == memory.bytes()
    written, read = one.take_moved()[1], two.take_moved()[0]
    assert list(written.pages) == list(read.pages) == [4] and min(*written.bytes_per_s, *read.bytes_per_s) > 0
    assert not two.take_moved()[0].pages
    for _ in range(STORAGE_COUNTS_MAX + 5):  # nobody asks
        two._count(two._read, 1, memory.pages(), time.monotonic())
    assert len(two.take_moved()[0].pages) == STORAGE_COUNTS_MAX
    assert host.worker is not None
    until_blocking(lambda: host.worker.pages.statistics()["pages_held"] == 0)  # type: ignore[union-attr]


def test_what_is_there_is_written_once_and_counts_as_there(host: Host, attach: Any) -> None:
    host.start()
    one, two = store(attach()), store(attach())
    assert write(one, Memory(1), KEYS[:3]) == 3
    assert write(two, Memory(50)) == 4, "three were there, one was written"
    assert list(two.take_moved()[1].pages) == [1]
    read = Memory(100)
    assert two.read(SPACE, KEYS, read.pages()) == 4
    assert [part[0] for part in read.bytes()] == [1, 2, 3, 53, 5, 6, 7, 57]


def test_a_page_that_another_is_writing_counts_once_that_is_done(host: Host, attach: Any) -> None:
    host.start()
    other = attach()
    mapping = other.mapping
    [slot] = other.reserve(SPACE, KEYS[1:2], 2 * PART, mapping)
    slot[:] = b"x" * 2 * PART
    one = store(attach(), deadline_s=1.0)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        other.commit(SPACE, KEYS[1:2], [1])

    one._wait = wait
    assert write(one, Memory(1)) == 4 and len(waits) == 1


def test_without_room_only_what_is_in_front_counts(host: Host, attach: Any) -> None:
    host.start()  # an arena of 1 MiB
    one = store(attach(), deadline_s=0.1)
    attachment = attach()
    assert None not in attachment.reserve(SPACE, hashes(1, 900), 1 << 20, attachment.mapping)
    assert write(one, Memory(1)) == 0


def test_weights_that_changed_meanwhile_leave_nothing(host: Host, attach: Any) -> None:
    host.start()
    one = store(attach())
    assert write(one, Memory(1), valid=lambda: False) == 0
    assert one.leading([SPACE], KEYS) == 0
    assert write(one, Memory(1)) == 4, "what was reserved was given back"


@pytest.mark.parametrize("shared", [0, 1 << 30])
def test_a_page_that_cannot_be_copied_leaves_nothing(
    host: Host, attach: Any, monkeypatch: pytest.MonkeyPatch, shared: int
) -> None:
    """By whichever thread the page is copied that finds out."""
    monkeypatch.setattr(page_copies, "STORAGE_COPY_SHARED_BYTES", shared)
    host.start()
    one, real, failed = store(attach()), page_copies.copy_out, []

    def losing(parts: Parts, slot: memoryview, move: page_copies.Move) -> None:
        real(parts, slot, move)
        if not failed:
            failed.append(threading.get_ident())
            raise Unavailable("lost")

    monkeypatch.setattr(module, "copy_out", losing)
    assert write(one, Memory(1)) == 0 and failed
    assert one.leading([SPACE], KEYS) == 0
    assert write(one, Memory(1)) == 4, "what was reserved was given back"
    memory = Memory(100)
    assert one.read(SPACE, KEYS, memory.pages()) == 4 and memory.bytes() == Memory(1).bytes()


class Slow:
    """A worker that takes 4 s for every answer, by a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.given: list[tuple[str, float]] = []
        self.connected, self.mapping = True, object()

    def _answer(self, what: str, timeout_s: float) -> None:
        self.given.append((what, timeout_s))
        self.now += min(4.0, timeout_s)
        if timeout_s < 4:
            raise DeadlineExceeded("late")

    def acquire(self, *asked: Any) -> list[memoryview]:
        self._answer("acquire", asked[-1])
        return []

    def reserve(self, *asked: Any) -> list[None]:
        self._answer("reserve", asked[-1])
        return [None] * len(KEYS)

    def lookup(self, *_: Any) -> Future[LookupResult]:
        self.now += 4.0
        found: Future[LookupResult] = Future()
        found.set_result(LookupResult(0, 0))
        return found

    def still_holds(self, _: object) -> bool:
        return True

    def release(self, _: object) -> None:
        """Nothing is held."""


def test_a_batch_has_one_deadline_whatever_its_pages_are_cut_into() -> None:
    def begin() -> tuple[Slow, PageStore, float]:
        worker = Slow()
        one = PageStore(worker, lambda: worker.now, lambda _: None, 5.0, 5.0)  # type: ignore[arg-type]
        return worker, one, one.until()

    worker, one, until = begin()
    assert [one.read(space, KEYS, Memory(1).pages(), until) for space in (SPACE, OTHER, SPACE)] == [0, 0, 0]
    assert worker.given == [("acquire", 5.0), ("acquire", 1.0)] and worker.now == 5.0
    worker, one, until = begin()
    assert [one.write(space, KEYS, Memory(1).pages(), lambda: True, until) for space in (SPACE, OTHER)] == [0, 0]
    assert worker.given == [("reserve", 5.0)] and worker.now == 8.0, "and one lookup"


def test_scattered_pages(host: Host, attach: Any) -> None:
    host.start()
    one = store(attach())
    one.write(SPACE, KEYS[1:2] + KEYS[3:], Memory(1).pages()[:2], lambda: True)
    assert one.scattered([SPACE], KEYS, 100) == [False, True, False, True]
    assert one.scattered([SPACE], KEYS, 2) == [False, False, False, True]
    assert one.scattered([SPACE], [], 2) == []


def test_a_long_prompt_is_looked_up_in_parts(host: Host, attach: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STORAGE_KEYS_PER_LOOKUP", 2)
    host.start()
    one = store(attach())
    assert write(one, Memory(1), KEYS[:3]) == 3
    assert one.leading([SPACE], KEYS) == 3 and one.leading([SPACE], KEYS[:2]) == 2
    assert one.leading([SPACE, SPACE], KEYS) == 3 and one.leading([SPACE], KEYS[3:]) == 0


def test_pages_of_another_size_are_not_taken(host: Host, attach: Any, caplog: pytest.LogCaptureFixture) -> None:
    host.start()
    one = store(attach())
    assert write(one, Memory(1)) == 4
    memory = Memory(100)
    half = [parts[:1] for parts in memory.pages()]
    assert one.read(SPACE, KEYS, half) == 0 and memory.bytes() == Memory(100).bytes()
    assert "2500 belong" in caplog.text


def test_without_a_worker_all_is_a_miss_and_goes_on_when_it_is_back(host: Host, attach: Any) -> None:
    host.start()
    attachment = attach()
    one = store(attachment)
    assert write(one, Memory(1)) == 4
    host.stop()
    until_blocking(lambda: not attachment.connected)
    assert one.leading([SPACE], KEYS) == one.read(SPACE, KEYS, Memory(9).pages()) == write(one, Memory(1)) == 0
    assert one.scattered([SPACE], KEYS, 9) == [False] * 4
    host.start()
    until_blocking(lambda: attachment.connected)
    assert one.leading([SPACE], KEYS) == 0, "another arena"
    assert write(one, Memory(1)) == 4 and one.leading([SPACE], KEYS) == 4


def test_an_error_is_told_once_until_something_goes_well(
    host: Host, attach: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, module.__name__)
    host.start()
    one = store(attach())
    for _ in range(2):
        for _ in range(3):
            assert one.leading([b"short"], KEYS) == one.read(b"short", KEYS, Memory(1).pages()) == 0
        assert one.leading([SPACE], KEYS) == 0
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and all("a keyspace has 16 bytes" in line for line in lines)


@pytest.mark.slow
def test_a_worker_that_is_late_is_left_alone_and_asked_again(
    host: Host, attach: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, module.__name__)
    host.start()
    now = [0.0]
    one = store(attach(), deadline_s=0.05, now=lambda: now[0])
    stopped = threading.Event()
    host.loop.call_soon_threadsafe(stopped.wait, 5)
    began = time.monotonic()
    assert one.leading([SPACE], KEYS) == 0
    for _ in range(100):
        assert one.read(SPACE, KEYS, Memory(9).pages()) == write(one, Memory(1)) == one.leading([SPACE], KEYS) == 0
    assert time.monotonic() - began < 1.0, "one call waited, the others did not"
    now[0] += STORAGE_BACKOFF_MIN_S
    assert one.read(SPACE, KEYS, Memory(9).pages()) == 0
    stopped.set()
    now[0] += 2 * STORAGE_BACKOFF_MIN_S
    until_blocking(lambda: write(one, Memory(1)) == 4)
    lines = [record.getMessage() for record in caplog.records if record.name == module.__name__]
    assert len(lines) == 2 and "left out" in lines[0] and "in time again" in lines[1]


def test_backoff_doubles_up_to_its_limit() -> None:
    backoff = Backoff()
    assert backoff.open(0.0) and not backoff.answered()
    now, pauses = 0.0, []
    for _ in range(10):
        assert backoff.late(now) is (not pauses)
        begin = now
        while not backoff.open(now):
            now += STORAGE_BACKOFF_MIN_S
        pauses.append(now - begin)
    assert pauses[:4] == [STORAGE_BACKOFF_MIN_S * factor for factor in (1, 2, 4, 8)]
    assert pauses[-1] == STORAGE_BACKOFF_MAX_S
    assert backoff.answered() and not backoff.answered() and backoff.open(0.0)
