"""How often each instance was given a new placement, per model: the counter by which ties go round."""

from collections.abc import Collection

import numpy as np

from smetric_router.state.shared_counts import SharedCounts
from smetric_router.view import Figures

# Ties go by placements of this many per instance; older ones count half, a quarter, and so on.
PLACEMENTS_REMEMBERED = 64


class Placements:
    """Counters of so many instances, by their ordinals; those of other processes are added to them when they are read."""

    def __init__(self, instances: int, shared: SharedCounts | None = None) -> None:
        self._instances = instances
        self._shared = shared
        self._counts: dict[str, Figures] = {}

    def of(self, model: str) -> Figures:
        """The model's counters as they are now."""
        own = self._own(model)
        if self._shared is None:
            return own.copy()
        return own + self._shared.others_placed(self._shared.slot(model))

    def count(self, model: str, ordinal: int) -> None:
        """One more there."""
        counts = self._own(model)
        counts[ordinal] += 1
        if counts.sum() >= PLACEMENTS_REMEMBERED * len(counts):
            counts /= 2
        self._share(model, counts)

    def rejoin(self, ordinal: int) -> None:
        """A place in the round like the others', so that it need not make up for the time it was away."""
        for model, counts in self._counts.items():
            everybodys = self.of(model)
            counts[ordinal] += everybodys.max() - everybodys[ordinal]
            self._share(model, counts)

    def keep(self, models: Collection[str]) -> None:
        """Forgets all other models."""
        for model in self._counts.keys() - set(models):
            del self._counts[model]

    def __len__(self) -> int:
        return len(self._counts)

    def _own(self, model: str) -> Figures:
        found = self._counts.get(model)
        if found is None:
            found = self._counts[model] = np.zeros(self._instances)
        return found

    def _share(self, model: str, counts: Figures) -> None:
        if self._shared is not None:
            self._shared.set_placed(self._shared.slot(model), counts)
