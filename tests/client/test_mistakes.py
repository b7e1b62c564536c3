"""What programs get wrong: each mistake is one typed error that names it, at once, and changes nothing."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorcast_connector.client.artifact import Artifact
from tensorcast_connector.client.blocking import BlockingArtifact, BlockingSession, connect_blocking
from tensorcast_connector.client.ownership import leased
from tensorcast_connector.client.plan import CallContext, Plan
from tensorcast_connector.client.session import Session, connect
from tensorcast_connector.errors import ConfigError, InvalidArgument, NotFound
from tests.client.callers import Pool, equal, weights

FORKED_LIMIT_S = 20


class Strange:
    """Nothing that could be sent."""


ASKED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda s: s.artifact(None).describe(), "reference=None: Expected `str`, got `null`"),
    (lambda s: s.artifact("\ud800").describe(), r"reference='\\ud800'"),
    (lambda s: s.artifact(Strange()).describe(), "reference=<.*Strange"),
    (lambda s: s.list_artifacts(5), "prefix=5: Expected `str`"),
    (lambda s: s.put(weights(), name=5), "the name of an artifact is text, not 5"),
    (lambda s: s.put(weights(), name=b"x"), "the name of an artifact is text, not b'x'"),
    (lambda s: s.put(weights(), ownership="mine"), r"ownership='mine': leased\(ttl_s\), or None"),
    (lambda s: s.put({"w": np.ma.array([1, 2], mask=[0, 1])}), "tensor 'w' has a mask, which is not kept"),
    (lambda s: s.name("n", ""), "name 'n' is to point to nothing; `unname`"),
    (lambda s: s.name("n", None), "name 'n' is to point to nothing; `unname`"),
    (lambda s: s.unname(5), "name=5: Expected `str`"),
    (lambda s: s.delete(None), "artifact_id=None: Expected `str`"),
    (lambda s: s.plan_record(7), "key=7: Expected `str`"),
    (lambda s: s.enable(5), "what=5: Expected `str`"),
]


@pytest.mark.slow
async def test_an_argument_of_the_wrong_kind(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    await session.put(weights(), name="n")
    for ask, says in ASKED:
        with pytest.raises(InvalidArgument, match=says):
            await ask(session)
    assert equal(await session.artifact("n").tensor_dict(), weights()), "nothing has changed, and the session goes on"


async def test_a_view_of_what_is_no_names_or_no_slices(pool: Pool) -> None:
    [a] = await pool.start()
    artifact = await (await pool.session(a)).put(weights())
    with pytest.raises(InvalidArgument, match=r"names='w0': a list of names; for one tensor \['w0'\]"):
        artifact.view(names="w0")
    with pytest.raises(InvalidArgument, match="slices are a mapping from tensors to slices, not a list"):
        artifact.view(slices=[slice(1)])  # type: ignore[arg-type]


@pytest.mark.slow
async def test_a_plan_of_what_cannot_be(pool: Pool) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    plan = session.plan()
    with pytest.raises(InvalidArgument, match="None is no artifact: neither a name, an id, a handle"):
        plan.on_worker("a").prefetch(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="named by text, not by 5"):
        plan.on_worker(5).unpin("n")  # type: ignore[arg-type]

    def one(context: CallContext | None = None) -> Plan:
        made = session.plan(context)
        made.on_worker("a").unpin("n")
        return made

    for concurrency in (0, -1, 1.5, None, "x"):
        with pytest.raises(InvalidArgument, match=r"concurrency=.*: how many steps run at once, 1 or more"):
            one().run(concurrency=concurrency)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="timeout_s='x' is no number of seconds"):
        one(CallContext(timeout_s="x")).run()  # type: ignore[arg-type]
    await session.put(weights(), name="n")
    outcome = await one().run().result()
    with pytest.raises(InvalidArgument, match="<Step unpin on a> is no step of the plan that has ended here"):
        outcome[one()._steps[0]]


async def test_an_address_or_a_tenant_of_the_wrong_kind() -> None:
    for address in (5, None, b"unix:/x"):
        with pytest.raises(ConfigError, match="is not an address; write unix:/path"):
            await connect(address)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="a tenant is text, not 5"):
        await connect("unix:/nobody", tenant=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="whole seconds from 1 to 3600"):
        leased("5")  # type: ignore[arg-type]


@pytest.mark.slow
async def test_what_is_put_after_a_lease_has_run_out_unnoticed_is_under_another_one(pool: Pool) -> None:
    """As when a program has kept its event loop busy for longer than its lease: the put comes before the next renewal."""
    [a] = await pool.start()
    session = await pool.session(a)
    await session.put(weights(1), name="old", ownership=leased(30))
    [lease_id] = session._leases._shared.values()
    assert pool.kv is not None
    await pool.kv.lease_revoke(lease_id)
    await session.put(weights(2), name="new", ownership=leased(30))
    [another] = session._leases._shared.values()
    assert another != lease_id and {each.lease_id for each in await session.list_artifacts()} == {another}
    with pytest.raises(NotFound, match="has ended"):
        async with session.lease(30) as own:
            await pool.kv.lease_revoke(own.lease_id)  # type: ignore[attr-defined]
            await session.put(weights(3), ownership=own)


# --- where a session is not to be used ---


@pytest.mark.slow
async def test_a_session_on_another_event_loop(pool: Pool) -> None:
    """Nothing would ever be answered there."""
    [a] = await pool.start()
    session = await pool.session(a)
    made = await session.put(weights(), name="n")

    def elsewhere() -> None:
        for ask in (
            session.list_artifacts,
            lambda: session.put(weights(1)),
            made.describe,
            made.tensor_dict,
            session.close,
        ):
            with pytest.raises(InvalidArgument, match="belongs to the event loop that it was made on"):
                asyncio.run(asyncio.wait_for(ask(), 5))

    await asyncio.to_thread(elsewhere)
    assert equal(await session.artifact("n").tensor_dict(), weights())


@pytest.mark.slow
async def test_a_session_whose_event_loop_has_ended(pool: Pool) -> None:
    [a] = await pool.start()

    def program() -> None:
        session = asyncio.run(connect(str(a.socket)))
        with pytest.raises(InvalidArgument, match="belongs to the event loop that it was made on"):
            asyncio.run(asyncio.wait_for(session.list_artifacts(), 5))
        asyncio.run(session.close())  # there is nothing left to be ended

    await asyncio.to_thread(program)


def forked(work: Callable[[], Any]) -> str:
    """What a child says that was forked without exec: what `work` returns or raises; "hangs" if it does not come back."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            signal.alarm(FORKED_LIMIT_S)
            try:
                said = repr(work())
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        said = answer.read().decode()
    os.waitpid(child, 0)
    return said or "hangs"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
async def test_a_session_in_a_forked_process(pool: Pool) -> None:
    """As in the workers of a data loader: it would wait for a thread that is not there, or speak on its parent's connection."""
    [a] = await pool.start()

    def program() -> None:
        with connect_blocking(str(a.socket)) as session:
            made = session.put(weights(), name="n")
            tensors = made.tensor_dict()
            began = time.monotonic()
            for ask in (session.list_artifacts, made.tensor_dict, lambda: session.put(weights(1)), session.plan().run):
                assert f"this session is of process {os.getpid()}" in forked(ask)
            assert forked(session.close) == "None"
            assert forked(lambda: tensors["w0"].tobytes() == weights()["w0"].tobytes()) == "True"
            assert time.monotonic() - began < FORKED_LIMIT_S
            assert equal(session.artifact("n").tensor_dict(), weights()), "the parent's goes on"

    await asyncio.to_thread(program)


def test_the_blocking_face_has_all_that_the_other_one_has() -> None:
    """But for what commands and publishers use among themselves."""
    inner = {"stored", "move_names", "put_image"}
    for face, blocking in ((Session, BlockingSession), (Artifact, BlockingArtifact)):
        names = {each for each in dir(face) if not each.startswith("_")} - inner
        assert names <= set(dir(blocking))
