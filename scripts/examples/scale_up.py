"""Scale up: weights are brought to workers before engines start there, so that they read nothing over the network then.

PYTHONPATH=scripts .venv/bin/python -m examples.scale_up unix:/run/tensorcast/worker.sock ...
"""

import asyncio
import time

import numpy as np

import tensorcast_connector as tensorcast
from examples.engines import Engine, attached, workers_of_command_line

LAYERS = 8


async def scale_up(engines: list[Engine]) -> int:
    """Prefetches to every worker, pinned for ten minutes, then loads; returns how many engines have the right parameters."""
    first = engines[0]
    weights = {f"layer.{number}": np.full((256, 1024), number, np.float32) for number in range(LAYERS)}
    artifact = await first.session.put(weights, name="example/weights@1")
    plan = first.session.plan(tensorcast.CallContext(timeout_s=60))
    for worker in {each.session.worker_id for each in engines}:
        plan.on_worker(worker).pin(artifact, ttl_s=600, pin="scale-up")
    await plan.run().result()
    print(f"resident at {', '.join((await artifact.describe()).workers)}")
    right = 0
    for engine in engines:  # they start now
        before = time.perf_counter()
        loaded = await engine.session.artifact("example/weights@1").tensor_dict()
        print(f"{engine.instance}: {len(loaded)} tensors in {(time.perf_counter() - before) * 1e3:.1f} ms")
        right += all(np.array_equal(loaded[name], tensor) for name, tensor in weights.items())
    return right


async def main(workers: list[str]) -> None:
    """See the module."""
    async with attached(workers) as engines:
        print(f"{await scale_up(engines)} of {len(engines)} engines have the right parameters")


if __name__ == "__main__":
    asyncio.run(main(workers_of_command_line(__doc__)))
