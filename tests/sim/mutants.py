"""Deliberate faults in production code, and the seed of a world that catches each. The simulation is worth what it catches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from tensorcast_connector.config import REPORT_RETRY_S
from tensorcast_connector.core.catalog import Catalog
from tensorcast_connector.core.cluster import ClusterView, _Listing
from tensorcast_connector.core.homes import Homes
from tensorcast_connector.core.leases import ShardLeases
from tensorcast_connector.core.member import Member
from tensorcast_connector.core.metadata import Metadata
from tensorcast_connector.core.reports import Reporter
from tensorcast_connector.core.segments import Segments
from tensorcast_connector.errors import Compacted
from tensorcast_connector.store.kv import Delete
from tensorcast_connector.store.server import Store
from tensorcast_connector.store.sqlite_kv import SqliteKv
from tensorcast_connector.types import Token, WorkerId
from tensorcast_connector.wire.messages import Message, Ok, Reported, ReportKeys
from tensorcast_connector.wire.store_messages import Changes, KeepAlive, ReleaseShards, Watch
from tensorcast_connector.worker.pages import Pages
from tests.sim import life_mutants, plan_mutants
from tests.sim.engine_process import EngineProcess

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """A fault, and how it is found."""

    apply: Callable[[Patch], None]
    seed: int
    complaint: str  # what the invariant says, as a regular expression

    @property
    def name(self) -> str:
        """What is wrong."""
        return self.apply.__name__.strip("_").replace("_", " ")


# --- fencing and homes ---


def _no_fence_check(patch: Patch) -> None:
    """Whoever claims a shard last is believed."""
    observe = Homes.observe

    def credulous(self: Homes, shard: int, token: Token, home: WorkerId) -> bool:
        best = self._best.get(shard)
        if best is not None and token < best[0]:
            shards = self._of[best[1]]
            del self._best[shard], shards[shard]
            if not shards:
                del self._of[best[1]]
        return observe(self, shard, token, home)

    patch.setattr(Homes, "observe", credulous)


def _home_accepts_any_token(patch: Patch) -> None:
    """A report counts if the shard is held, under whatever token it came."""
    report = Metadata._report

    def any_token(self: Metadata, message: ReportKeys, now: float) -> Reported:
        grants = [(shard, *self.leases.held.get(shard, token)) for shard, *token in message.shards]
        return report(self, msgspec.structs.replace(message, shards=grants), now)

    patch.setattr(Metadata, "_report", any_token)


def _home_ignores_its_own_expiry(patch: Patch) -> None:
    """A home takes reports as long as nobody has told it that its lease is over."""
    patch.setattr(ShardLeases, "may_write", lambda self, now: bool(self.lease_id))


def _keepalive_counts_from_its_reply(patch: Patch) -> None:
    """The lease is taken for valid from when the answer came, not from before it was asked."""
    answered = Member.answered

    def late(self: Member, call: Any, reply: Any, now: float) -> None:
        call.sent_at = now
        answered(self, call, reply, now)

    patch.setattr(Member, "answered", late)


def _clock_drift_ignored(patch: Patch) -> None:
    """The lease is taken for valid for its whole ttl, however fast the store's clock goes."""
    patch.setattr("tensorcast_connector.core.leases.CLOCK_DRIFT_MAX", 0.0)


def _given_back_but_still_served(patch: Patch) -> None:
    """A home goes on with a shard that it has just given back."""
    patch.setattr(ShardLeases, "given_back", lambda self, shards, now: [self.held[each].revision for each in shards])


def _woken_for_nothing(patch: Patch) -> None:
    """A worker without a valid lease wants to claim shards at once, again and again."""

    def wake_at(self: ShardLeases, now: float) -> float:
        return min((at for _, at in [*self._claim_times(), *self._handover_times()]), default=float("inf"))

    patch.setattr(ShardLeases, "wake_at", wake_at)


# --- reports ---


