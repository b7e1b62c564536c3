"""The shard leases of one worker: which it may claim, which it holds, until when, and which it should hand over.

All shards of a worker hang on its one lease at the store, so one heartbeat renews them all (TensorCast, section 4.2). What
it holds is what the store's watch says hangs on that lease; the reply to a claim is not needed for it, and may be lost.

The lease is valid until its ttl, less what clocks may drift, has passed on this worker's clock since *before* the last
renewal was sent. The store can only let it expire later than that.
"""

from collections.abc import Sequence

from tensorcast_connector.config import (
    CLAIM_RETRY_S,
    CLAIM_STAGGER_S,
    CLOCK_DRIFT_MAX,
    HANDOVER_AFTER_S,
    HANDOVER_DOUBLINGS_MAX,
    HANDOVER_SHARDS_MAX,
    SHARD_CONTENDERS,
    SHARD_HOME,
)
from tensorcast_connector.core.cluster import ClusterView
from tensorcast_connector.core.placement import shard_ranking
from tensorcast_connector.types import Token, WorkerId


class ShardLeases:
    """See the module. `now` is always this worker's clock: seconds that go on during suspend and never jump back."""

    def __init__(self, me: WorkerId) -> None:
        self._me = me
        self._valid_until = 0.0
        self._members: frozenset[WorkerId] = frozenset()
        self._shard_count = 0
        self._ranking: list[list[WorkerId]] = []  # per shard
        self._seen_since: dict[WorkerId, float] = {}
        self._vacant_since: dict[int, float] = {}
        self._claim_after: dict[int, float] = {}
        self._held_since: dict[int, float] = {}
        self._giving_up: dict[int, tuple[Token, float]] = {}  # under which token, and when to say so again
        self._give_up_after = 0.0
        self._offers: dict[int, int] = {}  # how often a shard was given back and nobody else took it
        self.lease_id = 0
        self.held: dict[int, Token] = {}

    def __repr__(self) -> str:
        return f"<ShardLeases {len(self.held)} held by lease {self.lease_id} until {self._valid_until:g}>"

    # --- the lease ---

    def renewed(self, lease_id: int, sent_at: float, ttl_s: float) -> None:
        """The store granted or renewed the lease; `sent_at` is from before it was asked."""
        if lease_id != self.lease_id:
            self.lost()
            self.lease_id = lease_id
        self._valid_until = max(self._valid_until, sent_at + ttl_s * (1 - 2 * CLOCK_DRIFT_MAX))

    def lost(self) -> None:
        """The lease has ended: everything that hung on it is somebody else's, maybe already."""
        self.lease_id = 0
        self._valid_until = 0.0
        self._giving_up = {}
        self.held = {}

    def may_write(self, now: float) -> bool:
        """Whether nobody else can hold our shards yet."""
        return now < self._valid_until

    # --- shards ---

    def update(self, view: ClusterView, now: float) -> None:
        """The view has changed."""
        members = frozenset(worker for worker, record in view.workers.items() if SHARD_HOME in record.roles)
        if members != self._members or view.shard_count != self._shard_count:
            self._members, self._shard_count = members, view.shard_count
            self._ranking = [shard_ranking(shard, members) for shard in range(view.shard_count)]
        self._seen_since = {worker: self._seen_since.get(worker, now) for worker in members}
        self._vacant_since = {
            shard: self._vacant_since.get(shard, now) for shard in range(view.shard_count) if shard not in view.shards
        }
        self._claim_after = {shard: at for shard, at in self._claim_after.items() if shard in self._vacant_since}
        mine = {
            shard: holder.token
            for shard, holder in view.shards.items()
            if self.lease_id and holder.lease_id == self.lease_id and holder.worker_id == self._me
        }
        self._giving_up = {shard: given for shard, given in self._giving_up.items() if mine.get(shard) == given[0]}
        self.held = {shard: token for shard, token in mine.items() if shard not in self._giving_up}
        self._held_since = {shard: self._held_since.get(shard, now) for shard in self.held}
        self._offers = {
            shard: count for shard, count in self._offers.items() if shard in mine or shard not in view.shards
        }

    def claims(self, now: float) -> list[int]:
        """Vacant shards to ask for now: the best ranked worker asks at once, the next ones a little later."""
        if not self.may_write(now):
            return []
        return [shard for shard, at in self._claim_times() if at <= now]

    def claimed(self, shards: Sequence[int], now: float) -> None:
        """They have been asked for; the watch tells whether they were granted."""
        for shard in shards:
            self._claim_after[shard] = now + CLAIM_RETRY_S

    def handovers(self, now: float) -> list[int]:
        """Held shards to give back now: a better placed worker has been here for a while."""
        if not self.may_write(now):
            return []
        return [shard for shard, at in self._handover_times() if at <= now][:HANDOVER_SHARDS_MAX]

    def given_back(self, shards: Sequence[int], now: float) -> list[int]:
        """The store is being told so; from now on this worker is not their home, whatever becomes of the message.

        Returns the revisions of the grants: the message may come late, when the shard has been granted anew.
        """
        for shard in shards:
            if shard in self.held:
                self._offers[shard] = self._offers.get(shard, 0) + 1
            token = self.held.pop(shard, None) or self._giving_up[shard][0]
            self._giving_up[shard] = token, now + CLAIM_RETRY_S
        self._give_up_after = now + CLAIM_RETRY_S  # until then somebody else is their home
        return [self._giving_up[shard][0].revision for shard in shards]

    def wake_at(self, now: float) -> float:
        """When there is next something to claim or to give back, if nothing else happens."""
        if not self.may_write(now):
            return float("inf")  # nothing before the lease is renewed
        times = [at for _, at in [*self._claim_times(), *self._handover_times()]]
        return min(times, default=float("inf"))

    def _claim_times(self) -> list[tuple[int, float]]:
        times = []
        for shard, since in self._vacant_since.items():
            contenders = self._ranking[shard][:SHARD_CONTENDERS]
            if self.lease_id and self._me in contenders:
                at = since + contenders.index(self._me) * CLAIM_STAGGER_S
                times.append((shard, max(at, self._claim_after.get(shard, at))))
        return times

    def _handover_times(self) -> list[tuple[int, float]]:
        return [(shard, at) for shard, (_, at) in self._giving_up.items()] + [
            (shard, max(max(self._seen_since[best], since) + self._patience(shard), self._give_up_after))
            for shard, since in self._held_since.items()
            if shard in self.held and (best := (self._ranking[shard] or [self._me])[0]) != self._me
        ]

    def _patience(self, shard: int) -> float:
        """How long a better placed worker waits; twice as long after each time that it did not take the shard."""
        return HANDOVER_AFTER_S * float(2 ** min(self._offers.get(shard, 0), HANDOVER_DOUBLINGS_MAX))

    def check(self) -> None:
        """Raises AssertionError unless the tables agree."""
        assert bool(self.lease_id) or not self.held
        assert not set(self.held) & (set(self._vacant_since) | set(self._giving_up))
