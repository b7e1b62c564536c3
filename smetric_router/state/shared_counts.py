"""The load and the placements of several processes in one table: each writes its own row, and reads the sum.

The table is memory that the processes share; it is handed in. Values are aligned and 8 bytes, written whole, so a reader sees
the old one or the new one. Nothing is locked, and nothing but its own row is ever written by a process; whoever replaces one
that died zeroes its requests in flight.
"""

import numpy as np
from xxhash import xxh3_64_intdigest

from smetric_router.view import ADDED, Figures

SLOTS = 16
"""Counters of placements per process: models are spread over them by name; those that share one share the ties."""
_WORD = 8


class SharedCounts:
    """One process's view of the table.

    Args:
        memory: at least `size(rows, width)` bytes, zeroed before the first use.
        rows: processes.
        width: instances.
        row: that of this process.
    """

    def __init__(self, memory: memoryview, rows: int, width: int, row: int) -> None:
        assert 0 <= row < rows and len(memory) >= self.size(rows, width)
        self._row = row
        flights = rows * ADDED * width * _WORD
        self._flights: Figures = np.frombuffer(memory[:flights]).reshape(rows, ADDED, width)
        self._placed: Figures = np.frombuffer(memory[flights : self.size(rows, width)]).reshape(rows, SLOTS, width)
        self._others = [each for each in range(rows) if each != row]

    @staticmethod
    def size(rows: int, width: int) -> int:
        """Bytes of the table."""
        return rows * (ADDED + SLOTS) * width * _WORD

    def __repr__(self) -> str:
        rows, _, width = self._flights.shape
        return f"<SharedCounts row {self._row} of {rows}, {width} instances>"

    @staticmethod
    def slot(model: str) -> int:
        """Where a model's placements are counted, in every process alike."""
        return xxh3_64_intdigest(model.encode("utf-8", "surrogatepass")) % SLOTS

    def set_flights(self, ordinal: int, figures: tuple[float, ...]) -> None:
        """What this process has in flight at an instance: the first rows of a view."""
        self._flights[self._row, :, ordinal] = figures

    def clear_inflight(self, row: int) -> None:
        """The process of that row has died."""
        self._flights[row] = 0

    def others_flights(self) -> Figures:
        """Those of all other processes. Shape (first rows, instances)."""
        return self._summed(self._flights)

    def others_flights_at(self, ordinal: int) -> list[float]:
        """The same at one instance."""
        found: list[float] = self._summed(self._flights[:, :, ordinal]).tolist()
        return found

    def set_placed(self, slot: int, values: Figures) -> None:
        """The placements of this process, by instance."""
        self._placed[self._row, slot] = values

    def others_placed(self, slot: int) -> Figures:
        """By instance, those of all other processes."""
        return self._summed(self._placed[:, slot])

    def _summed(self, table: Figures) -> Figures:
        found: Figures = np.zeros(table.shape[1:])
        for row in self._others:
            found += table[row]
        return found
