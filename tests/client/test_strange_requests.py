"""Every message a gateway, a worker or a store takes for callers and plans, with any values: one typed answer each."""

import asyncio
import logging
import random
from collections.abc import Iterable
from typing import Any

import pytest

from tensorcast_connector.errors import DeadlineExceeded, TensorcastError, Unavailable
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.wire.codec import CallerRequest
from tensorcast_connector.wire.messages import AttachInstance, Message, Ok, ReadHeader
from tensorcast_connector.wire.plan_messages import (
    CancelOwnedPlan,
    CancelSteps,
    ReportInstance,
    RunStep,
    StepEnded,
    TakeStep,
)
from tensorcast_connector.wire.store_messages import GrantLease, ReadRecords, WriteRecords
from tests.client.callers import Pool, check_artifacts, equal, used, weights
from tests.cluster import T
from tests.strange import TEXTS, some
from tests.waiting import until

COUNT = 12
CALLER_MESSAGES = list(CallerRequest.__args__)


async def answered(client: RpcClient, messages: Iterable[Message]) -> None:
    """Asks all at once. Each gets an answer of any kind, except one that speaks of a fault of the server."""

    async def ask(message: Message) -> None:
        try:
            await client.call(message, Message, 0.2)
        except DeadlineExceeded:
            pass  # it waits, as it was asked to
        except TensorcastError as error:
            assert error.code != TensorcastError.code and "\n" not in str(error) and len(str(error)) < 2000, message
            assert not isinstance(error, Unavailable) or client.connected, (message, error)

    await asyncio.gather(*map(ask, messages))


@pytest.fixture
def quietly(caplog: pytest.LogCaptureFixture) -> Any:
    """Nobody's strange request is an error in the log of this side."""
    yield
    assert not [each for each in caplog.get_records("call") if each.levelno >= logging.ERROR], caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("tenant", ["default", "other"])
async def test_a_caller_who_makes_no_sense(pool: Pool, scheme: str, tenant: str, quietly: None) -> None:
    [a] = await pool.start()
    good = await pool.session(a, scheme)
    for kind in CALLER_MESSAGES:
        made = await good.put(weights(), name="n")
        texts = [*TEXTS, await made.id(), a.worker_id, "a"]
        strange = await pool.session(a, scheme, tenant)
        await answered(strange._link._client, some(kind, random.Random(f"{kind.__name__} {scheme}"), COUNT, texts))
        await strange.close()
        pool.sessions.remove(strange)
        await until(lambda: not a.artifacts._uploads)
        check_artifacts(a)
        if tenant != "default" or kind.__name__ not in ("DeleteArtifact", "SetName"):
            assert equal(await good.artifact("n").tensor_dict(), weights()), kind
    again = await good.put(weights(1), name="later")
    assert equal(await again.tensor_dict(), weights(1))


async def test_a_tenant_that_cannot_be_is_told_so_by_the_worker(pool: Pool, scheme: str) -> None:
    """Whoever calls without this project's SDK."""
    [a] = await pool.start()
    address = a.socket if scheme == "unix" else a.address
    client = RpcClient(pool.network, address, "caller", "stranger", pool.chance, tenant="a/b")
    client.start()
    await until(lambda: "tenant 'a/b': 1 to 128 printable characters" in str(client.error))
    await client.close()


@pytest.mark.slow
@pytest.mark.parametrize("attached", [True, False])
async def test_an_engine_that_makes_no_sense(pool: Pool, attached: bool, quietly: None) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    for kind in (TakeStep, StepEnded, ReportInstance):
        engine = await pool.engine(a)
        if attached:
            await engine.client.call(AttachInstance("i", "vllm", "m", "n"), Ok, T)
        await answered(engine.client, some(kind, random.Random(kind.__name__), COUNT))
        await engine.client.call(AttachInstance("i", "vllm", "m", "n"), Ok, T)
        assert equal(await (await session.put(weights())).tensor_dict(), weights())
        await until(lambda: "i" in a.peers.metadata.view.instances)
        assert [each.instance_id for each in await session.list_instances()] == ["i"]


@pytest.mark.parametrize("kind", [RunStep, CancelSteps, CancelOwnedPlan, ReadHeader], ids=lambda each: each.__name__)
async def test_a_worker_that_makes_no_sense(pool: Pool, kind: type[Message], quietly: None) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    made = await session.put(weights(), name="n")
    peer = RpcClient(pool.network, a.address, "worker", "stranger/1", pool.chance)
    peer.start()
    await peer.wait_connected(T)
    texts = [*TEXTS, await made.id(), a.worker_id, "prefetch", "pin", "unpin", "publish"]
    await answered(peer, some(kind, random.Random(kind.__name__), 3 * COUNT, texts))
    arguments = ({}, {"artifact": "n"}, {"artifact": "n", "pin": ""}, {"artifact": "n", "pin": 5, "ttl_s": 1})
    for number, each in enumerate(arguments):
        for operation in ("prefetch", "pin", "unpin"):
            await answered(peer, [RunStep(f"default/{operation}{number}", "d", 1, 0, operation, "a", each, "t")])
    await peer.close()
    assert equal(await session.artifact("n").tensor_dict(), weights())
    assert used(a) == (await made.describe()).bytes


@pytest.mark.parametrize("kind", [ReadRecords, WriteRecords, GrantLease], ids=lambda each: each.__name__)
async def test_somebody_who_makes_no_sense_to_the_store(pool: Pool, kind: type[Message], quietly: None) -> None:
    [a] = await pool.start()
    session = await pool.session(a)
    await session.put(weights(), name="n")
    await pool.seen()
    client = RpcClient(pool.network, pool.store_address, "worker", "stranger/1", pool.chance)
    client.start()
    await client.wait_connected(T)
    texts = [
        *TEXTS,
        "cluster/",
        "cluster/workers/x",
        "cluster/shards/1",
        "cluster/replicas/x",
        "cluster/replicas/x/y",
        "cluster/names/t/n",
        "cluster/artifacts/t/a/system",
        "cluster/artifacts/",
        "callers/t/5",
        "plans/t/k",
        "plans/",
    ]
    await answered(client, some(kind, random.Random(kind.__name__), 4 * COUNT, texts))  # fmt: skip
    await client.close()
    await pool.settled()
    assert equal(await session.artifact("n").tensor_dict(), weights())
    await session.put(weights(1), name="later")
    assert equal(await session.artifact("later").tensor_dict(), weights(1))
