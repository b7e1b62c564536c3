"""Which workers hold which pages: the index that a shard home keeps. Volatile: rebuilt from the workers' reports.

One table for all shards, page key -> the workers that hold it as a bit mask. A mask with one worker is the worker's own bit,
one object for all its pages, so a page costs its key and one dictionary entry. A lookup of hundreds of keys is then one
pass in C; what concerns a shard as a whole, which is rare, looks at every page.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import repeat

from tensorcast_connector.core.placement import BYTE_VALUES, shard_of, shard_of_byte
from tensorcast_connector.types import Token, WorkerId
from tensorcast_connector.wire.codec import pack_numbered


class _Sender:
    """What is known of one worker's reports."""

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.shards: set[int] = set()  # whose inventory it has begun to report


class Catalog:
    """See the module. `check` states the invariants.

    Args:
        shards: how many there are in the cluster.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._pages: dict[bytes, int] = {}
        self._senders: dict[WorkerId, _Sender] = {}
        # The last report of each, also of those that left: a late one is late for ever.
        self._numbers: dict[WorkerId, int] = {}
        self.held: dict[int, Token] = {}  # the shards this worker is the home of, and under which token

    def __repr__(self) -> str:
        return f"<Catalog {self.pages} pages of {len(self._senders)} workers in {len(self.held)} shards>"

    @property
    def pages(self) -> int:
        """How many pages are listed."""
        return len(self._pages)

    # --- whose shards ---

    def hold(self, held: Mapping[int, Token]) -> None:
        """This worker is the home of these shards now; what is listed under any other token is void."""
        void = {shard for shard, token in self.held.items() if held.get(shard) != token}
        if void:
            for sender in self._senders.values():
                sender.shards -= void
            concerned = self._by_last_byte(void)
            for key in [key for key in self._pages if concerned[key[-1]]]:
                del self._pages[key]
        self.held = dict(held)

    def _by_last_byte(self, shards: Set[int]) -> list[bool]:
        """For the last byte of a key, which decides its shard, whether that is one of `shards`."""
        return [shard_of_byte(byte, self._shards) in shards for byte in range(BYTE_VALUES)]

    def missing(self, worker: WorkerId) -> set[int]:
        """Held shards of which `worker` has not reported its inventory."""
        sender = self._senders.get(worker)
        return set(self.held) - sender.shards if sender else set(self.held)

    def incomplete(self, workers: Iterable[WorkerId]) -> list[WorkerId]:
        """Those of which some inventory is missing."""
        count = len(self.held)
        known = self._senders
        return [each for each in workers if count and (each not in known or len(known[each].shards) < count)]

    def keep_only(self, workers: Iterable[WorkerId]) -> None:
        """Forgets everything of all workers but these: they have left."""
        for gone in set(self._senders) - set(workers):
            sender = self._senders.pop(gone)
            self._forget(sender.bit, sender.shards)

    def _forget(self, bit: int, shards: Set[int]) -> None:
        """One worker's pages in some shards."""
        if shards:
            concerned = self._by_last_byte(shards)
            for key in [key for key, mask in self._pages.items() if mask & bit and concerned[key[-1]]]:
                self._remove(key, bit)

    # --- reports ---

    def report(
        self, worker: WorkerId, number: int, shards: Iterable[int], reset: Iterable[int], added: Sequence[bytes],
        removed: Sequence[bytes],
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
        sender = self._sender(worker)
        current = self.held.keys() & set(shards)
        again = current.intersection(reset)
        self._forget(sender.bit, again & sender.shards)
        sender.shards |= again
        known = current & sender.shards  # nothing else is listed: its beginning is missing
        unknown = sorted(current - known)
        bit = sender.bit
        accepted = self._by_last_byte(known)
        for key in removed:
            if accepted[key[-1]]:
                self._remove(key, bit)
        pages = self._pages
        for key in added:  # hundreds of thousands a second
            if accepted[key[-1]]:
                mask = pages.get(key, 0)
                if not mask:
                    pages[key] = bit
                elif not mask & bit:
                    pages[key] = mask | bit
        return unknown

    def _sender(self, worker: WorkerId) -> _Sender:
        sender = self._senders.get(worker)
        if sender is None:
            used = {each.bit for each in self._senders.values()}
            bit = 1
            while bit in used:
                bit <<= 1
            sender = self._senders[worker] = _Sender(bit)
        return sender

    def _remove(self, key: bytes, bit: int) -> None:
        mask = self._pages.get(key, 0)
        if mask & bit:
            left = mask & ~bit
            if left:
                self._pages[key] = left
            else:
                del self._pages[key]

    # --- lookups ---

    def locate(self, keys: Sequence[bytes]) -> tuple[list[list[str]], bytes]:
        """`holders` and `which` of PagesFound."""
        masks = list(map(self._pages.get, keys, repeat(0)))
        numbers = {0: 0}
        for mask in set(masks):
            numbers.setdefault(mask, len(numbers))
        return [self._workers(mask) for mask in numbers], pack_numbered(masks, numbers)

    def _workers(self, mask: int) -> list[str]:
        return [worker for worker, sender in self._senders.items() if sender.bit & mask]

    def statistics(self) -> dict[str, int]:
        """Counts for people and metrics."""
        return {"catalog_pages": self.pages, "catalog_workers": len(self._senders)}

    def holdings(self) -> dict[int, dict[WorkerId, set[bytes]]]:
        """Everything that is listed, for tests and for people: per held shard and worker the keys."""
        found: dict[int, dict[WorkerId, set[bytes]]] = {
            shard: {worker: set() for worker, sender in self._senders.items() if shard in sender.shards}
            for shard in self.held
        }
        for key, mask in self._pages.items():
            for worker in self._workers(mask):
                found[shard_of(key, self._shards)][WorkerId(worker)].add(key)
        return found

    def check(self) -> None:
        """Raises AssertionError unless every page belongs to its shard, to known workers and to a held shard."""
        bits = [sender.bit for sender in self._senders.values()]
        assert len(set(bits)) == len(bits)
        for sender in self._senders.values():
            assert sender.shards <= set(self.held)
        known = [
            sum(sender.bit for sender in self._senders.values() if shard in sender.shards)
            for shard in range(self._shards)
        ]
        for key, mask in self._pages.items():
            assert mask and not mask & ~known[shard_of(key, self._shards)], "a page of a worker that has not reported"
