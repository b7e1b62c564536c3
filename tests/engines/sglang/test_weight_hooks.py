"""What SGLang does to weights, and which of it means that pages belong to others."""

import inspect
import pkgutil
from typing import Any

import pytest

# SGLang warns of much when it is imported.
pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls the hook of a target as SGLang does, in a server with these settings; whether pages belong to no weights then."""
    from tensorcast_connector.engines.sglang import weight_hooks
    from tensorcast_connector.engines.sglang.live_weights import LiveWeights

    def call(target: str, *arguments: Any, **settings: Any) -> bool:
        weights = LiveWeights()
        weights.found("files")
        monkeypatch.setattr(weight_hooks, "live", weights)
        monkeypatch.setattr(weight_hooks, "setting", settings.get)
        for each, hook, _ in weight_hooks.HOOKS:
            if each == target:
                hook(object(), *arguments)  # type: ignore[operator]
        return weights.identity is None

    return call


def test_every_target_is_there() -> None:
    from tensorcast_connector.engines.sglang import weight_hooks

    assert all(callable(pkgutil.resolve_name(target)) for target, _, _ in weight_hooks.HOOKS)


def test_the_memory_of_weights_is_given_back_after_its_hook() -> None:
    """As this release does it: only when weights are among what is given back."""
    from sglang.srt.managers.scheduler_components import weight_updater

    source = inspect.getsource(weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation)
    weights = source.partition("if GPU_MEMORY_TYPE_WEIGHTS in tags:")[2]
    assert weights.index("_export_static_state(") < weights.index("pause(GPU_MEMORY_TYPE_WEIGHTS)")


@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        ({"enable_memory_saver": True}, True),
        ({"enable_memory_saver": True, "enable_weights_cpu_backup": True}, False),
        ({}, False),  # nothing is given back then
    ],
)
def test_weights_whose_memory_was_given_back(called: Any, settings: dict[str, bool], lost: bool) -> None:
    from tensorcast_connector.engines.sglang import weight_hooks

    assert called(weight_hooks.RELEASE, **settings) is lost


def test_weights_that_were_made_random(called: Any) -> None:
    from tensorcast_connector.engines.sglang import weight_hooks

    made = [called(weight_hooks.CHECK, each) for each in ("snapshot", "reset_tensors", "compare")]
    assert made == [False, True, False]
