"""What becomes of versions when somebody dies: a publisher between any two steps, a worker, the bytes of a version."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Union

import msgspec
import numpy as np
import pytest

from tensorcast_connector.client import publisher as publisher_module
from tensorcast_connector.client.publisher import WeightPublisher
from tensorcast_connector.client.session import Session
from tensorcast_connector.core.weights import decode_manifest, encode_manifest
from tensorcast_connector.errors import ConfigError, Conflict, InvalidArgument, NotFound, TensorcastError
from tensorcast_connector.wire.caller_messages import AskArrival, MoveNames, NameMove, WaitName
from tensorcast_connector.wire.codec import EngineRequest
from tensorcast_connector.worker.service import EngineService
from tests.client.callers import Pool, equal, weights
from tests.client.checkpoints import random_folder
from tests.client.test_weights import held, model
from tests.waiting import until


class Killed(BaseException):
    """The process of a publisher has ended."""


def dying(session: Session, calls: int) -> Callable[[], int]:
    """Its process ends before so many calls and one more are made; how many were."""
    made = 0

    def counted(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def instead(*args: Any) -> Any:
            nonlocal made
            if made >= calls:
                raise Killed
            made += 1
            return await call(*args)

        return instead

    link = session._link
    begin_put = link.begin_put

    def put() -> Any:
        channel = begin_put()
        channel.call = counted(channel.call)  # type: ignore[method-assign]
        return channel

    link.call = counted(link.call)  # type: ignore[method-assign]
    link.begin_put = put  # type: ignore[method-assign]
    return lambda: made


async def needed(session: Session, name: str, *versions: int) -> set[str]:
    """The artifacts of these versions."""
    found = [await session.weights(name, version) for version in versions]
    return {each.reference for each in found} | {part for each in found for part in each.part_ids}


@pytest.mark.slow
async def test_a_publisher_is_killed_before_each_of_its_steps(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "WEIGHT_LEASE_S", 6)
    [a] = await pool.start(artifact_bytes=32 << 20)
    living, watching = await pool.session(a), await pool.session(a)
    steps, done, names = 0, False, list[str]()
    seen = set[int]()
    while not done:
        name = f"policy-{steps}"
        publisher = WeightPublisher(living, name)
        await publisher.publish(model(), 1)
        await publisher.publish(model({0: 20}), 2)
        victim = await pool.session(a)
        dying(victim, steps)
        try:
            await WeightPublisher(victim, name).publish(model({0: 20, 1: 30}), 3)
            done = True
        except Killed:
            steps += 1
        await pool.die(victim)
        newest = await watching.weights(name)  # whole, whichever it is
        seen.add(newest.version)
        assert equal(await newest.tensor_dict(), model({0: 20, 1: 30} if newest.version == 3 else {0: 20}))
        await publisher.publish(model({0: 20, 1: 30, 2: 40}), 4)
        names.append(name)
    assert seen == {2, 3} and steps > 12
    await pool.expire_crashed()
    kept = set[str]()
    for name in names:
        versions = (3, 4) if "policy:3" in await _names(watching, name) else (2, 4)
        expected = await needed(watching, name, *versions)
        assert await held(watching, f"{name}:") == expected, name
        kept |= expected
    await until(lambda: set(a.artifacts._copies) == kept)


async def _names(session: Session, name: str) -> set[str]:
    return {each.replace(name, "policy") for found in await session.list_artifacts(f"{name}:") for each in found.names}


async def test_a_name_of_somebody_else_keeps_a_version(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    publisher = WeightPublisher(session, "policy", keep_last=1)
    first = await publisher.publish(model(), 1)
    await session.name("production", first.artifact_id)
    for version in (2, 3):
        await publisher.publish(model({0: 50 + version}), version)
    assert equal(await (await session.weights("production")).tensor_dict(), model())
    assert {"production"} == {
        name for each in await session.list_artifacts() for name in each.names
        if each.artifact_id == first.artifact_id and ":manifest:" not in name
    }  # fmt: skip
    await session.unname("production")
    await publisher.publish(model({0: 60}), 4)
    assert await held(session) == await needed(session, "policy", 4)
    with pytest.raises(NotFound):
        await session.artifact(first.artifact_id).describe()


async def test_bytes_that_are_gone_are_published_again(pool: Pool) -> None:
    a, b = await pool.start("a", "b")
    at_b = await pool.session(b)
    publisher = WeightPublisher(await pool.session(a), "policy")
    first_version = await publisher.publish(model(), 1)
    encoded = encode_manifest(await publisher.manifest(first_version.artifact_id))
    await pool.seen()
    await pool.leave(a)
    await pool.settled()
    await until(lambda: not pool.workers[0].peers.metadata.view.replicas)
    with pytest.raises(NotFound, match="gone"):
        await at_b.weights("policy")
    coming = at_b.subscribe("policy")
    first = asyncio.ensure_future(anext(coming))
    again = WeightPublisher(at_b, "policy")
    again._manifests[first_version.artifact_id] = decode_manifest(encoded)  # it has read that before
    with pytest.raises(Conflict, match="policy:1 was published before with other content"):
        await again.publish(model({0: 50}), 1)
    assert (await again.publish(model(), 1)).moved_bytes == 10 * 4096
    assert (await first).version == 1
    assert equal(await (await at_b.weights("policy")).tensor_dict(), model())
    assert (await again.publish(model({0: 50}), 2)).moved_bytes == 4096
    assert await held(at_b) == await needed(at_b, "policy", 1, 2)


async def test_a_subscription_outlives_its_worker_and_the_store(pool: Pool) -> None:
    a, b = await pool.start("a", "b")
    publisher, reader = WeightPublisher(await pool.session(a), "policy"), await pool.session(b)
    coming = reader.subscribe("policy")
    await publisher.publish(model(), 1)
    assert (await anext(coming)).version == 1
    second = asyncio.ensure_future(anext(coming))
    await pool.crash(b)
    await publisher.publish(model({0: 50}), 2)
    assert not second.done()
    await pool.worker("b")
    assert (await second).version == 2
    third = asyncio.ensure_future(anext(coming))
    await pool.lose_store()
    with pytest.raises(TensorcastError):
        await publisher.publish(model({0: 51}), 3)
    await pool.found_store()
    await publisher.publish(model({0: 51}), 3)
    assert (await third).version == 3


async def test_a_folder_is_published(pool: Pool, tmp_path: Path) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    publisher = WeightPublisher(session, "policy")
    folder = tmp_path / "model"
    folder.mkdir()
    given = random_folder(folder, {f"w{number}": 5000 + number for number in range(10)})
    first = await publisher.publish(folder, 1)
    assert first.tensors == 10 and first.moved_bytes == sum(map(len, given.values()))
    got = await (await session.weights("policy")).tensor_dict()
    assert {name: tensor.tobytes() for name, tensor in got.items()} == given
    changed = {name: np.frombuffer(data, np.uint8) for name, data in given.items()} | {"w3": np.zeros(9, np.uint8)}
    second = await publisher.publish(changed, 2)
    assert second.moved_bytes == 9 and second.changed_bytes == 9, "files and memory are the same"
    third = await publisher.publish(str(folder), 3)
    assert third.moved_bytes == 5003 and third.id == first.id
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"\1")
    with pytest.raises(InvalidArgument, match="model-00001-of-00002"):
        await publisher.publish(folder, 4)


async def test_a_file_that_changes_while_it_is_published(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    publisher = WeightPublisher(session, "policy")
    folder = tmp_path / "model"
    folder.mkdir()
    random_folder(folder, {f"w{number}": 5000 for number in range(4)})
    put_image = session.put_image

    async def put(image: Any, **more: Any) -> Any:
        random_folder(folder, {f"w{number}": 5000 for number in range(3)})
        return await put_image(image, **more)

    monkeypatch.setattr(session, "put_image", put)
    with pytest.raises(InvalidArgument, match=r"model-0000.*(longer when|changed while)"):
        await publisher.publish(folder, 1)
    with pytest.raises(NotFound):
        await session.weights("policy")
    assert not await held(session)


async def test_names_that_are_no_versions(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    for model_name in ("", "a:b", " a", "0123456789abcdef" * 2, "x" * 129):
        with pytest.raises(InvalidArgument, match="is no name for weights"):
            WeightPublisher(session, model_name)
    with pytest.raises(InvalidArgument, match="keep_last=0"):
        WeightPublisher(session, "policy", keep_last=0)
    publisher = WeightPublisher(session, "policy")
    for version in (-1, True, "", "a:b", 1.5, "manifest", 1 << 63):
        with pytest.raises(InvalidArgument, match="is no version"):
            await publisher.publish(model(), version)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="has the order 3, not 4"):
        await publisher.publish(model(), 3, order=4)
    with pytest.raises(InvalidArgument, match="chance' has a name that is taken"):
        await publisher.publish({"tensorcast.chance": np.ones(1)}, 3)
    with pytest.raises(InvalidArgument, match="'w' is a list"):
        await publisher.publish({"w": [1]}, 3)
    await session.put(weights(), name="policy")
    with pytest.raises(Conflict, match="is that of an artifact which is no published version"):
        await publisher.publish(model(), 3)
    with pytest.raises(InvalidArgument, match="is no published weights"):
        await session.weights("policy")
    with pytest.raises(InvalidArgument, match="is no published weights"):
        await anext(session.subscribe("policy"))
    await session.unname("policy")
    await publisher.publish(model(), "step-a")
    await publisher.publish(model({1: 50}), "step-b")
    assert (await session.weights("policy")).published.order == 1
    with pytest.raises(Conflict, match="policy:step-c is older"):
        await publisher.publish(model({1: 51}), "step-c", order=1)


async def test_names_move_together_or_not_at_all(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    one, two = [await (await session.put(weights(seed))).id() for seed in (1, 2)]
    await session.move_names([NameMove("n", one, ""), NameMove("m", two, "")])
    for wrong in (
        [NameMove("n", two, ""), NameMove("k", one, "")],
        [NameMove("k", one, ""), NameMove("n", two, two)],
        [NameMove("k", one, one)],
    ):
        with pytest.raises(Conflict, match="points to"):
            await session.move_names(wrong)
    assert await session.artifact("n").id() == one
    with pytest.raises(NotFound):
        await session.artifact("k").id()
    with pytest.raises(NotFound, match="does not exist"):
        await session.move_names([NameMove("k", "f" * 32, "")])
    await session.move_names([NameMove("n", two, one), NameMove("m", "", two), NameMove("j", "", "")])
    assert await session.artifact("n").id() == two
    results = await asyncio.gather(
        *(session.move_names([NameMove("n", one, two), NameMove(f"w{at}", one, "")]) for at in range(5)),
        return_exceptions=True,
    )
    assert [type(each) for each in results if each is not None] == [Conflict] * 4


async def test_what_the_system_adopts_outlives_its_lease(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    async with session.lease(30) as lease:
        kept, lost = [await (await session.put(weights(seed), ownership=lease)).id() for seed in (1, 2)]
        await session.move_names([NameMove("n", kept, "")], adopt=[kept])
        assert not (await session.artifact("n").describe()).leased
    await pool.seen()
    assert equal(await session.artifact("n").tensor_dict(), weights(1))
    with pytest.raises(NotFound):
        await session.artifact(lost).describe()
    with pytest.raises(NotFound, match="the lease that it was put under has ended"):
        await session.move_names([], adopt=[lost])


async def test_a_gateway_that_is_too_old(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    former = [each for each in EngineRequest.__args__ if each not in (MoveNames, WaitName, AskArrival)]
    monkeypatch.setattr(EngineService, "decoder", msgspec.msgpack.Decoder(Union[tuple(former)]))  # noqa: UP007
    [a] = await pool.start()
    session = await pool.session(a)
    with pytest.raises(ConfigError, match="is older than this program and does not know MoveNames; upgrade it"):
        await WeightPublisher(session, "policy").publish(model(), 1)
    with pytest.raises(ConfigError, match="does not know WaitName"):
        await anext(session.subscribe("policy"))
    made = await session.put(weights())
    with pytest.raises(ConfigError, match="does not know AskArrival"):
        await made.arrival()
    assert equal(await made.tensor_dict(), weights()), "the rest goes on"
