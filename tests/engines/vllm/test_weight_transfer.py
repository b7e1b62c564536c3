"""The weight transfer engine on a real model and a real worker, called as a vLLM rank calls it."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from demo import model as demo_model
from demo import pool
from demo.processes import Supervisor

import tensorcast_connector as tensorcast
from tensorcast_connector.engines.vllm.weights_state import STARTED_WITH, UNKNOWN, WeightsReport, weights_state
from tests.engines.vllm.models import Models, models
from tests.engines.vllm.test_weight_reload import NORM, UP, tensors_in

__all__ = ["models"]
pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]
MODEL = "policy"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Supervisor(tmp_path_factory.mktemp("transfer")) as supervisor:
        store = pool.store(supervisor)
        yield pool.worker(supervisor, store["store"], arena="16MiB")["worker"]


class Rank:
    """As vLLM's worker: it owns the engine, and ends an update that failed."""

    def __init__(self, models: Models, folder: Path, worker: str) -> None:
        import torch

        from tensorcast_connector.engines.vllm.weight_transfer import TensorcastWeightTransferEngine

        self.model, self.config = models.load(folder)
        self.models = models
        self.weight_transfer_engine = TensorcastWeightTransferEngine(None, self.config, torch.device("cpu"), self.model)
        self._weight_update_active = False
        self.init({"worker": worker, "model": MODEL})

    def init(self, info: Any) -> None:
        made = self.weight_transfer_engine
        made.init_transfer_engine(made.parse_init_info(info))

    def update(self, version: Any = None) -> None:
        self._weight_update_active = True
        with self.models.configured(self.config):
            self.weight_transfer_engine.start_weight_update()
            self.weight_transfer_engine.update_weights({"version": version})
            self.weight_transfer_engine.finish_weight_update()

    @property
    def report(self) -> WeightsReport:
        return weights_state(self.config.instance_id).report


@pytest.fixture
def rank(models: Models, worker: str) -> Rank:
    return Rank(models, demo_model.make("tiny"), worker)


def publish(worker: str, tensors: dict[str, Any], version: int) -> str:
    async def put() -> str:
        async with await tensorcast.connect(worker) as session:
            publisher = tensorcast.WeightPublisher(session, MODEL, keep_last=10)
            return (await publisher.publish(tensors, version, rollback=True)).id

    return asyncio.run(put())


@pytest.fixture(scope="module")
def versions(worker: str) -> dict[int, str]:
    """1: what the engine starts from; 2: other weights; 3: these with two tensors changed; 4: no whole model."""
    first, second = (tensors_in(demo_model.make("tiny", seed=seed)) for seed in (0, 1))
    third = {**second, UP: second[UP] * 2, NORM: second[NORM] * 2}
    fourth = {name: each for name, each in second.items() if name != UP}
    return {number: publish(worker, each, number) for number, each in enumerate((first, second, third, fourth), 1)}


def loaded(caplog: pytest.LogCaptureFixture) -> str:
    return caplog.messages[-1].partition(" tensors")[0].partition(" now: ")[2]


def test_versions_are_served_and_only_what_changed_is_loaded(
    rank: Rank, models: Models, versions: dict[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tensorcast_connector")
    logging.getLogger("tensorcast_connector").propagate = True
    assert rank.report == WeightsReport(0, STARTED_WITH)
    wanted = models.computes(models.load(demo_model.make("tiny", seed=1))[0])
    rank.update(2)
    assert rank.report == WeightsReport(1, versions[2]) and loaded(caplog) == "47 of 47"
    assert models.differ(wanted, models.computes(rank.model)) == []
    rank.update(3)
    assert rank.report == WeightsReport(2, versions[3]) and loaded(caplog) == "3 of 47"
    changed = ["model.layers.0.self_attn.q_norm.weight", "model.layers.1.mlp.gate_up_proj (packed)"]
    assert models.differ(wanted, models.computes(rank.model)) == changed
    rank.update(3)
    assert rank.report == WeightsReport(3, versions[3]) and loaded(caplog) == "0 of 47"
    rank.update(2)
    assert models.differ(wanted, models.computes(rank.model)) == []


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"worker": "unix:/w"}, ["'model' is missing"]),
        ({"worker": "unix:/w", "model": "m", "tenat": "t"}, ["unknown key 'tenat'", "tenant"]),
        ({"worker": "127.0.0.1:7", "model": "m"}, ["Unix socket"]),
        ({"worker": 7, "model": "m"}, ["worker=7"]),
        ({"worker": "unix:/no/such.sock", "model": "m"}, ["cannot connect", "/no/such.sock"]),
    ],
)
def test_wrong_init_info_is_one_line(rank: Rank, info: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RuntimeError) as caught:
        rank.init(info)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (99, ["version 99"]),
        (True, ["version=True"]),
        ([2], ["version=[2]"]),
        (4, [UP, "missing"]),
        (None, ["version 4", UP]),
    ],
)
def test_a_refused_version_leaves_the_weights_and_their_identity(
    rank: Rank, models: Models, versions: dict[int, str], version: Any, words: list[str]
) -> None:
    before = models.computes(rank.model)
    with pytest.raises(RuntimeError) as caught:
        rank.update(version)
    for word in words:
        assert word in str(caught.value)
    assert rank.report == WeightsReport(0, STARTED_WITH)
    assert models.differ(before, models.computes(rank.model)) == []


