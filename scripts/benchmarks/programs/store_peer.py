"""Peers of `scripts/bench service`: what they take to put the tensors of benchmarks/service.py, and to have them there again.

    python -m benchmarks.programs.store_peer ray|safetensors FOLDER

It is told what to do like the programs of measure.py: {"do": "put", "number": N} and {"do": "read", "calls": N}, each
answered with {"seconds": S}. Runs in the peers' own environment.
"""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

PUT_BYTES = 64 << 20
PUT_TENSORS = 64
TENSORS = 1000


class Peer(Protocol):
    """A place for tensors."""

    def put(self, tensors: dict[str, Any]) -> Any:
        """Stores them; returns what `get` needs."""

    def get(self, stored: Any) -> dict[str, Any]:
        """Has them there again, without copying where it can."""

    def drop(self, stored: Any) -> None:
        """Deletes them."""


class Ray:
    """ray's object store."""

    def __init__(self, folder: Path) -> None:
        import ray

        ray.init(object_store_memory=512 << 20, _temp_dir=str(folder / "ray"), include_dashboard=False, num_cpus=1,
                 log_to_driver=False, logging_level="ERROR")  # fmt: skip
        self._ray = ray

    def put(self, tensors: dict[str, Any]) -> Any:
        """See Peer."""
        return [self._ray.put(tensors)]

    def get(self, stored: Any) -> dict[str, Any]:
        """See Peer."""
        return dict(self._ray.get(stored[0]))

    def drop(self, stored: Any) -> None:
        """See Peer."""
        stored.clear()


class Safetensors:
    """Files on a memory file system."""

    def __init__(self, folder: Path) -> None:
        from safetensors import numpy

        self._numpy = numpy
        self._folder = folder
        self._count = 0

    def put(self, tensors: dict[str, Any]) -> Any:
        """See Peer."""
        self._count += 1
        path = self._folder / f"{self._count}.safetensors"
        self._numpy.save_file(tensors, path)
        return path

    def get(self, stored: Any) -> dict[str, Any]:
        """See Peer."""
        return dict(self._numpy.load_file(stored))

    def drop(self, stored: Any) -> None:
        """See Peer."""
        stored.unlink()


def put_seconds(peer: Peer, number: int) -> float:
    """One put of other bytes each time."""
    made = {f"layer.{index}": np.full(PUT_BYTES // PUT_TENSORS // 4, index, np.float32) for index in range(PUT_TENSORS)}
    made["layer.0"][0] = number
    before = time.perf_counter()
    stored = peer.put(made)
    taken = time.perf_counter() - before
    peer.drop(stored)
    return taken


def read_seconds(peer: Peer, stored: Any, calls: int) -> float:
    """The median of some reads."""
    taken = []
    for _ in range(calls + 1):
        before = time.perf_counter()
        found = peer.get(stored)
        taken.append(time.perf_counter() - before)
        if len(found) != TENSORS or found["tensor.7"][5] != 7:
            raise ValueError("what was read is not what was put")
    return statistics.median(taken[1:])


def commands() -> Iterator[dict[str, Any]]:
    """What it is told, line by line."""
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    """See the module."""
    name, folder = sys.argv[1:]
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # a library that prints does not answer for us
        peer: Peer = Ray(Path(folder)) if name == "ray" else Safetensors(Path(folder))
        stored = peer.put({f"tensor.{index}": np.full(4096, index, np.float32) for index in range(TENSORS)})
        put_seconds(peer, -1)
        print("{}", file=answers, flush=True)
        for told in commands():
            if told["do"] == "put":
                seconds = put_seconds(peer, told["number"])
            else:
                seconds = read_seconds(peer, stored, told["calls"])
            print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
