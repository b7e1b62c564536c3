"""Where things live, by highest-random-weight (rendezvous) hashing: pure functions of the members."""

from collections.abc import Iterable

import xxhash

from tensorcast_connector.config import SHARDS_MAX
from tensorcast_connector.types import WorkerId

BYTE_VALUES = 256


def hrw_rank(what: bytes, workers: Iterable[WorkerId]) -> list[WorkerId]:
    """`workers` by descending weight for `what`; every caller with the same members gets the same order.

    When a member leaves, only what ranked it first moves. (TensorCast, "High-Cardinality Tensors".)
    """
    return sorted(
        workers, key=lambda worker: (xxhash.xxh3_64_intdigest(what + b"\0" + worker.encode()), worker), reverse=True
    )


def shard_of(key: bytes, shards: int) -> int:
    """The shard of a page: from the last byte of the engine's block hash, which is a digest and so evenly spread."""
    return shard_of_byte(key[-1], shards)


def shard_of_byte(byte: int, shards: int) -> int:
    """The same from that byte, for tables of all its values."""
    return byte % shards


def valid_shard_count(shards: int) -> bool:
    """Whether the pages can be cut into so many shards: a power of two, so that all are of one size."""
    return 1 <= shards <= SHARDS_MAX and shards & (shards - 1) == 0


def shard_ranking(shard: int, workers: Iterable[WorkerId]) -> list[WorkerId]:
    """Who should be the home of `shard`, best first."""
    return hrw_rank(b"shard/%d" % shard, workers)


def choose_source(key: bytes, holders: Iterable[WorkerId]) -> WorkerId | None:
    """Which of several holders to read `key` from: spread by key, the same for every caller."""
    candidates = list(holders)
    if len(candidates) < 2:  # nearly always, and a lookup asks this for hundreds of keys
        return candidates[0] if candidates else None
    return hrw_rank(key, candidates)[0]
