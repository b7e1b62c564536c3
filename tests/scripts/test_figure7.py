"""Figure 7 of the benchmark of weights: all ways give the same weights in each round, and their times are compared."""

from typing import Any

import pytest
from benchmarks import weights_figure7
from benchmarks.weights_figure7 import RELOAD as CACHE
from benchmarks.weights_figure7 import RELOAD_DISK as DISK
from benchmarks.weights_figure7 import Round


class Updates:
    """An engine that takes a second by the pool (a tenth if a tenth is new), two by files in the page cache, four by the disk."""

    def __init__(self) -> None:
        self.version, self.share = 0, 1.0
        self.given: list[tuple[int, str]] = []

    def change(self, share: float = 1.0) -> None:
        self.version, self.share = self.version + 1, share

    def by_pool(self) -> Round:
        self.given.append((self.version, "pool"))
        return Round(self.share, 0.25)

    def by_files(self) -> Round:
        self.given.append((self.version, "files"))
        return Round(2.0, 1.0)

    def by_disk(self) -> Round:
        self.given.append((self.version, "disk"))
        return Round(4.0, 3.0)


def test_the_ways_take_turns_and_each_row_says_how_much_faster_ours_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_figure7, "REST_S", 0.0)
    updates: Any = Updates()
    whole, still, tenth = weights_figure7._measured(updates, "10 MB, TP 2", runs=2)
    assert (whole.ours, whole.peers) == (1000.0, {CACHE: 2000.0, DISK: 4000.0}) and "2.00 times" in whole.row
    assert (still.ours, still.peers) == (250.0, {CACHE: 1000.0, DISK: 3000.0}) and "12.00 times" in still.row
    assert (tenth.ours, tenth.peers) == (100.0, {CACHE: 2000.0, DISK: 4000.0}) and "40.00 times" in tenth.row
    assert all("10 MB, TP 2" in each.row and each.runs == 2 and each.target is None for each in (whole, still, tenth))
    rounds = [updates.given[at : at + 3] for at in (0, 3, 6)]
    assert [version for each in rounds for version, _ in each] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert all({way for _, way in each} == {"pool", "files", "disk"} for each in rounds)
    assert rounds[0][0][1] != rounds[1][0][1] == rounds[2][-1][1], "none is always first"
