"""The face that all benchmarks share: a row, how it is made of measurements, and how it is shown."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

OURS, LIMIT = "ours", "limit"


class BenchError(Exception):
    """A benchmark cannot run here; says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Target:
    """What has to be at most, less than or at least so much: `ours`, its `ratio` to the limit, that to each of the `peers`, or
    that to the `best peer`, the one with the lowest median. Where no peer runs the last asks for nothing.

    Attributes:
        tie: of `peers`, where what both do besides differs by more from run to run than the two differ: equality is not excluded,
            and it is shown that the median misses by no more than this share (both ends of `median_interval`).
    """

    of: Literal["ours", "ratio", "peers", "best peer"]
    side: Literal["<=", "<", ">="]
    value: float
    tie: float = 0.0

    def __str__(self) -> str:
        of = "each ratio to a peer" if self.of == "peers" else self.of
        tie = f", or shown to miss by no more than {self.tie:.0%}" if self.tie else ""
        return f"{of} {self.side} {self.value:,.10g}{tie}"

    def holds(self, value: float) -> bool:
        """Whether it is reached."""
        if self.side == "<":
            return value < self.value
        return value <= self.value if self.side == "<=" else value >= self.value

    def tied(self, ratios: Sequence[float]) -> bool:
        """Whether these, each of one run, are a tie."""
        low, high = median_interval(ratios)
        if self.side == ">=":
            low, high = -high, -low
        value = -self.value if self.side == ">=" else self.value
        return self.tie > 0 and low <= value and high <= value + self.tie * self.value


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies that these were drawn around, however they are distributed: the sign test's interval.

    At 95 % at least from six values on; the range of fewer is less sure (75 % of three).
    """
    ordered, count = sorted(values), len(values)
    tail, place = 1.0, 0  # of 2 ** count ways in which they can fall on the two sides
    while (tail + math.comb(count, place + 1)) / 2**count <= 0.025:
        place += 1
        tail += math.comb(count, place)
    return ordered[place], ordered[-1 - place]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. All numbers are in `unit`.

    Attributes:
        ours: the median of all runs.
        peers: the same of each peer, or why it could not run here.
        limit: the same of what cannot be beaten; None: there is nothing of the kind.
        ratio: the median of ours divided by the limit of the same run, or by the best peer of the same run if the target is
            of that.
        target: what has to be reached; None: the row is for information, and holds. So is one whose target is of the best
            peer where no peer runs.
        spread: the range of ours in all runs, divided by the median.
        values: of each run in turn: ours, the limit, and what ran beside them; only in the JSON.
    """

    row: str
    unit: str
    ours: float
    peers: Mapping[str, float | str]
    limit: float | None
    ratio: float | None
    target: str | None
    holds: bool
    runs: int
    spread: float
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


