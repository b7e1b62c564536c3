"""Tree of thought: one engine computes a prompt, and every branch goes on from it on the engine that has room.

    PYTHONPATH=scripts .venv/bin/python -m examples.branching unix:/run/tensorcast/worker.sock ...

The prompt's KV cache is published once and hydrated where a branch runs; it is computed once, and moved over each link once.
"""

import asyncio

import numpy as np

import tensorcast_connector as tensorcast
from examples.engines import Engine, attached, workers_of_command_line

BRANCHES = 6
PROMPT_TOKENS = 512


async def branch(engines: list[Engine]) -> int:
    """Runs the tree; returns how many branches have the prompt's KV cache as it was computed."""
    first = engines[0]
    prompt = first.adaptor.compute("prompt", PROMPT_TOKENS)
    plan = first.session.plan(tensorcast.CallContext(timeout_s=30))
    published = plan.on_instance(first.instance).publish(request="prompt")
    hydrated = []
    for number in range(BRANCHES):
        engine = engines[number % len(engines)]
        hydrated.append(plan.on_instance(engine.instance).hydrate(published, request=f"branch-{number}"))
    plan.on_instance(first.instance).evict_local(request="prompt").after(*hydrated)
    outcome = await plan.run().result()
    for number, step in enumerate(hydrated):
        print(
            f"branch {number} on {engines[number % len(engines)].instance}: {outcome[step]['tokens']} tokens hydrated"
        )
        engines[number % len(engines)].adaptor.extend(f"branch-{number}", f"thought-{number}", 16, seed=number)
    return sum(
        np.array_equal(engines[number % len(engines)].adaptor.kv[f"thought-{number}"][:, :PROMPT_TOKENS], prompt)
        for number in range(BRANCHES)
    )


async def main(workers: list[str]) -> None:
    """See the module."""
    async with attached(workers) as engines:
        right = await branch(engines)
        print(f"{right} of {BRANCHES} branches go on from the same bytes")


if __name__ == "__main__":
    asyncio.run(main(workers_of_command_line(__doc__)))
