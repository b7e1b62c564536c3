"""The same for programs without an event loop: every method waits, and may be called from any thread.

with connect_blocking("unix:/run/tensorcast/worker.sock") as session:
    session.put({"w": tensor}, name="policy:v1")
    tensors = session.artifact("policy:v1").tensor_dict(framework="torch")
"""

import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from tensorcast_connector.client.artifact import Artifact, Description, Slices
from tensorcast_connector.client.blocking_weights import BlockingWeightPublisher, BlockingWeights
from tensorcast_connector.client.caller_loop import CallerLoop
from tensorcast_connector.client.files import Tensors
from tensorcast_connector.client.ownership import SYSTEM, Leased
from tensorcast_connector.client.plan import CallContext, OnInstance, OnWorker, Plan, PlanHandle, PlanOutcome, Referring
from tensorcast_connector.client.publisher import WeightPublisher
from tensorcast_connector.client.reading import Progress
from tensorcast_connector.client.session import Session, connect
from tensorcast_connector.client.tensors import Framework
from tensorcast_connector.client.upload import Upload
from tensorcast_connector.client.weights import WeightVersion
from tensorcast_connector.config import PLAN_CONCURRENCY, PLAN_DEADLINE_S, WEIGHT_VERSIONS_KEPT
from tensorcast_connector.core.plan import PlanRecord
from tensorcast_connector.errors import InvalidArgument
from tensorcast_connector.wire.caller_messages import (
    ArtifactListed,
    InstanceListed,
    ReplicaListed,
    ReplicaOpened,
    SignalsListed,
    WorkerListed,
)
from tensorcast_connector.wire.messages import PagesForgotten

T = TypeVar("T")


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)


async def _left(owned: "contextlib.AbstractAsyncContextManager[Leased]") -> None:
    await owned.__aexit__(None, None, None)


def connect_blocking(
    address: str, *, tenant: str = "", token: str = "", tls: tuple[str, str, str] | None = None, name: str = ""
) -> "BlockingSession":
    """See `connect`."""
    loop = CallerLoop()
    try:
        return BlockingSession(loop, loop.run(connect(address, tenant=tenant, token=token, tls=tls, name=name)))
    except BaseException:
        loop.close()
        raise


