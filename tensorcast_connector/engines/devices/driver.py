"""The few functions of the CUDA driver that are needed, by ctypes, each failure as an exception.

The driver's interface is the same for years and for every CUDA toolkit, and comes with the GPU's driver: nothing has to be
installed, no torch is loaded, and no error stays behind in the runtime that torch uses in the same process.
"""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

from tensorcast_connector.engines.devices.memory import DeviceError
from tensorcast_connector.errors import ConfigError, Exhausted

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
HOST_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
STREAM_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it does not wait for torch's default stream, nor that for it
EVENT_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
IPC_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, which cuIpcOpenMemHandle insists on


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


# Addresses on a device are CUdeviceptr, unsigned and of 64 bits; contexts, streams, events and host memory are pointers.
_SIGNATURES: Mapping[str, Sequence[Any]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (POINTER(Uuid), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}


class CudaError(DeviceError):
    """A function of the driver has failed.

    Attributes:
        number: a CUresult.
    """

    def __init__(self, function: str, number: int, text: str) -> None:
        super().__init__(f"{function} failed: {text} (CUDA error {number})")
        self.number = number


class Driver:
    """The functions, called by name: `driver("cuMemFree_v2", address)`.

    Raises:
        ConfigError: there is no driver, no GPU that it can use, or it is too old.
    """

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise ConfigError(f"no CUDA driver on this machine: {error}") from error
        self._functions: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise ConfigError(f"the CUDA driver is too old: it has no {name}; 470 or later is needed") from None
            function.argtypes, function.restype = arguments, c_int
            self._functions[name] = function
        try:
            self("cuInit", 0)
        except CudaError as error:
            raise ConfigError(f"no GPU can be used: {error}") from error

    def __call__(self, name: str, *arguments: Any) -> None:
        """Calls it.

        Raises:
            Exhausted: the device, or the machine, has no memory.
            CudaError: it has failed otherwise.
        """
        number = self._functions[name](*arguments)
        if number == OUT_OF_MEMORY:
            raise Exhausted(f"{name}: the device is out of memory")
        if number:
            raise CudaError(name, number, self._text(number))

    def _text(self, number: int) -> str:
        text = c_char_p()
        if self._functions["cuGetErrorString"](number, ctypes.byref(text)) or not text.value:
            return "unknown error"
        return text.value.decode(errors="replace")


@cache
def driver() -> Driver:
    """The one of this process. Raises as Driver."""
    return Driver()
