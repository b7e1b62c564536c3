"""The same for programs without an event loop: every method waits, and may be called from any thread.

with connect_blocking("unix:/run/tensorcast/worker.sock") as session:
    session.put({"w": tensor}, name="policy:v1")
    tensors = session.artifact("policy:v1").tensor_dict(framework="torch")
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from tensorcast_connector.client.artifact import Artifact, Description, Slices
from tensorcast_connector.client.files import Tensors
from tensorcast_connector.client.plan import CallContext, OnInstance, OnWorker, Plan, PlanHandle, PlanOutcome, Referring
from tensorcast_connector.client.session import SYSTEM, Leased, Session, connect
from tensorcast_connector.client.tensors import Framework
from tensorcast_connector.config import PLAN_CONCURRENCY
from tensorcast_connector.core.plan import PlanRecord
from tensorcast_connector.errors import InvalidArgument
from tensorcast_connector.wire.caller_messages import ArtifactListed, InstanceListed, SignalsListed, WorkerListed
from tensorcast_connector.wire.messages import PagesForgotten

T = TypeVar("T")


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="tensorcast-caller", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result; Ctrl-C ends it.

        Raises:
            InvalidArgument: the session is closed, or was closed meanwhile by another thread.
        """
        with self._lock:
            if self._closed:
                work.close()
                raise InvalidArgument("the session is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise InvalidArgument("the session was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def call(self, make: Callable[[], T]) -> T:
        """What `make` returns on the loop's thread."""

        async def work() -> T:
            return make()

        return self.run(work())

    def close(self) -> None:
        """Stops it; whoever waits in another thread waits no longer."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        ended.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()


def connect_blocking(
    address: str, *, tenant: str = "", token: str = "", tls: tuple[str, str, str] | None = None, name: str = ""
) -> "BlockingSession":
    """See `connect`."""
    loop = _Loop()
    try:
        return BlockingSession(loop, loop.run(connect(address, tenant=tenant, token=token, tls=tls, name=name)))
    except BaseException:
        loop.close()
        raise


class BlockingSession:
    """See `Session`. Made by `connect_blocking`."""

    def __init__(self, loop: _Loop, session: Session) -> None:
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
        self, tensors: Tensors, *, name: str = "", ownership: Leased | None = SYSTEM
    ) -> "BlockingArtifact":  # fmt: skip
        """See Session.put."""
        return BlockingArtifact(self._loop, self._loop.run(self._session.put(tensors, name=name, ownership=ownership)))

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

    def __init__(self, loop: _Loop, artifact: Artifact) -> None:
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

    def prefetch(self, to: str = "") -> None:
        """See Artifact.prefetch."""
        self._loop.run(self._artifact.prefetch(to))

    def pin(self, ttl_s: float, on: str = "") -> None:
        """See Artifact.pin."""
        self._loop.run(self._artifact.pin(ttl_s, on))

    def unpin(self, on: str = "") -> None:
        """See Artifact.unpin."""
        self._loop.run(self._artifact.unpin(on))

    def delete(self) -> None:
        """See Artifact.delete."""
        self._loop.run(self._artifact.delete())


class BlockingPlan:
    """See `Plan`."""

    def __init__(self, loop: _Loop, plan: Plan) -> None:
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

    def __init__(self, loop: _Loop, handle: PlanHandle) -> None:
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

    def result(self, timeout_s: float | None = None) -> PlanOutcome:
        """See PlanHandle.result."""
        return self._loop.run(self._handle.result(timeout_s))

    def cancel(self) -> None:
        """See PlanHandle.cancel."""
        self._loop.run(self._handle.cancel())