def _takeover_without_inventory(patch: Patch) -> None:
    """A new home asks nobody, and workers do not begin anew with it."""
    patch.setattr(Metadata, "_ask_times", lambda self: {})

    def untold(self: Reporter) -> dict[WorkerId, list[int]]:
        shards = {home: [each for each in self._homes.of(home) if each not in self._told] for home in self._streams}
        return {home: each for home, each in shards.items() if each}

    def report(self: Catalog, worker: Any, number: int, shards: Any, reset: Any, *keys: Any) -> list[int]:
        return reported(self, worker, number, shards, {*reset, *shards} - self._begun.get(worker, set()), *keys)

    reported = Catalog.report
    patch.setattr(Reporter, "_untold", untold)
    patch.setattr(Catalog, "report", report)


def _late_report_accepted(patch: Patch) -> None:
    """A report counts even if a later one of the same worker was there before."""
    report = Catalog.report

    def unnumbered(self: Catalog, worker: Any, number: int, *rest: Any) -> list[int]:
        self._numbers.clear()
        return report(self, worker, number, *rest)

    patch.setattr(Catalog, "report", unnumbered)


def _failed_report_forgotten(patch: Patch) -> None:
    """What a report said is not said again when nobody knows whether it arrived."""

    def failed(self: Reporter, home: WorkerId, report: ReportKeys, now: float) -> None:
        stream = self._finish(home, report)
        if stream is not None:
            stream.retry_at = now + REPORT_RETRY_S

    patch.setattr(Reporter, "failed", failed)


def _evicted_page_not_reported(patch: Patch) -> None:
    """Homes hear of new pages only."""

    def announce(self: Pages, added: Sequence[bytes]) -> None:
        self._segments.take_evicted()
        if added and self.elsewhere is not None:
            self.elsewhere.changed(added)

    patch.setattr(Pages, "_announce", announce)


def _forgets_who_left_too_late(patch: Patch) -> None:
    """A home lists the pages of workers that are not there any more."""
    patch.setattr(Catalog, "keep_only", lambda self, workers: None)


# --- the store ---


