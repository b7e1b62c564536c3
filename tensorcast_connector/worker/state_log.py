"""The changes of a worker's state, each told once: one line in the log, with its ids as fields, and one event in the stories.

Shards come and go a few at a time. Each change is an event in the stories at once; the log gets one line when they have
settled.
"""

import logging
from collections.abc import Mapping

from tensorcast_connector.config import PEER_UNREACHABLE_AFTER_S, SHARDS_SETTLED_AFTER_S, SHARDS_UNSETTLED_MAX_S
from tensorcast_connector.core.metadata import Metadata
from tensorcast_connector.errors import Unavailable
from tensorcast_connector.net.rpc_client import RpcClient
from tensorcast_connector.types import WorkerId
from tensorcast_connector.worker.artifact_log import ArtifactLog
from tensorcast_connector.worker.recorder import Record

logger = logging.getLogger(__name__)
_LOOKS_PER_DELAY = 4  # how exactly PEER_UNREACHABLE_AFTER_S is kept


class StateLog:
    """Compares what is with what was told last: whether the worker has joined, its shards, the store, its peers, artifacts."""

    def __init__(self, metadata: Metadata, record: Record) -> None:
        self._metadata = metadata
        self._record = record
        self._artifacts = ArtifactLog(metadata.view, record)
        self._lease = 0
        self._shards: frozenset[int] = frozenset()
        self._shards_told = self._shards  # in the log
        self._shards_changed_at = self._shards_unsettled_since = float("inf")  # inf: the log has been told
        self._store_is_there = True
        self._store_away_since = 0.0  # if it is not there
        self._apart_since: dict[WorkerId, float] = {}
        self.unreachable: set[WorkerId] = set()  # workers listed that have not been reached for a while
        self._look_at = 0.0
        self.counters = {"leases_lost": 0, "shards_gained": 0, "shards_lost": 0, "store_losses": 0}

    def __repr__(self) -> str:
        return f"<StateLog lease {self._lease}, {len(self._shards)} shards, {len(self.unreachable)} unreachable>"

    def tell(self, clients: Mapping[WorkerId, RpcClient], store: str, now: float) -> None:
        """Tells what has changed since the last call.

        Args:
            clients: the other workers that are listed.
            store: address of the store that is talked to.
            now: the worker's clock in seconds.
        """
        self._tell_lease()
        self._tell_shards(now)
        self._tell_store(store, now)
        self._artifacts.tell(now)
        if now >= self._look_at:
            self._look_at = now + PEER_UNREACHABLE_AFTER_S / _LOOKS_PER_DELAY
            self._tell_peers(clients, now)

    def _tell_lease(self) -> None:
        lease = self._metadata.member.lease_id
        if lease == self._lease:
            return
        before, self._lease = self._lease, lease
        me = self._metadata.worker_id
        if before:
            self.counters["leases_lost"] += 1
            self._record("lease lost", me)
        if lease:
            logger.info("joined the cluster as %s", me, extra={"event": "joined", "worker_id": me, "lease_id": lease})
            self._record("joined", me)
        else:
            fields = {"event": "lease-lost", "worker_id": me, "lease_id": before}
            logger.info("the lease of %s has ended", me, extra=fields)

    def _tell_shards(self, now: float) -> None:
        held = self._metadata.leases.held
        if held.keys() != self._shards:
            before, self._shards = self._shards, frozenset(held)
            gained, lost = sorted(self._shards - before), sorted(before - self._shards)
            self.counters["shards_gained"] += len(gained)
            self.counters["shards_lost"] += len(lost)
            if gained:
                self._record("shards gained", self._metadata.worker_id, shards=gained)
            if lost:
                self._record("shards lost", self._metadata.worker_id, shards=lost)
            self._shards_changed_at = now
            self._shards_unsettled_since = min(self._shards_unsettled_since, now)
        settled = now - self._shards_changed_at >= SHARDS_SETTLED_AFTER_S
        if settled or now - self._shards_unsettled_since >= SHARDS_UNSETTLED_MAX_S:
            self._shards_changed_at = self._shards_unsettled_since = float("inf")
            self._log_shards()

    def _log_shards(self) -> None:
        before, self._shards_told = self._shards_told, self._shards
        gained, lost = sorted(self._shards - before), sorted(before - self._shards)
        if not gained and not lost:
            return
        me, held, count = self._metadata.worker_id, len(self._shards), self._metadata.view.shard_count
        fields = {"event": "shards", "worker_id": me, "gained": gained, "lost": lost, "held": held}
        changes = ", ".join(f"{len(each)} {word}" for each, word in ((gained, "gained"), (lost, "lost")) if each)
        logger.info("home of %d shards of %d (%s)", held, count, changes, extra=fields)

    def store_away(self, error: Unavailable, now: float) -> Unavailable:
        """What callers are told for `error`, which came when the store was asked for them: as retriable, and no less certain."""
        since = "" if self._store_is_there else f" for {max(0.0, now - self._store_away_since):.0f} s"
        return type(error)(
            f"the store cannot be reached{since} ({error}); what is there can be read meanwhile, and put when it is back"
        )

    def _tell_store(self, store: str, now: float) -> None:
        error = self._metadata.member.store_error
        if (error is None) == self._store_is_there:
            return
        self._store_is_there = error is None
        if error is None:
            away_s = now - self._store_away_since
            fields = {"event": "store-back", "store": store, "away_s": round(away_s, 3)}
            logger.info("the store at %s is back after %.0f s", store, away_s, extra=fields)
            self._record("store back", store)
        else:
            self.counters["store_losses"] += 1
            self._store_away_since = now
            fields = {"event": "store-lost", "store": store, "error": str(error)}
            rest = (
                "lookups, reads and transfers go on with the members known"
                if self._lease
                else "not joined yet, serving the engines of this host"
            )
            logger.warning("the store cannot be reached: %s; %s", error, rest, extra=fields)
            self._record("store lost", store, cause=str(error))

    def _tell_peers(self, clients: Mapping[WorkerId, RpcClient], now: float) -> None:
        for worker_id, client in clients.items():
            if client.connected:
                self._apart_since.pop(worker_id, None)
                if worker_id in self.unreachable:
                    self.unreachable.discard(worker_id)
                    fields = {"event": "peer-reachable", "peer": worker_id}
                    logger.info("worker %s can be reached again", worker_id, extra=fields)
                    self._record("peer reachable", worker_id)
                continue
            apart_s = now - self._apart_since.setdefault(worker_id, now)
            if apart_s >= PEER_UNREACHABLE_AFTER_S and worker_id not in self.unreachable:
                self.unreachable.add(worker_id)
                fields = {"event": "peer-unreachable", "peer": worker_id, "error": str(client.error)}
                logger.warning("worker %s cannot be reached: %s", worker_id, client.error, extra=fields)
                self._record("peer unreachable", worker_id, cause=str(client.error))
        for worker_id in self._apart_since.keys() - clients.keys():
            del self._apart_since[worker_id]
            if worker_id in self.unreachable:
                self.unreachable.discard(worker_id)
                fields = {"event": "peer-left", "peer": worker_id}
                logger.info("worker %s has left", worker_id, extra=fields)
                self._record("peer left", worker_id)
