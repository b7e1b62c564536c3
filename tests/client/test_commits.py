"""A name never points to bytes that a worker has thrown away, whatever becomes of the caller, of an answer or of the store."""

import asyncio
import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from tensorcast_connector.core.cluster import artifact_key
from tensorcast_connector.errors import DeadlineExceeded, Exhausted, Unauthorized, Unavailable
from tensorcast_connector.wire.caller_messages import AbortUpload, CommitUpload, ListDisabled, OpenUpload, UploadOpened
from tensorcast_connector.wire.messages import AttachInstance, Hello, Ok
from tensorcast_connector.worker import commits
from tensorcast_connector.worker.gateway import CallerSession
from tests.client.callers import Pool, equal, used, weights
from tests.cluster import plane
from tests.waiting import until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is asked again soon."""
    monkeypatch.setattr(commits, "COMMIT_FOLLOW_INTERVAL_S", 0.01)


async def test_a_caller_that_dies_in_mid_commit_leaves_bytes_or_nothing(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    handle = CallerSession.handle

    def dies(self: CallerSession, message: Any) -> Any:
        answer = handle(self, message)
        if not isinstance(message, CommitUpload):
            return answer
        task = asyncio.ensure_future(answer)  # type: ignore[arg-type]
        asyncio.get_running_loop().call_later(0, lambda: asyncio.get_running_loop().call_soon(task.cancel))
        return task

    with monkeypatch.context() as patch:
        patch.setattr(CallerSession, "handle", dies)
        putting = asyncio.ensure_future(session.put(weights(), name="n"))
        await until(lambda: any(name == "n" for _, name in plane(a).view.names))
        putting.cancel()
    await asyncio.gather(putting, return_exceptions=True)
    assert equal(await (await pool.session(a)).artifact("n").tensor_dict(), weights())


@pytest.mark.parametrize("done", [True, False])
async def test_after_an_unknown_outcome_the_store_is_asked(pool: Pool, done: bool) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    write = a.gateway.records.write

    async def unanswered(*arguments: Any, **named: Any) -> int:
        if done:
            await write(*arguments, **named)
        raise DeadlineExceeded("no answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a.gateway.records, "write", unanswered)
        with pytest.raises(Unavailable):
            await session.put(weights(), name="n")
    await until(lambda: not a.gateway.commits._tasks)
    if done:
        assert equal(await session.artifact("n").tensor_dict(), weights())
    else:
        assert used(a) == 0


async def test_a_name_that_was_put_again_is_deleted_and_read_as_it_is_now(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    for _ in range(5):
        one = await (await session.put(weights(1), name="n")).id()
        await pool.seen()
        two = await (await session.put(weights(2), name="n")).id()
        plan = session.plan()
        step = plan.on_worker("a").prefetch("n")
        assert (await plan.run().result())[step]["artifact"] == two
        await session.put(weights(2), name="n")
        await session.put(weights(3), name="n")
        await session.delete("n")
        assert {each.artifact_id for each in await session.list_artifacts()} == {one, two}


async def test_after_the_stores_database_was_lost_sessions_go_on_and_bytes_stay(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    for number in range(10):
        await session.put(weights(number), name=f"n{number}")
    await pool.lose_store()
    shutil.rmtree(pool.folder / "store")
    pool.life += 1
    await pool.found_store()
    await until(lambda: plane(a).view.incarnation == pool.life)
    assert await session.list_artifacts() == []
    assert a.artifacts.statistics()["artifacts"] == a.artifacts.statistics()["artifacts_lost"] == 10
    await session.put(weights(3), name="again")
    assert session._link.revision <= plane(a).view.revision + 5, "it counts as the store does now"
    assert equal(await session.artifact("again").tensor_dict(), weights(3))
    assert a.artifacts.statistics()["artifacts_lost"] == 9
    await session.delete("again")
    await until(lambda: a.artifacts.statistics()["artifacts"] == 9)


async def test_uploads_of_a_session_and_artifacts_of_a_worker_are_limited(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a, "tcp")
    uploads = [(await session._link.call(OpenUpload(0), UploadOpened)).upload_id for _ in range(64)]
    with pytest.raises(Exhausted, match="64 uploads of one connection are open; commit or abort"):
        await session._link.call(OpenUpload(0), UploadOpened)
    a.artifacts.residence.count_max = 64
    other = await pool.session(a, "tcp")
    with pytest.raises(Exhausted, match="64 artifacts and uploads are at this worker"):
        await other._link.call(OpenUpload(0), UploadOpened)
    for each in uploads:
        await session._link.call(AbortUpload(each), Ok)
    await other.put(weights())


async def test_memory_is_given_back_when_an_upload_is_cancelled_while_it_is_allocated(pool: Pool) -> None:
    [a] = await pool.start(artifact_bytes=256 << 20)
    opening = asyncio.ensure_future(a.artifacts.open_upload("s", 100 << 20))
    await asyncio.sleep(0)
    assert used(a) == 100 << 20
    opening.cancel()
    await until(lambda: used(a) == 0)
    assert not a.artifacts._opening


async def test_an_artifact_of_very_many_owners_is_deleted(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    identity = await (await session.put(weights())).id()
    [owner] = await a.gateway.records.read(artifact_key("default", identity))
    for part in (range(1, 100), range(100, 200)):
        await a.gateway.records.write([(artifact_key("default", identity, each), owner.value, 0) for each in part])
    await session.delete(identity)
    assert await session.list_artifacts() == []


async def test_tenants_see_nothing_of_each_others_engines(pool: Pool) -> None:
    [a] = await pool.start()
    for name, tenant in (("of-a", "team-a"), ("of-b", "team-b"), ("of-all", "")):
        client = await pool.engine(a, name)
        await client.client.call(AttachInstance(name, "engine", "m", "n", tenant), Ok, 5)
    await pool.seen()
    operator, session, what = await pool.session(a), await pool.session(a, tenant="team-a"), "0123456789abcdef" * 2
    await operator.disable(what)
    assert what in await operator.list_disabled()
    assert {each.instance_id for each in await operator.list_instances()} == {"of-a", "of-b", "of-all"}
    assert {each.instance_id for each in await session.list_instances()} == {"of-a", "of-all"}
    with_token: Any = SimpleNamespace(tenant="team-a")
    with pytest.raises(Unauthorized):
        a.gateway.open_session(with_token, Hello(1, 1, "caller", "c", "team-a")).handle(ListDisabled())


async def test_watching_is_not_hurried_by_what_others_write(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    before = plane(a).view.revision
    waiting = asyncio.ensure_future(a.gateway.records.members_changed(before, 5))
    await session.put(weights(), name="n")
    await pool.seen()
    assert plane(a).view.revision > before and not waiting.done()
    await pool.worker("b")
    async with asyncio.timeout(5):
        await waiting
