"""The blocking face: the same for programs without an event loop, from any thread."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tensorcast_connector.client.blocking import BlockingArtifact, BlockingSession, connect_blocking
from tensorcast_connector.client.ownership import leased
from tensorcast_connector.client.plan import CallContext
from tensorcast_connector.errors import ConfigError, InvalidArgument, NotFound, Unavailable
from tests.client.callers import Pool, equal, used, weights
from tests.waiting import until


def threads() -> int:
    return sum(each.name == "tensorcast-caller" for each in threading.enumerate())


async def blocking(pool: Pool, work: Callable[[BlockingSession], Any], scheme: str = "unix") -> Any:
    """What `work` returns, with a session of its own in a thread of its own."""
    worker = pool.workers[0]

    def run() -> Any:
        with connect_blocking(str(worker.socket if scheme == "unix" else worker.address)) as session:
            return work(session)

    return await asyncio.to_thread(run)


@pytest.mark.slow
async def test_artifacts(pool: Pool, scheme: str) -> None:
    a, b = await pool.start("a", "b")

    def work(session: BlockingSession) -> None:
        made = session.put(weights(), name="n")
        assert (
            isinstance(made, BlockingArtifact) and "n" in repr(made) and repr(session).startswith("<Blocking <Session")
        )
        assert made.reference == made.id() and session.artifact("n").id() == made.id()
        assert equal(session.artifact("n").tensor_dict(), weights())
        assert session.artifact("n").tensor("w1", framework="torch").numpy().tobytes() == weights()["w1"].tobytes()
        view = made.view(slices={"w0": slice(2, 3)}, names=["w0"])
        assert view.tensor_dict()["w0"].tobytes() == weights()["w0"][2:3].tobytes()
        assert [each.names for each in session.list_artifacts("n")] == [["n"]]
        session.name("m", "n")
        session.unname("n")
        assert made.describe().names == ("m",)
        made.prefetch(to="b")
        made.pin(100, on="b")
        made.unpin(on="b")
        other = session.put(weights(1), ownership=leased(30))
        assert other.describe().leased
        made.delete()
        with pytest.raises(NotFound):
            session.artifact("m").tensor_dict()
        session.put(weights(2), name="x")
        session.delete("x")

    await blocking(pool, work, scheme)
    await until(lambda: used(a) == used(b) == 0)
    assert not threads()


async def test_plans_and_signals(pool: Pool) -> None:
    await pool.start("a", "b")

    def work(session: BlockingSession) -> None:
        made = session.put(weights())
        plan = session.plan(CallContext(idempotency_key="k"))
        step = plan.on_worker("b").prefetch(made)
        handle = plan.run(concurrency=2)
        assert handle.result(20)[step]["artifact"] == made.id() and handle.done and handle.status == "done"
        handle.cancel()
        assert session.plan_record("k").state == session.cancel_plan("k").state == "done"
        with pytest.raises(NotFound, match="there is no plan"):
            session.plan_record("other")
        nobody = session.plan()
        nobody.on_instance("nobody").evict_local()
        with pytest.raises(NotFound, match="there is no instance 'nobody'"):
            nobody.run().result(20)
        assert sorted(each.name for each in session.list_workers()) == ["a", "b"] and session.list_instances() == []
        listed = next(iter(session.watch(0.01)))
        assert len(listed.workers) == 2

    await blocking(pool, work)
    assert not threads()


async def test_what_is_disabled(pool: Pool) -> None:
    await pool.start()

    def work(session: BlockingSession) -> None:
        assert session.list_disabled() == {}
        session.disable("instance-1", "it is slow")
        assert session.list_disabled() == {"instance-1": "it is slow"}
        session.enable("instance-1")
        assert session.list_disabled() == {}

    await blocking(pool, work)


async def test_many_threads_use_one_session(pool: Pool) -> None:
    await pool.start()

    def work(session: BlockingSession) -> None:
        errors: list[BaseException] = []

        def one(number: int) -> None:
            try:
                session.put(weights(number), name=f"n{number}")
                assert equal(session.artifact(f"n{number}").tensor_dict(), weights(number))
            except BaseException as error:
                errors.append(error)

        running = [threading.Thread(target=one, args=(number,)) for number in range(8)]
        for each in running:
            each.start()
        for each in running:
            each.join()
        assert not errors and len(session.list_artifacts()) == 8

    await blocking(pool, work)


async def test_it_is_closed_while_another_thread_waits(pool: Pool) -> None:
    """That one is told, and does not wait for ever."""
    await pool.start()
    waiting = threading.Event()
    told: list[BaseException] = []

    def work(session: BlockingSession) -> None:
        def watches() -> None:
            try:
                for _ in session.watch(60):
                    waiting.set()
            except BaseException as error:
                told.append(error)

        thread = threading.Thread(target=watches)
        thread.start()
        assert waiting.wait(10)
        session.close()
        session.close()
        thread.join(10)
        assert not thread.is_alive()

    await blocking(pool, work)
    assert isinstance(told[0], InvalidArgument | Unavailable) and "closed" in str(told[0])
    assert not threads()


async def test_a_closed_session(pool: Pool) -> None:
    await pool.start()

    def work(session: BlockingSession) -> None:
        made = session.put(weights(), name="n")
        plan = session.plan()
        plan.on_worker("a").prefetch("n")
        session.close()
        attempts: list[Callable[[], Any]] = [
            made.tensor_dict, made.id, session.list_artifacts, lambda: session.put(weights()), plan.run,
        ]  # fmt: skip
        for attempt in attempts:
            with pytest.raises(InvalidArgument, match="the session is closed"):
                attempt()

    await blocking(pool, work)


async def test_nobody_is_there(pool: Pool) -> None:
    await pool.start()
    for address, kind in ((f"unix:{pool.folder}/none.sock", Unavailable), ("nonsense", ConfigError)):
        attempt: Awaitable[Any] = asyncio.to_thread(connect_blocking, address)
        with pytest.raises(kind):
            await attempt
    assert not threads()


async def test_published_versions(pool: Pool) -> None:
    await pool.start()

    def work(session: BlockingSession) -> None:
        publisher = session.weight_publisher("policy", keep_last=1)
        first = publisher.publish(weights(), 1)
        before = session.weights("policy")
        assert (before.version, before.id, before.reference) == (1, first.id, first.artifact_id) and "policy" in repr(
            before
        )
        versions = session.subscribe("policy")
        assert next(versions) == first == before.published
        publisher.publish({**weights(), "w1": weights(1)["w1"]}, 2)
        assert next(versions).version == 2
        now = session.weights("policy", 2)
        assert (
            now.changed_since(before) == ("w1",)
            and now.names == ("w0", "w1", "w2")
            and now.specs["w1"].shape == (500, 2)
        )
        assert now.tensor("w1").tobytes() == weights(1)["w1"].tobytes() and "policy" in repr(publisher)
        assert equal(now.view(names=["w0"]).tensor_dict(), {"w0": weights()["w0"]})
        now.prefetch()
        now.pin(100)
        now.unpin()

    await blocking(pool, work)
    assert not threads()
