"""The seam to device memory: bytes there and back, shared between processes, nothing beyond its bounds, nothing twice."""

import ctypes
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tensorcast_connector.config import DEVICE_STAGE_BYTES
from tensorcast_connector.engines.devices import cuda, driver
from tensorcast_connector.engines.devices.memory import DeviceMemory
from tensorcast_connector.engines.devices.opening import open_device
from tensorcast_connector.errors import ConfigError, Exhausted, InvalidArgument, TensorcastError, Unavailable
from tests.engines.devices.conftest import device, fake_cuda, stand_in

__all__ = ["device", "fake_cuda", "stand_in"]

OWNER = """
import sys
from tensorcast_connector.engines.devices.opening import open_device
device = open_device(sys.argv[1])
data = bytes.fromhex(sys.argv[2]) * int(sys.argv[3])
address = device.allocate(len(data))
device.copy_in(address, memoryview(data))
device.synchronise()
print(device.export(address).hex(), device.identity, flush=True)
for line in sys.stdin:
    device.free(address)
    print("freed", flush=True)
"""


@pytest.fixture
def memory(device: str) -> Iterator[DeviceMemory]:
    """Of one device."""
    opened = open_device(device)
    yield opened
    opened.close()


class Owner:
    """Another process, with `data` times `count` in the memory of a device."""

    def __init__(self, name: str, data: bytes, count: int = 1) -> None:
        command = [sys.executable, "-c", OWNER, name, data.hex(), str(count)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        handle, self.identity = self.process.stdout.readline().split()
        self.handle = bytes.fromhex(handle)

    def free(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "freed\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
def test_bytes_come_back(memory: DeviceMemory) -> None:
    data = random.Random(1).randbytes(5 << 20)
    address = memory.allocate(len(data))
    memory.copy_in(address, memoryview(data))
    memory.copy_in(address + 100, memoryview(b"other"))
    target = ctypes.create_string_buffer(1000)
    memory.copy(ctypes.addressof(target), address + 50, 1000)
    memory.synchronise()
    expected = data[:100] + b"other" + data[105:]
    assert memory.copy_out(address, len(data)) == expected and target.raw == expected[50:1050]
    free, total = memory.memory()
    assert 0 < free <= total


@pytest.mark.slow
def test_buffers_are_not_filled_again_before_they_are_copied(fake_cuda: None) -> None:
    """The stand-in copies nothing before it is waited for, so a buffer that is reused too early is seen in the bytes."""
    data = random.Random(2).randbytes(3 * DEVICE_STAGE_BYTES // 2) * 4  # other bytes in every buffer
    memory = open_device("cuda:0")
    address = memory.allocate(len(data))
    memory.copy_in(address, memoryview(data))
    assert memory.copy_out(address, len(data)) == data
    memory.close()


def test_without_waiting_nothing_is_there(fake_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the stand-in sees such mistakes."""
    monkeypatch.setattr(cuda, "DEVICE_STAGE_BYTES", 1000)
    real = driver.Driver.__call__

    def forgetful(self: driver.Driver, name: str, *arguments: object) -> None:
        if name != "cuEventSynchronize":
            real(self, name, *arguments)

    monkeypatch.setattr(driver.Driver, "__call__", forgetful)
    data = random.Random(3).randbytes(5000)
    memory = open_device("cuda:0")
    address = memory.allocate(len(data))
    memory.copy_in(address, memoryview(data))
    assert memory.copy_out(address, len(data)) != data
    memory.close()


@pytest.mark.slow
def test_another_process_opens_it(memory: DeviceMemory) -> None:
    owner = Owner(memory.name, b"0123456789", 1000)
    assert owner.identity == memory.identity
    address = memory.open(owner.handle, 10_000)
    target = ctypes.create_string_buffer(10_000)
    memory.copy(ctypes.addressof(target), address, 10_000)
    memory.synchronise()
    assert target.raw == b"0123456789" * 1000 == memory.copy_out(address, 10_000)
    memory.shut(address)
    with pytest.raises(InvalidArgument, match="given back already"):
        memory.shut(address)
    with pytest.raises(InvalidArgument, match="not within"):
        memory.copy_out(address, 1)
    again = memory.open(owner.handle, 10_000)  # as often as one likes
    owner.kill()
    assert memory.copy_out(again, 10) == b"0123456789"  # what is open stays readable
    memory.shut(again)
    with pytest.raises(Unavailable):
        memory.open(owner.handle, 10_000)


@pytest.mark.slow
def test_what_is_freed_cannot_be_opened(memory: DeviceMemory) -> None:
    owner = Owner(memory.name, b"x" * 100)
    owner.free()
    with pytest.raises(Unavailable):
        memory.open(owner.handle, 100)
    owner.kill()


def test_nothing_is_freed_twice_or_reached_beyond(memory: DeviceMemory) -> None:
    address = memory.allocate(4 << 20)
    for call in (
        lambda: memory.copy_in(address + 10, memoryview(bytes(4 << 20))),
        lambda: memory.copy_out(address - 1, 10),
        lambda: memory.copy(address, address + 1, 4 << 20),
        lambda: memory.copy_out(address, -1),
    ):
        with pytest.raises(InvalidArgument, match="not within"):
            call()
    memory.free(address)
    for call in (lambda: memory.free(address), lambda: memory.export(address)):
        with pytest.raises(InvalidArgument, match="already"):
            call()
    with pytest.raises(InvalidArgument, match=r"no handle|no IPC handle"):
        memory.open(b"nonsense", 1)
    memory.close()
    memory.close()


def test_a_device_that_is_full_says_so(fake_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_BYTES", str(8 << 20))
    memory = open_device("cuda:1")
    kept = memory.allocate(5 << 20)
    with pytest.raises(Exhausted, match=r"cuda:1 has no room for 4194304 bytes: 2097152 of 8388608 are free"):
        memory.allocate(3 << 20)
    memory.free(kept)
    memory.free(memory.allocate(8 << 20))
    memory.close()


def test_mistakes_are_told(fake_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, words in [
        ("cuda:2", "shows 2 device"),
        ("tpu:0", "is no device"),
        ("cuda:0,cuda:1", "one device"),
        ("", "one"),
    ]:
        with pytest.raises(ConfigError, match=words):
            open_device(name)
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "0")
    driver.driver.cache_clear()
    with pytest.raises(ConfigError, match="no GPU can be used: cuInit failed: no CUDA-capable"):
        open_device("cuda:0")
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-that-is-not-there.so")
    with pytest.raises(ConfigError, match="no CUDA driver on this machine"):
        open_device("cuda:0")
    monkeypatch.setattr(driver, "LIBRARY", "libc.so.6")
    with pytest.raises(ConfigError, match="too old: it has no cuInit"):
        open_device("cuda:0")


def test_an_error_of_the_driver_names_its_function(fake_cuda: None) -> None:
    with pytest.raises(TensorcastError, match=r"cuMemFree_v2 failed: invalid device context \(CUDA error 201\)"):
        driver.driver()("cuMemFree_v2", 5)
