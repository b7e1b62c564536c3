"""Tensors are read whole and right, in parts by several threads, or an error names the file and the tensor."""

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tensorcast_connector.client import reading
from tensorcast_connector.client.checkpoint import Checkpoint
from tensorcast_connector.client.reading import Piece, read_all, stream
from tensorcast_connector.errors import InvalidArgument
from tests.client.checkpoints import random_folder

SIZES = {
    f"t{number:02}": size for number, size in enumerate([5000, 1, 0, 999, 1000, 1001, 12_345, 7, 7, 7, 0, 4096, 3])
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts so small that each tensor has several, and each part several tensors."""
    monkeypatch.setattr(reading, "TENSOR_READ_BYTES", 1000)
    monkeypatch.setattr(reading, "READ_BUFFERS_MAX", 3)


def memory_for(checkpoint: Checkpoint) -> dict[str, bytearray]:
    return {name: bytearray(b"\xee" * each.bytes) for name, each in checkpoint.tensors.items()}


def pieces_of(checkpoint: Checkpoint, memory: dict[str, bytearray]) -> list[Piece]:
    return [Piece.of(checkpoint, each, memoryview(memory[name])) for name, each in checkpoint.tensors.items()]


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_all_is_read_where_it_belongs(threads: int, small: None, tmp_path: Path) -> None:
    wanted = random_folder(tmp_path, SIZES)
    told: list[tuple[int, int]] = []
    with Checkpoint.open(tmp_path) as checkpoint:
        memory = memory_for(checkpoint)
        count = read_all(pieces_of(checkpoint, memory), threads=threads, progress=lambda *at: told.append(at))
    assert memory == wanted and count == sum(SIZES.values())
    assert told == sorted(told) and told[-1] == (count, count) and len(told) > 10
    assert read_all([]) == 0


def test_parts_of_tensors_can_be_read(small: None, tmp_path: Path) -> None:
    wanted = random_folder(tmp_path, SIZES)
    target = bytearray(3000)
    with Checkpoint.open(tmp_path) as checkpoint:
        tensor = checkpoint.tensors["t06"]
        view = memoryview(target)
        read_all([Piece.of(checkpoint, tensor, view[2000:], 9000), Piece.of(checkpoint, tensor, view[:2000], 50)])
    assert target == wanted["t06"][50:2050] + wanted["t06"][9000:10_000]


def test_memory_of_other_kinds_is_filled_too(small: None, tmp_path: Path) -> None:
    wanted = random_folder(tmp_path, {"a": 24_000})
    array = np.zeros((10, 600), np.float32)
    with Checkpoint.open(tmp_path) as checkpoint:
        read_all([Piece.of(checkpoint, checkpoint.tensors["a"], memoryview(array))])  # type: ignore[arg-type]
    assert array.tobytes() == wanted["a"]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_that_shrinks_is_an_error_with_its_name(threads: int, small: None, tmp_path: Path) -> None:
    random_folder(tmp_path, SIZES)
    with Checkpoint.open(tmp_path) as checkpoint:
        short = checkpoint.tensors["t06"]
        path = checkpoint.files[short.file].path
        os.truncate(path, short.offset + 5555)
        with pytest.raises(InvalidArgument, match=r"tensor 't06': the file ends at byte") as refused:
            read_all(pieces_of(checkpoint, memory_for(checkpoint)), threads=threads)
        assert str(path) in str(refused.value) and not checkpoint.unchanged()
        with pytest.raises(InvalidArgument, match=r"tensor 't06': the file ends at byte"):
            for _ in stream(checkpoint, threads=threads):
                pass
    assert not [each for each in threading.enumerate() if each.name == "reading"]


def test_a_descriptor_that_cannot_be_read_is_an_error_with_its_name(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(InvalidArgument, match="the file: tensor 'a' cannot be read: Is a directory"):
            read_all([Piece(folder, 0, memoryview(bytearray(5)), "the file: tensor 'a'")])
    finally:
        os.close(folder)


def test_who_stops_it_is_obeyed(small: None, tmp_path: Path) -> None:
    random_folder(tmp_path, {"a": 1_000_000})

    class Enough(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done >= 10_000:
            raise Enough

    with Checkpoint.open(tmp_path) as checkpoint:
        memory = memory_for(checkpoint)
        with pytest.raises(Enough):
            read_all(pieces_of(checkpoint, memory), progress=stop)
        assert memory["a"].endswith(b"\xee" * 500_000), "it was not read to its end"
    assert not [each for each in threading.enumerate() if each.name == "reading"]


# --- one after the other ---


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("ring", [1, 3 * mmap.PAGESIZE, 1 << 20])
def test_tensors_come_in_order_with_their_bytes(threads: int, ring: int, small: None, tmp_path: Path) -> None:
    wanted = random_folder(tmp_path, SIZES)
    with Checkpoint.open(tmp_path) as checkpoint:
        got = [(each.name, bytes(data)) for each, data in stream(checkpoint, threads=threads, ring_bytes=ring)]
        assert got == [(name, wanted[name]) for name in checkpoint.tensors]
        order = ["t06", "t02", "t00", "t06", "t12"]
        picked = stream(checkpoint, order, threads=threads, ring_bytes=ring)
        assert [(each.name, bytes(data)) for each, data in picked] == [(name, wanted[name]) for name in order]


def test_a_slow_consumer_keeps_what_it_has_until_it_asks_for_more(small: None, tmp_path: Path) -> None:
    wanted = random_folder(tmp_path, {f"t{number}": 5000 for number in range(50)})
    with Checkpoint.open(tmp_path) as checkpoint:
        for each, data in stream(checkpoint, ring_bytes=1, threads=3):
            read_all([Piece.of(checkpoint, each, memoryview(bytearray(5000)))])  # others have time to overwrite it
            assert bytes(data) == wanted[each.name]


def test_what_is_left_off_in_the_middle_ends(small: None, tmp_path: Path) -> None:
    random_folder(tmp_path, SIZES)
    with Checkpoint.open(tmp_path) as checkpoint:
        tensors = stream(checkpoint, ring_bytes=1)
        next(tensors)
        tensors.close()  # type: ignore[attr-defined]
        assert not [each for each in threading.enumerate() if each.name == "reading"]
        with pytest.raises(InvalidArgument, match="it has no tensor 'zz'"):
            next(stream(checkpoint, ["t00", "zz"]))