@dataclass(slots=True)
class Figure:
    """A row while it is measured: one value of ours, of the limit and of each peer per run, in the same order."""

    row: str
    unit: str
    target: Target | Sequence[Target] | None
    ours: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)
    beside: dict[str, list[float]] = field(default_factory=dict)
    """Further figures of ours, shown among the peers and not judged."""

    def add(self, system: str, value: float) -> None:
        """A value of "ours", of the "limit", or of a peer."""
        if system == OURS:
            self.ours.append(value)
        elif system == LIMIT:
            self.limit.append(value)
        else:
            self.peers.setdefault(system, []).append(value)

    def made(self, missing: Mapping[str, str]) -> Row:
        """The row.

        Args:
            missing: peers that cannot run here, and why.

        Raises:
            BenchError: nothing was measured, or the target is of a ratio and there is no limit.
        """
        if not self.ours or (self.limit and len(self.limit) != len(self.ours)):
            raise BenchError(f"{self.row}: {len(self.ours)} values of ours and {len(self.limit)} of the limit")
        median = statistics.median(self.ours)
        ratio = None
        targets = (self.target,) if isinstance(self.target, Target) else tuple(self.target or ())
        if any(target.of == "best peer" for target in targets):
            if self.peers:
                ratio = self._ratio_to_best()
            else:
                targets = tuple(target for target in targets if target.of != "best peer")
        elif self.limit:
            ratio = statistics.median(ours / limit for ours, limit in zip(self.ours, self.limit, strict=True))
        holds = all(
            target.holds(judged) or self._tied(target, peer)
            for target in targets
            for peer, judged in self._judged(target, median, ratio).items()
        )
        shown = {**self.peers, **self.beside}
        return Row(
            row=self.row + "".join(self._told(peer) for peer in self.peers if any(target.tie for target in targets)),
            unit=self.unit,
            ours=median,
            peers={**{name: statistics.median(values) for name, values in shown.items()}, **missing},
            limit=statistics.median(self.limit) if self.limit else None,
            ratio=ratio,
            target=" and ".join(map(str, targets)) or None,
            holds=holds,
            runs=len(self.ours),
            spread=(max(self.ours) - min(self.ours)) / median if median else 0.0,
            values={OURS: self.ours, LIMIT: self.limit, **shown} if self.limit else {OURS: self.ours, **shown},
        )

    def _ratio_to_best(self) -> float:
        """Ours to the peer with the lowest median, in the same runs."""
        best = min(self.peers, key=lambda name: statistics.median(self.peers[name]))
        return statistics.median(self.ratios(best))

    def _judged(self, target: Target, median: float, ratio: float | None) -> dict[str, float]:
        """What the target is held against, by the peer if it is of peers."""
        if target.of == "ours":
            return {"": median}
        if target.of in ("ratio", "best peer"):
            if ratio is None:
                raise BenchError(f"{self.row}: a ratio is to be judged, and there is no limit")
            return {"": ratio}
        return {
            name: statistics.median(self.ratios(name))
            if len(values) == len(self.ours)
            else median / statistics.median(values)  # it failed in some runs
            for name, values in self.peers.items()
        }

    def ratios(self, peer: str) -> list[float]:
        """Ours to that peer's, run by run."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.peers[peer], strict=True)]

    def _told(self, peer: str) -> str:
        """Its part of the row's name, if ties are looked at: the median of the pairs, and where that lies."""
        if len(self.peers[peer]) != len(self.ours):
            return ""
        ratios = self.ratios(peer)
        low, high = median_interval(ratios)
        return f"; {statistics.median(ratios):.2f} of {peer} ({low:.2f} to {high:.2f})"

    def _tied(self, target: Target, peer: str) -> bool:
        values = self.peers.get(peer, [])
        return target.of == "peers" and len(values) == len(self.ours) and target.tied(self.ratios(peer))


def number(value: float | None) -> str:
    """Three digits that mean something, or none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def show(rows: Sequence[Row], console: Console) -> None:
    """A table, and below it why a peer is not in it."""
    table = Table(show_lines=True)
    for heading in ("row", "unit", "ours", "limit", "ratio", "beside it", "target", "holds", "runs", "spread"):
        table.add_column(Text(heading), no_wrap=heading in ("ours", "limit", "ratio", "beside it"))
    for row in rows:
        beside = "\n".join(
            f"{name} {'not run' if isinstance(value, str) else number(value)}" for name, value in row.peers.items()
        )
        figures = [number(row.ours), number(row.limit), "-" if row.ratio is None else f"{row.ratio:.2f}"]
        holds = Text("-" if row.target is None else "yes" if row.holds else "no", "" if row.holds else "bold red")
        texts = (row.row, row.unit, *figures, beside or "-", (row.target or "-").replace(" and ", "\n"))
        table.add_row(*map(Text, texts), holds, str(row.runs), f"{row.spread:.0%}")
    console.print(table)
    reasons = {name: why for row in rows for name, why in row.peers.items() if isinstance(why, str)}
    for name, why in reasons.items():
        console.print(f"{name} did not run: {why}", markup=False, highlight=False)
