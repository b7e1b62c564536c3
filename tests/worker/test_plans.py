"""Plans on real workers in this process: what core/gateway_plans decides is carried out."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tensorcast_connector.client.instance import InstanceLink, StepContext
from tensorcast_connector.client.plan import CallContext, PlanHandle
from tensorcast_connector.client.session import Session
from tensorcast_connector.core import gateway_plans
from tensorcast_connector.core.plan import DONE, decode_record
from tensorcast_connector.errors import Cancelled, InvalidArgument, Unavailable
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.wire.messages import AttachInstance
from tensorcast_connector.wire.plan_messages import PlanState, RunStep, WaitPlan
from tensorcast_connector.worker import links
from tensorcast_connector.worker.server import Worker
from tests.client.callers import Pool, weights
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("quick")
ROLES = "basic,gateway,shard-home"


class Slow:
    """An engine whose steps wait until they may go on."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.go = asyncio.Event()

    async def publish(self, arguments: Mapping[str, Any], context: StepContext) -> Mapping[str, Any]:
        self.begun.append(context.key)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(context.key)
            raise
        return {"artifact": "a"}

    hydrate = evict_local = transform_into = publish


class Plans(Pool):
    """Workers a and b, an engine at b, and a caller at a."""

    links: list[InstanceLink]

    async def begin(self) -> tuple[Worker, Worker]:
        self.links, self.sessions, self.engine_ = [], [], Slow()
        await self.start_store()
        a, b = [await self.worker(name, roles=ROLES, artifact_bytes=8 << 20) for name in "ab"]
        await self.settled()
        await self.attach(b)
        await until(lambda: all("e" in each.peers.metadata.view.instances for each in (a, b)))
        return a, b

    async def attach(self, worker: Worker) -> InstanceLink:
        link = InstanceLink(
            self.network, worker.socket, AttachInstance("e", "fake", "m", "n"), self.engine_, random.Random(1)
        )
        self.links.append(link)
        await link.start()
        return link

    async def running(self, session: Session, key: str = "k", timeout_s: float = 30.0) -> PlanHandle:
        """A plan of which the engine does the one step now."""
        plan = session.plan(CallContext(timeout_s=timeout_s, idempotency_key=key))
        plan.on_instance("e").publish(request="r")
        handle = plan.run()
        await until(lambda: self.engine_.begun)
        return handle

    async def close(self) -> None:
        for link in self.links:
            await link.close()
        await super().close()


@pytest.fixture
async def plans(tmp_path: Path) -> AsyncIterator[Plans]:
    plans = Plans(SocketNetwork(), tmp_path)
    try:
        yield plans
    finally:
        await plans.close()


async def test_a_result_goes_to_the_next_step_and_another_worker(plans: Plans) -> None:
    a, _ = await plans.begin()
    session = await plans.session(a)
    made = await session.put(weights(), name="w")
    plan = session.plan()
    there = plan.on_worker("b").prefetch("w")
    pinned = plan.on_worker("a").pin(there, 30.0)
    outcome = await plan.run().result(10)
    assert outcome[pinned]["artifact"] == outcome[there]["artifact"] == await made.id()
    assert outcome.step(there).attempts == 1


async def test_a_cancelled_step_is_cancelled_at_the_engine(plans: Plans) -> None:
    a, _ = await plans.begin()
    handle = await plans.running(await plans.session(a))
    await handle.cancel()
    assert handle.status == "cancelled"
    with pytest.raises(Cancelled, match="cancelled by its caller"):
        await handle.result()
    await until(lambda: plans.engine_.cancelled)


