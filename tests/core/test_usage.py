"""How full an arena is, counted by slabs, against a count of each page."""

import random

import pytest

from tensorcast_connector.core.segments import Segments
from tensorcast_connector.core.usage import Usage

SLOT = 64


def counted(segments: Segments) -> Usage:
    """The same by looking at each page."""
    pages = list(segments._pages.values())
    used = pinned = 0
    for page in pages:
        slot = -(-page.length // SLOT) * SLOT
        used += slot
        pinned += slot if page.owner is not None or page.holds else 0
    return Usage(
        sum(page.owner is None for page in pages), sum(page.owner is not None for page in pages),
        sum(page.holds > 0 for page in pages), used, pinned, segments.statistics()["bytes_total"], segments.evictions,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_usage_is_what_a_count_of_all_pages_gives(seed: int) -> None:
    chance = random.Random(seed)
    segments = Segments(16_384, 4096, SLOT)
    for step in range(300):
        key = bytes([chance.randrange(60)])
        kind = chance.randrange(6)
        if kind < 3:
            if segments.reserve("o", key, chance.choice([10, 64, 100, 1000])) and chance.random() < 0.8:
                segments.commit("o", key, 0)
        elif kind == 3:
            segments.hold(step % 5, [key])
        elif kind == 4:
            segments.release(step % 5)
        else:
            segments.abort("o", key)
        segments.check()
        assert segments.usage() == counted(segments)
    assert segments.usage().evictions and segments.usage().pages_held


def test_pressure_is_the_share_that_cannot_be_evicted() -> None:
    segments = Segments(4096, 1024, SLOT)
    assert segments.usage().pressure == 0
    for key in (b"1", b"2"):
        segments.reserve("o", key, 1024)
    assert segments.usage().pressure == 0.5, "what is being written"
    segments.commit("o", b"1", 0)
    assert segments.usage().pressure == 0.25
    segments.hold("h", [b"1"])
    assert segments.usage().pressure == 0.5, "what is used"
    assert Segments(4096, 1024, SLOT, ready_bytes=0).usage().pressure == 1, "no memory yet"
