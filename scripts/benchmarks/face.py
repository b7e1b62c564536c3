"""The face that all benchmarks share: a row, how it is made of measurements, and how it is shown."""

import json
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
    """What a row has to reach: `ours`, or the `ratio` of ours to the limit, at most or at least so much."""

    of: Literal["ours", "ratio"]
    side: Literal["<=", ">="]
    value: float

    def __str__(self) -> str:
        return f"{self.of} {self.side} {self.value:,.10g}"

    def holds(self, value: float) -> bool:
        """Whether it is reached."""
        return value <= self.value if self.side == "<=" else value >= self.value


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. All numbers are in `unit`.

    Attributes:
        ours: the median of all runs.
        peers: the same of each peer, or why it could not run here.
        limit: the same of what cannot be beaten; None: there is nothing of the kind.
        ratio: the median of ours divided by the limit of the same run.
        target: what has to be reached; None: the row is for information, and holds.
        spread: the range of ours in all runs, divided by the median.
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

    def line(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


@dataclass(slots=True)
class Figure:
    """A row while it is measured: one value of ours, of the limit and of each peer per run, in the same order."""

    row: str
    unit: str
    target: Target | None
    ours: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=dict)

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
        if self.limit:
            ratio = statistics.median(ours / limit for ours, limit in zip(self.ours, self.limit, strict=True))
        holds = True
        if self.target is not None:
            judged = median if self.target.of == "ours" else ratio
            if judged is None:
                raise BenchError(f"{self.row}: a ratio is to be judged, and there is no limit")
            holds = self.target.holds(judged)
        return Row(
            row=self.row,
            unit=self.unit,
            ours=median,
            peers={**{name: statistics.median(values) for name, values in self.peers.items()}, **missing},
            limit=statistics.median(self.limit) if self.limit else None,
            ratio=ratio,
            target=None if self.target is None else str(self.target),
            holds=holds,
            runs=len(self.ours),
            spread=(max(self.ours) - min(self.ours)) / median if median else 0.0,
        )


def number(value: float | None) -> str:
    """Three digits that mean something, or none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def show(rows: Sequence[Row], console: Console) -> None:
    """A table, and below it why a peer is not in it."""
    names = list(dict.fromkeys(name for row in rows for name in row.peers))
    table = Table()
    for heading in ("row", "unit", "ours", "limit", "ratio", *names, "target", "holds", "runs", "spread"):
        table.add_column(Text(heading))
    for row in rows:
        peers = [row.peers.get(name) for name in names]
        cells = ["not run" if isinstance(value, str) else number(value) for value in peers]
        figures = [number(row.ours), number(row.limit), "-" if row.ratio is None else f"{row.ratio:.2f}"]
        holds = Text("-" if row.target is None else "yes" if row.holds else "no", "" if row.holds else "bold red")
        texts = (row.row, row.unit, *figures, *cells, row.target or "-")
        table.add_row(*map(Text, texts), holds, str(row.runs), f"{row.spread:.0%}")
    console.print(table)
    reasons = {name: why for row in rows for name, why in row.peers.items() if isinstance(why, str)}
    for name, why in reasons.items():
        console.print(f"{name} did not run: {why}", markup=False, highlight=False)