async def test_many_steps_go_in_turn_and_are_cancelled_at_once(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a connection of their own, which is not the one that pages are asked for on."""
    monkeypatch.setattr(links, "LANE_REQUESTS_MAX", 3)
    a, b = await plans.begin()
    plan = (await plans.session(a)).plan(CallContext(timeout_s=30.0))
    for _ in range(12):
        plan.on_instance("e").publish()
    handle = plan.run()
    await until(lambda: len(plans.engine_.begun) == 3)
    assert not any(isinstance(each.message, RunStep) for each in a.gateway.plans._asks if each.to != b.worker_id)
    assert len(a.gateway.plans._asks) == 12 and len(a.peers.lanes(b.worker_id).client._pending) == 3
    await handle.cancel()
    await until(lambda: len(plans.engine_.cancelled) == 3 and not a.gateway.plans._asks)
    assert len(plans.engine_.begun) == 3


async def test_a_step_that_nobody_waits_for_is_cancelled_without_a_word(
    plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway cannot tell the executor that the deadline has passed."""
    a, b = await plans.begin()
    monkeypatch.setattr(b.gateway.executor, "cancel", lambda message: None)
    handle = await plans.running(await plans.session(a), timeout_s=0.3)
    with pytest.raises(Unavailable, match="step 0"):
        await handle.result(10)
    await until(lambda: plans.engine_.cancelled)


async def test_an_engine_that_attaches_again_is_told_again(plans: Plans) -> None:
    """Its former connection may not have ended for the worker yet."""
    a, b = await plans.begin()
    handle = await plans.running(await plans.session(a))
    await plans.attach(b)
    await until(lambda: len(plans.engine_.begun) == 2)
    assert plans.engine_.begun[0] == plans.engine_.begun[1]
    plans.engine_.go.set()
    await handle.result(10)


async def test_the_plan_of_a_gateway_that_was_killed_ends_with_nobody_waiting(
    plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_plans, "PLAN_ORPHANS_DELAY_MAX_S", 0.01)
    a, b = await plans.begin()
    session = await plans.session(a)
    handle = await plans.running(session)
    await plans.die(session)
    await plans.crash(a)
    with pytest.raises(InvalidArgument, match="closed"):
        await handle.result(30)
    await plans.expire_crashed()
    plans.engine_.go.set()
    session = await plans.session(b)
    question = WaitPlan("k", 0)
    record = decode_record((await session._link.call(question, PlanState)).record)
    while not record.finished:  # nobody waits, so that it is not for their sake that it is taken over
        await asyncio.sleep(0.01)
        record = decode_record((await session._link.call(question, PlanState)).record)
    assert record.owner == b.worker_id and record.state == DONE
    assert set(plans.engine_.begun) == {"default/k/0"}


async def test_a_step_that_needs_nobody_is_done_without_a_task(plans: Plans) -> None:
    """What it needs is here: a task would be most of what it costs. One that fails can be tried again."""
    a, b = await plans.begin()
    identity = await (await (await plans.session(a)).put(weights(), name="w")).id()
    await until(lambda: all(each.gateway.names.known("default", "w") for each in (a, b)))

    def begun(worker: Worker, step: int, operation: str, **arguments: Any) -> Any:
        message = RunStep("default/k", "d", 1, step, operation, worker.worker_id, {"artifact": "w", **arguments}, "")
        return worker.gateway.executor.run(message)

    for step, arguments in enumerate(({"pin": "p", "ttl_s": 30.0}, {"pin": "p"}, {})):
        with pytest.raises(StopIteration) as done:
            begun(a, step, ("pin", "unpin", "prefetch")[step], **arguments).send(None)
        assert done.value.value["artifact"] == identity
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="a pin of 0 seconds"):
            begun(a, 3, "pin", pin="p", ttl_s=0).send(None)
    assert await begun(a, 3, "pin", pin="p", ttl_s=1.0) and not a.gateway.executor._tasks
    fetching = asyncio.ensure_future(begun(b, 0, "prefetch"))
    await until(lambda: b.gateway.executor._tasks or fetching.done())
    assert (await fetching)["artifact"] == identity and await begun(b, 0, "prefetch")


async def test_steps_that_take_no_time_leave_the_loop_to_others(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = await plans.begin()
    session = await plans.session(a)
    await session.put(weights(), name="w")
    turns, seen, do, going = 0, set[int](), a.gateway.executor._done_at_once, True

    def turn() -> None:
        nonlocal turns
        turns += 1
        if going:
            asyncio.get_running_loop().call_soon(turn)

    def done(*what: Any) -> Any:
        seen.add(turns)
        return do(*what)

    monkeypatch.setattr(a.gateway.executor, "_done_at_once", done)
    plan = session.plan()
    for _ in range(60):
        plan.on_worker("a").prefetch("w")
    turn()
    await plan.run(concurrency=1).result(10)
    going = False
    assert len(seen) == 60, "each step has a turn of the loop for itself"
    await until(lambda: not a.gateway.plans._asks and not a.gateway.plans._sent)
