"""What one worker has told the homes of its pages, and what it has still to tell.

Only keys whose state may have changed are remembered, not the changes: a report says of each whether it is here *now*. So a
report that may or may not have arrived is simply made again, and nothing depends on the order of evictions and saves.
A home that is new, or that has forgotten us, is told the whole inventory of the shards concerned first.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from tensorcast_connector.config import (
    REPORT_BACKLOG_KEYS_MAX,
    REPORT_INTERVAL_S,
    REPORT_KEYS_PER_MESSAGE,
    REPORT_RETRY_S,
)
from tensorcast_connector.core.homes import Homes
from tensorcast_connector.core.placement import shard_of
from tensorcast_connector.types import Token, WorkerId
from tensorcast_connector.wire.keys import pack
from tensorcast_connector.wire.messages import Reported, ReportKeys


class PageIndex(Protocol):
    """The pages that can be read at this worker."""

    def inventory(self) -> Collection[bytes]:
        """All of them."""

    def resident(self, key: bytes) -> bool:
        """Whether this one is."""


@dataclass(slots=True)
class _Home:
    """The conversation with one home."""

    dirty: dict[bytes, None] = field(default_factory=dict)
    sent: ReportKeys | None = None  # and not answered
    retry_at: float = 0.0  # nothing before that
    retry_s: float = 0.0  # how long it waited the last time; 0 if that report arrived
    beat_at: float = 0.0  # even if there is nothing to tell


class Reporter:
    """See the module. One report per home is under way at a time.

    Args:
        numbers: of the reports, ascending.
    """

    def __init__(self, me: WorkerId, pages: PageIndex, homes: Homes, numbers: Iterator[int]) -> None:
        self._me = me
        self._pages = pages
        self._homes = homes
        self._told: dict[int, tuple[Token, WorkerId]] = {}  # whose inventory has been sent, and to whom
        self._streams: dict[WorkerId, _Home] = {}
        self._untold_as_of = -1  # which version of `homes`
        self._untold_of: dict[WorkerId, list[int]] = {}
        self._numbers = numbers

    def __repr__(self) -> str:
        return f"<Reporter of {self._me}: {len(self._told)} shards told to {len(self._streams)} homes>"

    def changed(self, keys: Iterable[bytes]) -> None:
        """Pages were saved, fetched or evicted."""
        count = self._homes.shards
        if not count:
            return
        for key in keys:
            told = self._told.get(shard_of(key, count))
            if told is not None:  # else it will be part of the inventory
                self._streams[told[1]].dirty[key] = None

    def asked(self, shards: Iterable[int]) -> None:
        """A home wants the inventory of shards, whatever we believe to have told it."""
        for shard in shards:
            if self._told.pop(shard, None) is not None:
                self._untold_as_of = -1

    def poll(self, now: float) -> list[tuple[WorkerId, ReportKeys]]:
        """The reports to send now."""
        self._meet_homes()
        untold = self._untold()
        due = [
            home
            for home, stream in self._streams.items()
            if stream.sent is None and self._at(stream, home in untold) <= now
        ]
        return [(home, self._next(home, now)) for home in due]

    def wake_at(self) -> float:
        """When there is next something to send, if nothing else happens."""
        untold = self._untold()
        return min(
            (self._at(stream, home in untold) for home, stream in self._streams.items() if stream.sent is None),
            default=float("inf"),
        )

    @staticmethod
    def _at(stream: _Home, untold: bool) -> float:
        return stream.retry_at if stream.dirty or untold else max(stream.retry_at, stream.beat_at)

    def _untold(self) -> dict[WorkerId, list[int]]:
        """The homes that have not been sent some inventory, and of which shards."""
        if self._untold_as_of != self._homes.version:
            self._untold_as_of = self._homes.version
            self._untold_of = {}
            for home in self._homes.workers():
                for shard, token in self._homes.of(home).items():
                    if self._told.get(shard) != (token, home):
                        self._untold_of.setdefault(home, []).append(shard)
        return self._untold_of

    def _meet_homes(self) -> None:
        """One conversation per current home, and none with former ones."""
        current = self._homes.workers()
        for home in current:
            if home not in self._streams:
                self._streams[home] = _Home()
        for home in [each for each in self._streams if each not in current]:
            del self._streams[home]
            self._told = {shard: told for shard, told in self._told.items() if told[1] != home}
            self._untold_as_of = -1

    def _next(self, home: WorkerId, now: float) -> ReportKeys:
        stream = self._streams[home]
        held = self._homes.of(home)
        reset = self._untold().get(home, [])
        if reset:
            self._told.update((shard, (held[shard], home)) for shard in reset)
            self._untold_as_of = -1
            wanted = set(reset)
            inventory = [key for key in self._pages.inventory() if shard_of(key, self._homes.shards) in wanted]
            stream.dirty = dict.fromkeys(inventory) | stream.dirty
        batch = _of_one_length(stream.dirty)
        for key in batch:
            del stream.dirty[key]
        resident = self._pages.resident
        added = [key for key in batch if resident(key)]
        removed = [key for key in batch if not resident(key)] if len(added) < len(batch) else []
        grants = [(shard, token.incarnation, token.revision) for shard, token in held.items()]
        stream.beat_at = now + REPORT_INTERVAL_S
        key_bytes = len(batch[0]) if batch else 0
        stream.sent = ReportKeys(
            self._me, next(self._numbers), grants, reset, key_bytes, pack(added).packed, pack(removed).packed
        )
        return stream.sent

    def answered(self, home: WorkerId, report: ReportKeys, reply: Reported, now: float) -> None:
        """The home's answer; `homes` has seen what it says of shards that moved."""
        stream = self._finish(home, report)
        if stream is None:
            return
        refused = {shard for shard, *_ in reply.moved}
        # A home that refuses what is its own waits for the store: the same is said again, and not at once.
        waiting = {shard for shard in refused if self._homes.home(shard) == home}
        self._forget(home, (refused - waiting).union(reply.unknown, waiting.intersection(report.reset)))
        stream.retry_s = stream.retry_s if waiting else 0.0
        if waiting:
            count = self._homes.shards
            keys = [key for key in _keys(report) if shard_of(key, count) in waiting]
            self._say_again(home, stream, keys, now)

    def failed(self, home: WorkerId, report: ReportKeys, now: float) -> None:
        """Nothing is known of it: what it said is said again."""
        stream = self._finish(home, report)
        if stream is None:
            return
        self._forget(home, report.reset)
        self._say_again(home, stream, _keys(report), now)

    def _say_again(self, home: WorkerId, stream: _Home, keys: Iterable[bytes], now: float) -> None:
        stream.dirty = dict.fromkeys(keys) | stream.dirty
        stream.retry_s = min(max(2 * stream.retry_s, REPORT_RETRY_S), REPORT_INTERVAL_S)
        stream.retry_at = now + stream.retry_s
        if len(stream.dirty) > REPORT_BACKLOG_KEYS_MAX:  # the pages that were evicted meanwhile would pile up for ever
            stream.dirty.clear()
            self._forget(home, [shard for shard, told in self._told.items() if told[1] == home])

    def _forget(self, home: WorkerId, shards: Iterable[int]) -> None:
        """`home` has to be told the whole inventory of these shards."""
        for shard in shards:
            if self._told.get(shard, (None, None))[1] == home:
                del self._told[shard]
                self._untold_as_of = -1

    def _finish(self, home: WorkerId, report: ReportKeys) -> _Home | None:
        stream = self._streams.get(home)
        if stream is None or stream.sent is not report:
            return None
        stream.sent = None
        return stream

    def check(self) -> None:
        """Raises AssertionError unless every shard that was told has a conversation to go on with."""
        assert all(home in self._streams for _, home in self._told.values())
        before = self._untold()
        self._untold_as_of = -1
        assert before == self._untold()


def _of_one_length(keys: Collection[bytes]) -> list[bytes]:
    """As many as a report may have, beginning with the first."""
    batch = list(itertools.islice(keys, REPORT_KEYS_PER_MESSAGE))
    size = len(batch[0]) if batch else 0
    return [key for key in batch if len(key) == size]


def _keys(report: ReportKeys) -> Iterator[bytes]:
    """All that it speaks of."""
    return itertools.chain(report.listed_added, report.listed_removed)
