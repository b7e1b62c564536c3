"""The process that owns device memory, message by message."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tensorcast_connector.engines.devices.host import HostMemory
from tensorcast_connector.engines.devices.process import Owner, serve
from tensorcast_connector.errors import ProtocolError
from tensorcast_connector.wire.device_messages import (
    CopyFreed,
    CopyMade,
    DeviceMessage,
    DevicesReady,
    FreeCopy,
    MakeCopy,
    Refused,
    decode_answer,
    decode_request,
    encode,
)
from tests.engines.devices.conftest import fake_cuda, stand_in

__all__ = ["fake_cuda", "stand_in"]
SIZE = 10_000


class Worker:
    """Asks an owner that runs in a thread."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(10)
        self.device = HostMemory("host:0")
        self.owner = Owner({"host:0": self.device})
        self.ended: list[bool] = []
        self._theirs = theirs
        self._thread = threading.Thread(target=lambda: self.ended.append(serve(theirs, self.owner)))
        self._thread.start()

    def ask(self, message: DeviceMessage | bytes, *descriptors: int) -> Any:
        packet = message if isinstance(message, bytes) else encode(message)
        socket.send_fds(self.sock, [packet], list(descriptors))
        return decode_answer(self.sock.recv(65536))

    def end(self) -> None:
        self.sock.close()
        self._thread.join(10)
        self._theirs.close()
        self.owner.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.end()
    assert made.ended


@pytest.fixture
def memory() -> Iterator[int]:
    """A descriptor of SIZE bytes."""
    descriptor = os.memfd_create("test")
    os.write(descriptor, b"ab" * (SIZE // 2))
    yield descriptor
    os.close(descriptor)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_copies_are_made_and_freed_once(worker: Worker, memory: int) -> None:
    made = worker.ask(MakeCopy(1, "host:0", SIZE), memory)
    assert isinstance(made, CopyMade)
    reader = HostMemory("host:0")
    address = reader.open(made.handle, SIZE)
    assert reader.copy_out(address, SIZE) == b"ab" * (SIZE // 2)
    reader.close()
    assert isinstance(worker.ask(FreeCopy(1)), CopyFreed)
    again = worker.ask(FreeCopy(1))
    assert isinstance(again, Refused) and "freed already" in again.message and not again.fatal


def test_what_cannot_be_done_is_refused_and_leaves_nothing(worker: Worker, memory: int) -> None:
    assert isinstance(worker.ask(MakeCopy(1, "host:0", SIZE), memory), CopyMade)
    before = open_files()
    for message, descriptors in [
        (MakeCopy(1, "host:0", SIZE), [memory]),  # there is one with this number
        (MakeCopy(2, "host:9", SIZE), [memory]),
        (MakeCopy(2, "host:0", SIZE), []),  # no memory to copy
        (MakeCopy(2, "host:0", 100 * SIZE), [memory]),  # less of it than is said
        (MakeCopy(2, "host:0", 1 << 60), [memory]),
        (b"nonsense", []),
        (b"nonsense", [memory]),
    ]:
        found = worker.ask(message, *descriptors)
        assert isinstance(found, Refused) and found.message and not found.fatal, (message, found)
    assert open_files() == before
    assert isinstance(worker.ask(MakeCopy(2, "host:0", 0)), CopyMade)


def test_nonsense_is_no_message() -> None:
    for decode in (decode_request, decode_answer):
        with pytest.raises(ProtocolError):
            decode(b"\xff")


def test_a_fault_of_its_own_ends_it_with_a_word(worker: Worker, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.device, "export", lambda address: {}[address])
    found = worker.ask(MakeCopy(1, "host:0", SIZE), memory)
    assert isinstance(found, Refused) and found.fatal and found.message.startswith("KeyError")
    worker._thread.join(10)
    assert worker.ended == [False]


@pytest.mark.slow
def test_it_says_what_it_has_or_why_not_and_ends_with_its_socket(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*devices: str, parent: int = os.getpid()) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tensorcast_connector.engines.devices.process"]
        arguments = ["--socket", str(theirs.fileno()), "--parent", str(parent), *devices]
        process = subprocess.Popen([*command, *arguments], pass_fds=[theirs.fileno()])
        theirs.close()
        return process, ours

    process, sock = start("cuda:1", "host:3")
    ready = decode_answer(sock.recv(65536))
    assert isinstance(ready, DevicesReady)
    assert [(each.name, each.identity) for each in ready.devices] == [
        ("cuda:1", f"cuda-{'a1' * 16}"),
        ("host:3", "host:3"),
    ]
    assert all(0 < each.free_bytes <= each.total_bytes for each in ready.devices)
    sock.close()
    assert process.wait(10) == 0
    process, sock = start("cuda:0", "cuda:5")
    refused = decode_answer(sock.recv(65536))
    assert (
        isinstance(refused, Refused) and refused.fatal and refused.code == "config" and "no cuda:5" in refused.message
    )
    assert process.wait(10) == 1
    sock.close()
    process, sock = start("host:0", parent=1)  # its worker has died before it could ask to be told
    assert process.wait(10) == 0 and sock.recv(100) == b""
    sock.close()
