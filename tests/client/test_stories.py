"""What workers tell of artifacts and plans, over the wire, as `tensorcast story` asks for it."""

import re
from typing import Any

import pytest

from tensorcast_connector.client.instance import attach_instance
from tensorcast_connector.client.plan import CallContext
from tensorcast_connector.client.status import read_story
from tensorcast_connector.errors import NotFound
from tensorcast_connector.worker import artifact_log
from tensorcast_connector.worker.server import Worker
from tests.client.callers import Pool, weights
from tests.cluster import plane
from tests.waiting import until


async def story(pool: Pool, worker: Worker, text: str) -> list[str]:
    """The lines without their times."""
    lines = await read_story(pool.network, worker.address, text, "test", pool.chance)
    return [line.split("  ", 1)[1] for line in lines]


async def looked(pool: Pool) -> None:
    """Until every worker has told its stories what it sees now."""
    await pool.seen()
    logs = [(plane(each).view, each.peers.log._artifacts) for each in pool.workers]
    for worker in pool.workers:
        worker.peers.wake()
    await until(lambda: all(log._seen == (view.incarnation, view.revision) for view, log in logs))


@pytest.mark.slow
async def test_the_story_of_an_artifact(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact_log, "ARTIFACT_LOOK_S", 0.0)
    a, b = await pool.start("a", "b")
    session = await pool.session(a)
    made = await session.put(weights(), name="policy:v1")
    identity = await made.id()
    other = await (await session.put(weights(7), name="other")).id()
    await looked(pool)
    plan = session.plan(CallContext(idempotency_key="move-17"))
    plan.on_worker("b").prefetch("policy:v1")
    await plan.run().result()
    await pool.listed(identity, [a, b])
    await looked(pool)
    await session.put(weights(7), name="policy:v1")  # the name moves on
    await looked(pool)
    await session.delete(identity)
    await pool.listed(identity, [])
    await looked(pool)
    for worker in (a, b):
        told = await story(pool, worker, identity)
        assert told[0] == f"artifact recorded {identity}, 3048 bytes in 3 tensors for tenant default"
        assert f"name given {identity}, 'policy:v1' of tenant default points to it" in told
        assert f"copy {identity}, at {a.worker_id}, the keeper" in told and f"copy {identity}, at {b.worker_id}" in told
        assert f"name taken {identity}, 'policy:v1' of tenant default points elsewhere, or is gone" in told
        assert f"artifact deleted {identity}, of tenant default, or its lease has ended" in told
        assert [line for line in told if line.startswith("copy gone")], told
        assert not [line for line in told if other in line and not line.startswith("step")]
        assert await story(pool, worker, identity[:8]) == told
        named = await story(pool, worker, "policy:v1")
        assert set(told) <= set(named) and f"copy {other}, at {a.worker_id}, the keeper" in named, "both had that name"
        assert not [line for line in await story(pool, worker, "other") if identity in line]
    step = "step 0 (prefetch on b)"
    assert [line for line in await story(pool, b, "policy:v1") if line.startswith("step")] == [
        f"step begun default/move-17, {step}", f"step done default/move-17, {step}",
    ]  # fmt: skip
    assert [line for line in await story(pool, b, identity) if line.startswith("step")] == [
        f"step done default/move-17, {step}"
    ]


class Engine:
    """It publishes nothing, and evicts what it does not have."""

    async def publish(self, arguments: Any, context: Any) -> dict[str, Any]:
        return {"artifact": "x"}

    async def evict_local(self, arguments: Any, context: Any) -> dict[str, Any]:
        raise NotFound("no such layer " + "x" * 1000)

    hydrate = transform_into = publish


@pytest.mark.slow
async def test_the_story_of_a_plan(pool: Pool) -> None:
    a, b = await pool.start("a", "b")
    session = await pool.session(a)
    async with await attach_instance(str(b.socket), Engine(), instance_id="e"):
        await until(lambda: plane(a).view.instances)
        plan = session.plan(CallContext(idempotency_key="k"))
        first = plan.on_instance("e").publish()
        plan.on_instance("e").evict_local().after(first)
        with pytest.raises(NotFound):
            await plan.run().result()
    told = await story(pool, a, "k")
    assert re.fullmatch(r"plan run default/k, by this gateway: 2 steps, epoch \d+, trace [0-9a-f]{32}", told[0])
    assert told[1] == f"step answered default/k, step 0 (publish on e) at {b.worker_id}: done"
    assert told[2].startswith(
        f"step answered default/k, step 1 (evict_local on e) at {b.worker_id}: failed: no such layer xxx"
    )
    assert told[3].startswith("plan ended default/k, failed: step 1 (evict_local on e): no such layer")
    assert len(told) == 4 and max(map(len, told)) < 500 and await story(pool, a, "default/k") == told
    assert [line.split(": ")[0] for line in await story(pool, b, "k")] == [
        "step begun default/k, step 0 (publish on e)", "step done default/k, step 0 (publish on e)",
        "step begun default/k, step 1 (evict_local on e)", "step failed default/k, step 1 (evict_local on e)",
    ]  # fmt: skip
    assert await story(pool, a, "k2") == []
