"""What is asked of a disk ahead of the reads: only if one is waited for, only what will be read, nothing twice."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from benchmarks.programs.loads import forget

from tensorcast_connector.client import image, read_ahead, reading
from tensorcast_connector.client.checkpoint import Checkpoint
from tensorcast_connector.client.image import FileImage
from tensorcast_connector.client.read_ahead import ReadAhead, Span, read_cached
from tensorcast_connector.client.reading import Piece, read_all, read_part, stream
from tests.client.checkpoints import random_folder

Asked = list[tuple[int, int, int]]
SIZES = {f"t{number}": size for number, size in enumerate([700, 2500, 1, 0, 900, 4000])}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What the kernel is told, in small steps and a small window: the descriptor, the offset and the size."""
    found: Asked = []
    monkeypatch.setattr(read_ahead, "READ_AHEAD_BYTES", 3000)
    monkeypatch.setattr(read_ahead, "READ_AHEAD_STEP_BYTES", 1000)
    monkeypatch.setattr(reading, "TENSOR_READ_BYTES", 1000)
    monkeypatch.setattr(image, "READ_BYTES", 1000)

    def advise(descriptor: int, offset: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        found.append((descriptor, offset, size))

    monkeypatch.setattr(read_ahead.os, "posix_fadvise", advise)
    return found


def test_the_window_moves_on_and_nothing_is_asked_twice(asked: Asked) -> None:
    ahead = ReadAhead([Span(0, 5, 100, 2500), Span(2500, 6, 0, 3500), Span(6000, 5, 9000, 10)])
    ahead.reached(0)
    assert not asked, "all is in the page cache"
    ahead.waited()
    ahead.reached(1000)
    # What is before 1000 is being read. A step begins less than 3000 behind it, and has at most 1000 bytes of one file.
    assert asked == [(5, 1100, 1000), (5, 2100, 500), (6, 0, 1000), (6, 1000, 1000)]
    ahead.reached(1000)
    ahead.reached(500)
    assert len(asked) == 4
    ahead.reached(5800)
    assert asked[4:] == [(6, 3000, 500), (5, 9000, 10)], "what was passed meanwhile is not asked for"
    ahead.reached(10_000)
    assert len(asked) == 6


def test_what_the_kernel_refuses_is_left_to_the_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError("no")

    monkeypatch.setattr(read_ahead.os, "posix_fadvise", refuse)
    ahead = ReadAhead([Span(0, 5, 0, 10)])
    ahead.waited()
    ahead.reached(0)


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever in the page cache."""
    monkeypatch.setattr(reading, "read_cached", lambda *_: None)


def memory_for(checkpoint: Checkpoint) -> dict[str, bytearray]:
    return {name: bytearray(each.bytes) for name, each in checkpoint.tensors.items()}


def all_of(checkpoint: Checkpoint) -> dict[str, bytearray]:
    memory = memory_for(checkpoint)
    read_all(
        (Piece.of(checkpoint, each, memoryview(memory[each.name])) for each in checkpoint.tensors.values()), threads=1
    )
    return memory


def streamed(checkpoint: Checkpoint) -> dict[str, bytearray]:
    return {each.name: bytearray(data) for each, data in stream(checkpoint, threads=1)}


def put(checkpoint: Checkpoint) -> dict[str, bytearray]:
    made = FileImage(checkpoint.path)
    try:
        target = np.empty(made.size, np.uint8)
        made.write(0, target)
        return {each.name: bytearray(target[each.offset : each.offset + each.bytes]) for each in made.specs}
    finally:
        made.close()


WAYS = pytest.mark.parametrize("way", [all_of, streamed, put])


@WAYS
def test_of_a_disk_what_comes_next_is_asked_for(
    way: Callable[[Checkpoint], dict[str, bytearray]], asked: Asked, cold: None, tmp_path: Path
) -> None:
    wanted = random_folder(tmp_path, SIZES)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert way(checkpoint) == wanted
        # Every byte that was asked for belongs to a tensor, and no byte was asked for twice.
        inside = {each.offset + at for each in checkpoint.tensors.values() for at in range(each.bytes)}
    bytes_asked = [(descriptor, offset + at) for descriptor, offset, size in asked for at in range(size)]
    assert len(set(bytes_asked)) == len(bytes_asked) and {at for _, at in bytes_asked} <= inside
    assert len(bytes_asked) >= 5000, "nearly all that is behind the first read"


@WAYS
def test_of_the_page_cache_nothing_is_asked(
    way: Callable[[Checkpoint], dict[str, bytearray]], asked: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reading, "read_cached", os.preadv)
    wanted = random_folder(tmp_path, SIZES)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert way(checkpoint) == wanted
    assert not asked


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


def test_a_file_system_that_cannot_tell_may_be_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    whole = os.preadv

    def refuse(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(95, "Operation not supported")
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(read_ahead.os, "preadv", refuse)
    with path.open("rb") as file:
        target = bytearray(5000)
        assert read_part(file.fileno(), 0, [Piece(file.fileno(), 0, memoryview(target), "file")]) is True
        assert target == b"x" * 5000
