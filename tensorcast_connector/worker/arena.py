"""The worker's shared memory: a sealed memfd that engines of this host map. The only module that makes shared memory.

A memfd has no name, so nobody can open it who was not handed it, the kernel frees it with its last user, and no
container's /dev/shm bounds it. The seal keeps a client from shrinking it under others.
"""

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorcast_connector.config import SLAB_BYTES
from tensorcast_connector.errors import ConfigError
from tensorcast_connector.net.mapping import allocate, map_shared

logger = logging.getLogger(__name__)
# Left for the worker itself and its neighbours when the arena is checked against the machine's memory.
HEADROOM_BYTES = 128 << 20


def available_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process may still allocate: the machine's MemAvailable, or less where a cgroup limits it."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        membership = (proc / "self" / "cgroup").read_text().strip().rpartition("::")[2]
        folder = cgroup / membership.lstrip("/")
        while True:
            limit = (folder / "memory.max").read_text().strip() if (folder / "memory.max").exists() else "max"
            if limit != "max":
                used = int((folder / "memory.current").read_text()) - _reclaimable_bytes(folder)
                available = min(available, max(0, int(limit) - used))
            if folder == cgroup or cgroup not in folder.parents:
                break
            folder = folder.parent
    except (OSError, ValueError):
        logger.debug("no readable cgroup v2 memory limit")
    return available


def _reclaimable_bytes(folder: Path) -> int:
    """Cached file pages count as used by the cgroup, but the kernel gives them up when memory is wanted."""
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0


def check_fits(arena_bytes: int, available_bytes: int) -> None:
    """Raises ConfigError for an arena that is larger than the memory that is available."""
    if arena_bytes + HEADROOM_BYTES > available_bytes:
        raise ConfigError(
            f"arena={arena_bytes / (1 << 30):.2f} GiB is larger than the memory that is available "
            f"({available_bytes / (1 << 30):.2f} GiB less {HEADROOM_BYTES >> 20} MiB for the process); choose a smaller one"
        )


class Arena:
    """`arena_bytes` of shared memory. Its first slab is allocated at once, the rest by `allocate_rest`.

    Only allocated memory may be handed out: a process that touches a memfd page for which there is no memory is killed
    by SIGBUS, and that process would be the user's engine. It is zeroed and of huge pages where the kernel makes them, so that
    an engine that writes to it for the first time does it nearly as fast as the next time (net/mapping.py). All of it is memory
    of this process, also for cgroups; what engines map counts as shared in their resident memory.

    Raises:
        ConfigError: larger than the memory that is available.
    """

    def __init__(self, arena_bytes: int, available_bytes: int) -> None:
        check_fits(arena_bytes, available_bytes)
        self.bytes = arena_bytes
        self.descriptor = os.memfd_create("tensorcast-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.descriptor, 0o600)
        os.ftruncate(self.descriptor, arena_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        self.view = map_shared(self.descriptor, arena_bytes)
        self._map: Any = self.view.obj
        self._stop = threading.Event()
        self._allocating: threading.Thread | None = None
        self.allocated_bytes = 0
        try:
            self._allocate_next()
        except OSError as error:
            self.close()
            raise ConfigError(f"arena={arena_bytes} bytes: no memory for it: {error.strerror}") from error

    def __repr__(self) -> str:
        return f"<Arena {self.bytes >> 20} MiB>"

    def _allocate_next(self) -> None:
        size = min(SLAB_BYTES, self.bytes - self.allocated_bytes)
        allocate(self.descriptor, self.allocated_bytes, size)
        self.allocated_bytes += size

    def allocate_rest(self, tell: Callable[[int], None]) -> None:
        """Allocates slab by slab on a thread of its own.

        Args:
            tell: called on that thread with all the bytes that are allocated by then.
        """

        def work() -> None:
            while self.allocated_bytes < self.bytes and not self._stop.is_set():
                try:
                    self._allocate_next()
                except OSError as error:
                    logger.warning(
                        "arena: %s; going on with %d of %d MiB",
                        error.strerror,
                        self.allocated_bytes >> 20,
                        self.bytes >> 20,
                    )
                    return
                tell(self.allocated_bytes)

        self._allocating = threading.Thread(target=work, name="arena-allocate", daemon=True)
        self._allocating.start()

    def close(self) -> None:
        """Lets go of the memory; engines that still map it keep it until they let go. May be called twice."""
        self._stop.set()
        if self._allocating is not None:
            self._allocating.join()
        self.view.release()
        with contextlib.suppress(BufferError):  # a page is still being copied: the memory goes with its last view
            self._map.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
