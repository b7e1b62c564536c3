"""How long a home stands still when shards change hands: its index alone, in this process, without a network.

python -m benchmarks.programs.stall
"""

import asyncio
import random
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.programs.measure import HOLDERS, KEY_BYTES, PAGES_PER_REPORT, obey
from tensorcast_connector.config import SHARDS
from tensorcast_connector.core import fingerprints
from tensorcast_connector.core.catalog import Catalog
from tensorcast_connector.types import Token, WorkerId
from tensorcast_connector.wire.keys import Keys

QUARTER = SHARDS // 4
MILLISECONDS = 1e3


async def stall(told: Mapping[str, Any]) -> Mapping[str, float]:
    """Milliseconds: `hold`, when a quarter of the shards goes to another home of an index of so many `pages`; `report`, the
    longest of the reports that filled it, in which the index grows; `forget`, when one of the workers leaves. It is CPU time,
    since all of it is computing, and so other work on the machine does not count.
    """
    chance = random.Random()
    catalog = Catalog(SHARDS)
    everything = {shard: Token(1, 1) for shard in range(SHARDS)}
    catalog.hold(everything)
    holders = [WorkerId(f"member/{number}") for number in range(HOLDERS)]
    nothing = fingerprints.of([])
    for holder in holders:
        catalog.report(holder, 1, everything, everything, nothing, nothing)
    longest = 0.0
    for number, first in enumerate(range(0, told["pages"], PAGES_PER_REPORT)):
        count = min(PAGES_PER_REPORT, told["pages"] - first)
        pages = fingerprints.of(Keys(chance.randbytes(count * KEY_BYTES), KEY_BYTES))
        before = time.process_time()
        catalog.report(holders[number % HOLDERS], number + 2, everything, (), pages, nothing)
        longest = max(longest, time.process_time() - before)
    before = time.process_time()
    catalog.hold({shard: token for shard, token in everything.items() if shard >= QUARTER})
    held = time.process_time()
    catalog.keep_only(holders[1:])
    forgotten = time.process_time()
    taken_s = {"report": longest, "hold": held - before, "forget": forgotten - held}
    return {what: seconds * MILLISECONDS for what, seconds in taken_s.items()}


if __name__ == "__main__":
    asyncio.run(obey({"stall": stall}))
