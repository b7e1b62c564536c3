"""The shared memory: private, sealed, and refused in one line when there is not enough memory for it."""

import errno
import fcntl
import mmap
import os
import stat
from pathlib import Path

import pytest

from tensorcast_connector.errors import ConfigError
from tensorcast_connector.net import mapping
from tensorcast_connector.worker import arena as arena_module
from tensorcast_connector.worker.arena import HEADROOM_BYTES, Arena, available_memory_bytes
from tests.waiting import until_blocking

MIB = 1 << 20
PLENTY = 1 << 40


def test_it_is_private_and_can_neither_shrink_nor_grow() -> None:
    arena = Arena(2 * MIB, PLENTY)
    assert stat.S_IMODE(os.fstat(arena.descriptor).st_mode) == 0o600
    assert not os.get_inheritable(arena.descriptor)
    for size in (MIB, 0, 3 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert arena.view.nbytes == 2 * MIB and repr(arena) == "<Arena 2 MiB>"
    arena.close()
    arena.close()


def test_it_is_allocated_ahead_slab_by_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "SLAB_BYTES", MIB)
    arena = Arena(3 * MIB - 4096, PLENTY)
    assert arena.allocated_bytes == MIB == os.fstat(arena.descriptor).st_blocks * 512
    told: list[int] = []
    arena.allocate_rest(told.append)
    until_blocking(lambda: told == [2 * MIB, 3 * MIB - 4096])
    assert os.fstat(arena.descriptor).st_blocks * 512 == 3 * MIB - 4096
    arena.close()


@pytest.mark.parametrize("advice", [mapping._MADV_COLLAPSE, 4321])
def test_an_engine_that_writes_to_it_first_waits_for_no_zeroing(monkeypatch: pytest.MonkeyPatch, advice: int) -> None:
    """In huge pages, and in small ones where the kernel makes no others. Memory to be zeroed is a hole for the kernel."""
    monkeypatch.setattr(mapping, "_MADV_COLLAPSE", advice)
    monkeypatch.setattr(arena_module, "SLAB_BYTES", 4 * MIB)
    arena = Arena(9 * MIB, PLENTY)
    assert os.lseek(arena.descriptor, 0, os.SEEK_HOLE) == 4 * MIB
    told: list[int] = []
    arena.allocate_rest(told.append)
    until_blocking(lambda: told == [8 * MIB, 9 * MIB])
    assert os.lseek(arena.descriptor, 0, os.SEEK_HOLE) == 9 * MIB
    assert os.fstat(arena.descriptor).st_blocks * 512 == 9 * MIB and not any(arena.view)
    arena.close()


def test_memory_that_runs_out_while_it_is_allocated_leaves_a_smaller_arena(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arena_module, "SLAB_BYTES", MIB)
    real = os.posix_fallocate

    def scarce(descriptor: int, offset: int, size: int) -> None:
        if offset >= 2 * MIB:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", scarce)
    arena = Arena(4 * MIB, PLENTY)
    told: list[int] = []
    arena.allocate_rest(told.append)
    until_blocking(lambda: "going on with 2 of 4 MiB" in caplog.text)
    assert told == [2 * MIB]
    arena.close()


def test_no_memory_at_all_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", none)
    with pytest.raises(ConfigError, match="no memory for it: No space left"):
        Arena(MIB, PLENTY)


def test_who_maps_it_keeps_it() -> None:
    arena = Arena(MIB, PLENTY)
    with mmap.mmap(arena.descriptor, MIB) as engine:
        arena.view[:3] = b"abc"
        arena.close()
        assert engine[:3] == b"abc"


def test_closing_while_a_page_is_still_looked_at() -> None:
    arena = Arena(MIB, PLENTY)
    page = arena.view[10:20]
    arena.close()
    page[:] = b"0123456789"
    page.release()


def test_larger_than_the_memory_names_the_figures() -> None:
    with pytest.raises(ConfigError) as error:
        Arena(4 << 30, 4 << 30)
    assert str(error.value) == (
        "arena=4.00 GiB is larger than the memory that is available (4.00 GiB less 128 MiB for the process); "
        "choose a smaller one"
    )
    Arena(MIB, MIB + HEADROOM_BYTES).close()


class Machine:
    """A /proc and a /sys/fs/cgroup in a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        self.write("proc/meminfo", "MemTotal: 64 kB\nMemAvailable:   8388608 kB\n")

    def write(self, name: str, text: str) -> None:
        path = self.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def limit(self, name: str, limit: str, used: int, stat: str = "anon 5\n") -> None:
        self.write(f"cgroup/{name}/memory.max", limit + "\n")
        self.write(f"cgroup/{name}/memory.current", f"{used}\n")
        self.write(f"cgroup/{name}/memory.stat", stat)

    def available(self) -> int:
        return available_memory_bytes(self.proc, self.cgroup)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_cgroup_it_is_what_the_machine_has(machine: Machine) -> None:
    assert machine.available() == 8 << 30


@pytest.mark.parametrize("membership", ["0::/\n", "0::/a/b\n", "1:name=systemd:/x\n0::/a/b\n"])
def test_unlimited_groups(machine: Machine, membership: str) -> None:
    machine.write("proc/self/cgroup", membership)
    machine.limit("a/b", "max", 5)
    assert machine.available() == 8 << 30


def test_the_tightest_group_above_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.limit("a/b", str(4 << 30), 1 << 30)
    assert machine.available() == 3 << 30
    machine.limit("a", str(4 << 30), 2 << 30)
    assert machine.available() == 2 << 30
    machine.limit("a", str(1 << 30), 2 << 30)
    assert machine.available() == 0


def test_in_a_container_the_group_is_the_root(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.limit("", str(2 << 30), 0)
    assert machine.available() == 2 << 30


def test_cached_files_are_given_up_when_memory_is_wanted(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a\n")
    machine.limit("a", str(4 << 30), 4 << 30, f"anon 1\ninactive_file {3 << 30}\nactive_file 9\n")
    assert machine.available() == 3 << 30


def test_an_unreadable_group_is_no_limit(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a\n")
    machine.limit("a", "nonsense", 1)
    assert machine.available() == 8 << 30
