"""What is asked of a disk ahead of the reads: only if one is waited for, only what will be read, in time, nothing twice."""

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from benchmarks.programs.loads import forget

from tensorcast_connector.client import read_ahead
from tensorcast_connector.client.checkpoint import Checkpoint
from tensorcast_connector.client.image import FileImage, FilePart, Image
from tensorcast_connector.client.read_ahead import ReadAhead, Span, read_cached, step_bytes
from tensorcast_connector.client.reading import Piece, _Ring, read_all, read_part, stream
from tests.client.checkpoints import random_folder
from tests.client.read_log import CHUNK, Log, log

__all__ = ["log"]
SIZES = {f"t{number}": size for number, size in enumerate([700, 2500, 1, 0, 900, 4000, 5300, 64])}


# --- the window ---


def spans(*sizes: tuple[int, int, int]) -> list[Span]:
    found, at = [], 0
    for descriptor, offset, size in sizes:
        found.append(Span(at, descriptor, offset, size))
        at += size
    return found


def test_the_window_moves_on_and_nothing_is_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(read_ahead, "READ_AHEAD_BYTES", 3000)
    monkeypatch.setattr(read_ahead, "READ_AHEAD_STEP_MIN_BYTES", 1000)
    monkeypatch.setattr(read_ahead.os, "posix_fadvise", lambda *told: asked.append(told[:3]))
    ahead = ReadAhead(spans((5000, 100, 2500), (6000, 0, 3500), (5000, 9000, 10)))  # no such descriptors
    ahead.reached(0)
    assert not asked, "all is in the page cache"
    ahead.waited()
    ahead.reached(1000)
    # What is before 1000 was read. A step begins less than 3000 behind it, and has at most 1000 bytes of one file.
    assert asked == [(5000, 1100, 1000), (5000, 2100, 500), (6000, 0, 1000), (6000, 1000, 1000)]
    ahead.reached(1000)
    ahead.reached(500)
    assert len(asked) == 4
    ahead.reached(5800)
    assert asked[4:] == [(6000, 3000, 500), (5000, 9000, 10)], "what was passed meanwhile is not asked for"
    ahead.reached(10_000)
    assert len(asked) == 6


def test_what_the_kernel_refuses_is_left_to_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError("no")

    monkeypatch.setattr(read_ahead.os, "posix_fadvise", refuse)
    ahead = ReadAhead(spans((5, 0, 10)))
    ahead.waited()
    ahead.reached(0)


