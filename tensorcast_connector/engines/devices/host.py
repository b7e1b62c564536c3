"""A device that is memory of the machine: the same life as that of a GPU's, for tests and for trying things out.

Its memory is a memfd. A handle says which descriptor of which process that is, so it is of no use once that process has died or
has closed it, as with CUDA; and one whose number was given to something else is not taken for it, by the file's inode.
"""

import ctypes
import mmap
import os
import struct

from tensorcast_connector.engines.devices.memory import Ranges, check_within
from tensorcast_connector.errors import Exhausted, InvalidArgument, Unavailable
from tensorcast_connector.worker.arena import available_memory_bytes

_HANDLE = struct.Struct("<8sIIQQ")  # magic, process, descriptor, device and inode of the file
_MAGIC = b"tc-host1"


class HostMemory:
    """See DeviceMemory (memory.py). Copies are done at once."""

    def __init__(self, name: str) -> None:
        self.name = self.identity = name
        self._own = Ranges("allocated")
        self._opened = Ranges("open")
        self._maps: dict[int, mmap.mmap] = {}
        self._descriptors: dict[int, int] = {}  # of what was allocated

    def __repr__(self) -> str:
        return f"<HostMemory {self.name}, {len(self._descriptors)} allocations>"

    def allocate(self, size: int) -> int:
        """See DeviceMemory."""
        size = max(size, 1)
        free = available_memory_bytes()
        if size > free:  # the kernel would look for it until it ends somebody
            raise Exhausted(f"{self.name} has no room for {size} bytes: {free} are available")
        descriptor = os.memfd_create("tensorcast-device", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size)
            mapped = mmap.mmap(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise Exhausted(f"{self.name} has no room for {size} bytes: {error.strerror}") from error
        address = _address(mapped)
        self._maps[address], self._descriptors[address] = mapped, descriptor
        self._own.add(address, size)
        return address

    def copy_in(self, address: int, data: memoryview) -> None:
        """See DeviceMemory."""
        check_within(address, data.nbytes, self._own)
        target = (ctypes.c_ubyte * data.nbytes).from_address(address)
        memoryview(target).cast("B")[:] = data.cast("B")

    def export(self, address: int) -> bytes:
        """See DeviceMemory."""
        if address not in self._descriptors:
            raise InvalidArgument(f"there is no memory allocated at {address:#x}; it may have been freed already")
        descriptor = self._descriptors[address]
        found = os.fstat(descriptor)
        return _HANDLE.pack(_MAGIC, os.getpid(), descriptor, found.st_dev, found.st_ino)

    def free(self, address: int) -> None:
        """See DeviceMemory."""
        self._own.take(address)
        self._maps.pop(address).close()
        os.close(self._descriptors.pop(address))

    def open(self, handle: bytes, size: int) -> int:
        """See DeviceMemory."""
        if len(handle) != _HANDLE.size or not handle.startswith(_MAGIC):
            raise InvalidArgument(f"{len(handle)} bytes that are no handle of memory of {self.name}")
        _, process, number, device, inode = _HANDLE.unpack(handle)
        gone = f"memory of {self.name} has gone: process {process} has ended or has freed it"
        try:
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"{gone} ({error.strerror})") from error
        try:
            found = os.fstat(descriptor)
            if (found.st_dev, found.st_ino) != (device, inode):
                raise Unavailable(gone)
            if found.st_size < size:
                raise InvalidArgument(f"{size} bytes of memory of {self.name} that has {found.st_size}")
            # Private, so that nothing that is done here can change it; writable, since ctypes looks at nothing else.
            mapped = mmap.mmap(descriptor, found.st_size, mmap.MAP_PRIVATE)
        except OSError as error:
            raise Exhausted(f"cannot map {size} bytes of {self.name}: {error.strerror}") from error
        finally:
            os.close(descriptor)
        address = _address(mapped)
        self._maps[address] = mapped
        self._opened.add(address, max(size, 1))
        return address

    def shut(self, address: int) -> None:
        """See DeviceMemory."""
        self._opened.take(address)
        self._maps.pop(address).close()

    def copy(self, target: int, source: int, size: int) -> None:
        """See DeviceMemory."""
        check_within(source, size, self._own, self._opened)
        ctypes.memmove(target, source, size)

    def copy_out(self, address: int, size: int) -> bytes:
        """See DeviceMemory."""
        check_within(address, size, self._own, self._opened)
        return ctypes.string_at(address, size)

    def synchronise(self) -> None:
        """See DeviceMemory."""

    def memory(self) -> tuple[int, int]:
        """See DeviceMemory."""
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(available_memory_bytes(), total), total

    def close(self) -> None:
        """See DeviceMemory."""
        for address in self._own:
            self.free(address)
        for address in self._opened:
            self.shut(address)


def _address(mapped: mmap.mmap) -> int:
    """Where it is; the mapping can be closed again."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))
