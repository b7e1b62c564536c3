"""Published versions on real workers: what is read is what was published, and no more moves than has changed."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from examples.engines import attached

from tensorcast_connector.client.publisher import WeightPublisher
from tensorcast_connector.client.session import Session
from tensorcast_connector.client.weights import WeightVersion
from tensorcast_connector.errors import Conflict, InvalidArgument, NotFound, Unavailable
from tensorcast_connector.worker.metrics import WorkerMetrics
from tensorcast_connector.worker.server import Worker
from tests.client.callers import Pool, equal
from tests.waiting import until

torch = pytest.importorskip("torch")


def model(changes: Mapping[int, int] | None = None, count: int = 10, size: int = 4096) -> dict[str, Any]:
    """Tensors of equal sizes with bytes of their own; `changes`: seeds of some."""
    seeds = {number: number for number in range(count)} | dict(changes or {})
    return {
        f"layer.{number}": np.random.default_rng(seed).integers(0, 256, (64, size // 64), np.uint8)
        for number, seed in seeds.items()
    }


async def held(session: Session, name: str = "policy") -> set[str]:
    """All artifacts of a model."""
    return {each.artifact_id for each in await session.list_artifacts(name)}


async def test_a_version_is_read_as_it_was_published(pool: Pool, scheme: str) -> None:
    [a] = await pool.start()
    session = await pool.session(a, scheme)
    publisher = WeightPublisher(session, "policy")
    given = {**model(), "empty": np.zeros((0, 3), np.float32), "tied": model()["layer.3"]}
    version = await publisher.publish(given, version=7)
    assert (version.model, version.version, version.order, version.parts) == ("policy", 7, 7, 1)
    assert version.bytes == 11 * 4096 and version.changed_bytes == version.moved_bytes == 10 * 4096
    for reference in (("policy",), ("policy", 7), (version.artifact_id,)):
        weights = await session.weights(*reference)
        assert equal(await weights.tensor_dict(), given) and weights.version == 7 and weights.id == version.id
        assert weights.specs["layer.1"].shape == (64, 64) and weights.names == tuple(sorted(given))
    slices = {"layer.2": [slice(0, 32), slice(3, 5)], "tied": slice(1, 2)}
    view = weights.view(slices=slices, names=["layer.2", "layer.3", "tied"])
    cut = await view.tensor_dict(framework="torch")
    assert cut["layer.2"].numpy().tobytes() == given["layer.2"][:32, 3:5].tobytes()
    assert cut["tied"].numpy().tobytes() == given["tied"][1:2].tobytes() and cut["layer.3"].shape == (64, 64)
    with pytest.raises(InvalidArgument, match="no tensor 'x'"):
        weights.view(names=["x"])


async def test_only_what_has_changed_moves(pool: Pool) -> None:
    a, b = await pool.start("a", "b")
    publisher = WeightPublisher(await pool.session(a), "policy")
    reader = await pool.session(b)
    first = await publisher.publish(model(), version=1)
    before = await reader.weights("policy", 1)
    assert equal(await before.tensor_dict(), model())
    fetched = b.artifacts.counters["artifact_bytes_fetched"]
    second = await publisher.publish(model({4: 99}), version=2)
    assert second.id != first.id and second.changed_bytes == second.moved_bytes == 4096 and second.parts == 2
    await pool.seen()
    now = await reader.weights("policy")
    assert now.version == 2 and now.changed_since(before) == ("layer.4",) and len(now.changed_since(None)) == 10
    assert equal(await now.tensor_dict(), model({4: 99}))
    assert b.artifacts.counters["artifact_bytes_fetched"] - fetched < 4096 + 3000, "the part and the manifest"
    again = await publisher.publish(model({4: 99}), version=2)
    assert again == second


async def test_versions_that_are_not_kept_go(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    publisher = WeightPublisher(session, "policy", keep_last=2)
    read = {}
    for version in range(1, 6):
        await publisher.publish(model({number: 100 * version + number for number in range(version)}), version)
        read[version] = await (await session.weights("policy")).tensor_dict()
    versions = {name for each in await session.list_artifacts("policy") for name in each.names if name.count(":") < 2}
    assert versions == {"policy", "policy:4", "policy:5"}
    needed = set[str]()
    for version in (4, 5):
        weights = await session.weights("policy", version)
        needed |= {weights.reference, *weights.part_ids}
        assert equal(await weights.tensor_dict(), model({at: 100 * version + at for at in range(version)}))
    assert await held(session) == needed
    with pytest.raises(NotFound):
        await session.weights("policy", 3)
    assert all(equal(read[version], model({at: 100 * version + at for at in range(version)})) for version in read), (
        "who has mapped them has them"
    )


async def test_a_version_is_published_once_and_never_goes_backwards(pool: Pool) -> None:
    [a] = await pool.start()
    one, other = await pool.session(a), await pool.session(a)
    publisher, rival = WeightPublisher(one, "policy"), WeightPublisher(other, "policy")
    await publisher.publish(model(), 5)
    with pytest.raises(Conflict, match="policy:5 was published before with other content"):
        await rival.publish(model({1: 50}), 5)
    with pytest.raises(Conflict, match="policy:4 is older than the newest version"):
        await rival.publish(model({1: 50}), 4)
    assert (await rival.publish(model(), "5")).id == (await one.weights("policy")).id
    await publisher.publish(model({1: 50}), 6)
    assert (await rival.publish(model(), 5)).version == 5 and (await one.weights("policy")).version == 6
    back = await rival.publish(model(), 5, rollback=True)
    assert back.moved_bytes == 10 * 4096 and (await one.weights("policy")).version == 5
    with pytest.raises(NotFound):
        await one.weights("policy", 6)
    await publisher.publish(model({1: 51}), 6)
    assert equal(await (await other.weights("policy", 6)).tensor_dict(), model({1: 51}))


async def test_many_publish_one_version_at_once(pool: Pool) -> None:
    a, b = await pool.start("a", "b")
    publishers = [WeightPublisher(await pool.session(worker), "policy") for worker in (a, b, a)]
    same = await asyncio.gather(*(each.publish(model(), 1) for each in publishers))
    assert len({each.artifact_id for each in same}) == 1
    results = await asyncio.gather(
        *(each.publish(model({0: 50 + number}), 2) for number, each in enumerate(publishers)), return_exceptions=True
    )
    [won] = [each for each in results if isinstance(each, WeightVersion)]
    assert all(isinstance(each, Conflict) and "policy:2" in str(each) for each in results if each is not won)
    await pool.seen()
    session = publishers[0].session
    weights, first = await session.weights("policy"), await session.weights("policy", 1)
    assert weights.id == won.id
    needed = {weights.reference, first.reference, *weights.part_ids, *first.part_ids}
    await until(lambda: {*a.artifacts._copies, *b.artifacts._copies} == needed)
    assert await held(session) == needed


async def test_who_subscribes_gets_the_newest_and_then_each_newer_one(pool: Pool) -> None:
    a, b = await pool.start("a", "b")
    publisher, subscriber = WeightPublisher(await pool.session(a), "policy"), await pool.session(b)
    coming = subscriber.subscribe("policy")
    first = asyncio.ensure_future(anext(coming))
    await publisher.publish(model(), 1)
    assert (await first).version == 1
    for version in (2, 3, 4):
        await publisher.publish(model({0: 50 + version}), version)
    assert (await anext(coming)).version == 4, "who is slow skips"
    await publisher.publish(model({0: 52}), 2, rollback=True)
    following = subscriber.subscribe("policy", rollback=True)
    assert (await anext(following)).version == 2
    await publisher.publish(model({0: 60}), 5)
    assert (await anext(coming)).version == (await anext(following)).version == 5, "never backwards"
    await coming.aclose()  # type: ignore[attr-defined]
    await following.aclose()  # type: ignore[attr-defined]


def counted(*workers: Worker) -> int:
    """Bytes of artifacts that were put at, fetched by, or sent by these workers, as their metrics say."""
    names = ("artifact_put_bytes_total", "artifact_fetched_bytes_total", "artifact_sent_bytes_total")
    values = [WorkerMetrics(worker).values() for worker in workers]
    return sum(int(value) for each in values for name, _, value in each if name.endswith(names))  # type: ignore[arg-type]


@pytest.mark.slow
async def test_an_update_of_a_tenth_moves_a_tenth_everywhere(pool: Pool) -> None:
    a, b = await pool.start("a", "b", artifact_bytes=64 << 20)
    trainer, engine, remote = await pool.session(a), await pool.session(b), await pool.session(b, "tcp")
    publisher = WeightPublisher(trainer, "policy")
    tensors = model(count=200, size=64 << 10)
    size = sum(each.nbytes for each in tensors.values())
    await publisher.publish(tensors, 0)
    await pool.seen()
    held_there = await engine.weights("policy")
    await held_there.tensor_dict()
    have = await (await remote.weights("policy")).tensor_dict()
    for version in range(1, 4):
        changes = {20 * version + at: 1000 * version + at for at in range(20)}
        tensors |= {name: model(changes, 200, 64 << 10)[name] for name in (f"layer.{at}" for at in changes)}
        before = counted(a)
        published = await publisher.publish(tensors, version)
        assert 0.1 * size <= published.moved_bytes <= counted(a) - before <= 0.11 * size, "publisher to worker"
        await pool.seen()
        before = counted(b)
        now = await engine.weights("policy")
        assert equal(await now.tensor_dict(), tensors)
        assert 0.1 * size <= counted(b) - before <= 0.11 * size, "worker to worker"
        before = counted(b)
        far = await remote.weights("policy")
        have |= await far.view(names=far.changed_since(held_there)).tensor_dict()
        assert 0.1 * size <= counted(b) - before <= 0.11 * size, "worker to consumer on another host"
        assert equal(dict(sorted(have.items())), tensors)
        held_there = now


async def test_a_version_comes_to_a_worker_part_by_part(pool: Pool) -> None:
    a, b = await pool.start("a", "b")
    session = await pool.session(a)
    publisher = WeightPublisher(session, "policy")
    await publisher.publish(model(), 1)
    first = await session.weights("policy")
    assert await first.arrival("b") == (0, 10 * 4096)
    await first.prefetch(to="b")
    assert len(set(await first.arrival("b"))) == 1
    await publisher.publish(model({3: 50}), 2)
    second = await session.weights("policy")
    done, size = await second.arrival("b")
    assert 10 * 4096 <= done < size
    fetched = b.artifacts.counters["artifact_bytes_fetched"]
    await second.prefetch(to="b")
    assert 4096 <= b.artifacts.counters["artifact_bytes_fetched"] - fetched < 4096 + 3000
    done, size = await second.arrival()
    assert done == size == (await second.arrival(b.worker_id))[0]
    await publisher.publish(model({3: 50, 4: 51}), 3)
    await session.artifact("policy").prefetch(to="b")
    third = await session.weights("policy")
    assert len(set(await third.arrival("b"))) == 1, "the name alone stands for all parts"
    await session.artifact("policy").pin(60, on="b")
    pinned = [each for each in third.part_ids if b.artifacts.residence.pins(each, 0)]
    assert sorted(pinned) == sorted(third.part_ids)
    await session.artifact("policy").unpin(on="b")
    assert not any(b.artifacts.residence.pins(each, 0) for each in third.part_ids)
    await second.pin(60, on="b")
    await second.unpin(on="b")
    with pytest.raises(Unavailable, match="no worker 'c'"):
        await second.arrival("c")


async def test_an_engine_takes_its_share_of_a_trainers_tensors(pool: Pool) -> None:
    """Two ranks, each the half of every tensor, over several parts; as a step of a plan."""
    a, b = await pool.start("a", "b")
    trainer = await pool.session(a)
    publisher = WeightPublisher(trainer, "policy")
    await publisher.publish(model(), 1)
    tensors = model({3: 50, 7: 51})
    await publisher.publish(tensors, 2)
    async with attached([str(a.socket), str(b.socket)], 2) as engines:
        plan = trainer.plan()
        for engine in engines:
            plan.on_instance(engine.instance).transform_into(await trainer.weights("policy"), version="2")
        await plan.run().result()
        for rank, engine in enumerate(engines):
            assert engine.adaptor.version == "2"
            shares = {name: tensor[32 * rank : 32 * rank + 32] for name, tensor in tensors.items()}
            assert equal(engine.adaptor.parameters, shares)
