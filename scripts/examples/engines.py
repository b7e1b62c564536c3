"""What the examples share: engines that compute nothing, attached to the workers that are told on the command line."""

import argparse
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import tensorcast_connector as tensorcast
from tensorcast_connector.adaptor import attach_instance
from tensorcast_connector.testing.engine import FakeEngine


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine, and the session of its host."""

    instance: str
    adaptor: FakeEngine
    session: tensorcast.Session


def workers_of_command_line(description: str | None) -> list[str]:
    """The sockets of the workers."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument(
        "workers", nargs="+", metavar="unix:PATH", help="sockets of workers, as `tensorcast up` prints them"
    )
    return list(parser.parse_args().workers)


@asynccontextmanager
async def attached(workers: list[str], tp_size: int = 1) -> AsyncIterator[list[Engine]]:
    """One engine on each worker, or as many as `tp_size`, one after the other."""
    async with AsyncExitStack() as stack:
        engines: list[Engine] = []
        for number in range(max(len(workers), tp_size)):
            worker = workers[number % len(workers)]
            session = await stack.enter_async_context(await tensorcast.connect(worker))
            adaptor = FakeEngine(session, number % tp_size, tp_size)
            instance = f"example-{number}-{random.getrandbits(32):08x}"
            link = await attach_instance(
                worker, adaptor, instance_id=instance, engine="fake", model="example", namespace="example"
            )
            await stack.enter_async_context(link)
            async for seen in session.watch(interval_s=0.5):
                if any(each.instance_id == instance for each in seen.instances):
                    break
            engines.append(Engine(instance, adaptor, session))
        yield engines
