"""A version whose parts are at several workers: what is here is mapped, of the others only what a rank needs is sent."""

import asyncio
import time
from contextlib import ExitStack

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from tensorcast_connector.client.blocking import connect_blocking  # noqa: E402
from tensorcast_connector.client.publisher import WeightPublisher  # noqa: E402
from tensorcast_connector.engines.weights.load_plan import trace  # noqa: E402
from tensorcast_connector.engines.weights.peer_source import AtPeer, Peers, Scattered  # noqa: E402
from tensorcast_connector.errors import TensorcastError, Unauthorized  # noqa: E402
from tensorcast_connector.worker.server import Worker  # noqa: E402
from tests.client.callers import Pool  # noqa: E402
from tests.client.conftest import pool, quick, quiet_loop  # noqa: E402, F401

ROWS, COLUMNS = 400, 256
NAMES = [f"w{number}" for number in range(6)]
WHOLE = ROWS * COLUMNS * 4


class Half(nn.Module):
    """A rank of two: of each tensor it takes the second half of the rows."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.register_parameter(name, nn.Parameter(torch.zeros(ROWS // 2, COLUMNS), requires_grad=False))

    def load_weights(self, weights: "object") -> None:
        for name, tensor in weights:  # type: ignore[attr-defined]
            getattr(self, name).data.copy_(tensor[ROWS // 2 :])


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(ROWS, COLUMNS) for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("here", ["no part", "the older part", "all parts"])
async def test_of_parts_elsewhere_only_slices_come(pool: Pool, here: str) -> None:
    far, near = await pool.start("far", "near")
    trainer, engine = await pool.session(far), await pool.session(near)
    publisher = WeightPublisher(trainer, "policy")
    made = tensors()
    await publisher.publish(made, 1)
    first = await trainer.weights("policy")
    for name in NAMES[:2]:
        made[name] = made[name] + 1
    await publisher.publish(made, 2)
    second = await trainer.weights("policy")
    assert len(second.part_ids) == 2
    (older,) = first.part_ids
    if here != "no part":
        await engine.artifact(older).prefetch()
    if here == "all parts":
        await second.prefetch(near.worker_id)
    for part in second.part_ids:
        there = here == "all parts" or (here == "the older part" and part == older)
        await pool.listed(part, [far, near] if there else [far])
    before, fetched = _sent(far), _fetched(near)
    kind, loaded, after = await asyncio.to_thread(_load, near, far)
    assert kind == {"no part": AtPeer, "the older part": Scattered, "all parts": None}[here]
    assert all(torch.equal(loaded[name], made[name][ROWS // 2 :]) for name in NAMES) if loaded else here == "all parts"
    elsewhere = {"no part": len(NAMES), "the older part": 2, "all parts": 0}[here]
    assert elsewhere * WHOLE // 2 <= after - before < elsewhere * WHOLE // 2 + 20_000
    assert _fetched(near) - fetched < 20_000  # the manifest, and no part


def _load(near: Worker, far: Worker) -> tuple[type | None, dict[str, torch.Tensor], int]:
    with ExitStack() as stack:
        session = stack.enter_context(connect_blocking(str(near.socket)))
        weights = session.weights("policy")
        said: list[str] = []
        source = Peers(session, "default", "test", stack, said.append).source_of_version("policy", weights, 2)
        if source is None:
            return None, {}, _sent(far)
        assert [each[0] for each in source.given] == NAMES and source.again() is None
        model = Half()
        plan = trace(model, source.given, source.read, 1000)
        done: list[int] = []
        assert source.fill(plan.copies, done.append) == len(NAMES) * WHOLE // 2 == done[-1]
        sent = _sent(far)
        assert all(torch.equal(each, source.read(name)) for name, each in source.streamed())
        return type(source), {name: getattr(model, name).data for name in NAMES}, sent


def _sent(worker: Worker) -> int:
    return worker.artifacts.statistics()["artifact_bytes_sent"]


def _fetched(worker: Worker) -> int:
    return worker.artifacts.statistics()["artifact_bytes_fetched"]


@pytest.mark.slow
async def test_a_peer_that_dies_meanwhile_is_an_error_at_once(pool: Pool) -> None:
    """The engine's own loader is asked then, if there are files."""
    far, near = await pool.start("far", "near")
    await WeightPublisher(await pool.session(far), "policy").publish(tensors(), 1)
    await pool.seen()
    loop = asyncio.get_running_loop()

    def load() -> None:
        with ExitStack() as stack:
            session = stack.enter_context(connect_blocking(str(near.socket)))
            source = Peers(session, "default", "test", stack, lambda _: None).source_of_version(
                "policy", session.weights("policy"), 2
            )
            assert source is not None
            plan = trace(Half(), source.given, source.read, 1000)

            def die(_: int) -> None:
                asyncio.run_coroutine_threadsafe(pool.crash(far), loop).result(10)

            with pytest.raises(TensorcastError):
                source.fill(plan.copies, die)

    begun = time.monotonic()
    await asyncio.to_thread(load)
    assert time.monotonic() < begun + 10


@pytest.mark.slow
async def test_a_peer_that_cannot_be_asked_is_named_and_all_of_it_comes(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, near = await pool.start("far", "near")
    made = tensors()
    await WeightPublisher(await pool.session(far), "policy").publish(made, 1)
    await pool.seen()
    monkeypatch.setattr("tensorcast_connector.engines.weights.peer_source.connect_blocking", _refused)

    def load() -> None:
        with ExitStack() as stack, connect_blocking(str(near.socket)) as session:
            said: list[str] = []
            weights = session.weights("policy")
            assert Peers(session, "default", "test", stack, said.append).source_of_version("policy", weights, 2) is None
            assert said == ["no slices from far: no token"]
            found = weights.tensor_dict(framework="torch")
            assert all(torch.equal(found[name], made[name]) for name in NAMES)

    await asyncio.to_thread(load)


def _refused(*_: object, **__: object) -> None:
    raise Unauthorized("no token")
