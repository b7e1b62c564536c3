"""What the rows of `scripts/bench weights` share: how much is measured, where, and whether there is room for it."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.face import BenchError

GIB = 1 << 30
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        files: sizes of files that are loaded, in bytes.
        cold_runs: from a disk whose cache was emptied; these differ most.
        runs: of everything else.
        artifact: bytes of the artifact that several readers share.
        remote: bytes of the one that is read from another host.
    """

    files: tuple[int, ...]
    cold_runs: int
    runs: int
    artifact: int
    remote: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the benchmark. `folder` is on a disk, and for logs and files."""

    size: Size
    say: Say
    folder: Path

    def need(self, memory: int, disk: int) -> None:
        """So many bytes are wanted.

        Raises:
            BenchError: they are not there.
        """
        available = available_memory()
        if available < memory:
            raise BenchError(
                f"{memory / GIB:.1f} GiB of memory are needed, {available / GIB:.1f} are free; try --quick"
            )
        free = shutil.disk_usage(self.folder).free
        if free < disk:
            raise BenchError(
                f"{disk / GIB:.1f} GiB on {self.folder} are needed, {free / GIB:.1f} are free; try --quick"
            )


def available_memory() -> int:
    """In bytes, as the kernel estimates."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise BenchError("/proc/meminfo does not say how much memory is available")


def own_python() -> str:
    """The project's interpreter."""
    return sys.executable