def test_an_update_that_fails_half_way_leaves_no_identity_and_the_next_one_loads_everything(
    rank: Rank, models: Models, versions: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorcast_connector.engines.vllm import weight_transfer

    rank.update(2)
    with monkeypatch.context() as patch:
        patch.setattr(weight_transfer, "reload_layers", lambda *_: 1 / 0)
        with pytest.raises(RuntimeError, match="HALF WAY"):
            rank.update(3)
    assert rank.report == WeightsReport(2, UNKNOWN)
    for each in rank.model.parameters():
        each.data.zero_()
    rank.update(2)
    wanted = models.computes(models.load(demo_model.make("tiny", seed=1))[0])
    assert models.differ(wanted, models.computes(rank.model)) == []


def test_weights_that_came_another_way_have_no_identity_and_are_not_compared_with(
    rank: Rank, models: Models, versions: dict[int, str]
) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    rank.update(2)
    with models.configured(rank.config):
        initialize_layerwise_reload(rank.model)
        rank.model.load_weights(iter(tensors_in(demo_model.make("tiny")).items()))
        finalize_layerwise_reload(rank.model, rank.config.model_config)
    assert rank.report == WeightsReport(2, UNKNOWN)
    rank.update(2)
    wanted = models.computes(models.load(demo_model.make("tiny", seed=1))[0])
    assert models.differ(wanted, models.computes(rank.model)) == []


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_of_several_ranks_the_last_one_raises_and_none_has_changed(
    rank: Rank, models: Models, versions: dict[int, str], bad_rank: int
) -> None:
    """Whichever it was that found something wrong; the other one is played by the fake."""

    class Ranks:
        is_last = False

        def share(self, value: Any) -> list[Any]:
            wrong = replace(value, error="tensor 'x' is missing")
            return [wrong, value] if bad_rank == 0 else [value, wrong]

    before = models.computes(rank.model)
    rank.weight_transfer_engine._ranks = Ranks()
    rank.update(2)
    assert not rank._weight_update_active, "ended as after an error, or vLLM would refuse the next one"
    assert rank.report == WeightsReport(0, STARTED_WITH)
    assert models.differ(before, models.computes(rank.model)) == []
    Ranks.is_last = True
    with pytest.raises(RuntimeError, match="tensor 'x' is missing"):
        rank.update(2)


def test_ranks_that_find_different_newest_versions_take_that_of_the_first(
    rank: Rank, models: Models, versions: dict[int, str]
) -> None:
    class Ranks:
        is_last = True

        def share(self, value: Any) -> list[Any]:
            """The first rank has found version 2 whatever this one has."""
            first = None if value is None else replace(value, version=2, identity=versions[2], error=None)
            return [first, value if value is None or value.version == 2 else replace(value, error=None)]

    rank.weight_transfer_engine._ranks = Ranks()
    rank.update(3)
    assert rank.report == WeightsReport(1, versions[2])
    wanted = models.computes(models.load(demo_model.make("tiny", seed=1))[0])
    assert models.differ(wanted, models.computes(rank.model)) == []


def test_a_compiled_model_on_cpu_is_refused(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank.config.model_config, "enforce_eager", False)
    monkeypatch.setattr(rank.config.compilation_config, "mode", 2)
    with pytest.raises(RuntimeError, match="--enforce-eager"):
        rank.init({"worker": "unix:/w", "model": MODEL})
