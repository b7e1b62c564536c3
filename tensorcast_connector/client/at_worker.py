"""Operations at one worker: a plan of steps, that is given up as soon as the worker is seen to be dead.

A worker that has died stays listed until its lease has run out, and a plan goes on trying for as long as it may: the worker may
come back. Who asks for something at one worker is told instead, and who else is there.
"""

import contextlib
from collections.abc import Callable

from tensorcast_connector.client.link import GatewayLink
from tensorcast_connector.client.plan import CallContext, OnWorker, Plan, PlanHandle
from tensorcast_connector.config import DEAD_WORKER_LOOK_S, DEAD_WORKER_LOOKS, SIGNALS_TIMEOUT_S, STORE_TIMEOUT_S
from tensorcast_connector.errors import NotFound, TensorcastError, Unavailable
from tensorcast_connector.wire.caller_messages import ListSignals, SignalsListed, WorkerListed


async def run_at(link: GatewayLink, worker: str, add: Callable[[OnWorker], object], timeout_s: float) -> None:
    """Does it.

    Args:
        worker: by name or id; the gateway itself if empty.
        add: adds the steps.
        timeout_s: what has not ended then has failed.

    Raises:
        NotFound: there is no such worker; names those that there are.
        Unavailable: it is listed and does not answer, twice in a row; names those that do.
        DeadlineExceeded: not within `timeout_s`.
        TensorcastError: as a step has failed.
    """
    target = worker or link.worker_id
    plan = Plan(link, CallContext(timeout_s))
    add(plan.on_worker(target))
    handle = plan.run()
    silent = 0
    while not await handle.wait(DEAD_WORKER_LOOK_S * (silent + 1)):
        listed = await _listed(link)
        here = [each for each in listed if target in (each.worker_id, each.name)]
        silent = silent + 1 if listed and all(each.error for each in here) else 0
        if silent == DEAD_WORKER_LOOKS:
            await _give_up(handle)
            why = here[0].error if here else "it has left the cluster"
            raise Unavailable(f"worker {target!r} does not answer ({why}); {_others(listed)}")
    try:
        await handle.result()
    except NotFound as error:
        listed = await _listed(link)
        if listed and not any(target in (each.worker_id, each.name) for each in listed):
            raise NotFound(f"there is no worker {target!r}; {_others(listed)}") from error
        raise


async def _listed(link: GatewayLink) -> list[WorkerListed]:
    """The workers, each with its signals or why there are none; empty if that cannot be told."""
    try:
        return (await link.call(ListSignals(), SignalsListed, SIGNALS_TIMEOUT_S + STORE_TIMEOUT_S)).workers
    except TensorcastError:
        return []


def _others(listed: list[WorkerListed]) -> str:
    alive = sorted(each.name for each in listed if not each.error)
    return f"those that answer are {', '.join(alive)}" if alive else "no worker answers"


async def _give_up(handle: PlanHandle) -> None:
    with contextlib.suppress(TensorcastError):
        await handle.cancel()
