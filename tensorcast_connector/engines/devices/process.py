"""The process that owns a worker's device memory: `tensorcast worker --devices` starts one, and nobody else should.

    python -m tensorcast_connector.engines.devices.process --socket DESCRIPTOR --parent PID cuda:0 cuda:1

It does one thing after the other, as wire/device_messages.py says it, and ends when its worker does: by the end of the socket,
and if it is busy then by a signal of the kernel. What it exports is gone with it.
"""

import argparse
import contextlib
import ctypes
import logging
import mmap
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

from tensorcast_connector.config import DEVICE_MESSAGE_BYTES_MAX
from tensorcast_connector.engines.devices.memory import DeviceError, DeviceMemory
from tensorcast_connector.engines.devices.opening import open_device
from tensorcast_connector.errors import InvalidArgument, NotFound, TensorcastError, Unavailable
from tensorcast_connector.wire.device_messages import (
    CopyFreed,
    CopyMade,
    DeviceInfo,
    DeviceMessage,
    DevicesReady,
    FreeCopy,
    MakeCopy,
    Refused,
    decode_request,
    encode,
)

logger = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1


class Owner:
    """The devices of this process, and what is allocated on them."""

    def __init__(self, devices: Mapping[str, DeviceMemory]) -> None:
        self._devices = devices
        self._copies: dict[int, tuple[DeviceMemory, int]] = {}  # by their numbers: where they are

    def __repr__(self) -> str:
        return f"<Owner of {len(self._copies)} copies on {', '.join(self._devices)}>"

    def answer(self, message: MakeCopy | FreeCopy, descriptor: int | None) -> DeviceMessage:
        """Does what is asked. Raises TensorcastError; a DeviceError if nothing more is to be done with the devices."""
        if isinstance(message, FreeCopy):
            if message.number not in self._copies:
                raise NotFound(f"there is no copy {message.number}; it may have been freed already")
            device, address = self._copies.pop(message.number)
            device.free(address)
            return CopyFreed()
        if message.device not in self._devices or message.number in self._copies:
            raise NotFound(f"no device {message.device[:40]!r} here, or there is a copy {message.number} already")
        return CopyMade(self._make(self._devices[message.device], message, descriptor))

    def _make(self, device: DeviceMemory, message: MakeCopy, descriptor: int | None) -> bytes:
        address = device.allocate(message.bytes)
        try:
            if message.bytes:
                there = os.fstat(descriptor).st_size if descriptor is not None else 0
                if descriptor is None or there < message.bytes:
                    raise InvalidArgument(
                        f"{there} bytes of memory were passed, of which {message.bytes} are to be copied"
                    )
                mapped = _mapped(descriptor, message.bytes)
                try:
                    with memoryview(mapped) as data:
                        device.copy_in(address, data)
                finally:
                    device.synchronise()  # before the memory is let go of
                    with contextlib.suppress(BufferError):  # an error that is under way refers to parts of it
                        mapped.close()
            handle = device.export(address)
        except BaseException:
            device.free(address)
            raise
        self._copies[message.number] = device, address
        return handle

    def close(self) -> None:
        """Frees everything, as far as the devices let it."""
        for device in self._devices.values():
            try:
                device.close()
            except DeviceError as error:
                logger.warning("%s", error)


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    """Private, as sealed memory may be mapped on every kernel (worker/blob.py)."""
    return mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ)


def serve(sock: socket.socket, owner: Owner) -> bool:
    """Until the worker has gone, or a device has failed: then False."""
    while True:
        packet, descriptors, _, _ = socket.recv_fds(sock, DEVICE_MESSAGE_BYTES_MAX, 1)
        if not packet:
            return True
        failed = False
        try:
            answer = owner.answer(decode_request(packet), descriptors[0] if descriptors else None)
        except TensorcastError as error:
            failed = isinstance(error, DeviceError)
            # The next process may do better, so it can be asked again.
            answer = Refused(Unavailable.code if failed else error.code, str(error), failed)
        except OSError as error:
            answer = Refused(TensorcastError.code, f"{error.strerror or error}")
        except Exception as error:  # a fault of our own; another process begins with what is known to be right
            logger.exception("a request failed")
            failed, answer = True, Refused(Unavailable.code, f"{type(error).__name__}: {error}", True)
        finally:
            for each in descriptors:
                os.close(each)
        sock.sendall(encode(answer))
        if failed:
            return False


def die_with(parent: int) -> None:
    """The kernel ends this process when the thread that started it has ended, however; at once if it has already."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        logger.warning("prctl: %s", os.strerror(ctypes.get_errno()))  # the end of the socket is left
    if os.getppid() != parent:
        sys.exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves the worker that has started it."""
    parser = argparse.ArgumentParser(description="Owns the device memory of a worker, which starts it.")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("devices", nargs="+")
    args = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # a Ctrl-C reaches the worker too, which ends this in its order
        signal.signal(number, signal.SIG_IGN)
    die_with(args.parent)
    logging.basicConfig(format="%(asctime)s %(levelname)s devices: %(message)s")
    with socket.socket(fileno=args.socket) as sock:
        opened: dict[str, DeviceMemory] = {}
        owner = Owner(opened)
        try:
            for name in args.devices:
                opened[name] = open_device(name)
            ready = [DeviceInfo(name, each.identity, *reversed(each.memory())) for name, each in opened.items()]
        except TensorcastError as error:
            sock.sendall(encode(Refused(error.code, str(error), fatal=True)))
            owner.close()
            return 1
        try:
            sock.sendall(encode(DevicesReady(ready)))
            return 0 if serve(sock, owner) else 1
        except (BrokenPipeError, ConnectionResetError):
            return 0  # the worker has gone
        finally:
            owner.close()


if __name__ == "__main__":
    sys.exit(main())
