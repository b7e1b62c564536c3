"""What one worker has told the homes of its pages, and what it has still to tell.

Only keys whose state may have changed are remembered, not the changes: a report says of each whether it is here *now*. So a
report that may or may not have arrived is simply made again, and nothing depends on the order of evictions and saves.
A home that is new, or that has forgotten us, is told the whole inventory of the shards concerned first.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tensorcast_connector.config import REPORT_INTERVAL_S, REPORT_KEYS_PER_MESSAGE, REPORT_RETRY_S
from tensorcast_connector.core.homes import Homes
from tensorcast_connector.core.placement import shard_of
from tensorcast_connector.types import Token, WorkerId
from tensorcast_connector.wire.messages import Reported, ReportPages


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
    sent: ReportPages | None = None  # and not answered
    retry_at: float = 0.0  # nothing before that
    beat_at: float = 0.0  # even if there is nothing to tell


class Reporter:
    """See the module. One report per home is under way at a time."""

    def __init__(self, me: WorkerId, pages: PageIndex, homes: Homes) -> None:
        self._me = me
        self._pages = pages
        self._homes = homes
        self._told: dict[int, tuple[Token, WorkerId]] = {}  # whose inventory has been sent, and to whom
        self._streams: dict[WorkerId, _Home] = {}
        self._number = 0

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
            self._told.pop(shard, None)

    def poll(self, now: float) -> list[tuple[WorkerId, ReportPages]]:
        """The reports to send now."""
        self._meet_homes()
        due = [home for home, stream in self._streams.items() if stream.sent is None and self._at(home, stream) <= now]
        return [(home, self._next(home, now)) for home in due]

    def wake_at(self) -> float:
        """When there is next something to send, if nothing else happens."""
        return min(
            (self._at(home, stream) for home, stream in self._streams.items() if stream.sent is None),
            default=float("inf"),
        )

    def _at(self, home: WorkerId, stream: _Home) -> float:
        return stream.retry_at if stream.dirty or self._untold(home) else max(stream.retry_at, stream.beat_at)

    def _untold(self, home: WorkerId) -> list[int]:
        return [shard for shard, token in self._homes.of(home).items() if self._told.get(shard) != (token, home)]

    def _meet_homes(self) -> None:
        """One conversation per current home, and none with former ones."""
        current = self._homes.workers() if self._homes.shards else set()
        for home in current - set(self._streams):
            self._streams[home] = _Home()
        for home in set(self._streams) - current:
            del self._streams[home]
            self._told = {shard: told for shard, told in self._told.items() if told[1] != home}

    def _next(self, home: WorkerId, now: float) -> ReportPages:
        stream = self._streams[home]
        held = self._homes.of(home)
        reset = self._untold(home)
        if reset:
            self._told.update((shard, (held[shard], home)) for shard in reset)
            wanted = set(reset)
            inventory = [key for key in self._pages.inventory() if shard_of(key, self._homes.shards) in wanted]
            stream.dirty = dict.fromkeys(inventory) | stream.dirty
        batch = list(stream.dirty)[:REPORT_KEYS_PER_MESSAGE]
        for key in batch:
            del stream.dirty[key]
        resident = self._pages.resident
        added = [key for key in batch if resident(key)]
        removed = [key for key in batch if not resident(key)] if len(added) < len(batch) else []
        self._number += 1
        grants = [(shard, token.incarnation, token.revision) for shard, token in held.items()]
        stream.beat_at = now + REPORT_INTERVAL_S
        stream.sent = ReportPages(self._me, self._number, grants, reset, added, removed)
        return stream.sent

    def answered(self, home: WorkerId, report: ReportPages, reply: Reported, now: float) -> None:
        """The home's answer; `homes` has seen what it says of shards that moved."""
        stream = self._finish(home, report)
        if stream is None:
            return
        again = {shard for shard, *_ in reply.moved} | set(reply.unknown)
        for shard in again:
            if self._told.get(shard, (None, None))[1] == home:
                del self._told[shard]
        # A home that refuses a token it has itself is waiting for the store; there is no use in asking at once.
        stuck = any(self._homes.home(shard) == home for shard, *_ in reply.moved)
        stream.retry_at = now + REPORT_RETRY_S if stuck else now

    def failed(self, home: WorkerId, report: ReportPages, now: float) -> None:
        """Nothing is known of it: what it said is said again."""
        stream = self._finish(home, report)
        if stream is None:
            return
        for shard in report.reset:
            if self._told.get(shard, (None, None))[1] == home:
                del self._told[shard]
        again = dict.fromkeys([*report.added, *report.removed])
        stream.dirty = again | stream.dirty
        stream.retry_at = now + REPORT_RETRY_S

    def _finish(self, home: WorkerId, report: ReportPages) -> _Home | None:
        stream = self._streams.get(home)
        if stream is None or stream.sent is not report:
            return None
        stream.sent = None
        return stream

    def check(self) -> None:
        """Raises AssertionError unless every shard that was told has a conversation to go on with."""
        assert all(home in self._streams for _, home in self._told.values())
