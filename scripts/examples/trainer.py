"""Trainer to engine: each version of a policy is published once, and every rank of the rollout engine takes its share of it.

    PYTHONPATH=scripts .venv/bin/python -m examples.trainer unix:/run/tensorcast/worker.sock ...

The trainer has whole tensors, the engine two tensor-parallel ranks; the pool cuts them (`view`), so that neither knows the
other's layout. Only tensors that have changed are moved. The name `policy` moves with each version, and of the versions before it
one is kept.
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
    layers = {f"layer.{number}": np.full((64, 32), 100 * version + number, np.float32) for number in range(4)}
    return {**layers, "frozen": np.full((64, 32), 7, np.float32)}


async def train(engines: list[Engine]) -> int:
    """Publishes all versions; returns after how many of them every rank had its share of the right one."""
    trainer, right = engines[0].session, 0
    publisher = tensorcast.WeightPublisher(trainer, "policy", keep_last=KEPT)
    for version in range(VERSIONS):
        published = await publisher.publish(policy(version), version)
        plan = trainer.plan(tensorcast.CallContext(timeout_s=30))
        for engine in engines:
            plan.on_instance(engine.instance).transform_into(published.artifact_id, version=str(version))
        await plan.run().result()
        names = [engine.adaptor.version for engine in engines]
        print(f"version {version}: {names}, {published.moved_bytes} of {published.bytes} bytes moved")
        right += all(
            np.array_equal(engine.adaptor.parameters[name], np.split(tensor, TP_SIZE)[number % TP_SIZE])
            for name, tensor in policy(version).items()
            for number, engine in enumerate(engines)
        )
    return right


async def main(workers: list[str]) -> None:
    """See the module."""
    async with attached(workers, TP_SIZE) as engines:
        print(f"{await train(engines)} of {VERSIONS} versions arrived at every rank as they were published")


if __name__ == "__main__":
    asyncio.run(main(workers_of_command_line(__doc__)))
