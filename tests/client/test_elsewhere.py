"""Artifacts of other workers: fetched, kept, lost, and never other bytes than were put."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tensorcast_connector.client.ownership import leased
from tensorcast_connector.core.artifact import CHUNK_BYTES
from tensorcast_connector.core.placement import hrw_rank
from tensorcast_connector.errors import Exhausted, NotFound, TensorcastError, Unavailable
from tensorcast_connector.types import ByteRange, WorkerId
from tensorcast_connector.worker.server import Worker
from tests.client.callers import Pool, equal, keeps, used, weights
from tests.cluster import plane
from tests.waiting import until

LARGE = 3 * CHUNK_BYTES + 17


def large(seed: int = 5) -> dict[str, Any]:
    """More chunks than one source is asked for at once."""
    return {"w": np.random.default_rng(seed).integers(0, 256, LARGE, np.uint8)}


def damage(worker: Worker, identity: str, at: int = 0) -> None:
    """Its copy has one other byte from now on."""
    copy = worker.artifacts._copies[identity]
    changed = bytearray(copy.blob.view)
    changed[at] ^= 1
    copy.blob._map = memoryview(bytes(changed))  # type: ignore[assignment]


async def test_an_artifact_of_another_worker(pool: Pool, scheme: str) -> None:
    a, b = await pool.start("a", "b", artifact_bytes=32 << 20)
    at_a, at_b = await pool.session(a), await pool.session(b, scheme)
    made = await at_a.put(large(), name="n")
    identity = await made.id()
    assert (await at_b.artifact("n").describe()).workers == (a.worker_id,), "to look at it is not to fetch it"
    assert used(b) == 0
    assert equal(await at_b.artifact("n").tensor_dict(), large())
    assert used(b) == LARGE and b.artifacts.counters["artifact_bytes_fetched"] == LARGE
    await pool.listed(identity, [a, b])
    assert keeps(a, identity) and not keeps(b, identity)
    assert (
        equal(await at_b.artifact(identity).tensor_dict(), large()) and b.artifacts.counters["artifacts_fetched"] == 1
    )
    await at_b.delete("n")
    await until(lambda: used(a) == used(b) == 0)
    with pytest.raises(NotFound):
        await at_a.artifact("n").tensor_dict()


@pytest.mark.slow
async def test_it_is_fetched_once_however_many_want_it(pool: Pool) -> None:
    a, b = await pool.start("a", "b", artifact_bytes=32 << 20)
    await (await pool.session(a)).put(large(), name="n")
    sessions = [await pool.session(b, each) for each in ("unix", "tcp", "unix")]
    got = await asyncio.gather(*(each.artifact("n").tensor_dict() for each in sessions * 4))
    assert all(equal(each, large()) for each in got) and b.artifacts.counters["artifacts_fetched"] == 1


async def test_who_stops_waiting_does_not_stop_the_fetch_for_the_others(pool: Pool) -> None:
    a, b = await pool.start("a", "b", artifact_bytes=32 << 20)
    await (await pool.session(a)).put(large(), name="n")
    one, two = await pool.session(b), await pool.session(b)
    reading = [asyncio.get_running_loop().create_task(each.artifact("n").tensor_dict()) for each in (one, two)]
    await until(lambda: b.artifacts._arriving)
    reading[0].cancel()
    assert equal(await reading[1], large())
    with pytest.raises(asyncio.CancelledError):
        await reading[0]
    assert equal(await one.artifact("n").tensor_dict(), large()), "its session goes on"


async def test_what_is_only_a_copy_goes_when_memory_is_needed(pool: Pool) -> None:
    a, b = await pool.start("a", "b", artifact_bytes=1 << 20)
    at_a, at_b = await pool.session(a), await pool.session(b)
    given = {"w": np.full(600 << 10, 7, np.uint8)}
    identity = await (await at_a.put(given, name="n")).id()
    assert equal(await at_b.artifact("n").tensor_dict(), given)
    await pool.listed(identity, [a, b])
    read = await at_b.artifact("n").tensor_dict()
    await at_b.put({"w": np.full(600 << 10, 8, np.uint8)}, name="own")
    assert identity not in b.artifacts.residence and b.artifacts.counters["artifacts_evicted"] == 1
    await pool.listed(identity, [a])
    assert equal(read, given), "who reads it has it for as long as he likes"
    with pytest.raises(Exhausted):
        await at_b.artifact("n").tensor_dict()
    await at_b.delete("own")
    assert equal(await at_b.artifact("n").tensor_dict(), given)


async def test_when_the_worker_that_keeps_it_has_gone_another_keeps_it(pool: Pool) -> None:
    a, b, c = await pool.start("a", "b", "c")
    identity = await (await (await pool.session(a)).put(weights(), name="n")).id()
    at_b, at_c = await pool.session(b), await pool.session(c)
    for session in (at_b, at_c):
        assert equal(await session.artifact("n").tensor_dict(), weights())
    await pool.listed(identity, [a, b, c])
    assert pool.keepers(identity) == [a]
    await pool.crash(a)
    await pool.expire_crashed()
    await pool.listed(identity, [b, c])
    first = hrw_rank(identity.encode(), [b.worker_id, c.worker_id])[0]
    await until(lambda: [each.worker_id for each in pool.keepers(identity)] == [first])
    await pool.settled()
    keeper = plane(b).view.replicas[identity]
    assert [who for who, each in keeper.items() if each.keeper] == [first] == [
        each.worker_id for each in pool.keepers(identity)
    ]  # fmt: skip


async def test_a_leased_artifact_goes_everywhere(pool: Pool) -> None:
    a, b = await pool.start("a", "b")
    owner, reader = await pool.session(a), await pool.session(b)
    identity = await (await owner.put(weights(), name="n", ownership=leased(6))).id()
    read = await reader.artifact("n").tensor_dict()
    await pool.listed(identity, [a, b])
    await pool.die(owner)
    await pool.expire_crashed()
    await until(lambda: used(a) == used(b) == 0)
    assert equal(read, weights())


async def test_the_bytes_are_gone(pool: Pool, scheme: str) -> None:
    a, b = await pool.start("a", "b")
    identity = await (await (await pool.session(a)).put(weights(), name="n")).id()
    at_b = await pool.session(b, scheme)
    await pool.seen()
    await pool.leave(a)
    await until(lambda: identity not in plane(b).view.replicas)
    for attempt in (at_b.artifact("n").tensor_dict, at_b.artifact(identity).tensor_dict, at_b.artifact("n").prefetch):
        with pytest.raises(NotFound, match=f"the bytes of artifact {identity} are gone: .* put it again"):
            await attempt()
    assert used(b) == 0
    [listed] = await at_b.list_artifacts()
    assert listed.artifact_id == identity and not listed.workers, "it can still be seen that it was"
    await at_b.put(weights())
    assert equal(await at_b.artifact("n").tensor_dict(), weights())


# --- wrong bytes, slow and broken sources ---


@pytest.mark.parametrize("at", [0, CHUNK_BYTES - 1, CHUNK_BYTES, LARGE - 1])
async def test_wrong_bytes_are_never_taken(pool: Pool, at: int) -> None:
    a, b = await pool.start("a", "b", artifact_bytes=32 << 20)
    identity = await (await (await pool.session(a)).put(large(), name="n")).id()
    session = await pool.session(b)
    damage(a, identity, at)
    with pytest.raises(
        NotFound, match=rf"are gone.* \({a.worker_id}: chunk {at // CHUNK_BYTES} arrived with wrong bytes"
    ):
        await session.artifact("n").tensor_dict()
    assert used(b) == 0 and not b.artifacts._copies


@pytest.mark.slow
async def test_wrong_bytes_of_one_are_had_from_another(pool: Pool) -> None:
    a, b, c = await pool.start("a", "b", "c", artifact_bytes=32 << 20)
    identity = await (await (await pool.session(a)).put(large(), name="n")).id()
    await (await pool.session(b)).artifact("n").prefetch()
    await pool.listed(identity, [a, b])
    for number in range(4):
        damage(b, identity, number * CHUNK_BYTES)
    session = await pool.session(c)
    assert equal(await session.artifact("n").tensor_dict(), large())


async def test_another_header_is_not_taken(pool: Pool) -> None:
    a, b = await pool.start("a", "b")
    at_a = await pool.session(a)
    identity = await (await at_a.put(weights(), name="n")).id()
    other = await (await at_a.put(weights(1))).id()
    session = await pool.session(b)
    await pool.seen()
    a.artifacts._copies[identity].encoded = a.artifacts._copies[other].encoded
    for attempt in (session.artifact("n").tensor_dict, session.artifact("n").describe):
        with pytest.raises(NotFound, match="are gone"):
            await attempt()
    assert used(b) == 0


async def test_a_source_that_is_slow_to_fail_loses_nothing(pool: Pool) -> None:
    """The others have done their part by then; they are asked for what it left over."""
    a, b, c = await pool.start("a", "b", "c", artifact_bytes=32 << 20)
    identity = await (await (await pool.session(a)).put(large(), name="n")).id()
    await (await pool.session(b)).artifact("n").prefetch()
    await pool.listed(identity, [a, b])
    elsewhere = c.artifacts._elsewhere
    fetch, held, done = elsewhere.fetch_bytes, 0, 0

    async def slow(
        artifact: str, source: WorkerId, ranges: Sequence[ByteRange], into: Sequence[memoryview]
    ) -> None:  # fmt: skip
        nonlocal held, done
        if source == b.worker_id:
            held += 1
            await until(lambda: done + held == 4)  # the other one has fetched everything else
            await asyncio.sleep(0)
            raise Unavailable("it has died")
        await until(lambda: held)
        await fetch(artifact, source, ranges, into)
        done += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elsewhere, "fetch_bytes", slow)
        assert equal(await (await pool.session(c)).artifact("n").tensor_dict(), large())
    assert held


async def test_the_source_dies_while_it_is_read(pool: Pool) -> None:
    a, b = await pool.start("a", "b", artifact_bytes=32 << 20)
    identity = await (await (await pool.session(a)).put(large(), name="n")).id()
    session = await pool.session(b)
    await pool.seen()
    elsewhere = b.artifacts._elsewhere
    fetch = elsewhere.fetch_bytes

    async def dies(*arguments: Any) -> None:
        if a in pool.workers:
            await pool.crash(a)
        await fetch(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elsewhere, "fetch_bytes", dies)
        with pytest.raises(NotFound, match=f"the bytes of artifact {identity} are gone"):
            await session.artifact("n").tensor_dict()
    assert used(b) == 0
    await pool.expire_crashed()


async def test_it_is_deleted_while_it_is_fetched(pool: Pool) -> None:
    a, b = await pool.start("a", "b", artifact_bytes=32 << 20)
    at_a, at_b = await pool.session(a), await pool.session(b)
    made = await at_a.put(large(), name="n")
    elsewhere = b.artifacts._elsewhere
    fetch = elsewhere.fetch_bytes
    deleting: list[asyncio.Task[None]] = []

    async def late(*arguments: Any) -> None:
        if not deleting:
            deleting.append(asyncio.get_running_loop().create_task(made.delete()))
        await fetch(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elsewhere, "fetch_bytes", late)
        try:
            got = await at_b.artifact("n").tensor_dict()
        except TensorcastError as error:
            assert isinstance(error, NotFound)
        else:
            assert equal(got, large())
    await deleting[0]
    await until(lambda: used(a) == used(b) == 0)


# --- two gateways ---


async def test_the_same_is_put_at_two_workers_at_once(pool: Pool) -> None:
    a, b = await pool.start("a", "b")
    sessions = [await pool.session(a), await pool.session(b)]
    one, two = await asyncio.gather(*(each.put(weights(), name="n") for each in sessions))
    identity = await one.id()
    assert identity == await two.id()
    await pool.listed(identity, [a, b])
    assert equal(await sessions[0].artifact("n").tensor_dict(), weights())
    await sessions[0].delete("n")
    await until(lambda: used(a) == used(b) == 0)


async def test_a_name_that_moves_is_seen_at_every_gateway(pool: Pool) -> None:
    a, b = await pool.start("a", "b")
    writer, reader = await pool.session(a), await pool.session(b)
    for number in range(5):
        made = await writer.put(weights(number), name="latest")
        await pool.seen()
        assert await reader.artifact("latest").id() == await made.id()
        assert equal(await reader.artifact("latest").tensor_dict(), weights(number))


async def test_what_another_gateway_has_just_recorded_is_found(pool: Pool) -> None:
    """Whoever is told a new id or name can use it at once, wherever it is."""
    a, b = await pool.start("a", "b")
    writer, reader = await pool.session(a), await pool.session(b)
    for number in range(10):
        made = await writer.put(weights(number), name=f"n{number}")
        reference = f"n{number}" if number % 2 else await made.id()
        assert equal(await reader.artifact(reference).tensor_dict(), weights(number))


# --- prefetch and pins ---


async def test_prefetch_and_pins(pool: Pool) -> None:
    a, b = await pool.start("a", "b", artifact_bytes=1 << 20)
    session = await pool.session(a)
    given = {"w": np.full(600 << 10, 7, np.uint8)}
    made = await session.put(given, name="n")
    identity = await made.id()
    await made.prefetch(to="b")
    await pool.listed(identity, [a, b])
    await session.artifact("n").pin(1000, on=b.worker_id)
    assert b.artifacts.residence.pins(identity, pool.now())
    at_b = await pool.session(b)
    with pytest.raises(Exhausted, match="unpin"):
        await at_b.put({"w": np.zeros(600 << 10, np.uint8)})
    await made.unpin(on="b")
    await made.unpin(on="b")
    assert not b.artifacts.residence.pins(identity, pool.now())
    await at_b.put({"w": np.zeros(600 << 10, np.uint8)})
    assert identity not in b.artifacts.residence
    with pytest.raises(NotFound, match="there is no worker 'nobody'"):
        await made.prefetch(to="nobody")
    await session.delete("n")


async def test_a_pin_ends_by_itself(pool: Pool) -> None:
    a, b = await pool.start("a", "b", artifact_bytes=1 << 20)
    session = await pool.session(a)
    made = await session.put({"w": np.full(600 << 10, 7, np.uint8)})
    await made.pin(100, on="b")
    pool.pass_time(101)
    await (await pool.session(b)).put({"w": np.zeros(600 << 10, np.uint8)})
    assert await made.id() not in b.artifacts.residence


@pytest.mark.slow
async def test_a_copy_that_has_to_go_while_it_is_read_is_fetched_again(pool: Pool) -> None:
    a, b = await pool.start("a", "b", artifact_bytes=32 << 20)
    identity = await (await (await pool.session(a)).put(large(), name="n")).id()
    session = await pool.session(b, "tcp")
    prepare, gone = session._link.prepare, 0

    async def evicted(artifact_id: str) -> None:
        nonlocal gone
        await prepare(artifact_id)
        if gone < 2:
            gone += 1
            b.artifacts.forget(identity)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session._link, "prepare", evicted)
        assert equal(await session.artifact("n").tensor_dict(), large()) and gone == 2
        gone = -10
        with pytest.raises(NotFound, match="is not resident here"):
            await session.artifact("n").tensor_dict()
