"""A fake engine as a process of its own, to be killed: `python -m tests.router.engine_process BEHAVIOUR`."""

import asyncio
import sys

from tests.router.fake_engine import FakeEngine, hang
from tests.router.server.test_failures import headers_only, stall

BEHAVIOURS = {"answer": None, "hang": hang, "headers_only": headers_only, "stall": stall}


async def main(behaviour: str) -> None:
    """Says its address, and its every request, in lines on standard output."""
    engine = FakeEngine("process")
    engine.behaviour = BEHAVIOURS[behaviour]
    await engine.start()
    sys.stdout.write(f"{engine.url}\n")
    sys.stdout.flush()
    await engine.started.wait()
    sys.stdout.write("asked\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
