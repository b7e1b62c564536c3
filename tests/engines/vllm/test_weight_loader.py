"""When the loader begins to share what it has loaded."""

import threading
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("fails", [False, True])
def test_it_shares_once_the_engine_has_packed_its_weights(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when that fails: whoever waits for it has to end."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from tensorcast_connector.engines.vllm.loader import TensorcastModelLoader

    seen: list[threading.Event] = []

    def load_model(self: Any, *_: object, **__: object) -> str:
        assert not self.processed.is_set()
        seen.append(self.processed)
        if fails:
            raise RuntimeError("no memory")
        return "model"

    monkeypatch.setattr(DefaultModelLoader, "load_model", load_model)
    loader: Any = TensorcastModelLoader(LoadConfig(load_format="auto"))
    assert loader.processed is None  # whose weights alone are loaded does not wait
    if fails:
        with pytest.raises(RuntimeError, match="no memory"):
            loader.load_model(None, None)
    else:
        assert loader.load_model(None, None, prefix="draft") == "model"
    assert seen[0].is_set() and loader.processed is None
