"""Which workers hold which pages: the index that a shard home keeps. Volatile: rebuilt from the workers' reports.

One table per shard, page key -> the workers that hold it as a bit mask. A mask with one worker is the worker's own bit,
one object for all its pages, so a page costs its key and one dictionary entry.
"""

from collections.abc import Iterable, Mapping, Sequence

from tensorcast_connector.core.placement import BYTE_VALUES, shard_of
from tensorcast_connector.types import Token, WorkerId
from tensorcast_connector.wire.codec import pack_indexes


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
        self._tables: list[dict[bytes, int]] = [{} for _ in range(shards)]
        # By the last byte of a key, which decides its shard: one step less for each of hundreds of keys.
        self._by_byte = [self._tables[byte % shards] if shards else {} for byte in range(BYTE_VALUES)]
        self._senders: dict[WorkerId, _Sender] = {}
        self._numbers: dict[
            WorkerId, int
        ] = {}  # the last report of each, also of those that left: a late one is late for ever
        self._held: dict[int, Token] = {}

    def __repr__(self) -> str:
        return f"<Catalog {self.pages} pages of {len(self._senders)} workers in {len(self._held)} shards>"

    @property
    def pages(self) -> int:
        """How many pages are listed."""
        return sum(map(len, self._tables))

    # --- whose shards ---

    def hold(self, held: Mapping[int, Token]) -> None:
        """This worker is the home of these shards now; what is listed under any other token is void."""
        for shard in {*self._held, *held}:
            if self._held.get(shard) != held.get(shard):
                self._tables[shard].clear()
                for sender in self._senders.values():
                    sender.shards.discard(shard)
        self._held = dict(held)

    def missing(self, worker: WorkerId) -> set[int]:
        """Held shards of which `worker` has not reported its inventory."""
        sender = self._senders.get(worker)
        return set(self._held) - sender.shards if sender else set(self._held)

    def keep_only(self, workers: Iterable[WorkerId]) -> None:
        """Forgets everything of all workers but these: they have left."""
        for gone in set(self._senders) - set(workers):
            sender = self._senders.pop(gone)
            for shard in sender.shards:
                self._forget(sender.bit, shard)

    def _forget(self, bit: int, shard: int) -> None:
        """One worker's pages in one shard."""
        table = self._tables[shard]
        for key in [key for key, mask in table.items() if mask & bit]:
            self._remove(table, key, bit)

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
        current = self._held.keys() & set(shards)
        for shard in current.intersection(reset):
            if shard in sender.shards:
                self._forget(sender.bit, shard)
            sender.shards.add(shard)
        known = current & sender.shards  # nothing else is listed: its beginning is missing
        unknown = sorted(current - known)
        bit = sender.bit
        tables = [table if byte % self._shards in known else None for byte, table in enumerate(self._by_byte)]
        for key in removed:
            table = tables[key[-1]]
            if table is not None:
                self._remove(table, key, bit)
        for key in added:  # hundreds of thousands a second
            table = tables[key[-1]]
            if table is not None:
                mask = table.get(key, 0)
                if not mask:
                    table[key] = bit
                elif not mask & bit:
                    table[key] = mask | bit
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

    @staticmethod
    def _remove(table: dict[bytes, int], key: bytes, bit: int) -> None:
        mask = table.get(key, 0)
        if mask & bit:
            left = mask & ~bit
            if left:
                table[key] = left
            else:
                del table[key]

    # --- lookups ---

    def locate(self, keys: Sequence[bytes]) -> tuple[list[list[str]], bytes]:
        """`holders` and `which` of PagesFound."""
        tables = self._by_byte
        masks = [tables[key[-1]].get(key, 0) for key in keys]
        distinct = {0: 0}
        for mask in set(masks):
            distinct.setdefault(mask, len(distinct))
        return [self._workers(mask) for mask in distinct], pack_indexes(map(distinct.__getitem__, masks))

    def _workers(self, mask: int) -> list[str]:
        return [worker for worker, sender in self._senders.items() if sender.bit & mask]

    def statistics(self) -> dict[str, int]:
        """Counts for people and metrics."""
        return {"catalog_pages": self.pages, "catalog_workers": len(self._senders), "shards_held": len(self._held)}

    def holdings(self) -> dict[int, dict[WorkerId, set[bytes]]]:
        """Everything that is listed, for tests and for people: per held shard and worker the keys."""
        return {
            shard: {
                worker: {key for key, mask in self._tables[shard].items() if mask & sender.bit}
                for worker, sender in self._senders.items()
                if shard in sender.shards
            }
            for shard in self._held
        }

    def check(self) -> None:
        """Raises AssertionError unless every page belongs to its shard, to known workers and to a held shard."""
        bits = [sender.bit for sender in self._senders.values()]
        assert len(set(bits)) == len(bits)
        for shard, table in enumerate(self._tables):
            known = sum(sender.bit for sender in self._senders.values() if shard in sender.shards)
            assert not table or shard in self._held
            for key, mask in table.items():
                assert shard_of(key, self._shards) == shard
                assert mask and not mask & ~known, "a page of a worker that has not reported"
        for sender in self._senders.values():
            assert sender.shards <= set(self._held)
