"""What a load plan reads through a buffer is asked of a disk ahead of the reads too."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tensorcast_connector.client.checkpoint import Checkpoint  # noqa: E402
from tensorcast_connector.engines.weights import load_sources  # noqa: E402
from tensorcast_connector.engines.weights.load_plan import Copy  # noqa: E402
from tensorcast_connector.engines.weights.load_sources import Files  # noqa: E402
from tests.client.checkpoints import random_folder  # noqa: E402
from tests.client.read_log import PART, Log, log  # noqa: E402

__all__ = ["log"]
SIZES = {f"t{number}": size for number, size in enumerate([700, 2500, 1, 900, 4000, 5300, 64])}


@pytest.mark.parametrize("cached", [False, True])
def test_what_is_converted_is_asked_for_in_time(
    cached: bool, log: Log, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(load_sources, "STAGE_BYTES", PART)
    log.cached = cached
    wanted = random_folder(tmp_path, SIZES)
    targets = {name: torch.empty(size, dtype=torch.float32) for name, size in SIZES.items()}
    copies = [Copy(name, torch.uint8, 0, (each.numel(),), (1,), each) for name, each in targets.items()]
    with Checkpoint.open(tmp_path) as checkpoint:
        Files(checkpoint, 1).fill(copies, lambda _: None)
    assert {name: bytes(each.to(torch.uint8).tolist()) for name, each in targets.items()} == wanted
    assert len(log.read) == sum(SIZES.values())
    if cached:
        assert not log.asked
    else:
        log.check()
