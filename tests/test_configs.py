"""Every example configuration is read by the code it is for."""

import json
from pathlib import Path

import pytest
import yaml

from smetric_router.config import load_config
from tensorcast_connector.engines.options import LoaderConfig, StorageConfig
from tensorcast_connector.settings import StoreConfig, WorkerConfig, config_from_file

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
RECIPES = sorted((CONFIGS / "recipes").iterdir())


def test_the_examples_are_valid_and_say_the_defaults() -> None:
    assert config_from_file(StoreConfig, str(CONFIGS / "store.toml"), {}).listen == StoreConfig().listen
    worker = config_from_file(WorkerConfig, str(CONFIGS / "worker.toml"), {})
    assert (worker.store, worker.listen, worker.arena_bytes) == ("127.0.0.1:7700", "127.0.0.1:0", 1 << 30)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda each: each.name)
def test_recipes(recipe: Path) -> None:
    """Our files of a recipe. What an engine's own parser says of the engine's is tested with that engine."""
    router = load_config(recipe / "router.toml")
    assert len(router.engines) > 1 and router.tokenizers
    engine = yaml.safe_load((recipe / "sglang.yaml").read_text())
    assert set(router.tokenizers) == {engine["model-path"]}
    assert all(each.endswith(f":{engine['port']}") for each in router.engines)
    if (recipe / "worker.toml").exists():
        worker = config_from_file(WorkerConfig, str(recipe / "worker.toml"), {})
        loader = LoaderConfig.from_extra(json.loads(engine["model-loader-extra-config"]))
        storage = StorageConfig.from_extra(json.loads(engine["hicache-storage-backend-extra-config"]))
        assert loader.worker == storage.worker == f"unix:{worker.socket}"
