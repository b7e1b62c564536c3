"""A host without an engine: a worker process, and a client that saves and loads pages as an engine would.

Every page has bytes of its own, derived from its key, and whatever is loaded is compared with them.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import xxhash
from demo.pool import Started

from tensorcast_connector.client.attachment import Attachment
from tensorcast_connector.config import SHARDS, parse_address
from tensorcast_connector.errors import TensorcastError
from tensorcast_connector.net.sockets import SocketNetwork
from tests.waiting import until_blocking

SPACE = b"f" * 16
PAGE_BYTES = 20_000
_numbers = itertools.count()


def content(block_hash: bytes) -> bytes:
    """The bytes of a page."""
    return random.Random(block_hash).randbytes(PAGE_BYTES)


def fresh(count: int = SHARDS) -> list[bytes]:
    """Block hashes nobody has used, one per shard and then again from the first."""
    return [next(_numbers).to_bytes(16, "big") + bytes([at % SHARDS]) for at in range(count)]


class Host:
    """One worker of the cluster and a client attached to it."""

    def __init__(self, worker: Started) -> None:
        self.worker = worker
        self.worker_id = worker["worker_id"]
        self._attachment = Attachment(SocketNetwork(), parse_address(worker["worker"], "worker"), "fault test")
        until_blocking(lambda: self._attachment.connected)

    def save(self, hashes: Sequence[bytes]) -> None:
        """Saves pages; asserts that all are saved."""
        attachment = self._attachment
        mapping = attachment.mapping
        slots = attachment.reserve(SPACE, hashes, PAGE_BYTES, mapping)
        digests = []
        for each, slot in zip(hashes, slots, strict=True):
            assert slot is not None
            slot[:] = content(each)
            digests.append(xxhash.xxh3_64_intdigest(content(each)))
        attachment.commit(SPACE, hashes, digests)

    def found(self, hashes: Sequence[bytes]) -> int:
        """How many of these pages can be had, here or elsewhere; each is asked for on its own."""
        futures = [self._attachment.lookup(f"l{at}", [SPACE], [each], 2.0) for at, each in enumerate(hashes)]
        total = 0
        for future in futures:
            with suppress(TensorcastError):
                total += future.result(5).blocks
        self._attachment.release([f"l{at}" for at in range(len(hashes))])
        return total

    def finds(self, hashes: Sequence[bytes], timeout_s: float = 30.0) -> None:
        """Waits until all of them can be had."""
        until_blocking(lambda: self.found(hashes) == len(hashes), timeout_s)

    def load(self, hashes: Sequence[bytes]) -> int:
        """How many of these pages could be loaded; asserts that they have the bytes that were saved."""
        loaded = 0
        for each in hashes:
            pages = self._attachment.acquire("h", SPACE, [each], self._attachment.mapping)
            for page in pages:
                assert bytes(page) == content(each), "other bytes than were saved"
                loaded += 1
            self._attachment.release(["h"])
        return loaded

    def loads(self, hashes: Sequence[bytes]) -> None:
        """Loads all of them; one that is a miss at first is asked for again, as a later request would."""
        left = list(hashes)

        def all_loaded() -> bool:
            left[:] = [each for each in left if not self.load([each])]
            return not left

        until_blocking(all_loaded, 30.0)

    def statistics(self) -> dict[str, int | str]:
        """What the worker counts."""
        return self._attachment.statistics()

    @property
    def shards_held(self) -> int:
        """Of how many shards the worker is the home."""
        return int(self.statistics()["shards_held"])

    @property
    def joins(self) -> int:
        """How often the worker has joined the cluster: more than once if its lease was lost."""
        return self.worker.running.log.read_text().count("joined the cluster")

    def reattached(self) -> None:
        """Waits until the client has found its worker again."""
        until_blocking(lambda: self._attachment.connected, 30.0)

    def close(self) -> None:
        """Detaches."""
        self._attachment.close()


@dataclass
class Interruption:
    """How long the pages that had been found could not all be found."""

    longest_s: float = 0.0


def for_seconds(seconds: float) -> Callable[[], bool]:
    """A `settle` of `watching`: goes on probing for so long after the fault."""
    started = time.monotonic()
    return lambda: time.monotonic() - started > seconds


@contextmanager
def watching(what: str, probe: Callable[[], bool], settle: Callable[[], bool]) -> Iterator[Interruption]:
    """Runs the block, then goes on probing until `settle()`; prints and gives the longest time without a good probe.

    The probe is also made in the block's own time by calling it there; a fault is injected in the block.
    """
    seen = Interruption()
    last_good = time.monotonic()
    yield seen
    deadline = time.monotonic() + 60
    while True:
        good = probe()
        now = time.monotonic()
        if good:
            seen.longest_s = max(seen.longest_s, now - last_good)
            last_good = now
            if settle():
                break
        assert now < deadline, f"{what}: service did not resume within a minute"
        time.sleep(0.01)
    print(f"{what}: longest interruption {seen.longest_s:.2f} s")
