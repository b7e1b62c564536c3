"""Batches that several threads copy: all of it, by whoever has time, and nobody copies any more at the end."""

import ctypes
import sys
import threading

import pytest

from tensorcast_connector.config import STORAGE_COPY_SHARED_BYTES, STORAGE_COPY_THREADS
from tensorcast_connector.engines.sglang.page_copies import Span, Together, copy_in, copy_out, move_of
from tensorcast_connector.errors import Unavailable
from tests.waiting import until_blocking

LARGE = STORAGE_COPY_SHARED_BYTES
T = 10.0


def test_a_large_batch_is_copied_by_all_threads_at_once() -> None:
    together = Together()
    meeting = threading.Barrier(STORAGE_COPY_THREADS, timeout=T)
    by: dict[int, str] = {}

    def copy(number: int) -> None:
        if number < STORAGE_COPY_THREADS:
            meeting.wait()  # passed only if they are all here
        by[number] = threading.current_thread().name

    together.run(copy, 50, LARGE)
    assert sorted(by) == list(range(50)) and len({by[each] for each in range(STORAGE_COPY_THREADS)}) == len(
        {*by.values()}
    )


def test_a_small_batch_is_copied_by_the_caller_alone() -> None:
    by: set[int] = set()
    Together().run(lambda _: by.add(threading.get_ident()), 50, LARGE - 1)
    assert by == {threading.get_ident()}
    Together().run(lambda _: by.add(0), 0, 0)
    assert 0 not in by


def test_while_the_others_help_somebody_else_the_caller_does_it_all() -> None:
    together = Together()
    go = threading.Event()
    inside: list[int] = []

    def stuck(number: int) -> None:
        inside.append(number)
        assert go.wait(T)

    busy = threading.Thread(target=together.run, args=(stuck, STORAGE_COPY_THREADS, LARGE))
    busy.start()
    try:
        until_blocking(lambda: len(inside) == STORAGE_COPY_THREADS)
        by: list[int] = []
        together.run(lambda _: by.append(threading.get_ident()), 20, LARGE)
        assert by == [threading.get_ident()] * 20
    finally:
        go.set()
        busy.join()


@pytest.mark.parametrize("in_caller", [True, False])
def test_what_fails_is_raised_when_nobody_copies_any_more(in_caller: bool) -> None:
    meeting = threading.Barrier(STORAGE_COPY_THREADS, timeout=T)
    caller, ended = threading.get_ident(), []

    def copy(number: int) -> None:
        if number < STORAGE_COPY_THREADS:
            meeting.wait()
        if number < STORAGE_COPY_THREADS and (threading.get_ident() == caller) == in_caller:
            raise Unavailable("lost")
        ended.append(number)

    with pytest.raises(Unavailable, match="lost"):
        Together().run(copy, 30, LARGE)
    count = len(ended)
    assert count == 30 - (1 if in_caller else STORAGE_COPY_THREADS - 1) and len(ended) == count


def test_a_process_that_ends_starts_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Together()
    together._helpers.shutdown()
    done: list[int] = []
    together.run(done.append, 3, LARGE)
    assert done == [0, 1, 2]


def test_the_threads_end_with_the_object() -> None:
    together = Together()
    together.run(lambda _: None, 50, LARGE)
    threads = list(together._helpers._threads)
    assert threads
    del together
    until_blocking(lambda: not any(each.is_alive() for each in threads))


@pytest.mark.parametrize("size", [LARGE, LARGE - 1])
def test_parts_of_a_page_follow_one_another(size: int) -> None:
    move = move_of(size)
    one, two, slot = ctypes.create_string_buffer(b"abc", 3), ctypes.create_string_buffer(b"de", 2), bytearray(5)
    parts = [Span(ctypes.addressof(one), 3), Span(ctypes.addressof(two), 2)]
    copy_out(parts, memoryview(slot), move)
    assert slot == b"abcde"
    copy_in(memoryview(bytearray(b"vwxyz")), parts, move)
    assert one.raw + two.raw == b"vwxyz"
    with pytest.raises(Unavailable, match="5 bytes where the others have 4"):
        copy_out(parts, memoryview(slot)[:4], move)


@pytest.mark.slow
def test_a_small_batch_is_copied_while_nobody_else_runs() -> None:
    """Beside a thread that never rests, as SGLang's scheduler, every part that lets go of the GIL may wait for it."""
    pages = 256
    source, target = ctypes.create_string_buffer(pages * 4096), bytearray(pages * 4096)
    slots = [memoryview(target)[at : at + 4096] for at in range(0, len(target), 4096)]
    parts = [[Span(ctypes.addressof(source) + at, 4096)] for at in range(0, len(target), 4096)]
    ran = 0
    stopped = threading.Event()

    def never_rest() -> None:
        nonlocal ran
        while not stopped.is_set():
            ran += 1

    spinning = threading.Thread(target=never_rest)
    before, between = sys.getswitchinterval(), 0
    sys.setswitchinterval(0.2)
    try:
        spinning.start()
        until_blocking(lambda: ran > 0, 60)
        count = ran
        for number, slot in enumerate(slots):
            copy_in(slot, parts[number], move_of(len(target)))
        between = ran - count
    finally:
        sys.setswitchinterval(before)
        stopped.set()
        spinning.join()
    assert between == 0
