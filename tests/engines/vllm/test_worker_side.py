"""A rank without an engine: every job ends, whatever happens to the worker."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import xxhash

from tensorcast_connector.client.attachment import Mapping
from tensorcast_connector.engines.vllm.jobs import LoadJob, SaveJob
from tensorcast_connector.engines.vllm.weights_state import UNKNOWN, WeightsReport, WeightsState
from tensorcast_connector.engines.vllm.worker_side import LOAD_PAGES_PER_PART, WorkerSide
from tensorcast_connector.errors import Unavailable

PAGE = 64


class FakeCopier:
    """A KV cache of bytes: block n holds PAGE times n."""

    page_bytes = PAGE

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}

    def save(self, block_id: int, page: memoryview) -> None:
        if block_id == 666:
            raise RuntimeError("broken block")
        page[:] = bytes([block_id % 256]) * PAGE

    def load(self, block_id: int, page: memoryview) -> None:
        self.blocks[block_id] = bytes(page)


class FakeWorker:
    """An arena in a dict."""

    connected = True

    def __init__(self) -> None:
        self.mapping = Mapping("w/1", memoryview(bytearray(1)))
        self.pages: dict[bytes, bytearray] = {}
        self.committed: dict[bytes, int] = {}
        self.aborted: list[bytes] = []
        self.released: list[str] = []
        self.fail: Callable[[], None] = lambda: None

    def still_holds(self, mapping: Mapping) -> bool:
        return mapping is self.mapping

    @contextmanager
    def writing(self, mapping: Mapping) -> Iterator[None]:
        if mapping is not self.mapping:
            raise Unavailable("lost the worker while pages were copied")
        yield

    def acquire(self, hold_id: str, keyspace: bytes, hashes: Sequence[bytes], mapping: Mapping) -> list[memoryview]:
        self.fail()
        found: list[memoryview] = []
        for each in hashes:
            if keyspace + each not in self.committed:
                break
            found.append(memoryview(self.pages[keyspace + each]))
        return found

    def release(self, hold_ids: Sequence[str]) -> None:
        self.released += hold_ids

    def reserve(
        self, keyspace: bytes, hashes: Sequence[bytes], page_bytes: int, mapping: Mapping
    ) -> list[memoryview | None]:
        self.fail()
        slots: list[memoryview | None] = []
        for each in hashes:
            exists = keyspace + each in self.pages
            slots.append(None if exists else memoryview(self.pages.setdefault(keyspace + each, bytearray(page_bytes))))
        return slots

    def commit(self, keyspace: bytes, hashes: Sequence[bytes], digests: Sequence[int]) -> None:
        self.committed.update(zip([keyspace + each for each in hashes], digests, strict=True))

    def abort(self, keyspace: bytes, hashes: Sequence[bytes]) -> None:
        self.aborted += hashes


def hashes(count: int) -> list[bytes]:
    return [i.to_bytes(32, "big") for i in range(count)]


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
def weights() -> WeightsState:
    return WeightsState()


@pytest.fixture
def side(worker: FakeWorker, weights: WeightsState) -> Iterator[WorkerSide]:
    side = WorkerSide(worker, rank=1, weights=weights)
    side.use(FakeCopier())
    yield side
    side.close()


def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("not within 2 s")


def save(side: WorkerSide, job: SaveJob) -> None:
    side.start_saves([job])
    done: dict[int, int] = {}
    until(lambda: bool(done.update(side.take_saved()) or done.get(job.job_id)))


def load(side: WorkerSide, job: LoadJob) -> set[int]:
    side.start_loads([job])
    received: set[str] = set()
    until(lambda: bool(received.update(side.take_received()) or job.request_id in received))
    return side.take_failed_blocks()


def test_what_is_saved_is_loaded_in_this_ranks_own_keyspace(side: WorkerSide, worker: FakeWorker) -> None:
    count = 2 * LOAD_PAGES_PER_PART + 3
    spaces = [b"0" * 16, b"1" * 16]
    save(side, SaveJob(1, spaces, list(range(count)), hashes(count)))
    assert set(worker.committed) == {b"1" * 16 + each for each in hashes(count)}
    assert worker.committed[b"1" * 16 + hashes(count)[5]] == xxhash.xxh3_64_intdigest(bytes([5]) * PAGE)
    assert load(side, LoadJob("r", spaces, list(range(100, 100 + count)), hashes(count))) == set()
    copier = side._copier
    assert isinstance(copier, FakeCopier)
    assert {block: data[0] for block, data in copier.blocks.items()} == {100 + i: i for i in range(count)}
    assert len(worker.released) == 3


def test_pages_that_exist_are_not_written_again(side: WorkerSide, worker: FakeWorker) -> None:
    save(side, SaveJob(1, [b"0" * 16] * 2, [1, 2], hashes(2)))
    save(side, SaveJob(2, [b"0" * 16] * 2, [5, 6, 7], hashes(3)))
    assert bytes(worker.pages[b"0" * 16 + hashes(3)[0]]) == bytes([1]) * PAGE
    assert bytes(worker.pages[b"0" * 16 + hashes(3)[2]]) == bytes([7]) * PAGE


def test_a_missing_page_fails_its_block_and_those_behind_it_in_its_part(side: WorkerSide, worker: FakeWorker) -> None:
    save(side, SaveJob(1, [b"0" * 16] * 2, [0, 1, 2, 3], hashes(4)))
    del worker.committed[b"0" * 16 + hashes(4)[2]]
    assert load(side, LoadJob("r", [b"0" * 16] * 2, [10, 11, 12, 13], hashes(4))) == {12, 13}


def test_a_page_of_the_wrong_size_is_not_loaded(side: WorkerSide, worker: FakeWorker) -> None:
    save(side, SaveJob(1, [b"0" * 16] * 2, [0, 1], hashes(2)))
    worker.pages[b"0" * 16 + hashes(2)[1]] = bytearray(PAGE // 2)
    assert load(side, LoadJob("r", [b"0" * 16] * 2, [10, 11], hashes(2))) == {11}


def test_a_dead_worker_fails_loads_and_ends_saves(side: WorkerSide, worker: FakeWorker) -> None:
    def gone() -> None:
        raise Unavailable("gone")

    worker.fail = gone
    assert load(side, LoadJob("r", [b"0" * 16] * 2, [1, 2], hashes(2))) == {1, 2}
    save(side, SaveJob(1, [b"0" * 16] * 2, [1, 2], hashes(2)))
    assert worker.committed == {}


def test_pages_that_were_let_go_while_they_were_copied_are_not_trusted(side: WorkerSide, worker: FakeWorker) -> None:
    save(side, SaveJob(1, [b"0" * 16] * 2, [0, 1], hashes(2)))
    copier = side._copier
    assert isinstance(copier, FakeCopier)
    load_one = copier.load

    def load_and_lose(block_id: int, page: memoryview) -> None:
        load_one(block_id, page)
        worker.mapping = Mapping("w/2", memoryview(bytearray(1)))

    copier.load = load_and_lose  # type: ignore[method-assign]
    assert load(side, LoadJob("r", [b"0" * 16] * 2, [10, 11], hashes(2))) == {10, 11}


def test_nothing_is_written_to_slots_that_were_let_go(side: WorkerSide, worker: FakeWorker) -> None:
    copier = side._copier
    assert isinstance(copier, FakeCopier)
    save_one, written = copier.save, []

    def save_and_lose(block_id: int, page: memoryview) -> None:
        save_one(block_id, page)
        written.append(block_id)
        worker.mapping = Mapping("w/2", memoryview(bytearray(1)))

    copier.save = save_and_lose  # type: ignore[method-assign]
    save(side, SaveJob(1, [b"0" * 16] * 2, [3, 4, 5], hashes(3)))
    assert written == [3] and worker.committed == {}


def test_a_fault_of_our_own_also_ends_the_job(
    side: WorkerSide, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    def bug() -> None:
        raise ZeroDivisionError

    worker.fail = bug
    assert load(side, LoadJob("r", [b"0" * 16] * 2, [1, 2], hashes(2))) == {1, 2}
    worker.fail = lambda: None
    save(side, SaveJob(1, [b"0" * 16] * 2, [1, 666], hashes(2)))
    assert worker.aborted == hashes(2), "a half-written page is never committed"
    assert worker.committed == {}
    assert "failed" in caplog.text


def test_a_report_says_what_is_new(side: WorkerSide, worker: FakeWorker) -> None:
    assert side.take_report() == {"attached": 1}
    assert side.take_report() == {}
    save(side, SaveJob(1, [b"0" * 16] * 2, [0, 1], hashes(2)))
    load(side, LoadJob("r", [b"0" * 16] * 2, [10, 11, 12], hashes(3)))
    assert side.take_report() == {"pages_saved": 2, "pages_loaded": 2, "pages_failed": 1, "attached": 1}
    worker.connected = False
    assert side.take_report() == {"attached": 0}


def test_without_a_kv_cache_everything_fails_softly(worker: FakeWorker) -> None:
    side = WorkerSide(worker, rank=0, weights=WeightsState())
    assert load(side, LoadJob("r", [b"0" * 16], [1], hashes(1))) == {1}
    save(side, SaveJob(1, [b"0" * 16], [1], hashes(1)))
    side.close()


# --- weights that change ---


def test_what_was_planned_under_former_weights_is_neither_loaded_nor_saved(
    side: WorkerSide, worker: FakeWorker, weights: WeightsState
) -> None:
    spaces = [b"0" * 16] * 2
    save(side, SaveJob(1, spaces, [0, 1], hashes(2)))
    weights.begin()
    for end in (lambda: None, lambda: weights.end("b")):  # while they change, and afterwards
        end()
        assert load(side, LoadJob("r", spaces, [10, 11], hashes(2))) == {10, 11}
        save(side, SaveJob(2, spaces, [2, 3, 4], hashes(4)[1:]))
        assert len(worker.pages) == 2, "dropped before bytes are copied"
    copier = side._copier
    assert isinstance(copier, FakeCopier) and copier.blocks == {}
    assert load(side, LoadJob("s", spaces, [10, 11], hashes(2), changes=1)) == set()
    save(side, SaveJob(3, spaces, [3], hashes(3)[2:], changes=1))
    assert len(worker.committed) == 3


def test_nothing_is_loaded_or_saved_while_weights_change(
    side: WorkerSide, worker: FakeWorker, weights: WeightsState
) -> None:
    spaces = [b"0" * 16] * 2
    save(side, SaveJob(1, spaces, [0, 1], hashes(2)))
    weights.begin()
    assert load(side, LoadJob("r", spaces, [10, 11], hashes(2), changes=1)) == {10, 11}
    save(side, SaveJob(2, spaces, [2], hashes(3)[2:], changes=1))
    assert len(worker.committed) == 2


def test_a_save_under_way_when_weights_change_is_not_committed(
    side: WorkerSide, worker: FakeWorker, weights: WeightsState
) -> None:
    copier = side._copier
    assert isinstance(copier, FakeCopier)
    save_one = copier.save

    def save_and_change(block_id: int, page: memoryview) -> None:
        save_one(block_id, page)
        if block_id == 4:
            weights.begin()
            weights.end("b")

    copier.save = save_and_change  # type: ignore[method-assign]
    save(side, SaveJob(1, [b"0" * 16] * 2, [3, 4, 5], hashes(3)))
    assert worker.committed == {} and worker.aborted == hashes(3)


def test_what_was_loaded_just_before_weights_changed_is_computed_as_a_whole(
    side: WorkerSide, worker: FakeWorker, weights: WeightsState
) -> None:
    spaces = [b"0" * 16] * 2
    save(side, SaveJob(1, spaces, [0, 1, 2], hashes(3)))
    side.start_loads([LoadJob("r", spaces, [10, 11, 12], hashes(3))])
    until(lambda: bool(side._received))
    weights.begin()
    weights.end("b")
    assert side.take_received() == {"r"}
    assert side.take_failed_blocks() == {10, 11, 12}


def test_a_rank_tells_its_weights_when_they_have_changed_and_when_asked(
    side: WorkerSide, weights: WeightsState
) -> None:
    assert side.take_weights(asked=False) is None
    assert side.take_weights(asked=True) == WeightsReport()
    weights.begin()
    weights.end("b")
    assert side.take_weights(asked=False) == WeightsReport(1, "b")
    assert side.take_weights(asked=False) is None
    weights.begin()
    weights.end(UNKNOWN)
    assert side.take_weights(asked=False) == WeightsReport(2, UNKNOWN)
