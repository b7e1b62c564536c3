"""Which workers hold which pages: the index that the home of pages keeps. Volatile: rebuilt from announcements."""

from collections.abc import Iterable, Sequence

from tensorcast_connector.errors import NotFound
from tensorcast_connector.types import WorkerId


class Catalog:
    """Page key -> the workers that announced it. `check` states the invariants."""

    def __init__(self) -> None:
        self._holders: dict[bytes, tuple[WorkerId, ...]] = {}
        self._held: dict[WorkerId, set[bytes]] = {}

    def __repr__(self) -> str:
        return f"<Catalog {len(self._holders)} pages at {len(self._held)} workers>"

    def announce(self, worker: WorkerId, reset: bool, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Applies one announcement of `worker`, in the order it was sent.

        Raises:
            NotFound: nothing is known of `worker` yet, or any more; it must announce all it has (`reset`).
        """
        if reset:
            self.drop_worker(worker)
            self._held[worker] = set()
        held = self._held.get(worker)
        if held is None:
            raise NotFound(f"nothing is known of {worker} here; announce everything")
        for key in removed:
            if key in held:
                held.discard(key)
                self._remove(key, worker)
        for key in added:
            if key not in held:
                held.add(key)
                self._holders[key] = (*self._holders.get(key, ()), worker)

    def drop_worker(self, worker: WorkerId) -> None:
        """Forgets everything `worker` announced: it has left, or starts anew."""
        for key in self._held.pop(worker, ()):
            self._remove(key, worker)

    def keep_only(self, workers: Iterable[WorkerId]) -> None:
        """Forgets all workers but these."""
        for gone in set(self._held) - set(workers):
            self.drop_worker(gone)

    def locate(self, keys: Sequence[bytes]) -> list[tuple[WorkerId, ...]]:
        """The holders of each key."""
        get = self._holders.get
        return [get(key, ()) for key in keys]

    def _remove(self, key: bytes, worker: WorkerId) -> None:
        left = tuple(each for each in self._holders[key] if each != worker)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]

    def statistics(self) -> dict[str, int]:
        """Counts for people and metrics."""
        return {"catalog_pages": len(self._holders), "catalog_workers": len(self._held)}

    def check(self) -> None:
        """Raises AssertionError unless both directions agree."""
        pairs = {(key, worker) for key, workers in self._holders.items() for worker in workers}
        assert pairs == {(key, worker) for worker, keys in self._held.items() for key in keys}
        assert all(len(set(workers)) == len(workers) > 0 for workers in self._holders.values())
