"""The seam to the memory of devices: what a worker's child process, and engines that copy from it, do with it.

Two implementations: `cuda.py` by the CUDA driver, and `host.py` in memory of the machine, which does the same things without a
GPU. Memory is named by its address, a number; for `host` devices that is an address of this process. Nothing here needs torch.
"""

from collections.abc import Iterator
from typing import Protocol

from tensorcast_connector.errors import InvalidArgument, TensorcastError


class DeviceError(TensorcastError):
    """A device has failed. What was being done with it is lost, and it may be of no use to this process any more."""


class DeviceMemory(Protocol):
    """The memory of one device, for one thread of one process. `close` gives everything back."""

    name: str
    identity: str  # the same for the same device in every process of this host

    def allocate(self, size: int) -> int:
        """Memory of at least `size` bytes, with room for it at once; its address.

        Raises:
            Exhausted: there is no room.
        """

    def copy_in(self, address: int, data: memoryview) -> None:
        """Bytes of this process into memory that was allocated here; under way until `synchronise`.

        Raises:
            InvalidArgument: it would reach beyond that memory.
        """

    def export(self, address: int) -> bytes:
        """By which another process of this host opens memory that was allocated here, as often as it likes, until it is freed.

        Raises:
            InvalidArgument: it was not, or is freed.
        """

    def free(self, address: int) -> None:
        """Gives memory back that was allocated here.

        Raises:
            InvalidArgument: it was not, or is freed already.
        """

    def open(self, handle: bytes, size: int) -> int:
        """Memory that another process has exported; its address here. Nobody writes to it.

        Raises:
            Unavailable: it has gone, with the process that owned it for example.
            InvalidArgument: not a handle of such a device, or of less memory than `size`.
        """

    def shut(self, address: int) -> None:
        """Ends what `open` began.

        Raises:
            InvalidArgument: nothing is open there.
        """

    def copy(self, target: int, source: int, size: int) -> None:
        """Bytes of this device to another place on it; under way until `synchronise`.

        Args:
            target: any memory of this process on the device, whoever allocated it.
            source: within what was allocated or opened here.

        Raises:
            InvalidArgument: it would reach beyond that.
        """

    def copy_out(self, address: int, size: int) -> bytes:
        """Bytes of what was allocated or opened here, when all copies are done. Raises as `copy`."""

    def synchronise(self) -> None:
        """Waits until all copies are done.

        Raises:
            DeviceError: one has failed.
        """

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and that there are."""

    def close(self) -> None:
        """Waits for copies; frees what was allocated and ends what was opened. May be called twice.

        Raises:
            DeviceError: something cannot be given back; it goes with the process.
        """


class Ranges:
    """The memory that is allocated or open, by address: that nothing reaches beyond it, and nothing ends twice."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._sizes: dict[int, int] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._sizes))

    def add(self, address: int, size: int) -> None:
        """It is there from now on."""
        self._sizes[address] = size

    def take(self, address: int) -> int:
        """It is not any more; its size.

        Raises:
            InvalidArgument: it was not there.
        """
        if address not in self._sizes:
            raise InvalidArgument(
                f"there is no memory {self._what} at {address:#x}; it may have been given back already"
            )
        return self._sizes.pop(address)

    def at(self, address: int) -> int | None:
        """The size of what begins there."""
        return self._sizes.get(address)

    def has(self, address: int, size: int) -> bool:
        """Whether all of it lies within one of them."""
        return any(start <= address and address + size <= start + length for start, length in self._sizes.items())


def check_within(address: int, size: int, *ranges: Ranges) -> None:
    """Raises InvalidArgument for bytes that are not within one of them."""
    if size < 0 or not any(each.has(address, size) for each in ranges):
        raise InvalidArgument(f"{size} bytes at {address:#x} are not within memory of this device")
