"""How long a prefix can be restored when besides the KV pages other pools must have theirs. Pure.

A pool of states (Mamba, sliding windows) keeps only the last pages before certain points, so what can be restored is not
every length up to the longest: each rank answers with the set of lengths, and SGLang takes what all ranks have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Presence:
    """Which pages of a pool there are.

    `there[i]`: the page at place i of the prefix. `window`: how many pages before the end of a prefix must be there; None:
    all pages of it.
    """

    there: Sequence[bool]
    window: int | None = None


def lengths(kv_pages: int, presence: Presence) -> list[int]:
    """The prefix lengths, of 1 to `kv_pages` pages, that one pool can serve."""
    there = presence.there
    found = []
    run = 0  # pages in a row that end here
    for end in range(1, min(kv_pages, len(there)) + 1):
        run = run + 1 if there[end - 1] else 0
        if run >= min(end, end if presence.window is None else presence.window):
            found.append(end)
    return found


def restorable(kv_pages: int, pools: Mapping[str, Presence]) -> tuple[list[int], dict[str, int]]:
    """The prefix lengths that all pools can serve, and for each pool the longest that it could serve alone."""
    found = set(range(1, kv_pages + 1))
    longest: dict[str, int] = {}
    for name, presence in pools.items():
        mine = lengths(kv_pages, presence)
        longest[name] = mine[-1] if mine else 0
        found &= set(mine)
    return sorted(found), longest