def _token_counter_lost_on_restart(patch: Patch) -> None:
    """Revisions, and so tokens, begin anew."""
    begin = SqliteKv.__init__

    def forgetful(self: SqliteKv, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        self._atomically(lambda: self._set_meta("revision", 1))
        self._atomically(lambda: self._set_meta("compacted", 1))
        self._db.execute("DELETE FROM history")
        self._last_revision = self._compacted = 1

    patch.setattr(SqliteKv, "__init__", forgetful)


def _renewal_revives_an_expired_lease(patch: Patch) -> None:
    """A keepalive that comes too late makes the lease anew."""
    keepalive = Store._keep_alive

    async def revive(self: Store, message: KeepAlive) -> Message:
        kv: Any = self._kv
        await kv.revision()
        if message.lease_id not in kv._deadline:
            kv._db.execute("INSERT INTO lease VALUES (?, 6)", (message.lease_id,))
            kv._ttl_s[message.lease_id] = 6
            kv._set_deadline(message.lease_id)
        return await keepalive(self, message)

    patch.setitem(Store._handlers, KeepAlive, revive)


def _store_answers_before_it_is_durable(patch: Patch) -> None:
    """Several transactions are committed together, later."""

    def lazily(self: SqliteKv, work: Callable[[], Any], _: str = "") -> Any:
        if not self._db.in_transaction:
            self._db.execute("BEGIN IMMEDIATE")
        result = work()
        self._lazy = getattr(self, "_lazy", 0) + 1  # type: ignore[attr-defined]
        if self._lazy % 8 == 0:  # type: ignore[attr-defined]
            self._db.execute("COMMIT")
        return result

    patch.setattr(SqliteKv, "_atomically", lazily)


def _release_of_somebody_elses_shard(patch: Patch) -> None:
    """A shard is given back by whoever says so."""

    async def release(self: Store, message: ReleaseShards) -> Message:
        for shard in await self._known(message.shards):
            await self._kv.txn([], [Delete(f"cluster/shards/{shard}")])
        return Ok()

    patch.setitem(Store._handlers, ReleaseShards, release)


def release_of_a_later_grant(patch: Patch) -> None:
    """A shard is given back by a message about an earlier grant to the same lease.

    No world is so unlucky; test_found.py plays it on purpose.
    """
    release = Store._release

    async def any_grant(self: Store, message: ReleaseShards) -> Message:
        return await release(self, ReleaseShards(message.lease_id, message.shards))

    patch.setitem(Store._handlers, ReleaseShards, any_grant)


def _watch_ignores_compaction(patch: Patch) -> None:
    """Who has missed more than the history holds is told that nothing happened."""
    changes = SqliteKv.changes

    async def shortened(self: SqliteKv, prefix: str, after_revision: int) -> Any:
        try:
            return await changes(self, prefix, after_revision)
        except Compacted:
            return await self.revision(), []

    patch.setattr(SqliteKv, "changes", shortened)


def _deletions_missing_in_the_watch(patch: Patch) -> None:
    """What has gone is not told."""
    changes = Store.changes

    async def incomplete(self: Store, message: Watch) -> Changes:
        return msgspec.structs.replace(await changes(self, message), deleted=[])

    patch.setattr(Store, "changes", incomplete)


def _first_page_taken_for_the_whole(patch: Patch) -> None:
    """Who is on a later page of a listing counts as gone."""
    apply = ClusterView.apply

    def hasty(self: ClusterView, changes: Changes) -> None:
        apply(self, msgspec.structs.replace(changes, more=False))

    patch.setattr(ClusterView, "apply", hasty)


def _nothing_asked_after_the_last_page(patch: Patch) -> None:
    """What happened since the first page of a listing is not waited for."""
    add = _Listing.add

    def hasty(self: _Listing, changes: Changes) -> Changes | None:
        done = add(self, changes)
        if changes.more:
            return done
        return done or Changes(self.incarnation, changes.revision, True, list(self._entries.values()), [])

    patch.setattr(_Listing, "add", hasty)


# --- pages ---


def _reservation_freed_by_time(patch: Patch) -> None:
    """A slot that was reserved long ago is given to somebody else."""
    reserve = Segments.reserve
    patience = 12

    def impatient(self: Any, owner: Any, key: bytes, length: int) -> Any:
        self.age = {**getattr(self, "age", {}), key: self._uses}
        for old, page in list(self._pages.items()):
            if page.owner is not None and self._uses - self.age.get(old, self._uses) > patience:
                self.abort(page.owner, old)
        return reserve(self, owner, key, length)

    patch.setattr(Segments, "reserve", impatient)


def _reservation_outlives_its_connection(patch: Patch) -> None:
    """A connection ends, and what it had reserved is never free again."""

    def end_session(self: Pages, session: int) -> None:
        for hold_id in self._holds_of.pop(session, set()):
            self._segments.release((session, hold_id))

    patch.setattr(Pages, "end_session", end_session)


def _hold_ignored_by_eviction(patch: Patch) -> None:
    """A page that somebody reads may be evicted."""

    def hold(self: Segments, holder: Any, keys: Any) -> list[bytes]:
        return [key for key in keys if not self.resident(key)]

    patch.setattr(Segments, "hold", hold)


def _engine_closes_before_its_copies_are_done(patch: Patch) -> None:
    """The engine's side of a connection goes while one of its threads still writes."""
    patch.setattr(EngineProcess, "closes_after_copies", False)


def _page_readable_before_its_commit(patch: Patch) -> None:
    """Whoever wants to read a page that is being written gets it."""
    hold = Segments.hold

    def eager(self: Segments, holder: Any, keys: Sequence[bytes]) -> list[bytes]:
        for key in keys:
            if self.owner(key) is not None:
                self.commit(self.owner(key), key, 0)
        return hold(self, holder, keys)

    patch.setattr(Segments, "hold", eager)


def _late_listing_stands(patch: Patch) -> None:
    """Nobody compares what the store lists of a worker with what the worker has."""
    patch.setattr(Member, "_compare", lambda self: None)


MUTANTS = [
    Mutant(_no_fence_check, 12, "believes in Token|accepts a .* under"),
    Mutant(_home_accepts_any_token, 22, "accepts a report .* under"),
    Mutant(_home_ignores_its_own_expiry, 36, "are both the home"),
    Mutant(_keepalive_counts_from_its_reply, 243, "are both the home"),
    Mutant(_clock_drift_ignored, 190, "are both the home"),
    Mutant(_given_back_but_still_served, 2, "are both the home|takes shard"),
    Mutant(_woken_for_nothing, 59, "nothing to do"),
    Mutant(_takeover_without_inventory, 6, "not settled .* lists"),
    Mutant(_late_report_accepted, 13, "not settled .* lists"),
    Mutant(_failed_report_forgotten, 4, "not settled .* lists"),
    Mutant(_evicted_page_not_reported, 3, "not settled .* lists"),
    Mutant(_forgets_who_left_too_late, 0, "not settled .* lists|check failed"),
    Mutant(_token_counter_lost_on_restart, 22, "revision 1 after|is granted to .* after|was .* and is"),
    Mutant(_renewal_revives_an_expired_lease, 2, "too late|had ended and are alive"),
    Mutant(_store_answers_before_it_is_durable, 22, "revision .* after|was .* and is|are lost"),
    Mutant(_release_of_somebody_elses_shard, 26, "takes shard"),
    Mutant(_watch_ignores_compaction, 8, "not settled .* knows"),
    Mutant(_deletions_missing_in_the_watch, 0, "not settled .* knows"),
    Mutant(_first_page_taken_for_the_whole, 0, "not settled .* knows|are both the home"),
    Mutant(_nothing_asked_after_the_last_page, 17, "not settled .* knows|check failed"),
    Mutant(life_mutants.restored_store_grants_at_once, 138, "are both the home"),
    Mutant(life_mutants.former_life_is_nothing_to_the_store, 9, "as if there had been none"),
    Mutant(life_mutants.grants_of_before_stand, 9, "while nobody is to be a home|can be renewed"),
    Mutant(life_mutants.grants_taken_back_under_a_lease_that_lives, 9, "takes shard|can be renewed"),
    Mutant(_late_listing_stands, 13, "not settled .* the store lists"),
    Mutant(_reservation_freed_by_time, 7, "gave the slot"),
    Mutant(_reservation_outlives_its_connection, 13, "pages reserved"),
    Mutant(_hold_ignored_by_eviction, 9, "evicted"),
    Mutant(_engine_closes_before_its_copies_are_done, 5, "writes .* not reserved|never committed"),
    Mutant(_page_readable_before_its_commit, 4, "gave the slot|never committed"),
    Mutant(plan_mutants.record_after_dispatch, 7, "before its record is there"),
    Mutant(plan_mutants.records_written_without_compare, 7, "the record of plan .* changes|becomes another|goes from"),
    Mutant(plan_mutants.taken_over_under_the_same_epoch, 8, "goes from .* to"),
    Mutant(plan_mutants.follower_dispatches, 7, "before its record is there"),
    Mutant(
        plan_mutants.conflict_taken_as_written,
        7,
        "before its record is there|the record of plan .* changes|becomes another|goes from",
    ),
    Mutant(plan_mutants.finished_plan_run_again_by_its_owner, 8, "the record of plan .* changes"),
    Mutant(plan_mutants.result_visible_before_the_record, 7, "which the store does not say"),
    Mutant(plan_mutants.orphans_are_nobodys, 15, "not settled .* run"),
    Mutant(plan_mutants.needs_ignored, 7, "before step"),
    Mutant(plan_mutants.gateway_woken_for_nothing, 7, "again and again for plans"),
    Mutant(plan_mutants.retry_without_idempotency, 25, "which it has done|which was None"),
    Mutant(plan_mutants.step_under_way_begun_again, 7, "which it is doing"),
    Mutant(plan_mutants.ledger_without_epochs, 39, "after the epoch"),
    Mutant(plan_mutants.cancelled_step_begun_later, 26, "which was cancelled"),
    Mutant(plan_mutants.step_outlives_its_plan, 26, "after nobody waits|not settled .* still does"),
]
