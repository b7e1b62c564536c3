"""One operation at one worker: dead ones are refused, slow ones waited for, and each has its time."""

import asyncio

import pytest

from tensorcast_connector.client import at_worker
from tensorcast_connector.client.publisher import WeightPublisher
from tensorcast_connector.errors import DeadlineExceeded, NotFound, TensorcastError, Unavailable
from tests.client.callers import Pool, weights
from tests.cluster import plane
from tests.waiting import until


@pytest.mark.slow
async def test_a_worker_that_has_died_is_refused_long_before_the_plan_would_end(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_worker, "DEAD_WORKER_LOOK_S", 0.02)
    a, b, _ = await pool.start("a", "b", "c")
    session = await pool.session(a)
    made = await session.put(weights(), name="n")
    await WeightPublisher(session, "policy").publish(weights(), 1)
    version = await session.weights("policy")
    await pool.crash(b)
    assert b.worker_id in plane(a).view.workers, "its lease has not run out"
    await until(lambda: not a.peers._clients[b.worker_id].connected)
    asked = [made.prefetch("b", 30), made.pin(5, b.worker_id, 30), made.unpin("b", 30)]
    asked += [version.prefetch("b", 30), version.pin(5, b.worker_id, 30), version.unpin("b", 30)]
    for ask in asked:
        with pytest.raises(
            Unavailable, match=r"worker 'b.*' does not answer \(.+\); those that answer are a, c"
        ) as failed:
            await asyncio.wait_for(ask, 10)
        assert not isinstance(failed.value, DeadlineExceeded)
    assert not session._link.plans, "the plan was cancelled"
    await pool.expire_crashed()
    await until(lambda: b.worker_id not in plane(a).view.workers)
    with pytest.raises(NotFound, match="there is no worker 'b'; those that answer are a, c"):
        await made.prefetch("b", 30)
    await made.prefetch("c", 30)


@pytest.mark.slow
async def test_a_worker_that_is_slow_is_not_dead(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_worker, "DEAD_WORKER_LOOK_S", 0.01)
    a, b = await pool.start("a", "b")
    session = await pool.session(a)
    made = await session.put(weights(), name="n")
    gate, looks, resident, listed = asyncio.Event(), 0, b.artifacts.resident, at_worker._listed

    async def slow(identity: str) -> object:
        await gate.wait()
        return await resident(identity)

    async def look(link: object) -> object:
        nonlocal looks
        looks += 1
        return await listed(link)  # type: ignore[arg-type]

    monkeypatch.setattr(b.artifacts, "resident", slow)
    monkeypatch.setattr(at_worker, "_listed", look)
    task = asyncio.create_task(made.prefetch("b", 30))
    await until(lambda: looks > 3 or task.done())
    gate.set()
    await task
    gate.clear()
    with pytest.raises(DeadlineExceeded, match=r"step 0 \(prefetch on b\)|not known how it ended"):
        await (await session.put(weights(1))).prefetch("b", 0.5)


@pytest.mark.slow
async def test_nobody_can_say_who_is_alive(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is tried as long as it may."""
    monkeypatch.setattr(at_worker, "DEAD_WORKER_LOOK_S", 0.01)
    a, b = await pool.start("a", "b")
    session = await pool.session(a)
    made = await session.put(weights(), name="n")
    call, asked = session._link.call, 0

    async def deaf(message: object, *args: object) -> object:
        nonlocal asked
        if type(message).__name__ == "ListSignals":
            asked += 1
            raise TensorcastError("this gateway does not know that")
        return await call(message, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(session._link, "call", deaf)
    await pool.crash(b)
    with pytest.raises(Unavailable, match=r"cannot connect|deadline"):
        await made.prefetch("b", 0.3)
    assert asked > 2
