"""The child process that owns a worker's device memory, as its worker sees it: started, asked, ended.

The worker itself loads no driver and no torch: what lies in a device's memory and goes wrong there is the child's alone.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from tensorcast_connector.config import DEVICE_CALL_TIMEOUT_S, DEVICE_MESSAGE_BYTES_MAX, DEVICE_START_TIMEOUT_S
from tensorcast_connector.errors import ProtocolError, TensorcastError, Unavailable, error_from_code
from tensorcast_connector.wire.device_messages import (
    CopyFreed,
    CopyMade,
    DeviceInfo,
    DeviceMessage,
    DevicesReady,
    FreeCopy,
    MakeCopy,
    Refused,
    decode_answer,
    encode,
)

logger = logging.getLogger(__name__)
PROGRAM = "tensorcast_connector.engines.devices.process"  # not imported here: see the import rule
_Answer = DevicesReady | Refused | CopyMade | CopyFreed


class DeviceProcess:
    """See the module. Made by `start`; of no use any more once `gone` is done, which `end` sees to.

    Attributes:
        gone: done when the process has ended, or does not speak any more; why.
        devices: what it has.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._process = process
        self._socket = sock
        self._waiting: deque[asyncio.Future[_Answer]] = deque()
        self._turn = asyncio.Lock()
        self.gone: asyncio.Future[str] = loop.create_future()
        self.devices: Sequence[DeviceInfo] = ()
        loop.add_reader(sock.fileno(), self._read)

    def __repr__(self) -> str:
        return f"<DeviceProcess {self.pid} {'gone' if self.gone.done() else 'running'}>"

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it is at this moment; also if nothing was heard of its end yet."""
        if self.gone.done():
            return False
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    @classmethod
    async def start(cls, devices: Sequence[str]) -> "DeviceProcess":
        """A process that has these devices.

        Raises:
            ConfigError: there is no such device, or no driver.
            TensorcastError: it does not come up otherwise; says why.
        """
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise Unavailable(f"the owner of device memory cannot be started: {error.strerror}") from error
        with theirs:
            command = [sys.executable, "-m", PROGRAM, "--socket", str(theirs.fileno()), "--parent", str(os.getpid())]
            try:
                # Not on another thread: it ends with the thread that has started it.
                process = subprocess.Popen(  # noqa: ASYNC220
                    [*command, *devices], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )  # fmt: skip
            except OSError as error:
                ours.close()
                raise Unavailable(f"the owner of device memory cannot be started: {error.strerror}") from error
        ours.setblocking(False)
        started = cls(process, ours)
        try:
            ready = await started._answer(DEVICE_START_TIMEOUT_S)
            if not isinstance(ready, DevicesReady):
                raise ProtocolError(f"the owner of device memory began with {type(ready).__name__}")
            started.devices = ready.devices
            return started
        except BaseException:
            await started.end()
            raise

    async def make(self, number: int, device: str, size: int, descriptor: int) -> bytes:
        """Copies `size` bytes of sealed memory to a device; the handle of the copy. To be freed by its number.

        Raises:
            Exhausted: the device has no room.
            Unavailable: the process has died.
            TensorcastError: what else went wrong.
        """
        answer = await self._ask(MakeCopy(number, device, size), [descriptor] if size else [])
        if not isinstance(answer, CopyMade):
            raise self._broken(answer)
        return answer.handle

    async def free(self, number: int) -> None:
        """Gives the memory of a copy back.

        Raises:
            NotFound: there is no such copy.
            Unavailable: the process has died.
        """
        answer = await self._ask(FreeCopy(number), [])
        if not isinstance(answer, CopyFreed):
            raise self._broken(answer)

    def _broken(self, answer: _Answer) -> ProtocolError:
        self._ended(f"it answered with {type(answer).__name__}")
        return ProtocolError(f"the owner of device memory answered with {type(answer).__name__}")

    async def _ask(self, message: DeviceMessage, descriptors: list[int]) -> _Answer:
        """One at a time, as the child does it. What a caller has asked who is cancelled is done all the same."""
        async with self._turn:
            if self.gone.done():
                raise Unavailable(f"the owner of device memory has died: {self.gone.result()}")
            try:
                socket.send_fds(self._socket, [encode(message)], descriptors)
            except OSError as error:
                self._ended(f"it cannot be written to: {error.strerror}")
                raise Unavailable(f"the owner of device memory has died: {error.strerror}") from error
            return await self._answer(DEVICE_CALL_TIMEOUT_S)

    async def _answer(self, timeout_s: float) -> _Answer:
        waiting: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        either: list[asyncio.Future[Any]] = [waiting, self.gone]
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            answer = waiting.result()
            if isinstance(answer, Refused):
                raise error_from_code(answer.code, answer.message)
            return answer
        self._ended(f"it has not answered within {timeout_s:g} s")
        raise Unavailable(f"the owner of device memory has died: {self.gone.result()}")

    def _read(self) -> None:
        try:
            packet = self._socket.recv(DEVICE_MESSAGE_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError as error:
            self._ended(f"{error.strerror}")
            return
        if not packet:
            self._ended("it closed its socket")
            return
        try:
            answer = decode_answer(packet)
        except TensorcastError as error:
            self._ended(str(error))
            return
        if self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(answer)
        if isinstance(answer, Refused) and answer.fatal:
            self._ended(answer.message)

    def _ended(self, why: str) -> None:
        if not self.gone.done():
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            status = self._process.poll()
            self.gone.set_result(why if status is None else f"it ended with status {status}")

    async def end(self) -> None:
        """Ends it, at once if it does not end by itself; may be called twice."""
        self._ended("it was told to end")
        self._socket.close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await asyncio.to_thread(self._process.wait)
