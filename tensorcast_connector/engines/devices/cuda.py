"""A GPU's memory by the CUDA driver: allocated, shared with other processes by IPC handles, copied to by a pipeline.

Not torch's handles (`UntypedStorage._share_cuda_`): each of those is for one receiver, and one that is killed keeps the memory
for ever. Here an allocation has one handle, for as many as like; who has opened it holds it at the worker, by a connection that
the kernel ends with the process (core/replicas.py).
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass

from tensorcast_connector.config import DEVICE_PAGE_BYTES, DEVICE_STAGE_BYTES, DEVICE_STAGES
from tensorcast_connector.engines.devices.driver import (
    EVENT_NO_TIMING,
    HANDLE_BYTES,
    HOST_PORTABLE,
    IPC_LAZY_PEER_ACCESS,
    STREAM_NON_BLOCKING,
    CudaError,
    IpcHandle,
    Uuid,
    driver,
)
from tensorcast_connector.engines.devices.memory import DeviceError, Ranges, check_within
from tensorcast_connector.errors import ConfigError, Exhausted, InvalidArgument, TensorcastError, Unavailable


@dataclass(slots=True)
class _Stage:
    """Pinned memory, and the event after which nothing is copied from it any more."""

    address: int
    view: memoryview
    event: int
    busy: bool = False


class CudaMemory:
    """See DeviceMemory (memory.py). Copies are on a stream of its own, in the device's primary context, which torch uses too.

    Args:
        number: of the device as this process counts, by CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: there is no such device, or no driver.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self._driver = driver()
        count, device = c_int(), c_int()
        self._driver("cuDeviceGetCount", byref(count))
        if number >= count.value:
            raise ConfigError(f"there is no {name}: the driver shows {count.value} device(s) to this process")
        self._driver("cuDeviceGet", byref(device), number)
        self._device = device.value
        uuid = Uuid()
        self._driver("cuDeviceGetUuid_v2", byref(uuid), self._device)
        self.identity = f"cuda-{bytes(uuid.bytes).hex()}"
        self._own = Ranges("allocated")
        self._opened = Ranges("open")
        self._stages: list[_Stage] = []
        self._turn = DEVICE_STAGES - 1
        self._stream: int | None = None
        context = c_void_p()
        self._driver("cuDevicePrimaryCtxRetain", byref(context), self._device)
        self._context: int | None = context.value

    def __repr__(self) -> str:
        return f"<CudaMemory {self.name}, {self.identity}>"

    @contextmanager
    def _current(self) -> Iterator[int]:
        """Makes the device's context that of this thread; the stream."""
        if self._context is None:
            raise InvalidArgument(f"{self.name} is closed")
        self._driver("cuCtxPushCurrent_v2", self._context)
        try:
            if self._stream is None:
                made = c_void_p()
                self._driver("cuStreamCreate", byref(made), STREAM_NON_BLOCKING)
                self._stream = made.value or 0
            yield self._stream
        finally:
            self._driver("cuCtxPopCurrent_v2", byref(c_void_p()))

    def allocate(self, size: int) -> int:
        """See DeviceMemory. In whole pages of 2 MiB, so that who opens it sees nothing else."""
        size = max(1, -(-size // DEVICE_PAGE_BYTES)) * DEVICE_PAGE_BYTES
        address = c_uint64()
        with self._current():
            try:
                self._driver("cuMemAlloc_v2", byref(address), size)
            except Exhausted:
                free, total = self._memory()
                raise Exhausted(f"{self.name} has no room for {size} bytes: {free} of {total} are free") from None
        self._own.add(address.value, size)
        return address.value

    def copy_in(self, address: int, data: memoryview) -> None:
        """See DeviceMemory. Through pinned memory: while one part is on its way the next is put there."""
        check_within(address, data.nbytes, self._own)
        data = data.cast("B")
        with self._current() as stream:
            for start in range(0, data.nbytes, DEVICE_STAGE_BYTES):
                part = data[start : start + DEVICE_STAGE_BYTES]
                stage = self._next_stage()
                stage.view[: part.nbytes] = part
                self._driver("cuMemcpyHtoDAsync_v2", address + start, stage.address, part.nbytes, stream)
                stage.busy = True  # also if the event is not recorded: then only `synchronise` ends it
                self._driver("cuEventRecord", stage.event, stream)

    def _next_stage(self) -> _Stage:
        """The one that was used longest ago, when nothing is copied from it any more."""
        if len(self._stages) < DEVICE_STAGES:
            pinned, event = c_void_p(), c_void_p()
            self._driver("cuEventCreate", byref(event), EVENT_NO_TIMING)
            self._driver("cuMemHostAlloc", byref(pinned), DEVICE_STAGE_BYTES, HOST_PORTABLE)
            view = memoryview((ctypes.c_ubyte * DEVICE_STAGE_BYTES).from_address(pinned.value or 0)).cast("B")
            self._stages.append(_Stage(pinned.value or 0, view, event.value or 0))
            return self._stages[-1]
        self._turn = (self._turn + 1) % DEVICE_STAGES
        stage = self._stages[self._turn]
        if stage.busy:
            self._driver("cuEventSynchronize", stage.event)
            stage.busy = False
        return stage

    def export(self, address: int) -> bytes:
        """See DeviceMemory."""
        if self._own.at(address) is None:
            raise InvalidArgument(f"there is no memory allocated at {address:#x}; it may have been freed already")
        handle = IpcHandle()
        with self._current():
            self._driver("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle.reserved)

    def free(self, address: int) -> None:
        """See DeviceMemory."""
        self._own.take(address)
        with self._current():
            self._driver("cuMemFree_v2", address)

    def open(self, handle: bytes, size: int) -> int:
        """See DeviceMemory. How much memory it is of the driver does not say; the worker does."""
        if len(handle) != HANDLE_BYTES:
            raise InvalidArgument(f"{len(handle)} bytes that are no IPC handle of CUDA")
        address = c_uint64()
        with self._current():
            try:
                self._driver(
                    "cuIpcOpenMemHandle_v2", byref(address), IpcHandle.from_buffer_copy(handle), IPC_LAZY_PEER_ACCESS
                )
            except CudaError as error:
                raise Unavailable(f"memory of {self.name} cannot be opened: {error}") from error
        if self._opened.at(address.value) is not None:  # the driver counts how often; here once is enough
            self._shut(address.value)
            raise InvalidArgument(f"memory of {self.name} at {address.value:#x} is open already")
        self._opened.add(address.value, max(size, 1))
        return address.value

    def shut(self, address: int) -> None:
        """See DeviceMemory."""
        self._opened.take(address)
        self._shut(address)

    def _shut(self, address: int) -> None:
        with self._current():
            self._driver("cuIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, size: int) -> None:
        """See DeviceMemory."""
        check_within(source, size, self._own, self._opened)
        if size:
            with self._current() as stream:
                self._driver("cuMemcpyDtoDAsync_v2", target, source, size, stream)

    def copy_out(self, address: int, size: int) -> bytes:
        """See DeviceMemory."""
        check_within(address, size, self._own, self._opened)
        self.synchronise()
        memory = (ctypes.c_ubyte * size)()
        if size:
            with self._current():
                self._driver("cuMemcpyDtoH_v2", ctypes.addressof(memory), address, size)
        return bytes(memory)

    def synchronise(self) -> None:
        """See DeviceMemory."""
        with self._current() as stream:
            self._driver("cuStreamSynchronize", stream)
        for stage in self._stages:
            stage.busy = False

    def memory(self) -> tuple[int, int]:
        """See DeviceMemory."""
        with self._current():
            return self._memory()

    def _memory(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        self._driver("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def close(self) -> None:
        """See DeviceMemory. What cannot be given back by a device that has failed goes with the process."""
        if self._context is None:
            return
        try:
            self.synchronise()
            for address in self._opened:
                self.shut(address)
            for address in self._own:
                self.free(address)
            with self._current() as stream:
                for stage in self._stages:
                    stage.view.release()
                    self._driver("cuMemFreeHost", stage.address)
                    self._driver("cuEventDestroy_v2", stage.event)
                self._driver("cuStreamDestroy_v2", stream)
            self._driver("cuDevicePrimaryCtxRelease_v2", self._device)
        except TensorcastError as error:
            raise DeviceError(f"{self.name} cannot be closed: {error}") from error
        finally:
            self._context, self._stages = None, []
