"""Trainer to engine: each version of a policy is put once, and every rank of the rollout engine takes its share of it.

    PYTHONPATH=scripts .venv/bin/python -m examples.trainer unix:/run/tensorcast/worker.sock ...

The trainer has whole tensors, the engine two tensor-parallel ranks; the pool cuts them (`view`), so that neither knows the
other's layout. The name `policy:latest` moves with each version, and versions before the last two are deleted.
"""

import asyncio

import numpy as np

import tensorcast_connector as tensorcast
from examples.engines import Engine, attached, workers_of_command_line

VERSIONS = 3
TP_SIZE = 2
KEPT = 2


def policy(version: int) -> dict[str, np.ndarray]:
    """What the trainer has after `version` rounds."""
    return {f"layer.{number}": np.full((64, 32), 100 * version + number, np.float32) for number in range(4)}


async def train(engines: list[Engine]) -> int:
    """Publishes all versions; returns after how many of them every rank had its share of the right one."""
    trainer, right = engines[0].session, 0
    published: list[tensorcast.Artifact] = []
    for version in range(VERSIONS):
        published.append(await trainer.put(policy(version), name="policy:latest"))
        plan = trainer.plan(tensorcast.CallContext(timeout_s=30))
        for engine in engines:
            plan.on_instance(engine.instance).transform_into(published[-1], version=str(version))
        await plan.run().result()
        if len(published) > KEPT:
            await published.pop(0).delete()
        print(f"version {version}: {[engine.adaptor.version for engine in engines]}")
        right += all(
            np.array_equal(engine.adaptor.parameters[name], np.split(tensor, TP_SIZE)[rank])
            for name, tensor in policy(version).items()
            for rank, engine in enumerate(engines)
        )
    return right


async def main(workers: list[str]) -> None:
    """See the module."""
    async with attached(workers, TP_SIZE) as engines:
        print(f"{await train(engines)} of {VERSIONS} versions arrived at every rank as they were published")


if __name__ == "__main__":
    asyncio.run(main(workers_of_command_line(__doc__)))
