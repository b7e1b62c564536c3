"""`scripts/gpu_check`: copies to a GPU, memory shared between processes, and how fast they are, each checked by its bytes.

Exit status: 0, 1 if something is wrong, 3 if there is no GPU. With `--device host` the same is done on memory of the machine.
"""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tensorcast_connector.config import DEVICE_STAGE_BYTES, parse_size
from tensorcast_connector.engines.devices.memory import DeviceMemory
from tensorcast_connector.engines.devices.opening import open_device
from tensorcast_connector.errors import ConfigError, InvalidArgument, TensorcastError
from tensorcast_connector.worker.device_process import DeviceProcess

NO_GPU = 3
PIECE = 1 << 20
RUNS = 3


class Failed(Exception):
    """A check has found something wrong; says what."""


def content(seed: int, size: int) -> bytes:
    """`size` bytes that are others for each seed, and differ from piece to piece."""
    chance = random.Random(seed)
    made = bytearray(chance.randbytes(PIECE) * (-(-size // PIECE)))
    for start in range(0, len(made), PIECE):
        made[start : start + 8] = start.to_bytes(8, "little")
    return bytes(made[:size])


def same(got: bytes, expected: bytes, what: str) -> str:
    """Raises Failed if they are not."""
    if got != expected:
        if len(got) != len(expected):
            raise Failed(f"{what}: {len(got)} bytes instead of {len(expected)}")
        first = next(at for at in range(len(got)) if got[at] != expected[at])
        raise Failed(f"{what}: byte {first} of {len(got)} is {got[first]} instead of {expected[first]}")
    return f"{len(got)} bytes equal"


def speed(size: int, work: Callable[[], None]) -> float:
    """GB/s of the best of some runs."""
    best = float("inf")
    for _ in range(RUNS):
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
    return size / 1e9 / best


class Sealed:
    """Memory as a worker keeps artifacts: of a descriptor, and never written again."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self.descriptor = os.memfd_create("gpu-check", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(os.dup(self.descriptor), "wb") as file:
            file.write(data)


# --- the checks, each says what it has seen --------------------------------------------------------------------------------


def round_trip(device: DeviceMemory, _: int) -> str:
    """To the device and back, in sizes around those of the buffers."""
    total = 0
    for number, each in enumerate([1, 4095, DEVICE_STAGE_BYTES, DEVICE_STAGE_BYTES + 1, 5 * DEVICE_STAGE_BYTES + 77]):
        data = content(number, each)
        address = device.allocate(each)
        device.copy_in(address, memoryview(data))
        device.synchronise()
        same(device.copy_out(address, each), data, f"{each} bytes")
        device.free(address)
        total += each
    return f"{total} bytes equal"


def bounds(device: DeviceMemory, _: int) -> str:
    """Nothing is freed twice, nothing reaches beyond its memory."""
    address = device.allocate(100)
    too_much = 64 << 20
    device_calls: list[Callable[[], Any]] = [
        lambda: device.copy_in(address, memoryview(bytes(too_much))), lambda: device.copy_out(address, too_much),
        lambda: device.free(address + 1), lambda: device.shut(address),
    ]  # fmt: skip
    for number, call in enumerate(device_calls):
        try:
            call()
        except InvalidArgument:
            continue
        raise Failed(f"misuse {number} was not refused")
    device.free(address)
    try:
        device.free(address)
    except InvalidArgument:
        return f"{len(device_calls) + 1} misuses refused"
    raise Failed("memory was freed twice")


async def shared(device: DeviceMemory, size: int) -> str:
    """The process that owns a worker's device memory fills it, this one opens it."""
    data = content(11, min(size, 200 << 20) + 13)
    sealed = Sealed(data)
    owner = await DeviceProcess.start([device.name])
    try:
        if owner.devices[0].identity != device.identity:
            raise Failed(f"the owner sees {owner.devices[0].identity} and this process {device.identity}")
        handle = await owner.make(1, device.name, sealed.size, sealed.descriptor)
        for _ in range(2):  # a handle can be opened again
            source = device.open(handle, sealed.size)
            same(device.copy_out(source, sealed.size), data, "what another process has written")
            own = device.allocate(sealed.size)
            device.copy(own, source, sealed.size)
            device.synchronise()
            same(device.copy_out(own, sealed.size), data, "copied on the device")
            device.free(own)
            device.shut(source)
        await owner.free(1)
        try:
            await owner.free(1)
        except TensorcastError:
            return f"{sealed.size} bytes equal, read and copied on the device"
        raise Failed("the owner has freed a copy twice")
    finally:
        os.close(sealed.descriptor)
        await owner.end()


async def owner_killed(device: DeviceMemory, _: int) -> str:
    """Its handles are of no use then. What is open at that moment is looked at by another process, which may not survive it."""
    data = content(12, 1 << 20)
    sealed = Sealed(data)
    owner = await DeviceProcess.start([device.name])
    try:
        handle = await owner.make(1, device.name, sealed.size, sealed.descriptor)
        command = [sys.executable, "-m", "checks.gpu", "--device", device.name, "--reader", handle.hex()]
        reader = await asyncio.create_subprocess_exec(
            *command, str(sealed.size), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )  # fmt: skip
        assert reader.stdin is not None and reader.stdout is not None
        first = bytes.fromhex((await reader.stdout.readline()).decode())
        same(first, data[:64], "read by a third process")
        os.kill(owner.pid, signal.SIGKILL)
        await owner.gone
        await owner.end()
        reader.stdin.write(b"\n")
        answer = (await reader.communicate())[0]
        after = "intact" if answer.strip() == data[:64].hex().encode() else f"not readable: {answer.decode()[:200]!r}"
        try:
            device.shut(device.open(handle, sealed.size))
        except TensorcastError:
            return f"a stale handle is refused; memory that was open is {after}"
        raise Failed("the handle of a process that has died was taken")
    finally:
        os.close(sealed.descriptor)
        await owner.end()


def read_for_others(name: str, handle: str, size: int) -> None:
    """The third process of `owner_killed`: says the first bytes, and once more when it is asked."""
    device = open_device(name)
    address = device.open(bytes.fromhex(handle), size)
    print(device.copy_out(address, 64).hex(), flush=True)
    sys.stdin.readline()
    print(device.copy_out(address, 64).hex(), flush=True)


def rates(device: DeviceMemory, size: int) -> str:
    """Host to device as a replica is made, device to device as one is copied, beside what torch makes of pinned memory."""
    data = memoryview(bytearray(size))
    one, other = device.allocate(size), device.allocate(size)

    def fill() -> None:
        device.copy_in(one, data)
        device.synchronise()

    def copy() -> None:
        device.copy(other, one, size)
        device.synchronise()

    found = f"host to device {speed(size, fill):.1f} GB/s, device to device {speed(size, copy):.1f} GB/s"
    device.free(one)
    device.free(other)
    torch = torch_or_none()
    if torch is None:
        return f"{found} (no torch to compare with)"
    kind = torch_device(device)
    if kind.type == "cuda" and not torch.cuda.is_available():
        return f"{found} (this torch has no CUDA to compare with)"
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=kind.type == "cuda")
    target, third = (torch.empty(size, dtype=torch.uint8, device=kind) for _ in range(2))

    def by_torch(to: Any, given: Any) -> None:
        to.copy_(given, non_blocking=True)
        if kind.type == "cuda":
            torch.cuda.synchronize(kind)

    limits = speed(size, lambda: by_torch(target, pinned)), speed(size, lambda: by_torch(third, target))
    return f"{found}; by torch, pinned: {limits[0]:.1f} and {limits[1]:.1f} GB/s"


async def into_tensors(device: DeviceMemory, _: int) -> str:
    """What the loader does with a replica: into the memory of torch's tensors, on the same device."""
    torch = usable_torch(device)
    data = content(13, 3_000_001)
    sealed = Sealed(data)
    owner = await DeviceProcess.start([device.name])
    try:
        handle = await owner.make(1, device.name, sealed.size, sealed.descriptor)
        source = device.open(handle, sealed.size)
        targets = [
            torch.full((each,), 7, dtype=torch.uint8, device=torch_device(device)) for each in (1, 65, 2_000_000)
        ]
        synchronise(torch, device)
        for number, target in enumerate(targets):
            device.copy(target.data_ptr(), source + 64 * number, target.numel())
        device.synchronise()
        for number, target in enumerate(targets):
            start = 64 * number
            same(target.cpu().numpy().tobytes(), data[start : start + target.numel()], f"tensor {number}")
        device.shut(source)
        return f"{sum(each.numel() for each in targets)} bytes equal in {len(targets)} tensors"
    finally:
        os.close(sealed.descriptor)
        await owner.end()


def staged(device: DeviceMemory, _: int) -> str:
    """Copies through pinned buffers as weights are loaded: every layout and dtype, again and again, by several threads."""
    torch = usable_torch(device)
    from tensorcast_connector.engines.weights.load_sources import in_threads

    kind = torch_device(device)
    layouts: dict[str, Callable[[Any], Any]] = {
        "whole": lambda each: each, "columns": lambda each: each[:, 100:611], "transposed": lambda each: each.t(),
        "every other row": lambda each: each[::2], "one value": lambda each: each[3, 4], "nothing": lambda each: each[:0],
    }  # fmt: skip
    pairs: list[tuple[str, Any, Any, Any]] = []
    chance = torch.Generator().manual_seed(5)
    for number in range(8):
        for name, view in layouts.items():
            for dtype in (torch.float32, torch.bfloat16):
                target = torch.full((3000, 1024), -1.0, dtype=torch.bfloat16, device=kind)
                given = torch.randn(view(target).shape, generator=chance).to(dtype)
                given = given.t().contiguous().t() if number % 2 and given.dim() == 2 else given
                pairs.append((f"{name}, {dtype}", target, view(target), given))

    def send(pair: tuple[str, Any, Any, Any], stage: Any) -> int:
        stage.send(pair[2], pair[3].to(pair[2].dtype) if pair[3].dim() == 0 else pair[3])
        return int(pair[3].numel())

    in_threads(pairs, send, 4, lambda _: None)
    for name, target, view, given in pairs:
        if not torch.equal(view.cpu(), given.to(view.dtype)):
            raise Failed(f"{name}: other values than were sent")
        if int((target.cpu() != -1).sum()) > given.numel():
            raise Failed(f"{name}: something beside its target was written")
    return f"{len(pairs)} tensors equal"


# --- torch, if it is there --------------------------------------------------------------------------------------------------


class Skipped(Exception):
    """What is needed for a check is not there."""


def torch_or_none() -> Any:
    """The module."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def torch_device(device: DeviceMemory) -> Any:
    """The same device to torch."""
    torch = torch_or_none()
    return torch.device(device.name if device.name.startswith("cuda") else "cpu")


def usable_torch(device: DeviceMemory) -> Any:
    """torch; raises Skipped if it is not there, or cannot use the device."""
    torch = torch_or_none()
    if torch is None or (device.name.startswith("cuda") and not torch.cuda.is_available()):
        raise Skipped("no torch that can use it")
    return torch


def synchronise(torch: Any, device: DeviceMemory) -> None:
    """Nothing of torch's is under way any more."""
    if device.name.startswith("cuda"):
        torch.cuda.synchronize(torch_device(device))


# --- all of them -------------------------------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[DeviceMemory, int], str | Awaitable[str]]] = {
    "round trip": round_trip, "bounds": bounds, "shared between processes": shared, "owner killed": owner_killed,
    "into torch's tensors": into_tensors, "staged copies": staged, "speed": rates,
}  # fmt: skip


async def run(name: str, size: int) -> int:
    """All checks, a line for each; the exit status."""
    device = open_device(name)
    free, total = device.memory()
    print(f"{name}: {device.identity}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
    failed = 0
    for what, check in CHECKS.items():
        try:
            found = check(device, size)
            print(f"ok       {what}: {found if isinstance(found, str) else await found}", flush=True)
        except Skipped as why:
            print(f"skipped  {what}: {why}", flush=True)
        except (Failed, TensorcastError, OSError, RuntimeError) as error:
            failed += 1
            print(f"FAILED   {what}: {type(error).__name__}: {error}", flush=True)
    device.close()
    print(f"{failed} of {len(CHECKS)} checks failed" if failed else f"all {len(CHECKS)} checks done, none failed")
    return 1 if failed else 0


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or host (default: cuda:0)")
    parser.add_argument("--size", default="1GiB", help="of what speeds are measured with (default: 1GiB)")
    parser.add_argument("--reader", nargs=2, metavar=("HANDLE", "BYTES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    name = "host:0" if args.device == "host" else args.device
    try:
        size = parse_size(args.size, "size")
        if args.reader:
            read_for_others(name, args.reader[0], int(args.reader[1]))
            return 0
        open_device(name).close()
    except ConfigError as error:
        print(f"scripts/gpu_check: {error}; nothing was checked (--device host tries the checks without a GPU)")
        return NO_GPU
    return asyncio.run(run(name, size))


if __name__ == "__main__":
    sys.exit(main())
