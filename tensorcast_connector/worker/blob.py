"""Shared memory of one artifact: a memfd that is written once and then sealed, so that nobody can change it ever after.

Readers of the same host map it. They need no hold: what a worker forgets lives on until the last reader has let go, and is
never used for anything else. The kernel counts it, the worker's limit no longer does.
"""

import fcntl
import logging
import mmap
import os
import threading

from tensorcast_connector.config import ARTIFACT_SPARE_BYTES
from tensorcast_connector.errors import Exhausted
from tensorcast_connector.net.mapping import allocate

logger = logging.getLogger(__name__)
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def _memfd(size: int, allocated: bool = True, touched: bool = False) -> int:
    try:
        descriptor = os.memfd_create("tensorcast-artifact", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise Exhausted(f"no memory for an artifact of {size} bytes: {error.strerror}; delete some") from error
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, size)
        if touched:
            allocate(descriptor, 0, size)
        elif allocated and size:
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        raise Exhausted(f"no memory for an artifact of {size} bytes: {error.strerror}") from error
    return descriptor


class Blob:
    """See the module. Memory is allocated at once, since touching memory that is not there kills a process.

    Args:
        allocated: or else while it is written as a file, which fails where there is none.

    Raises:
        Exhausted: the machine has none.
    """

    def __init__(self, size: int, descriptor: int | None = None, allocated: bool = True) -> None:
        self.bytes = size
        self.descriptor = _memfd(size, allocated) if descriptor is None else descriptor
        # Who fills it cannot take memory away that this process has mapped.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map: mmap.mmap | None = None

    def __repr__(self) -> str:
        return f"<Blob of {self.bytes} bytes>"

    def writable(self) -> memoryview:
        """The memory, to be filled. Let go of it before `seal`."""
        if self._map is None and self.bytes:
            self._map = mmap.mmap(self.descriptor, self.bytes)
        return memoryview(self._map) if self._map is not None else memoryview(bytearray())

    @property
    def filled(self) -> bool:
        """Whether all of it has memory."""
        return os.fstat(self.descriptor).st_blocks * 512 >= self.bytes

    def seal(self) -> None:
        """Nobody can write to it any more.

        Raises:
            Exhausted: somebody still has it mapped to write.
        """
        if self._map is not None:
            self._map.close()
            self._map = None
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            raise Exhausted("the memory of an artifact is still being written") from error
        # Private: before Linux 6.7 nobody may map sealed memory shared, not even to read it.
        if self.bytes:
            self._map = mmap.mmap(self.descriptor, self.bytes, mmap.MAP_PRIVATE, mmap.PROT_READ)

    @property
    def view(self) -> memoryview:
        """The sealed bytes."""
        return memoryview(self._map) if self._map is not None else memoryview(b"")

    def close(self) -> None:
        """Lets go of it. What reads from it now keeps it until it has ended."""
        held, descriptor = [self._map], self.descriptor
        self._map, self.descriptor = None, -1

        def free() -> None:
            held.clear()
            if descriptor >= 0:
                os.close(descriptor)

        if self.bytes > ARTIFACT_SPARE_BYTES:  # that takes long
            threading.Thread(target=free, name="artifact-free", daemon=True).start()
        else:
            free()


class Spare:
    """Memory that is allocated ahead, since fresh memory takes several times as long to write as memory that is there.

    Args:
        size: how much; 0 for none.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._descriptor = -1
        self._lock = threading.Lock()
        self._making: threading.Thread | None = None
        self.refill()

    @property
    def bytes(self) -> int:
        """How much there is when it is not taken."""
        return self._size

    def take(self, size: int) -> Blob:
        """A blob of `size` bytes, from what is there if it is enough.

        Raises:
            Exhausted: the machine has no memory.
        """
        descriptor = -1
        if 0 < size <= self._size:
            with self._lock:
                descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return Blob(size)
        os.ftruncate(descriptor, size)
        return Blob(size, descriptor)

    def refill(self) -> None:
        """Allocates again what was taken, on a thread of its own."""
        if not self._size or self._descriptor >= 0 or (self._making is not None and self._making.is_alive()):
            return

        def make() -> None:
            try:
                descriptor = _memfd(self._size, touched=True)
            except Exhausted as error:
                logger.info("no spare memory: %s", error)
                return
            with self._lock:
                self._descriptor = descriptor

        self._making = threading.Thread(target=make, name="artifact-spare", daemon=True)
        self._making.start()

    def close(self) -> None:
        """Frees it."""
        self._size = 0
        if self._making is not None:
            self._making.join()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
