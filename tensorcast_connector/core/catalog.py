"""Which workers hold which pages: the index that a shard home keeps. Volatile: rebuilt from the workers' reports.

One compact table for all shards: the fingerprint of a page's key (core/fingerprints.py) -> a set of workers. A page costs
about twenty bytes. Whatever is done is done for all pages of a message at once, and what concerns a shard as a whole reads
the table once.
"""

from collections.abc import Callable, Iterable, Mapping, Set

import numpy as np
from numpy.typing import NDArray

from tensorcast_connector.core.fingerprints import Fingerprints, distinct, last_bytes
from tensorcast_connector.core.holder_sets import NOBODY, Holders, HolderSets
from tensorcast_connector.core.page_table import PageTable, Slots
from tensorcast_connector.core.placement import BYTE_VALUES, shard_of_byte
from tensorcast_connector.types import Token, WorkerId

FEW_SETS = 16


class Catalog:
    """See the module. `check` states the invariants.

    Args:
        shards: how many there are in the cluster.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._shard_of_byte = np.array([shard_of_byte(byte, shards) for byte in range(BYTE_VALUES if shards else 0)])
        self._table = PageTable()
        self._sets = HolderSets()
        self._begun: dict[WorkerId, set[int]] = {}  # the shards whose inventory a worker has begun to report
        # The last report of each, also of those that left: a late one is late for ever.
        self._numbers: dict[WorkerId, int] = {}
        self.held: dict[int, Token] = {}  # the shards this worker is the home of, and under which token

    def __repr__(self) -> str:
        return f"<Catalog {self.pages} pages of {len(self._begun)} workers in {len(self.held)} shards>"

    @property
    def pages(self) -> int:
        """How many pages are listed."""
        return self._table.pages

    # --- whose shards ---

    def hold(self, held: Mapping[int, Token]) -> None:
        """This worker is the home of these shards now; what is listed under any other token is void."""
        void = {shard for shard, token in self.held.items() if held.get(shard) != token}
        if void:
            for shards in self._begun.values():
                shards -= void
            slots = self._table.of_last_bytes(self._by_last_byte(void))
            self._change(slots, lambda _: NOBODY)
            self._tidy()
        self.held = dict(held)

    def _by_last_byte(self, shards: Set[int]) -> NDArray[np.bool_]:
        """For the last byte of a key, which decides its shard, whether that is one of `shards`."""
        wanted = np.zeros(self._shards, dtype=bool)
        wanted[list(shards)] = True
        return wanted.take(self._shard_of_byte)

    def missing(self, worker: WorkerId) -> set[int]:
        """Held shards of which `worker` has not reported its inventory."""
        return set(self.held) - self._begun.get(worker, set())

    def incomplete(self, workers: Iterable[WorkerId]) -> list[WorkerId]:
        """Those of which some inventory is missing."""
        count = len(self.held)
        known = self._begun
        return [each for each in workers if count and (each not in known or len(known[each]) < count)]

    def keep_only(self, workers: Iterable[WorkerId]) -> None:
        """Forgets everything of all workers but these: they have left."""
        for gone in set(self._begun) - set(workers):
            self._forget(gone, self._begun.pop(gone))
            self._tidy()

    def _forget(self, worker: WorkerId, shards: Set[int]) -> None:
        """One worker's pages in some shards."""
        if shards and self.pages:
            slots = self._table.of_last_bytes(self._by_last_byte(shards))
            theirs = self._sets.having(worker).take(self._table.values(slots))
            self._change(slots[theirs], lambda holders: holders - {worker})

    # --- reports ---

    def report(
        self, worker: WorkerId, number: int, shards: Iterable[int], reset: Iterable[int], added: Fingerprints,
        removed: Fingerprints,
    ) -> list[int]:  # fmt: skip
        """Applies one report of `worker`; returns the shards it has to report from the beginning.

        A report that is not newer than the last of that worker is ignored: it was delayed.

        Args:
            shards: those whose keys may be applied, because the token they came under is the current one.
            reset: of these, those whose inventory begins with `added`.
        """
        if number <= self._numbers.get(worker, 0) or not self._shards:
            return []
        self._numbers[worker] = number
        begun = self._begun.setdefault(worker, set())
        current = self.held.keys() & set(shards)
        again = current.intersection(reset)
        self._forget(worker, again & begun)
        begun |= again
        known = current & begun  # nothing else is listed: its beginning is missing
        if len(added) or len(removed):
            accepted = self._by_last_byte(known)
            self._remove(worker, self._accepted(removed, accepted))
            self._add(worker, self._accepted(added, accepted))
        self._tidy()
        return sorted(current - known)

    @staticmethod
    def _accepted(pages: Fingerprints, accepted: NDArray[np.bool_]) -> Fingerprints:
        """Those in the right shards, each once."""
        if not len(pages):
            return pages
        return distinct(pages[accepted.take(last_bytes(pages))])

    def _remove(self, worker: WorkerId, pages: Fingerprints) -> None:
        slots, _ = self._table.find(pages)
        self._change(slots, lambda holders: holders - {worker})

    def _add(self, worker: WorkerId, pages: Fingerprints) -> None:
        mine = frozenset([worker])
        slots, new = self._table.find(pages)
        self._change(slots, lambda holders: holders | mine)
        self._table.add(new, self._sets.change(np.zeros(len(new), dtype=np.uint32), lambda _: mine))

    def _change(self, slots: Slots, become: Callable[[Holders], Holders]) -> None:
        if len(slots):
            self._table.set(slots, self._sets.change(self._table.values(slots), become))

    def _tidy(self) -> None:
        self._table.shrink()
        if lost := self._table.take_lost():
            self._sets.change(np.array(lost, dtype=np.uint32), lambda _: NOBODY)

    # --- lookups ---

    def locate(self, pages: Fingerprints) -> tuple[list[list[str]], bytes]:
        """`holders` and `which` of PagesFound."""
        values = self._table.get(pages)
        if len(self._sets) <= FEW_SETS:  # then all of them are told, and nothing is numbered anew
            return [self._sets.names(number) for number in range(len(self._sets))], values.astype(
                "<u4", copy=False
            ).tobytes()
        found = np.bincount(values, minlength=1)
        found[0] = 1
        kinds = found.nonzero()[0]
        found[kinds] = np.arange(len(kinds))
        return [self._sets.names(number) for number in kinds.tolist()], found.astype("<u4").take(values).tobytes()

    def statistics(self) -> dict[str, int]:
        """Counts for people and metrics."""
        return {"catalog_pages": self.pages, "catalog_workers": len(self._begun)}

    def _listed(self) -> tuple[Fingerprints, list[int]]:
        """Every page that is listed, and the number of its set."""
        slots = self._table.of_last_bytes(np.ones(BYTE_VALUES, dtype=bool))
        return self._table.fingerprints(slots), self._table.values(slots).tolist()

    def holdings(self) -> dict[int, dict[WorkerId, set[int]]]:
        """Everything that is listed, for tests and for people: per held shard and worker the fingerprints of the keys."""
        found: dict[int, dict[WorkerId, set[int]]] = {
            shard: {worker: set() for worker, shards in self._begun.items() if shard in shards} for shard in self.held
        }
        pages, numbers = self._listed()
        for page, last, number in zip(pages.tolist(), last_bytes(pages).tolist(), numbers, strict=True):
            for worker in self._sets.of(number):
                found[shard_of_byte(last, self._shards)][worker].add(page)
        return found

    def check(self) -> None:
        """Raises AssertionError unless every page belongs to its shard, to known workers and to a held shard."""
        for shards in self._begun.values():
            assert shards <= set(self.held)
        self._table.check()
        pages, numbers = self._listed()
        self._sets.check(np.array(numbers, dtype=np.uint32))
        for last, number in set(zip(last_bytes(pages).tolist(), numbers, strict=True)):
            holders = self._sets.of(number)
            known = {who for who, begun in self._begun.items() if shard_of_byte(last, self._shards) in begun}
            assert holders and holders <= known, "a page of a worker that has not reported"
