"""Shared memory that is written for the first time: faults are counted on real mappings, of huge pages and of small ones."""

import ctypes
import errno
import gc
import mmap
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorcast_connector.net import mapping as module
from tensorcast_connector.net.mapping import HUGE_PAGE_BYTES, FirstTouch, allocate, map_memory, map_shared

SIZE = 4 * HUGE_PAGE_BYTES + 3 * mmap.PAGESIZE
PAGES = -(-SIZE // mmap.PAGESIZE)
NONE_SUCH = 4321  # advice that no kernel knows: it answers as one that is too old
FEW = 40  # Python's own, and those of huge pages


def faults(work: Callable[[], object]) -> int:
    """Of this thread."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def fill(memory: memoryview, value: int = 7) -> None:
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), value, memory.nbytes)


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:test-mapping" in line]


def resident_bytes(memory: memoryview) -> int:
    """What of a mapping this process has in its page tables."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{start:x}-"):
            return 1024 * next(int(each.split()[1]) for each in lines if each.startswith("Rss:"))
    raise AssertionError("not mapped")


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create("test-mapping", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, SIZE)
    yield descriptor
    os.close(descriptor)
    gc.collect()
    assert not mappings()


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MADV_COLLAPSE", NONE_SUCH)


def test_in_huge_pages_whoever_writes_first_takes_next_to_no_faults(descriptor: int) -> None:
    if not allocate(descriptor, 0, SIZE):
        pytest.skip("this kernel makes no huge pages of shared memory")
    assert os.fstat(descriptor).st_blocks * 512 == SIZE
    memory = map_shared(descriptor, SIZE)
    assert not any(memory[:: mmap.PAGESIZE])
    assert faults(lambda: fill(memory)) < FEW
    again = map_shared(descriptor, SIZE)
    assert faults(lambda: fill(again, 9)) < FEW and memory[SIZE - 1] == 9


def test_in_small_pages_who_maps_ahead_takes_next_to_no_faults(descriptor: int, small_pages: None) -> None:
    assert allocate(descriptor, 0, SIZE) is False
    assert os.fstat(descriptor).st_blocks * 512 == SIZE
    memory = map_shared(descriptor, SIZE)
    assert faults(lambda: fill(memory)) >= PAGES, "this is what is spared"
    del memory
    memory = map_shared(descriptor, SIZE)
    FirstTouch(memory).write([(0, SIZE)])
    assert faults(lambda: fill(memory)) < FEW and resident_bytes(memory) == SIZE


def test_memory_is_zeroed_before_it_is_handed_out(descriptor: int, small_pages: None) -> None:
    """The kernel zeroes what is only allocated when it is touched, and names it a hole until then."""
    os.posix_fallocate(descriptor, 0, SIZE)
    assert os.lseek(descriptor, 0, os.SEEK_HOLE) == 0
    allocate(descriptor, 0, SIZE)
    assert os.lseek(descriptor, 0, os.SEEK_HOLE) == SIZE


def test_memory_is_allocated_part_by_part(descriptor: int) -> None:
    part = 2 * HUGE_PAGE_BYTES
    allocate(descriptor, 0, part)
    assert os.fstat(descriptor).st_blocks * 512 == part
    allocate(descriptor, part, SIZE - part)
    assert os.fstat(descriptor).st_blocks * 512 == SIZE
    allocate(descriptor, part - mmap.PAGESIZE, HUGE_PAGE_BYTES)  # not from the start of a huge page


def test_no_memory(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", none)
    for start in (0, mmap.PAGESIZE):
        with pytest.raises(OSError, match="No space left"):
            allocate(descriptor, start, HUGE_PAGE_BYTES)


def test_only_what_is_written_to_is_mapped(descriptor: int, small_pages: None) -> None:
    allocate(descriptor, 0, SIZE)
    memory = map_shared(descriptor, SIZE)
    touch = FirstTouch(memory)
    touch.write([])
    assert resident_bytes(memory) == 0
    touch.write([(3 * HUGE_PAGE_BYTES - 1, 2), (100, 1), (200, 1)])
    assert resident_bytes(memory) == 3 * HUGE_PAGE_BYTES and repr(touch) == "<FirstTouch 2 of 5 left>"
    touch.write([(4 * HUGE_PAGE_BYTES, 1)])  # less than 2 MiB are left there
    assert resident_bytes(memory) == 3 * HUGE_PAGE_BYTES + 3 * mmap.PAGESIZE


def counted(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int, int], int]) -> list[int]:
    """The sizes that the kernel is asked to map."""
    asked: list[int] = []

    def populate(address: int, size: int) -> int:
        asked.append(size)
        return answer(address, size)

    monkeypatch.setattr(module, "populate", populate)
    return asked


