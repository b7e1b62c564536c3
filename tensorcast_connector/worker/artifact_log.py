"""What becomes of artifacts in the cluster, as this worker sees it, for its stories: recorded, named, copied, kept, deleted."""

from collections.abc import Mapping
from typing import TypeVar

from tensorcast_connector.config import ARTIFACT_LOOK_S
from tensorcast_connector.core.cluster import ClusterView
from tensorcast_connector.wire.store_messages import ArtifactRecord
from tensorcast_connector.worker.recorder import Record

V = TypeVar("V")


class ArtifactLog:
    """Compares the view of the cluster with what was told last. What has come and gone between two looks is not told.

    Args:
        view: of the cluster, kept current by somebody else.
        record: of the worker's stories; events are about the artifact's id, and can be asked for by its names.
    """

    def __init__(self, view: ClusterView, record: Record) -> None:
        self._view = view
        self._record = record
        self._seen = 0, 0  # which state of the view
        self._look_at = 0.0
        self._artifacts: dict[tuple[str, str], dict[str, ArtifactRecord]] = {}  # as in the view
        self._names: dict[tuple[str, str], str] = {}
        self._copies: dict[tuple[str, str], bool] = {}  # artifact and worker -> whether it is the keeper

    def __repr__(self) -> str:
        return f"<ArtifactLog: {len(self._artifacts)} artifacts, {len(self._names)} names, {len(self._copies)} copies>"

    def tell(self, now: float) -> None:
        """Tells what has changed, if it is time to look again.

        Args:
            now: the worker's clock in seconds.
        """
        seen = self._view.incarnation, self._view.revision
        if now < self._look_at or seen == self._seen:
            return
        self._look_at, self._seen = now + ARTIFACT_LOOK_S, seen
        self._tell_artifacts()
        self._tell_names()
        self._tell_copies()

    def _tell_artifacts(self) -> None:
        before, self._artifacts = self._artifacts, dict(self._view.artifacts)
        for (tenant, identity), owners in _new(before, self._artifacts).items():
            one = next(iter(owners.values()))
            leased = f", under lease {one.lease_id}" if one.lease_id else ""
            what = f"{one.bytes} bytes in {one.tensors} tensors for tenant {tenant}{leased}"
            self._record("artifact recorded", identity, cause=what)
        for tenant, identity in before.keys() - self._artifacts.keys():
            self._record("artifact deleted", identity, cause=f"of tenant {tenant}, or its lease has ended")

    def _tell_names(self) -> None:
        before, self._names = self._names, dict(self._view.names)
        for (tenant, name), identity in before.items():
            if self._names.get((tenant, name)) != identity:
                cause = f"{name!r} of tenant {tenant} points elsewhere, or is gone"
                self._record("name taken", identity, names=(name,), cause=cause)
        for (tenant, name), identity in self._names.items():
            if before.get((tenant, name)) != identity:
                self._record("name given", identity, names=(name,), cause=f"{name!r} of tenant {tenant} points to it")

    def _tell_copies(self) -> None:
        before = self._copies
        self._copies = now = {
            (artifact, str(worker_id)): copy.keeper
            for artifact, copies in self._view.replicas.items()
            for worker_id, copy in copies.items()
        }
        for (artifact, worker_id), keeper in _new(before, now).items():
            self._record("copy", artifact, cause=f"at {worker_id}{', the keeper' if keeper else ''}")
        for (artifact, worker_id), keeper in now.items():
            if before.get((artifact, worker_id), keeper) != keeper:
                self._record("keeper" if keeper else "keeper no more", artifact, cause=f"is the copy at {worker_id}")
        for artifact, worker_id in before.keys() - now.keys():
            self._record("copy gone", artifact, cause=f"from {worker_id}: evicted, deleted, or the worker has left")


def _new(before: Mapping[tuple[str, str], V], after: Mapping[tuple[str, str], V]) -> dict[tuple[str, str], V]:
    """What is in `after` alone."""
    return {key: value for key, value in after.items() if key not in before}
