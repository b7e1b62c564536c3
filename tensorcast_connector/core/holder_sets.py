"""Sets of workers under small numbers: thousands of pages that the same workers hold share one set.

A set has a number as long as some page has it; then the number is free for another. 0 is nobody.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tensorcast_connector.core.page_table import Values
from tensorcast_connector.types import WorkerId

Holders = frozenset[WorkerId]
NOBODY: Holders = frozenset()


class HolderSets:
    """See the module."""

    def __init__(self) -> None:
        self._sets: list[Holders] = [NOBODY]
        self._names: list[list[str]] = [[]]
        self._numbers = {NOBODY: 0}
        self._pages = [0]  # how many have it; of nobody it says nothing
        self._free: list[int] = []

    def __repr__(self) -> str:
        return f"<HolderSets: {len(self._numbers) - 1}>"

    def __len__(self) -> int:
        """Above all numbers."""
        return len(self._sets)

    def of(self, number: int) -> Holders:
        """The set of that number."""
        return self._sets[number]

    def names(self, number: int) -> list[str]:
        """The same in order. Not to be changed."""
        return self._names[number]

    def having(self, worker: WorkerId) -> NDArray[np.bool_]:
        """For every number whether `worker` is in its set."""
        return np.array([worker in each for each in self._sets])

    def change(self, before: Values, become: Callable[[Holders], Holders]) -> Values:
        """What pages have from now on that had `before` until now, a number for each page."""
        counts = np.bincount(before)
        left = counts.nonzero()[0].tolist()
        numbers = np.zeros(len(counts), dtype=np.uint32)
        for number in left:
            numbers[number] = self._move(number, become(self._sets[number]), int(counts[number]))
        for number in left:
            if number and not self._pages[number]:
                del self._numbers[self._sets[number]]
                self._sets[number], self._names[number] = NOBODY, []
                self._free.append(number)
        return numbers.take(before)

    def _move(self, number: int, to: Holders, pages: int) -> int:
        other = self._numbers.get(to)
        if other is None:
            other = self._number(to)
        self._pages[number] -= pages
        self._pages[other] += pages
        return other

    def _number(self, holders: Holders) -> int:
        if self._free:
            number = self._free.pop()
            self._sets[number], self._names[number] = holders, sorted(holders)
        else:
            number = len(self._sets)
            self._sets.append(holders)
            self._names.append(sorted(holders))
            self._pages.append(0)
        self._numbers[holders] = number
        return number

    def check(self, values: Values) -> None:
        """Raises AssertionError unless these are the numbers of all pages."""
        counts = np.bincount(values, minlength=len(self)).tolist()
        assert counts[1:] == self._pages[1:], "the pages of a set are counted wrong"
        assert {number for number in range(1, len(self)) if not counts[number]} == set(self._free)
        assert len(set(self._free)) == len(self._free)
        assert all(self._sets[number] == holders for holders, number in self._numbers.items())
        assert len(self._numbers) + len(self._free) == len(self)
