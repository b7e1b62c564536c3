"""A cluster with callers: their sessions, tensors to put, and what has to hold of every worker's artifacts."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensorcast_connector.client.session import Session, connect
from tensorcast_connector.config import ARTIFACT_BYTES_MIN
from tensorcast_connector.worker.blob import Blob
from tensorcast_connector.worker.server import Worker
from tests.cluster import Cluster, plane
from tests.waiting import until


def weights(seed: int = 0, count: int = 3, size: int = 500) -> dict[str, Any]:
    """Tensors with bytes of their own."""
    chance = np.random.default_rng(seed)
    return {f"w{number}": chance.integers(0, 256, (size, 2), np.uint8) for number in range(count)}


def equal(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """The same names, and bit by bit the same tensors."""
    return list(got) == sorted(wanted) and all(
        got[name].dtype == wanted[name].dtype and got[name].shape == wanted[name].shape
        and got[name].tobytes() == wanted[name].tobytes() for name in wanted
    )  # fmt: skip


class Pool(Cluster):
    """See the module."""

    sessions: list[Session]

    async def start(
        self, *names: str, artifact_bytes: int = 8 << 20, devices: str = "", device_bytes: int = 64 << 20
    ) -> list[Worker]:
        """A store and workers that know each other."""
        self.sessions = []
        await self.start_store()
        workers = [
            await self.worker(name, artifact_bytes=artifact_bytes, devices=devices, device_bytes=device_bytes)
            for name in names or ("a",)
        ]
        await self.settled()
        return workers

    async def session(self, worker: Worker, scheme: str = "unix", tenant: str = "default") -> Session:
        """A caller at that worker."""
        address = worker.socket if scheme == "unix" else worker.address
        session = await connect(str(address), tenant=tenant, network=self.network)
        self.sessions.append(session)
        return session

    async def seen(self) -> None:
        """Until every worker has heard of all that was written by now; a caller sees at once only what it wrote itself."""
        assert self.kv is not None
        revision = await self.kv.revision()
        await until(lambda: all(plane(each).view.revision >= revision for each in self.workers))

    async def die(self, session: Session) -> None:
        """Its process is gone: nothing more is said."""
        self.sessions.remove(session)
        session._leases.forsake()
        await session._link.close()

    async def listed(self, identity: str, workers: Sequence[Worker]) -> None:  # type: ignore[override]
        """Until every worker sees copies at exactly these."""
        ids = {worker.worker_id for worker in workers}
        await until(lambda: all(set(plane(each).view.replicas.get(identity, {})) == ids for each in self.workers))

    def keepers(self, identity: str) -> list[Worker]:
        """The workers that keep it."""
        return [each for each in self.workers if identity in each.artifacts.residence and keeps(each, identity)]

    def check(self) -> None:
        super().check()
        for worker in self.workers:
            check_artifacts(worker)

    async def close(self) -> None:
        for session in getattr(self, "sessions", []):
            await session.close()
        for worker in self.workers:
            await until(lambda worker=worker: not worker.artifacts.statistics()["uploads"])
        await super().close()


def keeps(worker: Worker, identity: str) -> bool:
    """Whether it does."""
    return worker.artifacts.residence.keeps(identity)


def check_artifacts(worker: Worker) -> None:
    """The memory is accounted for, and what is resident is exactly what there are copies of."""
    artifacts = worker.artifacts
    artifacts.residence.check()
    assert set(artifacts._copies) == set(artifacts.residence.artifacts)
    held = sum(each.bytes for each in _blobs(worker)) + _padding(worker)
    if not artifacts._arriving:
        assert artifacts.residence.used_bytes == held
    for copy in artifacts._copies.values():
        assert os.fstat(copy.blob.descriptor).st_size == copy.blob.bytes


def used(worker: Worker) -> int:
    """Bytes of artifacts and uploads there."""
    return worker.artifacts.residence.used_bytes - _padding(worker)


def _blobs(worker: Worker) -> list[Blob]:
    return [each.blob for each in [*worker.artifacts._copies.values(), *worker.artifacts._uploads.values()]]


def _padding(worker: Worker) -> int:
    """What small ones count for more than they have."""
    return sum(max(ARTIFACT_BYTES_MIN - each.bytes, 0) for each in _blobs(worker))
