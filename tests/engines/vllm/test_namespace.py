"""Which weights an engine's KV is of, before any of them change."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensorcast_connector.engines.options import ConnectorConfig
from tensorcast_connector.engines.vllm.namespace import epoch_of_weights


def started(folder: Path, load_format: str, **extra: str) -> Any:
    """An engine's configuration, as far as it is asked."""
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder), revision=None),
        load_config=SimpleNamespace(load_format=load_format, model_loader_extra_config=extra),
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With weights, which may be others than those that are served."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tmp_path / "model"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights")
    return made


def test_weights_of_a_source_are_not_those_of_the_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = ConnectorConfig("unix:/w")
    own = epoch_of_weights(started(folder, "auto"), plain)
    assert own.startswith("content:") and epoch_of_weights(started(folder, "tensorcast"), plain) == own
    given = started(folder, "tensorcast", source="policy:7")
    epochs = {epoch_of_weights(given, plain) for _ in range(2)}
    assert len(epochs) == 2 and all(each.startswith("private:") for each in epochs)
    assert "the weights come from 'policy:7'" in caplog.text
    assert epoch_of_weights(given, ConnectorConfig("unix:/w", weight_version="7")) == "declared:7"
    assert epoch_of_weights(started(folder, "dummy"), plain).startswith("private:")
