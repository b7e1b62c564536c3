"""One set of weights, one epoch; any change of content, another."""

import os
from pathlib import Path

import pytest

from tensorcast_connector.engines.weights_epoch import snapshot_commit, weights_epoch
from tensorcast_connector.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"one" * 1000)
    (folder / "b.safetensors").write_bytes(b"two" * 1000)
    (folder / "config.json").write_text("{}")
    return folder


def test_two_copies_have_one_epoch_and_a_changed_byte_another(model: Path, tmp_path: Path) -> None:
    first = weights_epoch(model, tmp_path / "cache")
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert weights_epoch(copy, tmp_path / "cache") == first
    (copy / "b.safetensors").write_bytes(b"twO" + b"two" * 999)
    assert weights_epoch(copy, tmp_path / "cache") != first
    (copy / "config.json").write_text('{"x": 1}')  # not weights: the namespace holds the configuration itself


def test_each_file_is_read_once(model: Path, tmp_path: Path) -> None:
    read: list[str] = []
    first = weights_epoch(model, tmp_path / "cache", read.append)
    assert read == ["a.safetensors", "b.safetensors"]
    assert weights_epoch(model, tmp_path / "cache", read.append) == first
    assert len(read) == 2
    path = model / "a.safetensors"
    stat = path.stat()
    path.write_bytes(b"onE" * 1000)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert weights_epoch(model, tmp_path / "cache", read.append) != first
    assert read[2:] == ["a.safetensors"]


def test_a_damaged_or_unwritable_cache_only_costs_time(model: Path, tmp_path: Path) -> None:
    first = weights_epoch(model, tmp_path / "cache")
    for entry in (tmp_path / "cache").iterdir():
        entry.write_text("not json")
    assert weights_epoch(model, tmp_path / "cache") == first
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert weights_epoch(model, blocked) == first


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weight files"):
        weights_epoch(tmp_path, tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        weights_epoch(tmp_path / "missing", tmp_path)


def test_a_hub_snapshot_is_known_by_its_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    assert snapshot_commit(Path(f"/hub/models--x--y/snapshots/{commit}")) == commit
    assert snapshot_commit(Path("/hub/models--x--y/snapshots/main")) is None
    assert weights_epoch(Path(f"/hub/m/snapshots/{commit}"), tmp_path) == f"commit:{commit}"
