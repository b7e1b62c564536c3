"""Memory of artifacts: written once, then nobody's to change; and memory that is allocated ahead."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorcast_connector.errors import Exhausted
from tensorcast_connector.worker.blob import Blob, Spare
from tests.waiting import until_blocking


@pytest.fixture
def blob() -> Iterator[Blob]:
    made = Blob(5000)
    yield made
    made.close()


def test_it_is_written_and_then_never_again(blob: Blob) -> None:
    blob.writable()[10:13] = b"abc"
    os.pwrite(blob.descriptor, b"xyz", 20)
    blob.seal()
    assert bytes(blob.view[10:13]) == b"abc" and bytes(blob.view[20:23]) == b"xyz" and blob.view.readonly
    with pytest.raises(PermissionError):
        os.pwrite(blob.descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(blob.descriptor, 5000)
    private = mmap.mmap(blob.descriptor, 5000, flags=mmap.MAP_PRIVATE)
    private[10:13] = b"ABC"
    assert bytes(blob.view[10:13]) == b"abc"
    private.close()


def test_what_is_sealed_is_mapped_private(blob: Blob) -> None:
    """Before Linux 6.7 a shared mapping of sealed memory is refused, also one to read."""
    blob.seal()
    modes = [
        line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if "tensorcast-artifact" in line
    ]
    assert modes == ["r--p"]


def test_who_fills_it_cannot_change_its_size(blob: Blob) -> None:
    """This process would be killed when it touches memory that has been taken away."""
    for size in (0, 4999, 5001, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(blob.descriptor, size)
    with pytest.raises(PermissionError):
        os.pwrite(blob.descriptor, b"x", 8192)
    blob.writable()[:] = bytes(5000)


def test_it_is_not_sealed_while_somebody_can_write_to_it(blob: Blob) -> None:
    blob.writable()[:3] = b"abc"
    theirs = mmap.mmap(blob.descriptor, 5000)
    with pytest.raises(Exhausted, match="still being written"):
        blob.seal()
    blob.writable()[3:6] = b"def"
    theirs.close()
    blob.seal()
    assert bytes(blob.view[:6]) == b"abcdef"


def test_what_reads_from_it_keeps_it(blob: Blob) -> None:
    blob.writable()[:3] = b"abc"
    blob.seal()
    view = blob.view
    blob.close()
    blob.close()
    assert bytes(view[:3]) == b"abc"


def test_nothing_at_all() -> None:
    blob = Blob(0)
    assert blob.writable().nbytes == 0
    blob.seal()
    assert blob.view.nbytes == 0 and repr(blob) == "<Blob of 0 bytes>"
    blob.close()


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))

    def no_memory(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_memory)
    with pytest.raises(Exhausted, match="no memory for an artifact of 5000 bytes: No space left on device"):
        Blob(5000)
    spare = Spare(4096)
    with pytest.raises(Exhausted):
        spare.take(100)
    spare.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_spare_memory_is_used_cut_and_refilled() -> None:
    spare = Spare(1 << 20)
    until_blocking(lambda: spare._descriptor >= 0)
    ahead = spare._descriptor
    first, second = spare.take(70_000), spare.take(70_000)
    assert first.descriptor == ahead and second.descriptor != ahead
    for blob in (first, second):
        assert os.fstat(blob.descriptor).st_size == blob.bytes == 70_000
        assert not any(blob.writable())
        blob.seal()
    spare.refill()
    until_blocking(lambda: spare._descriptor >= 0)
    spare.refill()
    large, nothing = spare.take((1 << 20) + 1), spare.take(0)
    assert large.bytes == (1 << 20) + 1 and nothing.bytes == 0 and spare._descriptor >= 0
    for blob in (first, second, large, nothing):
        blob.close()
    spare.close()
    spare.refill()
    assert spare._descriptor < 0


def test_no_spare_memory_at_all() -> None:
    spare = Spare(0)
    blob = spare.take(10)
    assert blob.bytes == 10
    blob.close()
    spare.close()


def test_no_file_left_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    with pytest.raises(Exhausted, match="no memory for an artifact of 5 bytes: Too many open files; delete some"):
        Blob(5)


def test_what_is_allocated_while_it_is_written_says_whether_it_all_was() -> None:
    blob = Blob(3 << 20, allocated=False)
    assert not blob.filled
    os.pwrite(blob.descriptor, b"x" * (2 << 20), 0)
    assert not blob.filled
    os.pwrite(blob.descriptor, b"y" * (1 << 20), 2 << 20)
    assert blob.filled
    with pytest.raises(PermissionError):
        os.ftruncate(blob.descriptor, 1)
    blob.seal()
    assert bytes(blob.view[(2 << 20) - 1 : (2 << 20) + 1]) == b"xy"
    blob.close()
    for each in (Blob(5000), Blob(0, allocated=False)):
        assert each.filled
        each.close()
