"""What SGLang's plugin does with options and load formats; what SGLang does with it is tested where SGLang is."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tensorcast_connector.engines.sglang.plugin import check_options, verify_load_format


def arguments(load_format: str, extra: str | None) -> SimpleNamespace:
    return SimpleNamespace(load_format=load_format, model_loader_extra_config=extra)


@pytest.mark.parametrize(
    ("load_format", "extra"),
    [
        ("tensorcast", '{"worker": "unix:/x"}'),
        ("tensorcast", None),
        ("tensorcast", ""),
        ("tensorcast", "no JSON, which SGLang says"),
        ("auto", '{"num_threads": 4}'),
    ],
)
def test_options_that_are_not_wrong_or_not_ours(load_format: str, extra: str | None) -> None:
    check_options(arguments(load_format, extra))


@pytest.mark.parametrize("extra", ['{"wroker": "unix:/x"}', '{"worker": "10.0.0.1:1"}', "[1]", '{"threads": 0}'])
def test_a_mistake_is_one_line(extra: str) -> None:
    with pytest.raises(SystemExit) as exits:
        check_options(arguments("TensorCast", extra))
    said = str(exits.value.code)
    assert said.startswith("tensorcast: model_loader_extra_config") and "\n" not in said


def test_our_load_formats_become_our_loader_and_others_are_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = ModuleType("tensorcast_connector.engines.sglang.loader")
    loader.TensorcastModelLoader = ours = type("TensorcastModelLoader", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, loader.__name__, loader)
    asked: list[Any] = []
    for given, version in (
        ("tensorcast", ""), ("tensorcast:policy", "policy"), ("tensorcast:Policy:7", "Policy:7"), ("Tensorcast", ""),
    ):  # fmt: skip
        config = SimpleNamespace(load_format=given)
        verify_load_format(asked.append, config)
        assert (config.load_format, config.tensorcast_version) == (ours, version)
    assert not asked
    others = [SimpleNamespace(load_format=each) for each in ("auto", "tensorcastx", "sharded_state", ours)]
    for each in others:
        verify_load_format(asked.append, each)
    assert asked == others
