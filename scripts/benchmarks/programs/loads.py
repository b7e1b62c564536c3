"""What a loader takes to fill parameters from a safetensors file, each load in a process of its own.

    python -m benchmarks.programs.loads METHOD,METHOD...

It imports what the methods need, and for each {"do": "load", "method": M, "path": P, "cold": false, "threads": N} that it is told
forks a process that allocates the parameters, touches them, and then measures from opening the file until all of them are filled.
The answer is {"seconds": S}, or {"error": "why"}. The peers' methods run in the peers' own environment.
"""

import ctypes
import gc
import importlib
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BLOCK_BYTES = 4 << 20
_libc = ctypes.CDLL(None, use_errno=True)
IMPORTS = {
    "ours": ["tensorcast_connector.client.reading", "numpy"],
    "ours_stream": ["tensorcast_connector.client.reading", "numpy"],
    "raw": [],
    "load_file": ["torch", "safetensors.torch"],
    "safe_open": ["torch", "safetensors"],
    "runai": ["torch", "runai_model_streamer.safetensors_streamer.safetensors_streamer"],
    "fastsafetensors": ["torch", "fastsafetensors"],
}


class Parameters:
    """Memory of the kind that an engine's parameters have, one run of it, touched before anything is measured."""

    def __init__(self, path: str) -> None:
        with Path(path).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        self.data_at = 8 + length
        self.places: dict[str, tuple[list[int], int, int]] = {}
        for name, each in header.items():
            start, end = each["data_offsets"]
            self.places[name] = (each["shape"], start, end)
        self.bytes = max(end for _, _, end in self.places.values())
        self.memory = mmap.mmap(-1, self.bytes)
        self.view = memoryview(self.memory)
        for _ in range(2):  # the second time what the first has left cold
            for at in range(0, self.bytes, mmap.PAGESIZE):
                self.memory[at] = 1

    def tensors(self) -> dict[str, Any]:
        """As torch has them."""
        torch = sys.modules["torch"]
        return {
            name: torch.frombuffer(
                self.memory, dtype=torch.bfloat16, count=(end - start) // 2, offset=start
            ).view(shape)
            for name, (shape, start, end) in self.places.items()
        }  # fmt: skip

    def check(self, path: str) -> None:
        """The first and the last tensor are those of the file."""
        with Path(path).open("rb") as file:
            for _, start, end in (min(self.places.values(), key=_start), max(self.places.values(), key=_start)):
                file.seek(self.data_at + start)
                if file.read(end - start) != self.view[start:end]:
                    raise ValueError("what was loaded is not what the file has")


def _start(place: tuple[list[int], int, int]) -> int:
    return place[1]


# --- ours and the limit -----------------------------------------------------------------------------------------------


def ours(path: str, parameters: Parameters, threads: int) -> None:  # noqa: ARG001 - ours has its own number
    """`read_all` into the parameters."""
    from tensorcast_connector.client.checkpoint import Checkpoint
    from tensorcast_connector.client.reading import Piece, read_all

    with Checkpoint.open(path) as checkpoint:
        places = parameters.places
        read_all(
            Piece.of(checkpoint, each, parameters.view[places[each.name][1] : places[each.name][2]])
            for each in checkpoint.tensors.values()
        )


def ours_stream(path: str, parameters: Parameters, threads: int) -> None:  # noqa: ARG001
    """`stream`, and a copy of each tensor."""
    import numpy as np

    from tensorcast_connector.client.checkpoint import Checkpoint
    from tensorcast_connector.client.reading import stream

    target = np.frombuffer(parameters.memory, np.uint8)
    with Checkpoint.open(path) as checkpoint:
        for each, data in stream(checkpoint):
            start = parameters.places[each.name][1]
            target[start : start + each.bytes] = np.frombuffer(data, np.uint8)


def raw(path: str, parameters: Parameters, threads: int) -> None:
    """Positioned reads of the whole data by so many threads, with nothing else to do."""
    descriptor = os.open(path, os.O_RDONLY)
    blocks = iter(range(0, parameters.bytes, BLOCK_BYTES))

    def work() -> None:
        for at in blocks:
            target = parameters.view[at : at + BLOCK_BYTES]
            while target:
                count = os.preadv(descriptor, [target], parameters.data_at + at)
                at, target = at + count, target[count:]

    others = [threading.Thread(target=work) for _ in range(threads - 1)]
    for each in others:
        each.start()
    work()
    for each in others:
        each.join()
    os.close(descriptor)


# --- peers ------------------------------------------------------------------------------------------------------------


