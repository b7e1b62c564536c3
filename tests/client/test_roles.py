"""Who answers callers: workers with the role gateway, which `connect` finds; and who does steps, by what its hello said."""

import pytest

from tensorcast_connector.client.session import connect
from tensorcast_connector.errors import InvalidArgument, WrongRole
from tensorcast_connector.net import rpc
from tensorcast_connector.wire.caller_messages import AbortUpload, ListArtifacts, OpenLease, SetName
from tensorcast_connector.wire.messages import Message, Ok
from tensorcast_connector.wire.plan_messages import SubmitPlan, WaitPlan
from tests.client.callers import Pool, equal, weights
from tests.cluster import plane
from tests.waiting import until


async def test_connect_finds_a_gateway(pool: Pool, scheme: str) -> None:
    pool.sessions = []
    await pool.start_store()
    plain, gateway = await pool.worker("plain", roles="basic,shard-home"), await pool.worker("other")
    await pool.settled()
    session = await pool.session(plain, scheme)
    assert session.worker_id == gateway.worker_id
    await session.put(weights(), name="n")
    assert equal(await session.artifact("n").tensor_dict(), weights())
    plan = session.plan()
    step = plan.on_worker("plain").prefetch("n")
    assert (await plan.run().result())[step]["bytes"], "it does steps of plans all the same"
    assert len(await session.list_workers()) == 2


@pytest.mark.parametrize(
    "message",
    [ListArtifacts(), SetName("n", "x"), OpenLease(10), SubmitPlan("k", b"", "", 1.0, 1, 0), WaitPlan("k", 0)],
    ids=lambda message: type(message).__name__,
)
async def test_who_is_no_gateway_says_who_is(pool: Pool, message: Message) -> None:
    pool.sessions = []
    await pool.start_store()
    plain = await pool.worker("plain", roles="basic")
    with pytest.raises(WrongRole, match=r"worker plain/\w+ is no gateway \(--roles\): and none is listed just now"):
        await connect(str(plain.socket), network=pool.network)
    gateway = await pool.worker("other")
    await until(lambda: len(plane(plain).view.workers) == 2)
    at_plain = plain.gateway.open_session(None, rpc.Hello(1, 1, "caller", "c", "t"))  # type: ignore[arg-type]
    with pytest.raises(WrongRole, match=rf"is no gateway \(--roles\): ask other at {gateway.address}"):
        at_plain.handle(message)


async def test_a_step_for_a_worker_of_a_former_version_fails_at_once_and_says_why(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    [a] = await pool.start()
    monkeypatch.setattr(rpc, "PROTOCOL_VERSION", 2)  # whoever is greeted from now on hears of an older worker
    b = await pool.worker("b")
    await pool.settled()
    monkeypatch.undo()
    await until(lambda: a.peers.client(b.worker_id)[0].version == 2)
    session = await pool.session(a)
    await session._link.call(AbortUpload(""), Ok)
    identity = await (await session.put(weights())).id()
    plan = session.plan()
    plan.on_worker("b").prefetch(identity)
    with pytest.raises(InvalidArgument, match=r"worker b/\w+ speaks protocol version 2, and .* need 3: upgrade it"):
        await plan.run().result(10)
    assert (await session.forget_pages()).unreachable == [b.worker_id]
