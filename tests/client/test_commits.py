"""A name never points to bytes that a worker has thrown away, whatever becomes of the caller, of an answer or of the store."""

import asyncio
import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from tensorcast_connector.client.session import Session
from tensorcast_connector.core.cluster import artifact_key
from tensorcast_connector.errors import DeadlineExceeded, Exhausted, NotFound, Unauthorized, Unavailable
from tensorcast_connector.store.kv import TxnResult
from tensorcast_connector.wire.caller_messages import AbortUpload, CommitUpload, ListDisabled, OpenUpload, UploadOpened
from tensorcast_connector.wire.messages import AttachInstance, Hello, Ok
from tensorcast_connector.worker import commits, fence
from tensorcast_connector.worker.gateway import CallerSession
from tensorcast_connector.worker.metrics import WorkerMetrics
from tensorcast_connector.worker.server import Worker
from tests.client.callers import Pool, equal, used, weights
from tests.cluster import plane
from tests.waiting import until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is asked again soon."""
    monkeypatch.setattr(commits, "COMMIT_FOLLOW_INTERVAL_S", 0.01)
    monkeypatch.setattr(fence, "COMMIT_FOLLOW_INTERVAL_S", 0.01)


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


class Late:
    """The database takes the next write that puts something under a prefix, does not answer, and does it later."""

    def __init__(self, pool: Pool, patch: pytest.MonkeyPatch, prefix: str) -> None:
        assert pool.kv is not None
        self._txn = pool.kv.txn
        self._prefix = prefix
        self.taken: list[tuple[Any, Any]] = []
        patch.setattr(pool.kv, "txn", self._take)

    async def _take(self, compares: Any, operations: Any) -> TxnResult:
        if not self.taken and any(each.key.startswith(self._prefix) for each in operations):
            self.taken.append((compares, operations))
            raise DeadlineExceeded("the database does not answer in time")
        return await self._txn(compares, operations)

    async def done(self) -> bool:
        """Does it now; whether that changed anything."""
        try:
            return (await self._txn(*self.taken[0])).succeeded
        except NotFound:
            return False


async def refuses(lease_id: int) -> None:
    """A database that ends no lease."""
    raise Unavailable("not now")


async def test_what_was_not_answered_and_is_not_there_never_will_be(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    late = Late(pool, monkeypatch, "cluster/artifacts/")
    with pytest.raises(DeadlineExceeded):
        await session.put(weights(), name="n")
    await until(lambda: used(a) == 0)
    assert not await late.done()
    with pytest.raises(NotFound, match="no artifact has the name 'n'"):
        await session.artifact("n").tensor_dict()
    await session.put(weights(), name="n")
    assert equal(await session.artifact("n").tensor_dict(), weights())


@pytest.mark.parametrize("change", ["name", "put", "unname", "delete"])
async def test_what_is_done_late_does_not_undo_what_was_done_since(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    a, b = await pool.start("a", "b")
    here, there = await pool.session(a), await pool.session(b)
    old, new = [await (await here.put(weights(each))).id() for each in (1, 2)]
    await here.name("n", old)
    await pool.seen()
    changes = {
        "name": lambda: here.name("n", old),
        "put": lambda: here.put(weights(1), name="n"),
        "unname": lambda: here.unname("n"),
        "delete": lambda: here.delete("n"),
    }
    assert pool.kv is not None
    revoke = pool.kv.lease_revoke
    monkeypatch.setattr(pool.kv, "lease_revoke", refuses)  # so that nothing but what is compared is in its way
    late = Late(pool, monkeypatch, "cluster/artifacts/" if change == "delete" else "cluster/names/")
    with pytest.raises(DeadlineExceeded):
        await changes[change]()
    # Through another gateway, which knows nothing of it.
    await there.put(weights(1), name="other")
    await there.name("n", new)
    await pool.seen()
    assert not await late.done()
    assert await there.artifact("n").id() == new
    assert await there.artifact("other").id() == old
    monkeypatch.setattr(pool.kv, "lease_revoke", revoke)


async def test_a_lease_of_writes_that_cannot_be_ended_holds_writes_back(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    monkeypatch.setattr(fence, "STORE_TIMEOUT_S", 0.01)
    assert pool.kv is not None
    revoke = pool.kv.lease_revoke

    monkeypatch.setattr(pool.kv, "lease_revoke", refuses)
    Late(pool, monkeypatch, "cluster/artifacts/")
    with pytest.raises(DeadlineExceeded):
        await session.put(weights(), name="n")
    unsure = used(a)
    with pytest.raises(Unavailable, match="an earlier write may still be done"):
        await session.put(weights(1), name="m")
    assert used(a) == unsure > 0, "what was not written has gone; what may be has not"
    monkeypatch.setattr(pool.kv, "lease_revoke", revoke)
    await until(lambda: used(a) == 0)
    await session.put(weights(1), name="m")


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
    await until(lambda: ("default", "again") in plane(a).view.names)
    assert session._link.revision <= plane(a).view.revision + 5, "it counts as the store does now"
    assert equal(await session.artifact("again").tensor_dict(), weights(3))
    assert a.artifacts.statistics()["artifacts_lost"] == 9
    await session.delete("again")
    await until(lambda: a.artifacts.statistics()["artifacts"] == 9)


def metrics(worker: Worker) -> tuple[float, float]:
    """Artifacts whose record was lost, and those without a copy, as Prometheus is told."""
    values = {name: value for name, _, value in WorkerMetrics(worker).values()}
    lost, gone = (values[f"tensorcast_worker_artifacts_{each}"] for each in ("lost", "without_copy"))
    assert isinstance(lost, int) and isinstance(gone, int)
    return lost, gone


async def test_artifacts_whose_last_copy_has_gone_are_counted(pool: Pool) -> None:
    a, b = await pool.start("a", "b")
    session = await pool.session(a)
    await session.put(weights(), name="n")
    await pool.seen()
    assert metrics(b) == (0, 0)
    await session.close()
    pool.sessions.remove(session)
    await pool.leave(a)
    await until(lambda: metrics(b) == (0, 1))


async def test_what_the_store_has_lost_makes_room(pool: Pool) -> None:
    [a] = await pool.start(artifact_bytes=1 << 20)
    session = await pool.session(a)
    big = [weights(number, count=1, size=160 << 10) for number in range(4)]  # 320 KiB each
    for number in range(3):
        await session.put(big[number], name=f"n{number}")
    with pytest.raises(Exhausted):
        await session.put(big[3])
    await pool.lose_store()
    shutil.rmtree(pool.folder / "store")
    pool.life += 1
    await pool.found_store()
    await until(lambda: a.artifacts.statistics()["artifacts_lost"] == 3)
    assert metrics(a) == (3, 0)
    await session.put(big[2], name="again")  # it is here still, and is kept again
    await session.put(big[3], name="new")
    await until(lambda: a.artifacts.statistics()["artifacts_lost"] <= 1)
    assert a.artifacts.counters["artifacts_evicted"] >= 1
    for name, each in (("again", big[2]), ("new", big[3])):
        assert equal(await session.artifact(name).tensor_dict(), each)


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


async def listed(session: Session, wanted: set[str]) -> None:
    """Until a caller sees all these engines, and never another: on a busy machine one may be away for a moment."""
    async with asyncio.timeout(20):
        async for seen in session.watch(0.05):
            found = {each.instance_id for each in seen.instances}
            assert found <= wanted
            if found == wanted:
                assert {each.instance_id for each in await session.list_instances()} <= wanted
                return


async def test_tenants_see_nothing_of_each_others_engines(pool: Pool) -> None:
    [a] = await pool.start()
    for name, tenant in (("of-a", "team-a"), ("of-b", "team-b"), ("of-all", "")):
        client = await pool.engine(a, name)
        await client.client.call(AttachInstance(name, "engine", "m", "n", tenant), Ok, 5)
    await until(lambda: len(plane(a).view.instances) == 3)
    operator, session, what = await pool.session(a), await pool.session(a, tenant="team-a"), "0123456789abcdef" * 2
    await operator.disable(what)
    assert what in await operator.list_disabled()
    await listed(operator, {"of-a", "of-b", "of-all"})
    await listed(session, {"of-a", "of-all"})
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


async def test_a_tenants_artifacts_have_a_share_of_a_worker(pool: Pool) -> None:
    [a] = await pool.start(artifact_bytes=1 << 20)
    a.artifacts.residence.tenant_bytes_max = 400 << 10
    big = [weights(number, count=1, size=100 << 10) for number in range(3)]  # 200 KiB each
    session, other = await pool.session(a, tenant="one"), await pool.session(a, tenant="two")
    for each in big[:2]:
        await session.put(each)
    with pytest.raises(Exhausted, match="that one tenant may have at this worker"):
        await session.put(big[2], name="n")
    assert equal(await (await other.put(big[2])).tensor_dict(), big[2])
    await session.delete((await session.list_artifacts())[0].artifact_id)
    await until(lambda: used(a) < 500 << 10)
    await session.put(big[2], name="n")