def load_file(path: str, parameters: Parameters, threads: int) -> None:
    """safetensors.torch.load_file, and a copy of each tensor."""
    torch = _torch(threads)
    found = sys.modules["safetensors.torch"].load_file(path)
    with torch.no_grad():
        for name, each in parameters.tensors().items():
            each.copy_(found[name])


def safe_open(path: str, parameters: Parameters, threads: int) -> None:
    """safetensors.safe_open, tensor by tensor, as engines do."""
    torch = _torch(threads)
    with sys.modules["safetensors"].safe_open(path, "pt", "cpu") as file, torch.no_grad():
        for name, each in parameters.tensors().items():
            each.copy_(file.get_tensor(name))


def runai(path: str, parameters: Parameters, threads: int) -> None:
    """runai-model-streamer with its own concurrency."""
    torch = _torch(threads)
    module = sys.modules[IMPORTS["runai"][-1]]
    targets = parameters.tensors()
    with module.SafetensorsStreamer() as streamer, torch.no_grad():
        streamer.stream_file(path)
        for name, each in streamer.get_tensors():
            targets[name].copy_(each)


def fastsafetensors(path: str, parameters: Parameters, threads: int) -> None:
    """fastsafetensors without GPU-direct storage."""
    torch = _torch(threads)
    module = sys.modules["fastsafetensors"]
    loader = module.SafeTensorsFileLoader(module.SingleGroup(), "cpu", nogds=True)
    loader.add_filenames({0: [path]})
    buffer = loader.copy_files_to_device()
    with torch.no_grad():
        for name, each in parameters.tensors().items():
            each.copy_(buffer.get_tensor(name))
    buffer.close()
    loader.close()


def _torch(threads: int) -> Any:
    torch = sys.modules["torch"]
    torch.set_num_threads(threads)
    return torch


METHODS: dict[str, Callable[[str, Parameters, int], None]] = {
    "ours": ours, "ours_stream": ours_stream, "raw": raw, "load_file": load_file, "safe_open": safe_open,
    "runai": runai, "fastsafetensors": fastsafetensors,
}  # fmt: skip


# --- one load ---------------------------------------------------------------------------------------------------------


def forget(path: str) -> None:
    """Takes a file out of the page cache.

    Raises:
        ValueError: it is still there.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if _cached(descriptor) and os.access("/proc/sys/vm/drop_caches", os.W_OK):
            Path("/proc/sys/vm/drop_caches").write_text("3")
        if _cached(descriptor):
            raise ValueError("the file cannot be taken out of the page cache; as root it can")
    finally:
        os.close(descriptor)


def _cached(descriptor: int) -> bool:
    """Whether anything of a file is in the page cache."""
    size = os.fstat(descriptor).st_size
    with mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE) as mapped:
        found = (ctypes.c_uint8 * -(-size // mmap.PAGESIZE))()
        at = ctypes.addressof(ctypes.c_uint8.from_buffer(mapped))
        if _libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), found):
            raise OSError(ctypes.get_errno(), "mincore")
        gc.collect()  # what kept the mapping
        return any(bytes(found))


def warm(path: str) -> None:
    """Has all of a file in the page cache."""
    with Path(path).open("rb") as file:
        while file.read(BLOCK_BYTES):
            pass


def load(method: str, path: str, cold: bool, threads: int) -> dict[str, Any]:
    """One load in this process."""
    parameters = Parameters(path)
    if cold:
        forget(path)
    else:
        warm(path)
    before = time.perf_counter()
    METHODS[method](path, parameters, threads)
    seconds = time.perf_counter() - before
    parameters.check(path)
    return {"seconds": seconds, "bytes": parameters.bytes}


def load_apart(told: Mapping[str, Any]) -> dict[str, Any]:
    """One load in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = load(told["method"], told["path"], told["cold"], told["threads"])
        except BaseException as error:
            answer = {"error": (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answered:
        text = answered.read()
    _, status = os.waitpid(child, 0)
    return dict(json.loads(text)) if text else {"error": f"its process ended with status {status}"}


def main() -> None:
    """See the module."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints does not answer for us
    os.environ.setdefault("RUNAI_STREAMER_LOG_LEVEL", "ERROR")
    absent: dict[str, str] = {}
    for method in sys.argv[1].split(","):
        try:
            for module in IMPORTS[method]:
                importlib.import_module(module)
        except Exception as error:  # a peer's library may fail in any way where it does not run
            absent[method] = f"{type(error).__name__}: {error}"
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        why = absent.get(told["method"])
        print(json.dumps({"error": why} if why else load_apart(told)), file=answers, flush=True)


if __name__ == "__main__":
    main()