@pytest.mark.parametrize(
    ("told", "kib"),
    [
        ({"read_ahead_kb": 128, "max_sectors_kb": 1280}, 1280),
        ({"read_ahead_kb": 512, "max_sectors_kb": 128}, 512),
        ({"read_ahead_kb": 8192, "max_sectors_kb": 4096}, 4096),  # no more at once
        ({"read_ahead_kb": 0, "max_sectors_kb": 64}, 128),
        ({}, 128),
        ({"read_ahead_kb": "x"}, 128),
    ],
)
@pytest.mark.parametrize("partition", [False, True])
def test_a_step_is_what_the_kernel_takes_whole(
    told: dict[str, object], kib: int, partition: bool, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    (disk / "queue").mkdir(parents=True)
    for name, value in told.items():
        (disk / "queue" / name).write_text(f"{value}\n")
    where = disk / "disk1" if partition else disk
    where.mkdir(exist_ok=True)
    (tmp_path / "8:1").symlink_to(where)
    assert step_bytes(os.makedev(8, 1), tmp_path) == kib << 10
    assert step_bytes(os.makedev(0, 50), tmp_path) == 128 << 10, "a network file system"


# --- the ways to read ---


def memory_for(checkpoint: Checkpoint) -> dict[str, bytearray]:
    return {name: bytearray(each.bytes) for name, each in checkpoint.tensors.items()}


def all_of(checkpoint: Checkpoint) -> dict[str, bytearray]:
    memory = memory_for(checkpoint)
    read_all(
        (Piece.of(checkpoint, each, memoryview(memory[each.name])) for each in checkpoint.tensors.values()), threads=1
    )
    return memory


def streamed(checkpoint: Checkpoint) -> dict[str, bytearray]:
    found: dict[str, bytearray] = {}

    def run(ring: _Ring) -> None:  # no thread reads but this one
        for number, each in enumerate(order):
            found[each.name] = bytearray(ring.take(number))
            ring.release(number)

    order = list(checkpoint.tensors.values())
    run(_Ring(checkpoint, order, [4096 * (each.bytes // 4096 + 1) for each in order], 1 << 20))
    return found


def written(image: Image) -> dict[str, bytearray]:
    target = np.empty(image.size, np.uint8)
    for chunk in range(image.chunks):
        image.write(chunk, target[chunk * CHUNK :])
    return {each.name: bytearray(target[each.offset : each.offset + each.bytes]) for each in image.specs}


def put(checkpoint: Checkpoint) -> dict[str, bytearray]:
    image = FileImage(checkpoint.path)
    try:
        return written(image)
    finally:
        image.close()


def put_with_others(checkpoint: Checkpoint) -> dict[str, bytearray]:
    others = {f"a{number}": np.zeros(1500, np.uint8) for number in range(2)}
    made = written(FilePart(checkpoint, list(checkpoint.tensors), others))
    return {name: data for name, data in made.items() if name not in others}


def stored(checkpoint: Checkpoint) -> dict[str, bytearray]:
    image, memory = FileImage(checkpoint.path), os.memfd_create("image")
    try:
        os.truncate(memory, image.size)
        for chunk in range(image.chunks):
            image.store(chunk, memory)
        return {each.name: bytearray(os.pread(memory, each.bytes, each.offset)) for each in image.specs}
    finally:
        image.close()
        os.close(memory)


Way = Callable[[Checkpoint], dict[str, bytearray]]
WAYS = pytest.mark.parametrize("way", [all_of, streamed, put, put_with_others, stored])


@WAYS
def test_of_a_disk_what_comes_next_is_asked_for_in_time(way: Way, log: Log, tmp_path: Path) -> None:
    wanted = random_folder(tmp_path, SIZES)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert way(checkpoint) == wanted
    assert len(log.read) == sum(SIZES.values())
    log.check()


@WAYS
def test_of_the_page_cache_nothing_is_asked(way: Way, log: Log, tmp_path: Path) -> None:
    log.cached = True
    wanted = random_folder(tmp_path, SIZES)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert way(checkpoint) == wanted
    assert len(log.read) == sum(SIZES.values()) and not log.asked


def test_what_has_read_a_part_is_let_go_of_at_once(tmp_path: Path) -> None:
    # A ring has tens of megabytes; the garbage collector may not come for long.
    random_folder(tmp_path, SIZES)
    gc.disable()
    try:
        with Checkpoint.open(tmp_path) as checkpoint:
            order = list(checkpoint.tensors.values())
            ring = _Ring(checkpoint, order, [8192] * len(order), 1 << 20)
            ring.take(0)
            image = FileImage(tmp_path)
            gone = weakref.ref(ring), weakref.ref(image)
            image.close()
            del ring, image
            assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


# --- the kernel ---


def test_what_is_cached_is_read_without_waiting_and_what_is_not_is_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 4096)
    target = bytearray(1 << 20)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.pread(descriptor, 1 << 20, 0)
        if read_cached(descriptor, [memoryview(target)], 0) is None:
            pytest.skip("this file system cannot tell")
        piece = Piece(descriptor, 0, memoryview(target), "file")
        assert read_part(descriptor, 0, [piece]) is False and target == path.read_bytes()
        assert read_cached(descriptor, [memoryview(target)], 1 << 20) is None, "the end of a file is for a read to say"
        try:
            forget(str(path))
        except ValueError as error:
            pytest.skip(str(error))
        target[:] = bytes(1 << 20)
        assert read_part(descriptor, 0, [piece]) is True and target == path.read_bytes()
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("why", [1, 22, 38, 95])
def test_a_kernel_or_file_system_that_cannot_tell_is_read_as_ever(
    why: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    whole = os.preadv

    def refuse(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(why, os.strerror(why))
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(read_ahead.os, "preadv", refuse)
    with path.open("rb") as file:
        target = bytearray(5000)
        assert read_part(file.fileno(), 0, [Piece(file.fileno(), 0, memoryview(target), "file")]) is False
        assert target == b"x" * 5000


def test_a_c_library_that_cannot_ask_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(read_ahead, "_NOWAIT", None)
    random_folder(tmp_path, SIZES)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert {each.name: len(data) for each, data in stream(checkpoint)} == SIZES
