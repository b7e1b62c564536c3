"""Callers, artifacts and plans while real workers and callers are killed or stopped."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
from demo import pool
from demo.pool import Started
from demo.processes import Supervisor

from tensorcast_connector.client.instance import InstanceLink, StepContext
from tensorcast_connector.client.plan import CallContext, PlanHandle
from tensorcast_connector.client.session import Session, connect
from tensorcast_connector.config import MEMBER_TTL_S, parse_address
from tensorcast_connector.errors import DeadlineExceeded, NotFound, TensorcastError
from tensorcast_connector.net.sockets import SocketNetwork
from tensorcast_connector.wire.messages import AttachInstance
from tests.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
OWNER = """
import asyncio, sys
import numpy as np
from tensorcast_connector.client.ownership import leased
from tensorcast_connector.client.session import connect

async def main():
    session = await connect(sys.argv[1])
    await session.put({"w": np.full(1000, 7, np.uint8)}, name="mine", ownership=leased(2))
    print("put", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def weights(seed: int = 0) -> dict[str, Any]:
    chance = np.random.default_rng(seed)
    return {f"w{number}": chance.integers(0, 256, 6_000_000, np.uint8) for number in range(3)}


def equal(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return list(got) == sorted(wanted) and all(got[name].tobytes() == wanted[name].tobytes() for name in wanted)


class Engine:
    """An adaptor in this process; `gate` holds its steps up."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun: Counter[str] = Counter()  # by key
        self.done: list[int] = []

    async def publish(self, arguments: Mapping[str, Any], context: StepContext) -> Mapping[str, Any]:
        self.begun[context.key] += 1
        if arguments["n"]:
            await self.gate.wait()
        self.done.append(arguments["n"])
        return {"of": arguments["n"]}

    hydrate = evict_local = transform_into = publish


class Cluster:
    """Worker processes, and callers and engines of this process."""

    def __init__(self, supervisor: Supervisor, store: Started, stack: AsyncExitStack) -> None:
        self._supervisor = supervisor
        self._store = store
        self._stack = stack

    async def worker(self, name: str, socket: str = "") -> Started:
        return await asyncio.to_thread(
            pool.worker, self._supervisor, self._store["store"], name, arena="64MiB", socket=socket
        )

    async def session(self, worker: Started, scheme: str = "unix") -> Session:
        session = await connect(worker["worker"] if scheme == "unix" else worker["peer"])
        self._stack.push_async_callback(session.close)
        return session

    async def engine(self, worker: Started, engine: Engine, sees: Session) -> None:
        """Until that caller's gateway knows it."""
        attached = AttachInstance("e", "fake", "m", "n")
        where = parse_address(worker["worker"], "worker")
        link = InstanceLink(SocketNetwork(), where, attached, engine, random.Random(0))
        await link.start()
        self._stack.push_async_callback(link.close)
        await becomes(lambda: sees.list_instances())


async def becomes(ask: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Until it says something; errors are not yet."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                if found := await ask():
                    return found
            except TensorcastError:
                pass
            await asyncio.sleep(0.02)


@pytest.fixture
async def cluster(supervisor: Supervisor, store: Started) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(supervisor, store, stack)


def chain(session: Session, key: str, timeout_s: float = 60.0) -> PlanHandle:
    """Four steps, of which all but the first wait for the engine's gate."""
    plan = session.plan(CallContext(timeout_s=timeout_s, idempotency_key=key))
    step = plan.on_instance("e").publish(n=0)
    for number in range(1, 4):
        step = plan.on_instance("e").publish(n=number).after(step)
    return plan.run()


def kill(worker: Started) -> None:
    worker.running.process.kill()
    worker.running.process.wait()


def start(program: str, worker: Started) -> "subprocess.Popen[bytes]":
    """A caller in a process of its own."""
    return subprocess.Popen([sys.executable, "-c", program, worker["worker"]], stdout=subprocess.PIPE)


def end(owner: "subprocess.Popen[bytes]") -> None:
    owner.kill()
    owner.wait()
    assert owner.stdout is not None
    owner.stdout.close()


async def nothing_listed(session: Session) -> bool:
    return not await session.list_artifacts()


# --- artifacts ---


async def test_what_a_killed_caller_had_leased_goes(cluster: Cluster) -> None:
    worker = await cluster.worker("a")
    session = await cluster.session(worker)
    owner = start(OWNER, worker)
    try:
        assert owner.stdout is not None
        assert await asyncio.to_thread(owner.stdout.readline) == b"put\n"
        assert (await session.artifact("mine").tensor("w")).tobytes() == bytes([7]) * 1000
        assert [each.names for each in await session.list_artifacts()] == [["mine"]]
    finally:
        end(owner)
    await becomes(lambda: nothing_listed(session))
    with pytest.raises(NotFound):
        await session.artifact("mine").tensor("w")


async def test_the_worker_that_keeps_an_artifact_is_killed(cluster: Cluster) -> None:
    a, b, c = [await cluster.worker(name) for name in "abc"]
    at_a, at_b, at_c = [await cluster.session(each) for each in (a, b, c)]
    await at_a.put(weights(1), name="copied")
    await at_a.put(weights(2), name="only there")
    read = await at_a.artifact("only there").tensor_dict()
    await becomes(lambda: at_b.artifact("copied").tensor_dict())
    await becomes(lambda: at_b.artifact("only there").describe())
    kill(a)
    assert equal(read, weights(2)), "who had mapped it has it"
    assert equal(await at_b.artifact("copied").tensor_dict(), weights(1))
    assert equal(await becomes(lambda: at_c.artifact("copied").tensor_dict()), weights(1))

    async def gone() -> bool:
        try:
            await at_b.artifact("only there").tensor_dict()
        except NotFound as error:
            return "are gone" in str(error)
        return False

    await becomes(gone)
    await at_b.put(weights(2))
    assert equal(await becomes(lambda: at_c.artifact("only there").tensor_dict()), weights(2))


async def test_a_caller_is_killed_in_the_middle_of_a_put(cluster: Cluster) -> None:
    worker = await cluster.worker("a")
    session = await cluster.session(worker)
    for at_s in (0.3, 0.5, 0.7):
        owner = start(OWNER.replace("1000", "200_000_000"), worker)
        try:
            await asyncio.sleep(at_s)
        finally:
            end(owner)
    # Nothing of it takes the worker's memory (1 GiB) for good.
    for number in range(5):
        made = await becomes(lambda n=number: session.put({"w": np.full(190_000_000, n, np.uint8)}))
        await made.delete()


async def test_a_worker_is_started_again_under_its_callers(cluster: Cluster) -> None:
    worker = await cluster.worker("a")
    session = await cluster.session(worker)
    over_tcp = await cluster.session(worker, "tcp")
    await session.put(weights(1), name="n")
    read = await over_tcp.artifact("n").tensor_dict()
    kill(worker)
    with pytest.raises(TensorcastError):
        await session.put(weights(2))
    await cluster.worker("a", socket=worker["worker"])
    await becomes(lambda: session.put(weights(2), name="n"))
    assert equal(await session.artifact("n").tensor_dict(), weights(2)) and equal(read, weights(1))


# --- plans ---


async def test_the_gateway_of_a_plan_is_killed(cluster: Cluster) -> None:
    a, b, c = [await cluster.worker(name) for name in "abc"]
    at_a, at_b = await cluster.session(a), await cluster.session(b)
    engine = Engine()
    await cluster.engine(c, engine, at_a)
    await becomes(at_b.list_instances)
    lost = chain(at_a, "k")
    await until(lambda: len(engine.begun) == 2)
    waits = chain(at_b, "k")
    kill(a)
    started = asyncio.get_running_loop().time()
    await becomes(lambda: not_listed(at_b, a), 30)
    engine.gate.set()
    outcome = await waits.result(60)
    print(f"SIGKILL of a plan's gateway: ended {asyncio.get_running_loop().time() - started:.2f} s later")
    assert [outcome[step] for step in waits._steps] == [{"of": number} for number in range(4)]
    assert engine.done == [0, 1, 2, 3] and set(engine.begun.values()) == {1}, "effects once"
    again = chain(at_b, "k")
    await again.result(20)
    assert engine.done == [0, 1, 2, 3], "one result, for whoever asks"
    assert not lost.done or lost.status == "failed"


async def not_listed(session: Session, worker: Started) -> bool:
    """Whether the cluster takes it for gone."""
    return worker["worker_id"] not in [each.worker_id for each in await session.list_workers()]


async def test_the_gateway_of_a_plan_is_killed_and_nobody_waits(cluster: Cluster) -> None:
    """It goes on all the same; whoever asks later gets its outcome."""
    a, b, c = [await cluster.worker(name) for name in "abc"]
    at_a, at_b = await cluster.session(a), await cluster.session(b)
    engine = Engine()
    await cluster.engine(c, engine, at_a)
    chain(at_a, "k")
    await until(lambda: len(engine.begun) == 2)
    kill(a)
    engine.gate.set()
    await until(lambda: engine.done == [0, 1, 2, 3], 60)
    await chain(at_b, "k").result(30)
    assert set(engine.begun.values()) == {1}


async def test_the_gateway_of_a_plan_stands_still_for_longer_than_its_lease(cluster: Cluster) -> None:
    a, b, c = [await cluster.worker(name) for name in "abc"]
    at_a, at_b = await cluster.session(a), await cluster.session(b)
    engine = Engine()
    await cluster.engine(c, engine, at_a)
    await becomes(at_b.list_instances)
    first = chain(at_a, "k")
    await until(lambda: len(engine.begun) == 2)
    second = chain(at_b, "k")
    process = a.running.process
    os.kill(process.pid, signal.SIGSTOP)
    try:
        await becomes(lambda: not_listed(at_b, a), MEMBER_TTL_S + 30)
        engine.gate.set()
        outcome = await second.result(60)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    late = await first.result(60)
    for handle, got in ((first, late), (second, outcome)):
        assert [got[step] for step in handle._steps] == [{"of": number} for number in range(4)]
    assert engine.done == [0, 1, 2, 3] and set(engine.begun.values()) == {1}, "one result, effects once"


async def test_all_gateways_are_killed_and_the_plan_fails_by_its_deadline(cluster: Cluster) -> None:
    a, b = [await cluster.worker(name) for name in "ab"]
    at_a = await cluster.session(a)
    engine = Engine()
    await cluster.engine(b, engine, at_a)
    handle = chain(at_a, "k", timeout_s=4)
    await until(lambda: len(engine.begun) == 2)
    kill(a)
    with pytest.raises(DeadlineExceeded):
        await handle.result(40)
    assert handle.done and handle.status == "failed"


async def test_the_worker_of_an_engine_is_killed_in_the_middle_of_a_step(cluster: Cluster) -> None:
    """The engine attaches to the worker that is started in its place, and the step comes again."""
    a, b = [await cluster.worker(name) for name in "ab"]
    at_a = await cluster.session(a)
    engine = Engine()
    await cluster.engine(b, engine, at_a)
    handle = chain(at_a, "k", timeout_s=90)
    await until(lambda: len(engine.begun) == 2)
    kill(b)
    await cluster.worker("b", socket=b["worker"])
    engine.gate.set()
    await handle.result(60)
    assert engine.done == [0, 1, 2, 3] and len(engine.begun) == 4