class BlockingSession:
    """See `Session`. Made by `connect_blocking`."""

    def __init__(self, loop: CallerLoop, session: Session) -> None:
        self._loop = loop
        self._session = session

    def __repr__(self) -> str:
        return f"<Blocking {self._session!r}>"

    def __enter__(self) -> "BlockingSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """See Session.close."""
        try:
            self._loop.run(self._session.close())
        except InvalidArgument:
            return  # it is closed
        self._loop.close()

    def put(
        self, tensors: Tensors, *, name: str = "", ownership: Leased | None = SYSTEM, progress: Progress | None = None
    ) -> "BlockingArtifact":  # fmt: skip
        """See Session.put."""
        made = self._session.put(tensors, name=name, ownership=ownership, progress=progress)
        return BlockingArtifact(self._loop, self._loop.run(made))

    def upload(self, tensors: Iterable[tuple[str, str, Sequence[int]]]) -> "BlockingUpload":
        """See Session.upload."""
        return BlockingUpload(self._loop, self._loop.run(self._session.upload(tensors)))

    def artifact(self, reference: str) -> "BlockingArtifact":
        """See Session.artifact."""
        return BlockingArtifact(self._loop, self._session.artifact(reference))

    def list_artifacts(self, prefix: str = "") -> list[ArtifactListed]:
        """See Session.list_artifacts."""
        return self._loop.run(self._session.list_artifacts(prefix))

    def name(self, name: str, artifact: str | Referring) -> None:
        """See Session.name."""
        self._loop.run(self._session.name(name, artifact))

    def unname(self, name: str) -> None:
        """See Session.unname."""
        self._loop.run(self._session.unname(name))

    def delete(self, reference: str) -> None:
        """See Session.delete."""
        self._loop.run(self._session.delete(reference))

    def forget_pages(self) -> PagesForgotten:
        """See Session.forget_pages."""
        return self._loop.run(self._session.forget_pages())

    def disable(self, what: str, note: str = "") -> None:
        """See Session.disable."""
        self._loop.run(self._session.disable(what, note))

    def enable(self, what: str) -> None:
        """See Session.enable."""
        self._loop.run(self._session.enable(what))

    def list_disabled(self) -> dict[str, str]:
        """See Session.list_disabled."""
        return self._loop.run(self._session.list_disabled())

    @property
    def worker_id(self) -> str:
        """See Session.worker_id."""
        return self._session.worker_id

    def list_workers(self) -> list[WorkerListed]:
        """See Session.list_workers."""
        return self._loop.run(self._session.list_workers())

    def list_instances(self) -> list[InstanceListed]:
        """See Session.list_instances."""
        return self._loop.run(self._session.list_instances())

    def watch(self, interval_s: float = 1.0) -> Iterator[SignalsListed]:
        """See Session.watch."""
        signals = self._session.watch(interval_s)
        while True:
            yield self._loop.run(_next(signals))

    @contextlib.contextmanager
    def lease(self, ttl_s: int) -> Iterator[Leased]:
        """See Session.lease."""
        owned = self._session.lease(ttl_s)
        lease = self._loop.run(owned.__aenter__())
        try:
            yield lease
        finally:
            with contextlib.suppress(InvalidArgument):  # the session was closed meanwhile, and its leases with it
                self._loop.run(_left(owned))

    def weights(self, model: str, version: int | str | None = None) -> "BlockingWeights":
        """See Session.weights."""
        return BlockingWeights(self._loop, self._loop.run(self._session.weights(model, version)))

    def subscribe(self, model: str, *, rollback: bool = False) -> Iterator[WeightVersion]:
        """See Session.subscribe."""
        versions = self._session.subscribe(model, rollback=rollback)
        while True:
            yield self._loop.run(_next(versions))

    def weight_publisher(self, model: str, *, keep_last: int = WEIGHT_VERSIONS_KEPT) -> "BlockingWeightPublisher":
        """A WeightPublisher."""
        publisher = self._loop.call(lambda: WeightPublisher(self._session, model, keep_last=keep_last))
        return BlockingWeightPublisher(self._loop, publisher)

    def plan(self, context: CallContext | None = None) -> "BlockingPlan":
        """See Session.plan."""
        return BlockingPlan(self._loop, self._session.plan(context))

    def plan_record(self, key: str) -> PlanRecord:
        """See Session.plan_record."""
        return self._loop.run(self._session.plan_record(key))

    def cancel_plan(self, key: str) -> PlanRecord:
        """See Session.cancel_plan."""
        return self._loop.run(self._session.cancel_plan(key))


class BlockingArtifact:
    """See `Artifact`."""

    def __init__(self, loop: CallerLoop, artifact: Artifact) -> None:
        self._loop = loop
        self._artifact = artifact

    def __repr__(self) -> str:
        return f"<Blocking {self._artifact!r}>"

    @property
    def reference(self) -> str:
        """See Artifact.reference."""
        return self._artifact.reference

    def view(self, *, slices: Slices | None = None, names: Sequence[str] | None = None) -> "BlockingArtifact":
        """See Artifact.view."""
        return BlockingArtifact(self._loop, self._artifact.view(slices=slices, names=names))

    def id(self) -> str:
        """See Artifact.id."""
        return self._loop.run(self._artifact.id())

    def describe(self) -> Description:
        """See Artifact.describe."""
        return self._loop.run(self._artifact.describe())

    def tensor(self, name: str, *, framework: Framework = "numpy") -> Any:
        """See Artifact.tensor."""
        return self._loop.run(self._artifact.tensor(name, framework=framework))

    def tensor_dict(self, *, framework: Framework = "numpy") -> dict[str, Any]:
        """See Artifact.tensor_dict."""
        return self._loop.run(self._artifact.tensor_dict(framework=framework))

    def arrival(self, at: str = "") -> tuple[int, int]:
        """See Artifact.arrival."""
        return self._loop.run(self._artifact.arrival(at))

    def prefetch(self, to: str = "", timeout_s: float = PLAN_DEADLINE_S) -> None:
        """See Artifact.prefetch."""
        self._loop.run(self._artifact.prefetch(to, timeout_s))

    def replicate(self, device: str, to: str = "", timeout_s: float = PLAN_DEADLINE_S) -> None:
        """See Artifact.replicate."""
        self._loop.run(self._artifact.replicate(device, to, timeout_s))

    def open_replica(self, device: str) -> ReplicaOpened:
        """See Artifact.open_replica."""
        return self._loop.run(self._artifact.open_replica(device))

    def close_replica(self, opened: ReplicaOpened) -> None:
        """See Artifact.close_replica."""
        self._loop.run(self._artifact.close_replica(opened))

    def replicas(self) -> list[ReplicaListed]:
        """See Artifact.replicas."""
        return self._loop.run(self._artifact.replicas())

    def pin(self, ttl_s: float, on: str = "", timeout_s: float = PLAN_DEADLINE_S) -> None:
        """See Artifact.pin."""
        self._loop.run(self._artifact.pin(ttl_s, on, timeout_s))

    def unpin(self, on: str = "", timeout_s: float = PLAN_DEADLINE_S) -> None:
        """See Artifact.unpin."""
        self._loop.run(self._artifact.unpin(on, timeout_s))

    def delete(self) -> None:
        """See Artifact.delete."""
        self._loop.run(self._artifact.delete())


class BlockingUpload:
    """See `Upload`."""

    def __init__(self, loop: CallerLoop, upload: Upload) -> None:
        self._loop = loop
        self.upload = upload

    def commit(self, name: str = "") -> BlockingArtifact:
        """See Upload.commit."""
        return BlockingArtifact(self._loop, self._loop.run(self.upload.commit(name)))

    def close(self) -> None:
        """See Upload.close."""
        self._loop.run(self.upload.close())


class BlockingPlan:
    """See `Plan`."""

    def __init__(self, loop: CallerLoop, plan: Plan) -> None:
        self._loop = loop
        self._plan = plan

    def on_worker(self, worker: str) -> OnWorker:
        """See Plan.on_worker."""
        return self._plan.on_worker(worker)

    def on_instance(self, instance: str) -> OnInstance:
        """See Plan.on_instance."""
        return self._plan.on_instance(instance)

    def run(self, concurrency: int = PLAN_CONCURRENCY) -> "BlockingHandle":
        """See Plan.run; returns at once."""
        return BlockingHandle(self._loop, self._loop.call(lambda: self._plan.run(concurrency)))


class BlockingHandle:
    """See `PlanHandle`."""

    def __init__(self, loop: CallerLoop, handle: PlanHandle) -> None:
        self._loop = loop
        self._handle = handle

    @property
    def done(self) -> bool:
        """See PlanHandle.done."""
        return self._handle.done

    @property
    def status(self) -> str:
        """See PlanHandle.status."""
        return self._handle.status

    def wait(self, timeout_s: float) -> bool:
        """See PlanHandle.wait."""
        return self._loop.run(self._handle.wait(timeout_s))

    def result(self, timeout_s: float | None = None) -> PlanOutcome:
        """See PlanHandle.result."""
        return self._loop.run(self._handle.result(timeout_s))

    def cancel(self) -> None:
        """See PlanHandle.cancel."""
        self._loop.run(self._handle.cancel())
