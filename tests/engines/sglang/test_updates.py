"""Ranks that take a version together: all of them or none, and none waits for one that does not come."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# SGLang warns of much when it is imported.
pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]
WAIT_S = 5.0
Outcome = BaseException | None


class Ranks:
    """Two ranks as threads, each with an update of its own; `share` is what SGLang's group does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plan: Callable[[int], Any]) -> None:
        from tensorcast_connector.engines.sglang import updates

        self._barrier = threading.Barrier(2, timeout=WAIT_S)
        self._given: list[Any] = [None, None]
        self._mine = threading.local()
        self.shared = 0
        self.updates = [updates.Update("policy", SimpleNamespace(threads=1)) for _ in range(2)]  # type: ignore[arg-type]
        for each in self.updates:
            each._version = updates._Version("policy version 1", "version:1", {"beside": torch.ones(2)})
        monkeypatch.setattr(updates, "_share", self._share)
        monkeypatch.setattr(updates, "_plan", lambda *_: plan(self._mine.rank))

    def _share(self, value: Any) -> list[Any]:
        self.shared += 1
        self._given[self._mine.rank] = value
        self._barrier.wait()
        values = list(self._given)
        self._barrier.wait()
        return values

    def run(self, step: Callable[[int], None]) -> list[Outcome]:
        """What came of a step in each rank."""
        outcomes: list[Outcome] = [None, None]

        def work(rank: int) -> None:
            self._mine.rank = rank
            try:
                step(rank)
            except BaseException as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return outcomes


def plan_of_nothing(_: int) -> Any:
    from tensorcast_connector.engines.weights.load_plan import LoadPlan

    return LoadPlan((), None, frozenset(), frozenset())


def test_ranks_decide_alike_where_only_one_has_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, plan_of_nothing)
    ranks.updates[0]._expected = {"beside": (2,)}  # which the model skips, as another tensor that is not its own
    model = torch.nn.Module()
    assert ranks.run(lambda rank: ranks.updates[rank].apply(model)) == [None, None]
    without = Ranks(monkeypatch, plan_of_nothing)
    told = without.run(lambda rank: without.updates[rank].apply(model))
    assert all("'beside' is unknown to the model" in str(each) for each in told)


def test_whatever_fails_in_one_rank_is_heard_by_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(rank: int) -> Any:
        if rank:
            raise MemoryError("no room for a plan")
        return plan_of_nothing(rank)

    ranks = Ranks(monkeypatch, plan)
    told = ranks.run(lambda rank: ranks.updates[rank].apply(torch.nn.Module()))
    assert all("nothing" not in str(each) and "MemoryError: no room for a plan" in str(each) for each in told)


def test_a_rank_that_fails_at_the_end_does_not_wait_for_the_other_when_sglang_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tensorcast_connector.engines.sglang.loader import TensorcastModelLoader

    ranks = Ranks(monkeypatch, plan_of_nothing)
    loaders = [TensorcastModelLoader.__new__(TensorcastModelLoader) for _ in range(2)]
    model: Any = torch.nn.Module()

    def load(rank: int) -> None:
        ranks.updates[rank]._expected = {"beside": (2,)}
        loader: Any = loaders[rank]
        loader._update = ranks.updates[rank]
        loader.postprocess_weights = lambda *_: 1 / rank
        loader.load_weights_and_postprocess(model, (), "cpu")

    failed, fine = ranks.run(load)
    assert isinstance(failed, ZeroDivisionError) and fine is None
    shared = ranks.shared
    list(loaders[0]._get_weights_iterator(SimpleNamespace(model_config=SimpleNamespace(model_path="m"))))
    ranks.updates[0].apply(model)
    assert ranks.shared == shared
