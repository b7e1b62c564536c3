"""Where things live, by highest-random-weight (rendezvous) hashing: pure functions of the members."""

from collections.abc import Iterable

import xxhash

from tensorcast_connector.types import WorkerId


def hrw_rank(what: bytes, workers: Iterable[WorkerId]) -> list[WorkerId]:
    """`workers` by descending weight for `what`; every caller with the same members gets the same order.

    When a member leaves, only what ranked it first moves. (TensorCast, "High-Cardinality Tensors".)
    """
    return sorted(
        workers, key=lambda worker: (xxhash.xxh3_64_intdigest(what + b"\0" + worker.encode()), worker), reverse=True
    )


def home_of_pages(workers: Iterable[WorkerId]) -> WorkerId | None:
    """The one worker that keeps the locations of all pages; None without workers.

    One shard for now: leases and more shards come with the shard homes, and this becomes their ranking.
    """
    ranked = hrw_rank(b"shard/0", workers)
    return ranked[0] if ranked else None


def choose_source(key: bytes, holders: Iterable[WorkerId]) -> WorkerId | None:
    """Which of several holders to read `key` from: spread by key, the same for every caller."""
    candidates = list(holders)
    if len(candidates) < 2:  # nearly always, and a lookup asks this for hundreds of keys
        return candidates[0] if candidates else None
    return hrw_rank(key, candidates)[0]