def test_what_lies_together_is_one_call_and_each_is_mapped_once(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = counted(monkeypatch, lambda *_: 0)
    touch = FirstTouch(map_shared(descriptor, SIZE))
    touch.write([(place << 20, 1 << 20) for place in (5, 1, 0, 4)])
    assert asked == [HUGE_PAGE_BYTES, HUGE_PAGE_BYTES]
    touch.write([(place << 20, 1 << 20) for place in range(8)])
    assert asked[2:] == [HUGE_PAGE_BYTES, HUGE_PAGE_BYTES]
    touch.write([(0, SIZE)])
    touch.write([(0, SIZE)])
    assert asked[4:] == [SIZE - 4 * HUGE_PAGE_BYTES]


def test_a_kernel_that_is_too_old_is_asked_once(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", NONE_SUCH)
    real = module.populate
    asked = counted(monkeypatch, real)
    allocate(descriptor, 0, SIZE)
    asked.clear()
    memory = map_shared(descriptor, SIZE)
    touch = FirstTouch(memory)
    assert real(ctypes.addressof(ctypes.c_char.from_buffer(memory)), SIZE) == errno.EINVAL
    for offset in (0, HUGE_PAGE_BYTES):
        touch.write([(offset, 1)])
    assert asked == [HUGE_PAGE_BYTES]
    fill(memory)


def test_after_another_error_the_next_is_tried(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch, lambda *_: errno.EFAULT)
    touch = FirstTouch(map_shared(descriptor, SIZE))
    for offset in (0, 1, HUGE_PAGE_BYTES):
        touch.write([(offset, 1)])
    assert asked == [HUGE_PAGE_BYTES] * 2


def test_memory_that_is_let_go_of_while_it_is_mapped_ahead(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate(descriptor, 0, SIZE)
    inside, go, real, results = threading.Event(), threading.Event(), module.populate, []

    def slow(address: int, size: int) -> int:
        inside.set()
        assert go.wait(10)
        results.append(real(address, size))
        return results[-1]

    memory = map_shared(descriptor, SIZE)
    touch = FirstTouch(memory)
    monkeypatch.setattr(module, "populate", slow)
    thread = threading.Thread(target=touch.write, args=([(0, SIZE)],))
    thread.start()
    assert inside.wait(10)
    del memory, touch
    gc.collect()
    assert mappings()
    go.set()
    thread.join()
    del thread
    gc.collect()
    assert results == [0] and not mappings()


def test_a_part_keeps_the_mapping(descriptor: int) -> None:
    part = map_shared(descriptor, SIZE)[5:9]
    gc.collect()
    assert mappings()
    part[:] = b"abcd"
    assert os.pread(descriptor, 4, 5) == b"abcd" and not part.readonly and part.format == "B"


def test_more_than_there_is_is_not_mapped(descriptor: int) -> None:
    for size in (SIZE + 1, 0, -1, 1 << 62):
        with pytest.raises(ValueError, match="bytes of"):
            map_shared(descriptor, size)


def test_where_the_kernel_gives_no_room_to_choose_from(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = mmap.mmap

    def strict(number: int, size: int, *more: int) -> Any:
        if number < 0:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(number, size, *more)

    monkeypatch.setattr(mmap, "mmap", strict)
    memory = map_shared(descriptor, SIZE)
    fill(memory)
    assert os.pread(descriptor, 1, SIZE - 1) == b"\7" and memory.nbytes == SIZE


def test_a_descriptor_that_cannot_be_mapped() -> None:
    reading, writing = os.pipe()
    try:
        with pytest.raises(OSError, match="mmap"):
            map_memory(reading, 1)
        with pytest.raises(ValueError, match="bytes of 0"):
            map_shared(reading, 1)
    finally:
        os.close(reading)
        os.close(writing)
