"""What is read of files, and what is asked of a disk before that, as one sequence of events."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tensorcast_connector.client import image, read_ahead, reading
from tensorcast_connector.core import artifact

WINDOW, STEP, PART, CHUNK = 3000, 1000, 500, 1024
Byte = tuple[int, int]
"""An inode, and a place in it."""


@dataclass
class Log:
    """Everything small: parts, chunks, steps and the window. Nothing is in the page cache, unless `cached`."""

    cached: bool = False
    asked: dict[Byte, int] = field(default_factory=dict)  # before how many bytes were read
    read: list[Byte] = field(default_factory=list)
    twice: list[Byte] = field(default_factory=list)

    def advise(self, descriptor: int, offset: int, size: int, advice: int) -> None:
        """As `os.posix_fadvise`."""
        assert advice == os.POSIX_FADV_WILLNEED
        for each in _bytes(descriptor, offset, size):
            if each in self.asked:
                self.twice.append(each)
            self.asked[each] = len(self.read)

    def read_cached(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As `read_ahead.read_cached`."""
        self.read += _bytes(descriptor, offset, sum(map(len, buffers)))
        return os.preadv(descriptor, list(buffers), offset) if self.cached else 0

    def check(self) -> None:
        """All that was read was asked for in time, but for the first read; nothing else, nothing twice, nothing too early."""
        assert not self.twice
        assert set(self.asked) <= set(self.read), "what is not read is not asked for"
        places = {each: number for number, each in enumerate(self.read)}
        never = [places[each] for each in self.read if each not in self.asked]
        assert len(never) <= PART and never == list(range(len(never))), "only the first read had nobody before it"
        gaps = len(self.read) - len(places) + 64 * 16  # what is aligned in an image lies further apart there
        for each, at in self.asked.items():
            assert at <= places[each] < at + WINDOW + STEP + gaps or places[each] < STEP, (
                each
            )  # the first is part of a step


def _bytes(descriptor: int, offset: int, size: int) -> list[Byte]:
    inode = os.fstat(descriptor).st_ino
    return [(inode, at) for at in range(offset, offset + size)]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """For a test that reads with one thread."""
    made = Log()
    monkeypatch.setattr(read_ahead, "READ_AHEAD_BYTES", WINDOW)
    monkeypatch.setattr(read_ahead, "step_bytes", lambda _: STEP)
    monkeypatch.setattr(read_ahead.os, "posix_fadvise", made.advise)
    monkeypatch.setattr(reading, "read_cached", made.read_cached)
    monkeypatch.setattr(reading, "TENSOR_READ_BYTES", PART)
    monkeypatch.setattr(image, "READ_BYTES", PART)
    for module in (image, artifact):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    return made
