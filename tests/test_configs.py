"""Every example configuration is read by the code it is for."""

from pathlib import Path

from tensorcast_connector.config import StoreConfig, WorkerConfig, config_from_file

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def test_the_examples_are_valid_and_say_the_defaults() -> None:
    assert config_from_file(StoreConfig, str(CONFIGS / "store.toml"), {}).listen == StoreConfig().listen
    worker = config_from_file(WorkerConfig, str(CONFIGS / "worker.toml"), {})
    assert (worker.store, worker.listen, worker.arena_bytes) == ("127.0.0.1:7700", "127.0.0.1:0", 1 << 30)
